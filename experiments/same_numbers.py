"""Are decisions and utilities still the same, bit for bit? Compared with what an earlier version played.

    python -m experiments.same_numbers mlp mnist1d fashion      compares with results/same-numbers.json, exit code 1 if not equal
    python -m experiments.same_numbers --training               a quick training's weights, likewise
    python -m experiments.same_numbers mlp --write              keeps what is played now

64 validation scenarios of each family: the shipped mind (greedy), the best fixed plan, no growth. One thread, on the CPU: bits
depend on both. `results/same-numbers-0d25523.json` holds what was played before the redesign of 0.2.0, which left all of it (random
growth and the training too) the same; draws of actions, the entropy bonus and so trainings were changed by later commits.
"""

import hashlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from esper.cli import main as esper
from esper.cli.machine import keep_freed_memory
from esper.leyline.storage import read_state
from esper.simic.proof.baselines import Tuned, play_plans
from esper.simic.proof.evaluator import Evaluator
from esper.tamiyo import Learned, Wait
from esper.tamiyo.minds import read_mind
from esper.tolaria import EnvConfig, Episodes, PreviewConfig, find_family
from experiments.shared import parser

HERE = Path(__file__).parent
KEPT = HERE / "results" / "same-numbers.json"


def played(episodes: Episodes) -> dict[str, Any]:
    decisions, utility = episodes.decisions(), episodes.utility()
    digest = hashlib.sha256(json.dumps([list(decision) for decision in decisions]).encode())
    digest.update(utility.float().numpy().tobytes())
    return {"digest": digest.hexdigest()[:32], "decisions": len(decisions), "utility": float(utility.double().mean())}


def family_numbers(name: str) -> dict[str, Any]:
    family = find_family(name)
    member = next(m for m in read_mind("tamiyo-small") if m.about["family"] == name)
    config = member.about["run"]["config"]
    previews = PreviewConfig(config["preview_every"], config["preview_steps"]) if config["preview_every"] else None
    evaluator, drawn = Evaluator(EnvConfig(family, previews=previews)), family.scenarios(64, "validation")
    tuned = Tuned.load(HERE / "proof" / name / "controls.json")
    mind = Learned(member.controller.bound_to(evaluator.config.spec), greedy=True)
    return {"tamiyo-small": played(evaluator.play(mind, drawn, previews=True)),
            "best fixed": played(play_plans(evaluator, [tuned.fixed] * len(drawn), drawn)),
            "no growth": played(evaluator.play(Wait(), drawn))}


def training_numbers() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        esper(["train", "--family", "mlp", "--preset", "quick", "--out", f"{folder}/run"])
        return weights(f"{folder}/run/agent.safetensors")


def weights(path: str) -> dict[str, Any]:
    """Of a checkpoint: networks, statistics, moments and random state."""
    _, tensors = read_state(path, "agent")
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode() + tensors[name].contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return {"digest": digest.hexdigest()[:32], "tensors": len(tensors)}


def main() -> None:
    options_of = parser(__doc__)
    options_of.add_argument("families", nargs="*")
    options_of.add_argument("--training", action="store_true")
    options_of.add_argument("--write", action="store_true")
    options = options_of.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    now = {name: family_numbers(name) for name in options.families}
    if options.training:
        now["quick training"] = training_numbers()
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    if options.write:
        KEPT.write_text(json.dumps(kept | now, indent=1) + "\n")
    for name, numbers in now.items():
        print(name, "the same, bit for bit" if kept.get(name) == numbers else f"differs: {numbers} now, {kept.get(name)} before")
    sys.exit(not options.write and any(kept.get(name) != numbers for name, numbers in now.items()))


if __name__ == "__main__":
    main()
