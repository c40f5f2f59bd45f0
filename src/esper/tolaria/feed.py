"""Samples for every row: data lives on the device once, and each row reads it in its own order, with its own
distortions: functions of its scenario's key and of the clock, never of its place in the population.

Legend: N rows, B batch, n training samples, F numbers per sample.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from esper.kasmina import find_objective
from esper.leyline import EsperError
from esper.leyline.keys import Purpose, mix, uniform
from esper.tolaria.scenarios import Family, Scenarios
from esper.tolaria.tasks import TaskData

NOISES = 4096  # vectors in the bank from which samples draw their noise
TOGETHER = {"cpu": 0, "cuda": 10_000_000}
"""Numbers of training samples that are read at once: many small kernels would keep a device waiting."""


class Feed:
    """Batches [B, N, *inputs] and labels for a population: [B, N], or [B, N, T] where inputs are tokens."""

    def __init__(self, family: Family, data: TaskData, rows: int, device: torch.device) -> None:
        self.family, self.device, self.rows = family, device, rows
        self.inputs, self.outputs = family.host.inputs, family.host.classes
        self.objective = find_objective(family.objective)
        self.x, self.y = self.hold(data.x, data.y, family.samples, "samples")
        held = self.hold(data.validation_x, data.validation_y, family.validation, "validation")
        self.validation_x, self.validation_y = held
        self.batch = min(family.batch, len(self.x))
        n, width = self.x.shape
        self.steps = n // self.batch
        self.key = torch.zeros(rows, dtype=torch.int64, device=device)
        self.subset = torch.arange(n, device=device).repeat(rows, 1)  # [N, n]: position -> sample
        told = torch.zeros(0) if self.objective.tokens else self.y  # nobody is told wrong tokens
        self.labels = told.repeat(rows, 1)  # [N, n]: what the row is told about each sample
        self.count = torch.full((rows,), n, device=device)
        self.noise = torch.zeros(rows, device=device)
        self.shift = torch.zeros(rows, dtype=torch.int64, device=device)
        self.places = torch.arange(width, device=device).repeat(rows, 1)  # [N, F]: their sources
        self._order = self.subset.t()  # [n, N] of this epoch
        self._steps = max(1, TOGETHER[device.type] // (self.batch * rows * width))
        self._block: tuple[int, Tensor, Tensor] | None = None  # the first sample, samples, labels
        self._clock = torch.zeros(rows, dtype=torch.int64, device=device)
        generator = torch.Generator().manual_seed(0)
        self._noises = torch.randn(NOISES, width, generator=generator).to(device)
        self._shuffles = self._shifts = self._noisy = False

    def hold(self, x: Tensor, y: Tensor, most: int, what: str) -> tuple[Tensor, Tensor]:
        """([n, F], [n]) on the device: the first samples of a split, pooled to the host's inputs."""
        if most > len(x):
            raise EsperError(f"family {self.family.name!r} asks for {most} {what}, but the task has {len(x)}")
        x, y = x[: most or len(x)], y[: most or len(y)]
        if self.family.pool > 1:
            x = F.avg_pool2d(x, self.family.pool)
        if math.prod(x.shape[1:]) != math.prod(self.inputs):
            raise EsperError(f"family {self.family.name!r} has hosts for inputs {self.inputs}, "
                             f"but its samples are {tuple(x.shape[1:])}")
        for numbers in (x, y) if self.objective.tokens else (y,):
            self.objective.check(numbers.flatten(), self.outputs)
        return x.flatten(1).to(self.device), y.to(self.device)

    def reset(self, rows: Tensor, scenarios: Scenarios) -> None:
        """Give these rows the data of their new scenarios."""
        where, (n, width) = rows.to(self.device), self.x.shape
        key = scenarios.key.to(self.device)

        def told(name: str) -> Tensor:
            return scenarios.of_kind(name).to(self.device)

        self._block = None
        self.key[where] = key
        self.subset[where] = _shuffled(mix(key, Purpose.SUBSET), n)
        self.count[where] = torch.where(told("samples") > 0, told("samples"), n).clamp(max=n)
        if not self.objective.tokens:
            wrong = uniform(mix(key, Purpose.LABEL), n) < told("label_noise")[:, None]
            drawn = self.objective.wrong_labels(uniform(mix(key, Purpose.LABEL, 1), n), self.y, self.outputs)
            self.labels[where] = torch.where(wrong, drawn, self.y)
        self.noise[where] = told("noise").to(torch.float32)
        self.shift[where] = told("shift")
        mixed = _shuffled(mix(key, Purpose.SHUFFLE), math.prod(self.inputs[1:] or self.inputs))  # by channel
        whole = torch.arange(width, device=self.device)
        size = mixed.shape[1]
        one = torch.where(told("shuffle")[:, None], mixed, whole[:size])
        self.places[where] = (whole[::size, None] + one[:, None, :]).flatten(1)
        self._shuffles, self._shifts, self._noisy = (  # asked once here: asking a device makes it wait
            bool((self.places != whole).any()), bool(self.shift.any()), bool((self.noise > 0).any()))

    def begin_epoch(self, clock: Tensor) -> None:
        """Fix the order of this epoch from each row's clock [N]."""
        self._clock, self._block = clock.to(self.device), None
        place = _shuffled(mix(self.key, Purpose.ORDER, self._clock), len(self.x))
        self._order = self.subset.gather(1, place % self.count[:, None]).t().contiguous()  # [n, N]

    def train(self, step: int) -> tuple[Tensor, Tensor]:
        """Batch `step` of the epoch: samples [B, N, *inputs] and their labels."""
        span = self._steps * self.batch
        begin = step * self.batch
        first = begin - begin % span
        if self._block is None or self._block[0] != first:
            sample = self._order[first : min(first + span, self.steps * self.batch)]
            labels = self.y[sample] if self.objective.tokens else self.labels.t().gather(0, sample)
            self._block = first, self._read(self.x, sample, 0, self.family.augment), labels
        x, y = (part[begin - first : begin - first + self.batch] for part in self._block[1:])
        return x, y

    def validation(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Validation samples start..stop."""
        return self.held(self.validation_x, self.validation_y, 1, start, stop)

    def held(self, x: Tensor, y: Tensor, split: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Samples start..stop of a split that does not train, distorted as those that do; labels are true."""
        sample = torch.arange(start, min(stop, len(x)), device=self.device)[:, None].expand(-1, self.rows)
        return self._read(x, sample, split, 0), y[sample]

    def _read(self, x: Tensor, sample: Tensor, split: int, augment: int) -> Tensor:
        if self._shuffles or self._shifts or augment:
            out = x.take(sample[..., None] * x.shape[1] + self._sources(sample, split, augment))
        else:
            out = x.index_select(0, sample.flatten()).view(*sample.shape, -1)  # indexing copies one by one
        if self._noisy:
            which = mix(self.key, Purpose.NOISE, split)[None] + sample * 2_654_435_761
            out = out + self.noise[None, :, None] * self._noises[which.remainder(NOISES)]
        return out.view(*sample.shape, *self.inputs)

    def _sources(self, sample: Tensor, split: int, augment: int) -> Tensor:
        """[B, N, F]: the place in its sample from which each number is read."""
        if not augment and not self._shifts:
            return self.places.expand(*sample.shape, -1)
        grids = []  # along each axis [B, N, size]
        for axis, size in enumerate(self.inputs[1:] or self.inputs):
            moved = _spread(mix(self.key[None], Purpose.SHIFT + 100 * split, axis, sample), self.shift)
            if augment:
                keys = mix(self.key[None], Purpose.AUGMENT, axis, self._clock[None], sample)
                moved = moved + _spread(keys, augment)
            grids.append((torch.arange(size, device=self.device) - moved[..., None]) % size)
        inside = grids[0]
        for grid in grids[1:]:
            inside = (inside[..., :, None] * grid.shape[2] + grid[..., None, :]).flatten(2)
        offsets = torch.arange(0, self.x.shape[1], inside.shape[2], device=self.device)[:, None]
        return self.places.expand(*sample.shape, -1).gather(2, (offsets + inside[..., None, :]).flatten(2))


def _shuffled(keys: Tensor, count: int) -> Tensor:
    """[R, count]: a permutation of 0..count-1 for each key."""
    return mix(keys[:, None], torch.arange(count, device=keys.device)).argsort(1)


def _spread(keys: Tensor, most: Tensor | int) -> Tensor:
    """Whole numbers from -most to most, one per key."""
    return ((keys >> 11) % (2 * most + 1)) - most
