"""Does `esper.depths` know how deep a model should be? Beside every depth, a search over depths, and the best in hindsight.

    python -m experiments.depths FOLDER --workers 2      after experiments.shallow, whose runs of the same models are not made again

Static models on the texts and pictures of experiments.shallow, with its rate, splits and counting of FLOPs. A user comes with four blocks (eight
where they are narrow) and the steps that the FLOPs allow; a first rule names one depth before anything is trained, the deepest that sees 20 labels for each
parameter (experiments.depths_by_width has today's): six choices in all, since texts hardly
differ in what it looks at, and one for pictures. 64 wide, one, two and four blocks with four budgets; 32 wide, one to eight blocks with two, the larger one
on every second text; and what was named, if it is none of these. `halving` shares the FLOPs between one block, two and
four, and drops the worse ones on the part that is seen. Writes experiments/results/depths.json.
"""

import json
from pathlib import Path
from typing import Any

import torch

import esper
from esper.door import Depth, Depths
from esper.leyline.storage import atomic_write
from experiments.deeper import WIDTH, Data, compared, halving, play_all, read, static, step_flops
from experiments.deeper_images import READ
from experiments.shallow import LR, PICTURES, TEXTS
from experiments.shared import write

REGIMES = {"64 wide, 5e11 FLOPs": (64, 5e11, (1, 2, 4)), "64 wide, 1e12 FLOPs": (64, 1e12, (1, 2, 4)),
           "64 wide, 2e12 FLOPs": (64, 2e12, (1, 2, 4)), "64 wide, 4e12 FLOPs": (64, 4e12, (1, 2, 4)),
           "32 wide, 2.5e11 FLOPs": (32, 2.5e11, (1, 2, 4, 8)), "32 wide, 5e11 FLOPs": (32, 5e11, (1, 2, 4, 8))}
"""Name -> (width, FLOPs, depths)."""
ON = {"32 wide, 5e11 FLOPs": TEXTS[::2]}
ONLY_WITH_PICTURES = "64 wide, 2e12 FLOPs"
SEARCHED = (2e12, 4e12)
FIRST = 20


def first(table: Depths) -> Depth:
    """What the first rule named."""
    return next((depth for depth in reversed(table.every) if depth.targets >= FIRST), table.every[0])


def known(name: str, flops: float) -> dict[str, Any]:
    """Runs that experiments.shallow has made."""
    path, found = Path(__file__).parent / "results" / "shallow.json", dict[str, Any]()
    for cell in json.loads(path.read_text())["cells"] if path.exists() else ():
        most, _, budget = cell["regime"].partition(" blocks, ")
        if cell["text"] == name and float(budget.removesuffix(" FLOPs")) == flops:
            arms = {"model": int(most), "half": int(most) // 2, "one": 1}
            found |= {str(depth): cell["arms"][arm] for arm, depth in arms.items() if arm in cell["arms"]}
            found |= {"halving": cell["arms"]["halving"]} if "halving" in cell["arms"] else {}
    return found


def play(name: str, folder: str, regime: str, seed: int, cache: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    width, flops, tried = REGIMES[regime]
    kept = Path(cache) / f"{name}-{regime.replace(' ', '')}.json"
    data = READ[name](Path(folder)) if name in READ else Data(read(Path(folder), name), width)
    done: dict[str, Any] = json.loads(kept.read_text()) if kept.exists() else known(name, flops) if width == WIDTH else {}
    table = esper.depths(data.build(max(tried)), example=next(data.batches(0)), steps=int(flops / step_flops(data, max(tried))))
    named = first(table).blocks
    depths = sorted({*tried, named})
    for arm in (*map(str, depths), *["halving"] * (width == WIDTH and flops in SEARCHED)):
        if arm not in done:
            done[arm] = halving(data, seed, flops, (1, 2, 4), (3, 2, 1), LR) if arm == "halving" else static(data, int(arm), seed, flops, LR)
            atomic_write(kept, json.dumps(done))
            print(name, regime, arm, f"{done[arm]['loss']:.4f}", flush=True)
    return {"text": name, "regime": regime, "seed": seed, "named": named,
            "targets per parameter": {depth.blocks: round(depth.targets, 1) for depth in table.every if depth.blocks in depths},
            "arms": done | {"told": done[str(named)], "hindsight": min((done[str(depth)] for depth in depths), key=lambda run: run["loss"])}}


def main() -> None:
    cells = [(regime, name, seed) for regime in REGIMES for seed, name in enumerate(TEXTS) if name in ON.get(regime, TEXTS)]
    cells += [(ONLY_WITH_PICTURES, name, seed) for seed, name in enumerate(PICTURES)]
    options, played = play_all(__doc__, "depths", play, cells)
    texts = [cell for cell in played if cell["text"] in TEXTS]
    groups = {f"texts, {regime}": [cell for cell in texts if cell["regime"] == regime] for regime in REGIMES}
    groups["texts, 64 wide"] = [cell for cell in texts if REGIMES[cell["regime"]][0] == WIDTH]
    groups["pictures"] = [cell for cell in played if cell["text"] in PICTURES]
    write(options, "depths", {"cells": played, "compared": {group: {
        arm: compared(some, arm, "told") for arm in some[0]["arms"] if arm != "told" and all(arm in cell["arms"] for cell in some)}
        for group, some in groups.items() if some}})


if __name__ == "__main__":
    main()
