"""What is left to decide once plans may do what a controller may? Validation scenarios and samples only; no proof.

    python -m experiments.plans_gap runs/mlp-0 runs/mlp-1 runs/mlp-2 --controls controls.json

Plans and rule are those of a proof's tuning, or else searched with the least episodes there are (`esper.simic.proof.plans`);
they are played beside the controllers of these runs on validation scenarios that no training was examined on.
"""

import math
from dataclasses import replace
from pathlib import Path

import torch

from esper.cli.machine import keep_freed_memory
from esper.cli.runs import STORE, load_run
from esper.leyline import EsperError
from esper.nissa import read
from esper.simic.proof.baselines import LEVELS, Tuned, family_digest, play_plans, play_rule, schedule
from esper.simic.proof.evaluator import Evaluator
from esper.simic.proof.plans import search
from esper.simic.proof.proving import REHEARSAL
from esper.simic.training import CHECKPOINT
from esper.tamiyo import Learned, Wait
from experiments.shared import parser, write

Utilities = dict[str, torch.Tensor]
"""name -> [n]"""


def estimate(values: torch.Tensor) -> list[float]:
    """(mean, half the width of its 95 % interval), in points."""
    return [100 * float(values.mean()), 196 * float(values.std()) / math.sqrt(len(values))]


def main() -> None:
    options_of = parser(__doc__)
    options_of.add_argument("runs", type=Path, nargs="+")
    options_of.add_argument("--scenarios", type=int, default=256)
    options_of.add_argument("--controls", type=Path, help="controls.json of a proof")
    options = options_of.parse_args()
    keep_freed_memory()
    found = load_run(options.runs[0])
    if found is None:
        raise EsperError(f"{options.runs[0]} holds no run")
    evaluator = Evaluator(replace(found[0].env, device=options.device))
    family = evaluator.family
    tuned = Tuned.load(options.controls) if options.controls else searched(evaluator)
    drawn = family.scenarios(options.scenarios, "validation", REHEARSAL)
    bare = evaluator.play(Wait(), drawn).utility()
    arms = {level: play_plans(evaluator, schedule(tuned, level, family, drawn), drawn).utility() for level in LEVELS}
    arms["best rule"] = play_rule(evaluator, tuned, drawn).utility()
    minds = {}
    for run in options.runs:
        mind = Learned.load(run / CHECKPOINT, evaluator.config.spec, options.device, greedy=True)
        minds[run.name] = evaluator.play(mind, drawn, previews=True).utility()
    episodes = {run.name: read(run / STORE, "SELECT sum(episodes) FROM round")[0][0] for run in options.runs}
    write(options, f"plans-{family.name}", {"episodes": episodes | tuned.episodes, "best fixed": tuned.fixed.name,
                                            "scenarios": len(drawn), "points": compared(bare, arms, minds)})


def searched(evaluator: Evaluator) -> Tuned:
    found, family = search(evaluator, 1, 256, 30, lambda what, done, total: None), evaluator.family
    used = dict.fromkeys((*LEVELS, "best rule"), found.episodes)
    return Tuned(family.name, family_digest(family), used, {}, found.fixed, found.visible, found.oracle, found.rule,
                 found.choices, 30)


def compared(bare: torch.Tensor, arms: Utilities, minds: Utilities) -> dict[str, dict[str, list[float]]]:
    """From utilities [n]: each above no growth, and controllers less each of the others."""
    half = (arms["best per visible condition"] + arms["oracle"]) / 2
    others = arms | {"half way from best per visible condition to oracle": half}
    gains = {name: {"above no growth": estimate(utility - bare)} for name, utility in (arms | minds).items()}
    for name, mine in minds.items():
        gains[name] |= {f"less {other}": estimate(mine - utility) for other, utility in others.items()}
    for name, each in gains.items():
        print(name, {what: f"{mean:+.2f} ± {half:.2f}" for what, (mean, half) in each.items()}, flush=True)
    return gains


if __name__ == "__main__":
    main()
