"""How much of a step's reward is noise? One scripted seed against its twin, measured on two halves of the validation slice.

    python -m experiments.reward_noise

Signal: what the seed earns, by step and by episode. Noise: half the difference between the two halves, as its spread over
scenarios. Pairing: by how much the variance of a gain shrinks when it is taken against the twin of the same init and data
order instead of another init's of the same kind. Points of score; steps count from the seed's birth.

Legend: T epochs, K scenarios (every kind with every init).
"""

import time

import torch
from torch import Tensor

from esper.simic.proof.sweep import DECIDE_AT, full_spec, grid, seed_script
from esper.simic.rewards import RewardInputs
from esper.tamiyo import Scripted
from esper.tolaria import FAMILIES, Family, MorphogeneticEnv, Scores
from esper.tolaria.evaluation import evaluate
from experiments.shared import parser, write

HEADER = f"""{'':20}{'episode':>26}{'step':>20}{'pairing':>14}
{'family, score':20}  mean  spread  noise  s/n  spread  noise  s/n  episode step"""
SCORED = {"accuracy": "score", "probability": "smooth"}
"""name -> the score that it is, of classification."""
SEEDS = {"mlp": "mlp_small", "mnist1d": "conv_light"}
"""family -> the seed that helps most often, in slot 0."""


def played(family: Family, inits: int, device: str) -> tuple[Tensor, Tensor]:
    """(scores [T, 2 arms, K, 2 halves, scores] with the seed and without, cost of the seed [T, K])."""
    scenarios, _ = grid(family, inits, max(family.horizons))
    count = len(scenarios)
    spec, both = full_spec(family), scenarios.take(torch.arange(count).repeat(2))
    env = MorphogeneticEnv(family, 2 * count, spec=spec, device=device)
    decide = Scripted([seed_script(spec, DECIDE_AT, 0, SEEDS[family.name])] * count + [[]] * count)
    half, scores, costs = len(env.feed.validation_x) // 2, [], []
    env.reset(both)
    while not bool(env.done.all()):
        measured = env.step(decide(env.view()))
        parts = [evaluate(env.population, env.validation(start, start + half)) for start in (0, half)]
        over = measured.done
        halves = [torch.where(over, getattr(part.delivered, name), getattr(part.all_on, name))
                  for part in parts for name in SCORED.values()]
        scores.append(torch.stack(halves, 1).view(2, count, 2, len(SCORED)))
        now = RewardInputs.of(measured, env.scenarios, Scores(*torch.zeros(3, 2 * count)), "score")
        costs.append(-torch.stack(list(now.cost.values())).sum(0)[:count])
    return torch.stack(scores), torch.stack(costs)


def steps_of(levels: Tensor) -> Tensor:
    """Changes of levels [T, ...], from the seed's birth on."""
    return levels.diff(dim=0, prepend=torch.zeros_like(levels[:1]))[DECIDE_AT:]


def within(values: Tensor, kinds: int) -> float:
    """Variance over inits of values [..., K], the mean over all else."""
    return float(values.unflatten(-1, (-1, kinds)).var(-2).mean())


def told(family: Family, scores: Tensor, cost: Tensor) -> dict[str, float]:
    """Numbers of one score, [T, 2 arms, K, 2 halves]."""
    kinds, gain = len(family.kinds), scores[:, 0] - scores[:, 1]  # [T, K, 2]
    utility, noise = gain.mean(-1) - cost, (gain[..., 0] - gain[..., 1]) / 2
    grown, alone = scores.mean(-1).unbind(1)  # [T, K]
    strange = grown - alone.roll(kinds, -1)  # the next init of the same kind
    points = {"return": utility[-1].mean(), "return spread": utility[-1].std(), "return noise": noise[-1].std(),
              "step spread": steps_of(utility).std(), "step noise": steps_of(noise).std()}
    out = {name: 100 * float(value) for name, value in points.items()}
    out |= {f"{name} signal to noise": out[f"{name} spread"] / out[f"{name} noise"] for name in ("return", "step")}
    out["return pairing"] = within(strange[-1], kinds) / within(gain.mean(-1)[-1], kinds)
    return out | {"step pairing": within(steps_of(strange), kinds) / within(steps_of(gain.mean(-1)), kinds)}


def main() -> None:
    options_of = parser(__doc__)
    options_of.add_argument("--inits", type=int, default=8)
    options = options_of.parse_args()
    result: dict[str, object] = {"inits": options.inits}
    print(HEADER)
    for name in SEEDS:
        family, began = FAMILIES[name], time.perf_counter()
        scores, cost = played(family, options.inits, options.device)
        for number, score in enumerate(SCORED):
            row = told(family, scores[..., number], cost)
            result[f"{name} {score}"] = row
            a, b, c, d, e, f, g, h, i = row.values()
            print(f"{name + ', ' + score:20}{a:6.2f}{b:8.2f}{c:7.2f}{f:5.1f}{d:8.2f}{e:7.2f}{g:5.1f}{h:9.1f}{i:5.1f}", flush=True)
        result[f"{name} seconds"] = round(time.perf_counter() - began)
    write(options, "reward_noise", result)


if __name__ == "__main__":
    main()
