"""Does `esper.depths` know how deep a model should be hundreds of times further up? GPTs of millions of parameters, and residual nets.

    python -m experiments.depths_at_size FOLDER --device cuda --workers 5

As experiments.depths, with its rule, optimizer, schedules, splits and counting of FLOPs, on the six longest texts of experiments/universe/texts.json that were at
hand: GPTs 256 wide on 64 windows of 256 bytes a step, whose user comes with eight blocks (6.5 million parameters); and residual nets for CIFAR-10
(`esper tasks add-data`), one to nine blocks a stage, 128 pictures a step, moved and mirrored, whose user comes with 56 layers. Matrix products are of TF32.
The loss of pictures is in nats, too, on the part that chooses nothing: Esper's validation split, while a tenth of the training split is `seen`.
Writes experiments/results/depths_at_size.json.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import esper
from esper.leyline.storage import atomic_write
from esper.tolaria import load_task
from experiments.deeper import Data, Run, compared, halving, play_all, read, step_flops
from experiments.depths import first
from experiments.references import moved, plain_resnet
from experiments.shared import write

TEXTS = ("mail", "cities", "wordnet", "chinese", "rights", "stars")
NETS = ("cifar10-0", "cifar10-1")
LR, NETS_LR = 1e-3, 3e-3
REGIMES = {"GPT, 1.2e14 FLOPs": (1.2e14, (1, 2, 4, 8)), "GPT, 4e14 FLOPs": (4e14, (1, 2, 4, 8)), "GPT, 1.2e15 FLOPs": (1.2e15, (2, 4, 8)),
           "ResNet, 1.7e14 FLOPs": (1.7e14, (1, 2, 3, 5, 9)), "ResNet, 5e14 FLOPs": (5e14, (1, 2, 3, 5, 9))}
"""Name -> (FLOPs, depths; the deepest is the user's)."""
SEARCHED = "GPT, 4e14 FLOPs"


class Texts(Data):
    """Texts on a device."""

    batch, length = 64, 256

    def __init__(self, text: bytes, device: str) -> None:
        super().__init__(text, 256)
        self.device = device

    def build(self, blocks: int) -> nn.Module:
        return super().build(blocks).to(self.device)

    def batches(self, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        return ((x.to(self.device), y.to(self.device)) for x, y in super().batches(seed))

    def held_out(self, test: bool) -> list[tuple[Tensor, Tensor]]:
        return [(x.to(self.device), y.to(self.device)) for x, y in super().held_out(test)]


class Nets(Data):
    """CIFAR-10 on a device, for residual nets."""

    batch = 128

    def __init__(self, device: str) -> None:
        task, self.device = load_task("cifar10"), device
        x, y = task.x.to(device), task.y.to(device)
        self.x, self.y = x[:-4_500], y[:-4_500]
        self.parts = {False: self._pieces(x[-4_500:], y[-4_500:]), True: self._pieces(task.validation_x, task.validation_y)}

    def _pieces(self, x: Tensor, y: Tensor) -> list[tuple[Tensor, Tensor]]:
        return list(zip(x.to(self.device).split(500), y.to(self.device).split(500), strict=True))

    def build(self, blocks: int) -> nn.Module:
        return plain_resnet(blocks).to(self.device)

    def batches(self, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        generator, step = torch.Generator().manual_seed(seed), 1_000_000 * seed
        while True:
            for some in torch.randperm(len(self.x), generator=generator)[: len(self.x) // self.batch * self.batch].to(self.device).split(self.batch):
                step += 1
                yield moved(self.x[some], step), self.y[some]

    def held_out(self, test: bool) -> list[tuple[Tensor, Tensor]]:
        return self.parts[test]


@torch.no_grad()
def right(run: Run) -> float:
    """The share of the part that chooses nothing."""
    found = [(run.model.eval()(x).argmax(1) == y).float().mean() for x, y in run.data.held_out(test=True)]
    return float(torch.stack(found).mean())


def play(name: str, folder: str, regime: str, seed: int, cache: str, device: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("high")
    flops, tried = REGIMES[regime]
    kept = Path(cache) / f"{name}-{regime.replace(' ', '')}.json"
    data = Nets(device) if name in NETS else Texts(read(Path(folder), name, 20_000_000), device)
    rate = NETS_LR if name in NETS else LR
    done: dict[str, Any] = json.loads(kept.read_text()) if kept.exists() else {}
    table = esper.depths(data.build(max(tried)), example=next(data.batches(0)), steps=int(flops / step_flops(data, max(tried))))
    best = first(table)
    named = best.blocks // len(best.stacks)  # of every stage
    depths = sorted({*tried, named})
    for arm in (*map(str, depths), *["halving"] * (regime == SEARCHED)):
        if arm in done:
            continue
        if arm == "halving":
            done[arm] = halving(data, seed, flops, (1, 2, 4, 8), (4, 2, 1), rate)
        else:
            run = Run(data, int(arm), seed, int(flops / step_flops(data, int(arm))), lr=rate)
            steps = run.left
            run.go(steps)
            done[arm] = run.result(blocks=int(arm), steps=steps, **{"right": right(run)} if name in NETS else {})
        atomic_write(kept, json.dumps(done))
        print(name, regime, arm, f"{done[arm]['loss']:.4f}", done[arm].get("right", ""), flush=True)
    return {"text": name, "regime": regime, "seed": seed, "named": named,
            "targets per parameter": {depth.blocks // len(depth.stacks): round(depth.targets, 1) for depth in table.every
                                      if depth.blocks // len(depth.stacks) in depths},
            "arms": done | {"told": done[str(named)], "hindsight": min((done[str(depth)] for depth in depths), key=lambda run: run["loss"])}}


def main() -> None:
    cells = [(regime, name, seed) for regime in REGIMES for seed, name in enumerate(TEXTS if regime.startswith("GPT") else NETS)]
    options, played = play_all(__doc__, "depths_at_size", play, cells, on_device=True)
    write(options, "depths_at_size", {"cells": played, "compared": {regime: {
        arm: compared(some, arm, "told") for arm in some[0]["arms"] if arm != "told" and all(arm in cell["arms"] for cell in some)}
        for regime in REGIMES if len(some := [cell for cell in played if cell["regime"] == regime]) > 1}})


if __name__ == "__main__":
    main()
