"""What is left to decide once plans may do what a controller may? Validation scenarios and samples only; no proof.

    python -m experiments.plans_gap runs/mlp-0 runs/mlp-1 runs/mlp-2 --controls controls.json

Plans and rule are those of a proof's tuning, or else searched with the least episodes there are (`esper.simic.plans`); they are
played beside the controllers of these runs on validation scenarios that no training was examined on.
"""

import json
import math
from pathlib import Path

import torch
from esper.simic.controls import LEVELS, Tuned, about, play_plans, play_rule, schedule
from esper.simic.plans import search
from esper.simic.proving import REHEARSAL
from esper.simic.trials import Trials

from esper.cli.machine import keep_freed_memory
from esper.nissa import read
from esper.tamiyo import Learned, Wait
from esper.tolaria import PreviewConfig, find_family
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
    config = json.loads((options.runs[0] / "run.json").read_text())
    family = find_family(config["family"])
    every, steps = config["config"]["preview_every"], config["config"]["preview_steps"]
    trials = Trials(family, PreviewConfig(every, steps) if every else None, device=options.device)
    tuned = Tuned.load(options.controls) if options.controls else searched(trials)
    drawn = family.scenarios(options.scenarios, "validation", REHEARSAL)
    bare = trials.play(Wait(), drawn).utility
    arms = {level: play_plans(trials, schedule(tuned, level, family, drawn), drawn).utility for level in LEVELS}
    arms["best rule"] = play_rule(trials, tuned, drawn).utility
    spec, minds = trials.environment(len(drawn)).spec, {}
    for run in options.runs:
        mind = Learned.load(run / "agent.safetensors", spec, options.device, greedy=True)
        minds[run.name] = trials.play(mind, drawn, previews=True).utility
    episodes = {run.name: read(run / "run.db", "SELECT sum(episodes) FROM round")[0][0] for run in options.runs}
    write(options, f"plans-{family.name}", {"episodes": episodes | tuned.episodes, "best fixed": tuned.fixed.name,
                                            "scenarios": len(drawn), "points": compared(bare, arms, minds)})


def searched(trials: Trials) -> Tuned:
    found, family = search(trials, 1, 256, 30, lambda what, done, total: None), trials.family
    used = dict.fromkeys((*LEVELS, "best rule"), found.episodes)
    return Tuned(family.name, about(family), used, {}, found.fixed, found.visible, found.oracle, found.rule, found.choices, 30)


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
