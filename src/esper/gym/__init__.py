"""Growth as Gymnasium environments, and our PPO for anybody's: importing this registers `Esper/FAMILY-v0`.

    import esper.gym, gymnasium

    env = gymnasium.make("Esper/mlp-v0")                                 # one host
    envs = gymnasium.make_vec("Esper/mlp-v0", num_envs=64)               # 64 as one program
    env = gymnasium.make("Esper/Growth-v0", family="digits/mlp")         # any family
"""

from esper.leyline import EsperError

try:
    import gymnasium
except ImportError as error:
    raise EsperError("esper.gym needs Gymnasium; run pip install 'esper-morph[rl]'") from error

from esper.gym.envs import GrowthEnv, GrowthVectorEnv
from esper.gym.learning import GymWorld, learn
from esper.tolaria.families import FAMILIES

__all__ = ["GrowthEnv", "GrowthVectorEnv", "GymWorld", "learn"]

for _name, _options in {"Growth": {}, **{name: {"family": name} for name in FAMILIES}}.items():
    gymnasium.register(f"Esper/{_name}-v0", "esper.gym.envs:GrowthEnv", kwargs=_options,
                       vector_entry_point="esper.gym.envs:GrowthVectorEnv")
