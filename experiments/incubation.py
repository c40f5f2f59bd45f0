"""Is it worth letting a seed learn before it is blended in? Shadow rows, straight-through ghosts, and no learning at all.

    python -m experiments.incubation --device cuda

Every arm germinates the same seed in the same epoch, lets it incubate for 1 or 3 epochs, blends it within 3 epochs and keeps it.
In the arm "fresh" the seed takes its newborn weights again in the moment it is blended, so its incubation taught it nothing.
All arms share scenarios (init, data order); differences are paired. Writes experiments/results/incubation-*.json.
"""

import torch
from torch import Tensor

from esper.leyline import LifecycleOp, SeedStage
from esper.simic.proof.sweep import full_spec, grid, halves
from esper.tamiyo import Scripted, entry
from esper.tolaria import FAMILIES, MorphogeneticEnv
from experiments.shared import parser, write

SEEDS = {"mnist1d": ("conv_heavy", "mixer"), "mlp": ("mlp_heavy", "glu"), "fashion": ("conv_heavy", "depthwise")}
GERMINATE = 2


def run(family_name: str, blueprint: str, arm: str, wait: int, inits: int, device: str) -> tuple[Tensor, Tensor]:
    """(accuracy [K] at the horizon, accuracy [K] when the seed has just been blended in)."""
    family = FAMILIES[family_name]
    horizon = max(family.horizons)
    scenarios, _ = grid(family, inits, horizon)
    env = MorphogeneticEnv(family, len(scenarios), spec=full_spec(family), device=device,
                           incubation="shadow" if arm == "fresh" else arm)
    script = [entry(env.spec, GERMINATE, LifecycleOp.GERMINATE, slot=0, blueprint=blueprint, tempo=3),
              entry(env.spec, GERMINATE + wait, LifecycleOp.ADVANCE, slot=0),
              entry(env.spec, GERMINATE + wait + 1, LifecycleOp.FOSSILIZE, slot=0)]
    decide = Scripted([script] * len(scenarios))
    env.reset(scenarios)
    early = torch.zeros(len(scenarios))
    while not bool(env.done.all()):
        actions = decide(env.view())
        if arm == "fresh" and int(env.clock[0]) == GERMINATE + wait:
            born = env.population.life.at(SeedStage.TRAINING)[:, 0].nonzero().flatten()
            env.population._plant(born, 0)
        measured = env.step(actions)
        if int(env.clock[0]) == GERMINATE + wait + 3:
            early = measured.evidence.all_on.score.clone()
    return torch.stack(halves(env)).mean(0), early


def compare(late: Tensor, early: Tensor, base_late: Tensor, base_early: Tensor) -> dict[str, float]:
    """In points: accuracy at the horizon, and paired gains over fresh weights with their errors."""
    row = {"accuracy": 100 * float(late.mean())}
    for when, gain in (("blended", 100 * (early - base_early)), ("end", 100 * (late - base_late))):
        row |= {f"gain {when}": float(gain.mean()), f"error {when}": float(gain.std()) / len(gain) ** 0.5}
    return {name: round(value, 2) for name, value in row.items()}


def main() -> None:
    command = parser(__doc__)
    command.add_argument("--families", nargs="+", default=list(SEEDS))
    command.add_argument("--inits", type=int, default=16)
    options = command.parse_args()
    result: dict[str, object] = {"inits": options.inits}
    for name in options.families:
        for blueprint in SEEDS[name]:
            for wait in (1, 3):
                arms = {arm: run(name, blueprint, arm, wait, options.inits, options.device)
                        for arm in ("fresh", "straight_through", "shadow")}
                row = {arm: compare(late, early, *arms["fresh"]) for arm, (late, early) in arms.items()}
                result[f"{name}, {blueprint}, {wait} epochs"] = row
                print(name, blueprint, wait, row, flush=True)
    write(options, f"incubation-{'-'.join(options.families)}", result)


if __name__ == "__main__":
    main()
