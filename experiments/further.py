"""A model was trained before, and there is compute for more: is it better to let it grow deeper, or to train it on as it is?

    python -m experiments.further FOLDER --workers 2          FOLDER holds the packages, as for experiments.texts

Model, texts, splits and counting as in experiments.deeper. In each cell (regime, text) a model is trained to the end of its cosine. A
grown run comes next; all other arms get the FLOPs that it took, and a warm-up and a cosine of their own, at the rate that was best for
`as it is` on a text that is not among these:

    grown     attached with blueprints=["copy"]; every other setting is its default
    by hand   a copy of every block is put behind it before the first step, and no Esper
    as it is  trained on
    anew      twice as many blocks, which nobody has trained
    foreseen  twice as many blocks from the start, with the FLOPs of both trainings: had one known

Writes experiments/results/further.json.
"""

import copy
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from esper.leyline.storage import atomic_write
from experiments.deeper import TEXTS, Data, Model, Run, grow, read, run, static, step_flops, steps_of

RATE = 2.5e-3
REGIMES = {"1 block, 2e12 and 2e12 FLOPs": (1, 2e12, 2e12)}
"""Name -> (blocks, FLOPs of the first training, about how many a grown run takes)."""
ARMS = ("grown", "by hand", "as it is", "anew", "foreseen")


def doubled(model: Model) -> Model:
    """Every block is followed by its copy."""
    model = copy.deepcopy(model)
    model.blocks = nn.ModuleList(copy.deepcopy(block) for block in model.blocks for _ in range(2))
    return model


def go_on(data: Data, model: Model, seed: int, flops: float, rate: float) -> dict[str, Any]:
    blocks = len(model.blocks)
    run = Run(data, blocks, seed, int(flops / step_flops(data, blocks)), model, rate)
    run.go(run.left)
    return run.result(blocks=blocks)


def trained(data: Data, blocks: int, seed: int, flops: float) -> Model:
    run = Run(data, blocks, seed, int(flops / step_flops(data, blocks)))
    run.go(run.left)
    return run.model


def play(text: str, packages: str, regime: str, seed: int, cache: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    kept = Path(cache) / f"further-{text}-{regime.replace(' ', '')}.json"
    done: dict[str, Any] = json.loads(kept.read_text()) if kept.exists() else {}
    data, (blocks, before, flops) = Data(read(Path(packages), text)), REGIMES[regime]
    if done.keys() >= set(ARMS):
        return {"text": text, "regime": regime, "arms": done}
    first, later = trained(data, blocks, seed, before), seed + 100  # other batches than the first training's
    done["before"] = Run(data, blocks, seed, 0, first).result(blocks=blocks)
    for arm in ARMS:
        if arm in done:
            continue
        model, given = copy.deepcopy(first), done["grown"]["flops"] if arm != "grown" else 0.0
        done[arm] = (grow(Run(data, blocks, later, steps_of(data, blocks, flops), model, RATE), later, blueprints=["copy"])
                     if arm == "grown" else
                     go_on(data, doubled(model), later, given, RATE) if arm == "by hand" else
                     go_on(data, model, later, given, RATE) if arm == "as it is" else
                     static(data, 2 * blocks, seed, given if arm == "anew" else before + given))
        atomic_write(kept, json.dumps(done))
        print(text, regime, arm, f"{done[arm]['loss']:.4f}", done[arm]["blocks"], flush=True)
    return {"text": text, "regime": regime, "arms": done}


if __name__ == "__main__":
    run(__doc__, "further", play, [(regime, text, seed) for regime in REGIMES for seed, text in enumerate(TEXTS)], ("before", *ARMS[1:]))
