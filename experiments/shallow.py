"""Is a deep model better for the same compute if it starts shallow? Beside itself, shallower nets, and a search over depths.

    python -m experiments.shallow FOLDER --workers 2      FOLDER holds the packages, as for experiments.texts and .deeper_images

The twelve test texts of experiments/universe/texts.json, which no run had met, and three sets of pictures. Models, batches, optimizer,
schedules, splits and counting of FLOPs are those of experiments.deeper and .deeper_images; the learning rate was chosen for the model
of four blocks on two texts and on CIFAR-10, which are not in the table. Every arm has the same FLOPs, unless it says otherwise; the first
regime has all of them, the others the first three:

    shallow       every second block sleeps for half of the training, then wakes as a copy of the one in front of it
    model         the user's model as it is: all blocks from the start
    half, one     half of the blocks, or one, from the start to the end
    twice the rate   the model at another learning rate; `best rate` is the better one of both on the seen part
    halving       one block, two and four share the FLOPs; at each third of them the worse ones are dropped, 3 to 2 to 1
    quarter       shallow with doublings=(0.25, 0.5): one block of four at first
    fresh         shallow, but blocks wake with the random weights that they were born with
    as many steps shallow with as many steps as the model takes, which costs fewer FLOPs

The part of a set that is seen chooses in `halving` and `best rate`; the loss is that of another part, which chooses nothing. Runs are kept in --cache as
they end. Writes experiments/results/shallow.json.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from esper.leyline.storage import atomic_write
from experiments.deeper import Data, Run, compared, halving, play_all, read, static, step_flops
from experiments.deeper_images import READ
from experiments.shared import write

LR = 2.5e-3
TEXTS = ("mail", "bible", "licences", "russian", "hungarian", "python", "icons", "stars", "cities", "countries", "registry", "rights")
PICTURES = ("fashion", "sprites-x", "sprites-turn")
DEEP = ("shallow", "model", "half", "one", "fresh", "halving", "quarter", "twice the rate", "as many steps")
FEW = ("shallow", "model", "half")
REGIMES = {"4 blocks, 2e12 FLOPs": (4, 2e12, DEEP), "2 blocks, 4e12 FLOPs": (2, 4e12, FEW),
           "4 blocks, 5e11 FLOPs": (4, 5e11, FEW), "2 blocks, 1e12 FLOPs": (2, 1e12, FEW)}
"""Name -> (blocks of the model, FLOPs, arms)."""


class Waking:
    """A model whose blocks sleep at first: they give back what they get, and get no gradients. After each of these shares of the steps
    twice as many are awake; one that wakes is a copy of the awake one in front of it, if `copied`."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, doublings: Sequence[float], copied: bool = True) -> None:
        self.blocks, self.copied, self.done, self.stride = list(model.blocks), copied, 0, 2 ** len(doublings)  # type: ignore[arg-type]
        self.wakes = [round(share * steps) for share in doublings]
        for number, block in enumerate(self.blocks):
            if number % self.stride:
                block.forward = lambda h, *_, **__: h
        optimizer.register_step_post_hook(self._after_step)

    def _after_step(self, *_: Any) -> None:
        self.done += 1
        while self.wakes and self.done >= self.wakes[0]:
            self.wakes.pop(0)
            self.stride //= 2
            for number in range(self.stride, len(self.blocks), 2 * self.stride):
                front, block = self.blocks[number - self.stride], self.blocks[number]
                del block.forward
                if self.copied:
                    block.load_state_dict(front.state_dict())


def shallow(data: Data, blocks: int, seed: int, flops: float, same_flops: bool = True, copied: bool = True,
            doublings: Sequence[float] = (0.5,)) -> dict[str, Any]:
    steps = int(flops / step_flops(data, blocks))
    parts = zip((0.0, *doublings), (*doublings, 1.0), range(len(doublings), -1, -1), strict=True)
    share = sum((after - before) * step_flops(data, -(-blocks // 2**halved)) for before, after, halved in parts) / step_flops(data, blocks)
    run = Run(data, blocks, seed, round(steps / share) if same_flops else steps, lr=LR)
    longer = run.left
    Waking(run.model, run.optimizer, longer, doublings, copied)
    run.go(longer)
    return run.result(blocks=blocks, steps=longer, flops=share * longer / steps)


def play_arm(arm: str, data: Data, blocks: int, flops: float, seed: int) -> dict[str, Any]:
    if arm == "halving":
        return halving(data, seed, flops, (1, 2, 4), (3, 2, 1), LR)
    statics = {"model": (blocks, LR), "twice the rate": (blocks, 2 * LR), "half": (blocks // 2, LR), "one": (1, LR)}
    if arm in statics:
        return static(data, statics[arm][0], seed, flops, statics[arm][1])
    return shallow(data, blocks, seed, flops, **{
        "shallow": {}, "quarter": {"doublings": (0.25, 0.5)}, "fresh": {"copied": False}, "as many steps": {"same_flops": False}}[arm])


def play(name: str, folder: str, regime: str, seed: int, cache: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    blocks, flops, arms = REGIMES[regime]
    kept = Path(cache) / f"{name}-{regime.replace(' ', '')}.json"
    done: dict[str, Any] = json.loads(kept.read_text()) if kept.exists() else {}
    data = READ[name](Path(folder)) if name in READ else Data(read(Path(folder), name))
    for arm in arms:
        if arm not in done:
            done[arm] = play_arm(arm, data, blocks, flops, seed)
            atomic_write(kept, json.dumps(done))
            print(name, regime, arm, f"{done[arm]['loss']:.4f}", flush=True)
    if "twice the rate" in done:
        done["best rate"] = min(done["model"], done["twice the rate"], key=lambda each: each["seen"])
    targets = int(flops / step_flops(data, blocks)) * next(data.batches(0))[1].numel()
    return {"text": name, "regime": regime, "seed": seed, "arms": done,
            "targets per parameter": targets / sum(p.numel() for p in data.build(blocks).parameters())}


def main() -> None:
    deep, *others = REGIMES
    named = {f"{what}, {regime}": [(regime, name, seed) for seed, name in enumerate(names)] for what, regime, names in (
        ("texts", deep, TEXTS), ("pictures", deep, PICTURES), *(("texts", regime, TEXTS) for regime in others))}
    options, played = play_all(__doc__, "shallow", play, [cell for cells in named.values() for cell in cells])
    found = {(cell["regime"], cell["text"]): cell for cell in played}
    groups = {group: [found[regime, name] for regime, name, _ in cells if (regime, name) in found] for group, cells in named.items()}
    write(options, "shallow", {"cells": played, "compared": {
        group: {arm: compared(cells, arm, "shallow") for arm in cells[0]["arms"] if arm != "shallow"} for group, cells in groups.items() if cells}})


if __name__ == "__main__":
    main()
