"""Growth through Gymnasium: the contract, what is paid, exact masks; and our PPO on anybody's environment."""

import statistics
import subprocess
import sys
import warnings
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env

import esper.gym
from esper.gym import learning
from esper.gym.envs import flat_actions, flat_masks
from esper.leyline import ActionSpec, EsperError, LifecycleOp
from esper.simic import Collector
from esper.tamiyo import NetworkConfig, action_masks
from esper.tamiyo.distributions import ActionDistribution, ActionLogits
from esper.tolaria import FAMILIES, Family, MorphogeneticEnv, Twins, play
from tests.workshop import toy_env, toy_family

TOY = toy_family(samples=120, validation=80, horizons=(7, 8), task="digits", host=esper.Host("mlp", (64,), (8, 8)))


def made(rows: int, family: Family | str = TOY, **options: Any) -> Any:
    return gymnasium.make_vec("Esper/Growth-v0", num_envs=rows, family=family, **{"scenarios": 16} | options)


def drawn(rng: np.random.Generator, masks: np.ndarray) -> np.ndarray:
    return (rng.random(masks.shape) * masks).argmax(1)


def test_every_shipped_family_has_an_id_that_its_module_brings() -> None:
    code = "import gymnasium; print(gymnasium.make('esper.gym:Esper/mlp-v0').action_space)"
    assert "Discrete(25)" in subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert {f"Esper/{name}-v0" for name in FAMILIES} <= set(gymnasium.registry)


def test_without_gymnasium_one_sentence_says_what_to_install() -> None:
    code = "import sys; sys.modules['gymnasium'] = None; import esper.simic; import esper.gym"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stderr
    assert said.strip().endswith("EsperError: esper.gym needs Gymnasium; run pip install 'esper-morph[rl]'")


def test_both_checkers_pass_without_a_warning() -> None:
    from stable_baselines3.common.env_checker import check_env as sb3_check

    env = gymnasium.make("Esper/Growth-v0", family=TOY, scenarios=4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(env.unwrapped, skip_render_check=True)
        sb3_check(env)


@pytest.mark.parametrize("preset", [ActionSpec.decisive, ActionSpec.compact, ActionSpec.full])
def test_flat_masks_are_exactly_what_can_be_expressed(preset: Any) -> None:
    """The legal ones hold all of the probability, each once: none is missing, aliased or too many."""
    env = toy_env(6, spec=preset(2, ("noop", "norm", "mlp_small")))
    env.reset(env.family.scenarios(6))
    actions, rng = flat_actions(env.spec), np.random.default_rng(0)
    assert len(actions.unique(dim=0)) == len(actions)
    assert env.spec.ops[actions[0, 0]] is LifecycleOp.WAIT
    for _ in range(5):
        masks = action_masks(env.view())
        legal = flat_masks(env.spec, actions, masks)
        flat = ActionDistribution(env.spec, ActionLogits.flat(env.spec, masks), masks)
        scores = torch.stack([flat.score(one.repeat(6, 1)).joint for one in actions], 1)
        assert torch.equal(scores > -1000, legal)
        torch.testing.assert_close(torch.where(legal, scores.exp(), 0).sum(1), torch.ones(6))
        env.step(actions[drawn(rng, legal.numpy())])


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
def test_a_return_is_the_utility_above_the_twin(mode: str) -> None:
    """Rows end at different times and begin anew; the engine plays the same decisions again, all together."""
    env, rng, rows = made(5, autoreset_mode=mode), np.random.default_rng(1), 5
    _, info = env.reset(options={"scenario": 0})
    taken: dict[int, list[int]] = {}
    paid: dict[int, float] = {}
    closed: set[int] = set()
    over = np.zeros(rows, dtype=bool)
    while len(closed) < 12:
        actions, now = drawn(rng, info["action_mask"]), info["scenario"]
        _, reward, ended, cut, info = env.step(actions)
        assert not cut.any()
        for row in range(rows):
            if over[row]:
                assert reward[row] == 0
                assert info["scenario"][row] != now[row], "it begins anew, whatever was chosen"
            elif int(now[row]) not in closed:
                taken.setdefault(int(now[row]), []).append(int(actions[row]))
                paid[int(now[row])] = paid.get(int(now[row]), 0.0) + reward[row]
        closed |= {int(n) for n in now[ended & ~over]}
        assert ("final_obs" in info) == bool(mode == "SameStep" and ended.any())
        over = ended if mode == "NextStep" else over
    numbers = torch.tensor(sorted(closed))
    scenarios = TOY.scenarios(16).take(numbers)
    assert scenarios.horizon.unique().tolist() == [7, 8]
    engine, clock = MorphogeneticEnv(TOY, len(numbers)), iter(range(8))
    table = flat_actions(engine.spec)

    def again(view: Any) -> torch.Tensor:
        at = next(clock)
        return table[[(taken[n] + [0] * 8)[at] for n in numbers.tolist()]]

    episodes, twins = play(engine, again, scenarios), Twins(MorphogeneticEnv(TOY, len(numbers)))(scenarios)
    last = twins[torch.arange(len(numbers)), scenarios.horizon - 1, 1]
    grown = (episodes.measured["germinations"][-1].sum(1) > 0).float()
    expected = episodes.utility() - torch.where(grown > 0, last, episodes.delivered.score)
    assert float(expected.abs().max()) > 0.01
    torch.testing.assert_close(torch.tensor([paid[n] for n in numbers.tolist()]).float(), expected, rtol=0, atol=1e-5)


def test_a_seed_repeats_everything_and_another_begins_elsewhere() -> None:
    def rollout(env: Any, seed: int) -> tuple[np.ndarray, float, int]:
        rng, total = np.random.default_rng(0), 0.0
        seen, info = env.reset(seed=seed)
        first = int(info["scenario"])
        for _ in range(7):
            seen, reward, _, _, info = env.step(drawn(rng, info["action_mask"][None])[0])
            total += reward
        return seen, total, first

    env, other = (gymnasium.make("Esper/Growth-v0", family=TOY, scenarios=16) for _ in range(2))
    (seen, total, first), (again, same, _), (_, _, elsewhere) = rollout(env, 3), rollout(other, 3), rollout(other, 4)
    np.testing.assert_array_equal(seen, again)
    assert total == same
    assert first != elsewhere
    assert rollout(other, 3)[1] == total, "what was played before does not matter"


def test_what_the_mask_excludes_is_played_as_wait() -> None:
    runs = []
    for choose in (lambda mask: int((mask == 0).argmax()), lambda mask: 0):
        env = gymnasium.make("Esper/Growth-v0", family=TOY, scenarios=4)
        _, info = env.reset(seed=0)
        steps = [env.step(choose(info["action_mask"])) for _ in range(3)]
        assert env.get_wrapper_attr("action_masks")().tolist() == steps[-1][4]["action_mask"].tolist()
        runs.append([step[0] for step in steps])
    np.testing.assert_array_equal(*runs)


@pytest.mark.parametrize(("options", "message"), [
    ({"split": "test"}, "choose a split from train, validation"),
    ({"autoreset_mode": "Disabled"}, "NextStep or SameStep"),
    ({"scenarios": 0}, "scenarios is 0"),
    ({"reward": "gold"}, "no reward 'gold'"),
    ({"family": "nonsense"}, "no family 'nonsense'"),
])
def test_what_cannot_be_meant_is_one_sentence(options: dict[str, Any], message: str) -> None:
    with pytest.raises(EsperError, match=message):
        made(2, **options).reset(seed=0)


def test_actions_that_are_none_are_refused() -> None:
    env = made(2)
    env.reset(seed=0)
    for actions in ([0, 99], [-1, 0], [0], [0.0, 1.0]):
        with pytest.raises(EsperError, match="expected 2 actions, whole numbers of 0 to"):
            env.step(np.array(actions))
    with pytest.raises(EsperError, match="autoreset_mode is of make_vec"):
        gymnasium.make("Esper/Growth-v0", family=TOY, autoreset_mode="SameStep")


class Recall(gymnasium.Env):
    """Name a cue that was shown three steps ago; until then the third action alone is allowed."""

    observation_space, action_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32), gymnasium.spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.cue, self.clock = int(self.np_random.integers(2)), 0
        return self.look()

    def look(self) -> Any:
        last = self.clock == 3
        seen = np.array([0 if self.clock else 2 * self.cue - 1, last], np.float32)
        return seen, {"action_mask": np.array([last, last, not last], np.int8)}

    def step(self, action: int) -> Any:
        assert self.look()[1]["action_mask"][action], "masks are kept"
        over, self.clock = self.clock == 3, self.clock + 1
        seen, info = self.look()
        return seen, float(action == self.cue), over, False, info


def test_our_learner_remembers_on_any_gymnasium_environment() -> None:
    gymnasium.register("Recall-v0", Recall)
    reached = {}
    for memory in (True, False):
        curve: list[float] = []
        agent = esper.gym.learn("Recall-v0", 16, rows=32, steps=30, network=NetworkConfig(32, 16, 8, 32, memory=memory),
                                watch=lambda update, returns, curve=curve: curve.append(statistics.mean(returns)))
        assert agent.updates == 16
        reached[memory] = statistics.mean(curve[-3:])
    assert reached[True] > 0.9
    assert 0.4 < reached[False] < 0.6


def test_other_spaces_and_resets_are_refused_by_one_sentence() -> None:
    with pytest.raises(EsperError, match="does not reset by NextStep"):
        esper.gym.GymWorld(made(2, autoreset_mode="SameStep"))
    with pytest.raises(EsperError, match="needs a Discrete action here, not a Box"):
        esper.gym.GymWorld(gymnasium.make_vec("Pendulum-v1", num_envs=1))


def test_our_learner_plays_growth_through_the_same_door(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[float] = []
    collectors: list[Collector] = []
    monkeypatch.setattr(learning, "Collector", lambda *told: collectors.append(Collector(*told)) or collectors[-1])
    esper.gym.learn(made(4), updates=1, steps=18, watch=lambda update, returns: heard.extend(returns))
    assert not collectors[0].counted, "what only training rounds need is not gathered for ever"
    assert len(heard) >= 4
    assert max(map(abs, heard)) < 1
