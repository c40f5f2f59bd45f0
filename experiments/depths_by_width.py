"""May wide models be deeper? Two rules for `esper.depths` on texts that no run about depth had met.

    python -m experiments.depths_by_width FOLDER --workers 2      FOLDER holds the packages, as for experiments.texts

As experiments.depths. The first rule names the deepest model that sees 20 labels for each parameter; the second, which ships, asks 640 labels for each block
and parameter, divided by the width: 20 for one block 32 wide, 5 for one 128 wide. The second was found by looking at the runs of experiments.depths and
.depths_at_size; here both are asked about ten other texts, with budgets where they differ, and a width that neither had met (on every second text).
Writes experiments/results/depths_by_width.json.
"""

import json
from pathlib import Path
from typing import Any

import torch

import esper
from esper.leyline.storage import atomic_write
from experiments.deeper import WIDTH, Data, compared, play_all, read, static, step_flops
from experiments.depths import first
from experiments.shallow import LR
from experiments.shared import write

TEXTS = ("quran", "spanish", "greek", "turkish", "sqlite", "grammar", "borders", "chess", "monsters", "browsers")
REGIMES = {"32 wide, 2.5e11 FLOPs": (32, 2.5e11, (1, 2), 8), "32 wide, 1e12 FLOPs": (32, 1e12, (2, 3, 5), 8),
           "64 wide, 4e12 FLOPs": (64, 4e12, (2, 3), 4), "128 wide, 1.6e13 FLOPs": (128, 1.6e13, (1, 2), 0)}
"""Name -> (width, FLOPs, depths, the depth of a user; 0 was not played)."""
FEW = "128 wide, 1.6e13 FLOPs"


def named(data: Data, flops: float) -> dict[str, int]:
    """Rule -> the deepest that it allows."""
    table = esper.depths(data.build(4), example=next(data.batches(0)), steps=max(1, int(flops / step_flops(data, 4))))
    return {"first": first(table).blocks, "second": table.best.blocks}


def play(name: str, folder: str, regime: str, seed: int, cache: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    width, flops, tried, yours = REGIMES[regime]
    kept = Path(cache) / f"{name}-{regime.replace(' ', '')}.json"
    data, done = Data(read(Path(folder), name), width), json.loads(kept.read_text()) if kept.exists() else {}
    told = named(data, flops)
    depths = sorted({*tried, *told.values(), *[yours] * (yours > 0)})
    for depth in depths:
        if str(depth) not in done:
            done[str(depth)] = static(data, depth, seed, flops, LR * min(1.0, WIDTH / width))
            atomic_write(kept, json.dumps(done))
            print(name, regime, depth, f"{done[str(depth)]['loss']:.4f}", flush=True)
    return {"text": name, "regime": regime, "seed": seed, "named": told,
            "arms": done | ({"yours": done[str(yours)]} if yours else {}) | {rule: done[str(depth)] for rule, depth in told.items()}
            | {"hindsight": min((done[str(depth)] for depth in depths), key=lambda run: run["loss"])}}


def main() -> None:
    cells = [(regime, name, seed) for regime in REGIMES for seed, name in enumerate(TEXTS) if regime != FEW or seed % 2 == 0]
    options, played = play_all(__doc__, "depths_by_width", play, cells)
    groups = {regime: some for regime in REGIMES if (some := [cell for cell in played if cell["regime"] == regime])} | {"all": played}
    write(options, "depths_by_width", {"cells": played, "compared": {group: {
        arm: compared(some, arm, "second") for arm in ("yours", "first", "hindsight") if all(arm in cell["arms"] for cell in some)}
        for group, some in groups.items()}})


if __name__ == "__main__":
    main()
