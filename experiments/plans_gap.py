"""What is left to decide once plans may do what a controller may? Validation scenarios and samples only; no proof.

    python experiments/plans_gap.py runs/mlp-0 runs/mlp-1 runs/mlp-2

Plans are searched with the least episodes there are (`esper.simic.plans`), then played beside the controllers of these runs.
"""

import json
import math
from pathlib import Path

import torch

from esper.memory import keep_freed_memory
from esper.nissa import read
from esper.simic.controls import LEVELS, Tuned, about, play_plans, play_rule, schedule
from esper.simic.plans import search
from esper.simic.trials import Trials
from esper.tamiyo import Learned, Wait
from esper.tolaria import PreviewConfig, find_family

from shared import parser, write  # isort: skip


def estimate(values: torch.Tensor) -> list[float]:
    """(mean, half the width of its 95 % interval), in points."""
    return [100 * float(values.mean()), 196 * float(values.std()) / math.sqrt(len(values))]


def main() -> None:
    options_of = parser(__doc__)
    options_of.add_argument("runs", type=Path, nargs="+")
    options_of.add_argument("--scenarios", type=int, default=256)
    options = options_of.parse_args()
    keep_freed_memory()
    options.out.mkdir(parents=True, exist_ok=True)
    config = json.loads((options.runs[0] / "run.json").read_text())
    family = find_family(config["family"])
    every, steps = config["config"]["preview_every"], config["config"]["preview_steps"]
    trials = Trials(family, PreviewConfig(every, steps) if every else None, device=options.device)
    found = search(trials, 1, 256, 30, lambda what, done, total: None)
    used = dict.fromkeys((*LEVELS, "best rule"), found.episodes)
    tuned = Tuned(family.name, about(family), used, {}, found.fixed, found.visible, found.oracle, found.rule, found.choices, 30)
    tuned.save(options.out / f"tuned-{family.name}.json")
    drawn = family.scenarios(options.scenarios, "validation")
    bare = trials.play(Wait(), drawn).utility
    arms = {level: play_plans(trials, schedule(tuned, level, family, drawn), drawn).utility for level in LEVELS}
    arms["best rule"] = play_rule(trials, tuned, drawn).utility
    spec = trials.environment(len(drawn)).spec
    gains = {name: {"above no growth": estimate(utility - bare)} for name, utility in arms.items()}
    episodes = {run.name: read(run / "run.db", "SELECT sum(episodes) FROM round")[0][0] for run in options.runs}
    for run in options.runs:
        mind = Learned.load(run / "agent.safetensors", spec, options.device, greedy=True)
        mine = trials.play(mind, drawn, previews=True).utility
        gains[run.name] = {"above no growth": estimate(mine - bare)}
        gains[run.name] |= {f"less {name}": estimate(mine - other) for name, other in arms.items()}
    for name, each in gains.items():
        print(name, {what: f"{mean:+.2f} ± {half:.2f}" for what, (mean, half) in each.items()}, flush=True)
    write(options, f"plans-{family.name}", {"episodes": episodes | {"plans": found.episodes}, "best fixed": found.fixed.name,
                                            "scenarios": len(drawn), "points": gains})


if __name__ == "__main__":
    main()
