"""Does a model get better for the same compute if it grows deeper by copies of its own blocks? Beside static nets of several depths.

    python -m experiments.deeper FOLDER --workers 2          FOLDER holds the packages, as for experiments.texts

The model is made of PyTorch's parts alone: embeddings, `nn.TransformerEncoderLayer`s under a causal mask, a head; 64 wide, trained on
windows of 64 bytes, 16 at a time, by AdamW with a warm-up and a cosine. A text's first nine tenths train it, the next twentieth is what
decisions see, and the last one is reported; it chooses nothing. Compute is training FLOPs by PyTorch's counter, those of seeds and of
what they learn behind the model included, and the evaluations of grown runs, but not those of others. In each cell (regime, text) a grown run comes first,
all others get the FLOPs that it took, and a schedule of their own length:

    grown     attached with blueprints=["copy"]; every other setting is its default
    at once   the same, but the plan says: every slot, before anything is known
    built-in  attached with all defaults
    host      the model as it is, for longer
    twice     twice as many blocks from the start
    halving   1, 2, 3, 4 and 6 blocks share the FLOPs; at each third of them the worse ones are dropped, 5 to 3 to 1
    either    the host and twice as many blocks have half of the FLOPs each; the better one is taken

Loss in nats per byte. Runs are kept in --cache as they end, so that a killed command goes on. Writes experiments/results/deeper.json.
"""

import argparse
import functools
import itertools
import json
import math
import os
import statistics
import tarfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import esper
from esper.leyline.storage import atomic_write
from experiments.shared import parser, write
from experiments.texts import LIST, archive

WIDTH, LENGTH, BATCH, LR, EPOCHS, SEEN, MOST = 64, 64, 16, 5e-3, 20, 192, 3_000_000
TEXTS = ("moby", "speeches", "wordnet", "declarations", "chinese", "sounds", "german", "plotly", "airports", "diagnoses")
REGIMES = {"1 block, 1e12 FLOPs": (1, 1e12), "1 block, 4e12 FLOPs": (1, 4e12)}
"""Name -> (blocks of the host, about how many FLOPs a grown run takes)."""
DEPTHS, RUNGS = (1, 2, 3, 4, 6), (5, 3, 1)
ARMS = ("grown", "at once", "built-in", "host", "twice", "halving", "either")


class Model(nn.Module):
    def __init__(self, vocabulary: int, blocks: int, width: int = WIDTH, length: int = LENGTH) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        nn.init.normal_(self.token.weight, std=0.02)
        nn.init.normal_(self.place.weight, std=0.02)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
                                    for _ in range(blocks))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False))
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.token(x) + self.place.weight
        for block in self.blocks:
            h = block(h, src_mask=self.mask, is_causal=True)
        return self.head(h)


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, -2), batch[1].flatten())


class Data:
    """A text as numbers, in three parts."""

    batch, length = BATCH, LENGTH

    def __init__(self, text: bytes, width: int = WIDTH) -> None:
        self.width = width
        known = sorted(set(text))
        table = torch.zeros(256, dtype=torch.long)
        table[known] = torch.arange(len(known))
        tokens = table[torch.frombuffer(bytearray(text), dtype=torch.uint8).long()]
        self.vocabulary, n = len(known), len(tokens)
        self.train, self.seen, self.test = tokens[: n * 18 // 20], tokens[n * 18 // 20 : n * 19 // 20], tokens[n * 19 // 20 :]

    def build(self, blocks: int) -> nn.Module:
        return Model(self.vocabulary, blocks, self.width, self.length)

    def batches(self, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        while True:
            yield windows(self.train, torch.randint(len(self.train) - self.length - 1, (self.batch,), generator=generator), self.length)

    def held_out(self, test: bool) -> list[tuple[Tensor, Tensor]]:
        """Windows that cover a part evenly: few where decisions are made, more at the end."""
        tokens = self.test if test else self.seen
        starts = torch.linspace(0, len(tokens) - self.length - 2, min(2000 if test else SEEN, len(tokens) // self.length)).long()
        return [windows(tokens, some, self.length) for some in starts.split(64)]


def windows(tokens: Tensor, starts: Tensor, length: int = LENGTH) -> tuple[Tensor, Tensor]:
    found = tokens[starts[:, None] + torch.arange(length + 1)]
    return found[:, :-1], found[:, 1:]


@functools.cache
def step_flops(data: Data, blocks: int) -> int:
    """Of one training step: three times the forward pass."""
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        data.build(blocks).train()(next(data.batches(0))[0])
    return 3 * counter.get_total_flops()


class Run:
    """A training that can be gone on with, of a fresh model or of one that was trained before."""

    def __init__(self, data: Data, blocks: int, seed: int, steps: int, model: nn.Module | None = None, lr: float = LR) -> None:
        torch.manual_seed(seed)
        self.data, self.blocks, self.model = data, blocks, model or data.build(blocks)
        self.left, self.step_flops = steps, step_flops(data, blocks)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr)
        warm = max(1, steps // 20)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: min(
            (step + 1) / warm, 0.51 + 0.49 * math.cos(math.pi * min(1.0, max(0, step - warm) / max(1, steps - warm)))))
        self.stream = data.batches(1000 + seed)

    def go(self, steps: int) -> None:
        self.model.train()
        for batch in itertools.islice(self.stream, min(steps, self.left)):
            self.optimizer.zero_grad()
            loss_of(self.model, batch).backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.schedule.step()
            self.left -= 1

    def score(self, model: nn.Module | None = None, test: bool = False) -> float:
        net, parts = (model or self.model).eval(), self.data.held_out(test)
        with torch.no_grad():
            return sum(float(loss_of(net, part)) * len(part[0]) for part in parts) / sum(len(part[0]) for part in parts)

    def result(self, model: nn.Module | None = None, **more: Any) -> dict[str, Any]:
        return {"loss": self.score(model, test=True), "seen": self.score(model), **more}


def grow(run: Run, seed: int, **options: Any) -> dict[str, Any]:
    class Batches:
        def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
            return data.batches(next(fresh))

    data, blocks, each, fresh = run.data, run.blocks, run.left // EPOCHS, itertools.count(10_000 * (seed + 1))
    growing = esper.attach(run.model, run.optimizer, example=next(data.batches(0)), slots=[f"blocks.{n}" for n in range(blocks)],
                           epochs=EPOCHS, loss=loss_of, data=Batches(), schedulers=[run.schedule], **options)
    told, looked, looks = [], [], sum(len(part[0]) for part in data.held_out(test=False)) / data.batch

    def evaluate() -> float:
        looked.append(step_flops(data, blocks + len(growing.active)) / 3 * looks)
        return -run.score()

    for _ in range(EPOCHS):
        run.go(each)
        told.append(growing.end_epoch(evaluate).decision)
    flops = EPOCHS * each * run.step_flops * (1 + growing.compute.spent) + sum(looked)
    net = growing.deliver()
    return run.result(net, flops=flops, blocks=len(net.blocks), decisions=told)


def steps_of(data: Data, blocks: int, flops: float) -> int:
    """Of a grown run that takes about so many FLOPs."""
    return int(flops / (0.95 * step_flops(data, 2 * blocks))) // EPOCHS * EPOCHS


def static(data: Data, blocks: int, seed: int, flops: float, lr: float = LR) -> dict[str, Any]:
    run = Run(data, blocks, seed, int(flops / step_flops(data, blocks)), lr=lr)
    run.go(run.left)
    return run.result(blocks=blocks)


def halving(data: Data, seed: int, flops: float, depths: Sequence[int] = DEPTHS, rungs: Sequence[int] = RUNGS, lr: float = LR) -> dict[str, Any]:
    """Schedules are as long as the last one's training will be."""
    parts = [flops / len(rungs) / alive for alive in rungs]
    runs = [Run(data, blocks, seed, int(sum(parts) / step_flops(data, blocks)), lr=lr) for blocks in depths]
    for alive, part in zip(rungs, parts, strict=True):
        runs = sorted(runs, key=Run.score)[:alive] if alive < len(runs) else runs
        for run in runs:
            run.go(int(part / run.step_flops))
    return runs[0].result(blocks=runs[0].blocks)


def play(text: str, packages: str, regime: str, seed: int, cache: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    blocks, flops = REGIMES[regime]
    kept = Path(cache) / f"{text}-{regime.replace(' ', '')}-{seed}.json"
    return {"text": text, "regime": regime, "seed": seed, "arms": arms(
        Data(read(Path(packages), text)), blocks, flops, seed, kept, f"{text} {regime} {seed}")}


def arms(data: Data, blocks: int, flops: float, seed: int, kept: Path, name: str) -> dict[str, Any]:
    done: dict[str, Any] = json.loads(kept.read_text()) if kept.exists() else {}
    steps = steps_of(data, blocks, flops)
    plan = {f"blocks.{n}": "copy" for n in range(blocks)}
    for arm in ARMS:
        if arm in done:
            continue
        given = done["grown"]["flops"] if done else 0.0
        done[arm] = (grow(Run(data, blocks, seed, steps), seed, blueprints=["copy"]) if arm == "grown" else
                     grow(Run(data, blocks, seed, steps), seed, blueprints=["copy"], controller=plan) if arm == "at once" else
                     grow(Run(data, blocks, seed, steps), seed) if arm == "built-in" else
                     halving(data, seed, given) if arm == "halving" else
                     min((static(data, n, seed, given / 2) for n in (blocks, 2 * blocks)), key=lambda each: each["seen"])
                     if arm == "either" else
                     static(data, blocks * (1 + (arm == "twice")), seed, given))
        atomic_write(kept, json.dumps(done))
        print(name, arm, f"{done[arm]['loss']:.4f}", done[arm]["blocks"], flush=True)
    return done


def read(folder: Path, name: str, most: int = MOST) -> bytes:
    source = next(each for each in json.loads(LIST.read_text())["sources"] if each["name"] == name)
    with tarfile.open(folder / archive(source["package"]), "r:gz") as held:
        found = sorted((entry for entry in held if entry.isfile() and fnmatch(entry.name, source["files"])), key=lambda entry: entry.name)
        return b"".join(file.read() for entry in found if (file := held.extractfile(entry)))[:most]


def compared(cells: list[dict[str, Any]], arm: str, ours: str = "grown") -> dict[str, float]:
    """What our run is better by, in nats; 95 % intervals over texts."""
    by_text = [statistics.fmean(cell["arms"][arm]["loss"] - cell["arms"][ours]["loss"] for cell in cells if cell["text"] == text)
               for text in sorted({cell["text"] for cell in cells})]
    student = {2: 12.71, 3: 4.30, 5: 2.78, 6: 2.57, 10: 2.26, 12: 2.20}[len(by_text)]
    return {"better by": statistics.fmean(by_text), "error": student * statistics.stdev(by_text) / math.sqrt(len(by_text)),
            "texts ahead": sum(value > 0 for value in by_text), "texts": len(by_text)}


def play_all(description: str | None, name: str, play: Callable[..., dict[str, Any]], cells: Sequence[tuple[str, str, int]],
             on_device: bool = False) -> tuple[argparse.Namespace, list[dict[str, Any]]]:
    """The command of an experiment plays each cell (regime, text, seed); returns its options and what was played.
    `on_device`: `play` takes a device, too."""
    made: argparse.ArgumentParser = parser(description)
    made.add_argument("folder", metavar="FOLDER")
    made.add_argument("--workers", type=int, default=1)
    made.add_argument("--cache", type=Path, default=Path(f"{name}-cache"))
    made.add_argument("--only", default="", help="cells whose regime begins so")
    options = made.parse_args()
    options.cache.mkdir(parents=True, exist_ok=True)
    os.environ["OMP_NUM_THREADS"] = "1"
    device = [options.device] * on_device
    with ProcessPoolExecutor(options.workers) as pool:
        return options, list(pool.map(play, *zip(*((text, options.folder, regime, seed, str(options.cache), *device)
                                                   for regime, text, seed in cells if regime.startswith(options.only)), strict=True)))


def run(description: str | None, name: str, play: Callable[..., dict[str, Any]], cells: Sequence[tuple[str, str, int]],
        arms: Sequence[str]) -> None:
    """Writes what the arms did and how they compare."""
    options, played = play_all(description, name, play, cells)
    groups = {regime: [cell for cell in played if cell["regime"] == regime] for regime, _, _ in cells} | {"all": played}
    write(options, name, {"cells": played, "compared": {
        group: {arm: compared(some, arm) for arm in arms} for group, some in groups.items() if some}})


if __name__ == "__main__":
    run(__doc__, "deeper", play, [(regime, text, seed) for regime in REGIMES for seed, text in enumerate(TEXTS)], ARMS[1:])
