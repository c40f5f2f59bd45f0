"""An epoch of a population by the engine: which rows run, and which engine has their size of batch.

Legend: N rows of the population, W rows at work, R rows of a pass, S slots, B samples.
"""

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from esper.kasmina.engine.engine import Engine
from esper.kasmina.engine.program import Programs
from esper.kasmina.engine.rows import Rows, kinds_of, probe_rows, training_rows
from esper.kasmina.grouped import Grouped
from esper.kasmina.packing import Prefix

if TYPE_CHECKING:
    from esper.kasmina.population import Population

MOST_ENGINES = 2
"""Sizes of batches, each with buffers of its own; a loop may end an epoch with a smaller one."""
LARGEST = 128
"""Samples of an engine that was made to evaluate."""


class Engines:
    """The engines of a population, by their size of batch. They last, whatever grows."""

    def __init__(self, population: "Population", programs: Programs) -> None:
        self.population, self.programs = population, programs
        self._made: dict[int, Engine] = {}

    def fit(self) -> bool:
        """Do they know all seeds of now?"""
        return bool((kinds_of(self.population.life, self.programs.kinds) > -2).all())

    def training(self, batch: int) -> Engine:
        if batch not in self._made:
            while len(self._made) >= MOST_ENGINES:
                del self._made[next(iter(self._made))]
            p = self.population
            self._made[batch] = Engine(p.host, self.programs, p.banks, p.trainable, p.optim, p.objective,
                                       p.compute_dtype, batch)
        return self._made[batch]

    def evaluating(self, batch: int) -> Engine:
        """Any will do: it takes samples piece by piece."""
        return self._made[max(self._made)] if self._made else self.training(min(batch, LARGEST))


class EngineEpoch:
    """What `Grouped` is for the general path. Banks are trained in place."""

    def __init__(self, population: "Population", engines: Engines) -> None:
        self.population, self.engines = population, engines
        self.working = population.at_work(torch.arange(population.rows))
        self.rows: Rows | None = None  # that train
        self._used: list[Engine] = []
        self._grouped: Grouped | None = None  # with the weights of now

    @property
    def untrained(self) -> bool:
        return self.rows is None

    def train(self, x: Tensor, y: Tensor) -> Tensor:
        return self._step(x, y, None, True)[: len(self.working)]

    def shadow(self, x: Tensor, y: Tensor, prefix: Prefix | None) -> bool:
        """False if no seed is incubating."""
        if not bool(self.population.life.incubating[self.working].any()):
            return False
        self._step(x, y, prefix, False)
        return True

    def _step(self, x: Tensor, y: Tensor, prefix: Prefix | None, hosts: bool) -> Tensor:
        if self.rows is None:
            kinds = self.engines.programs.kinds
            self.rows = training_rows(self.population.life, kinds, self.working, prefix, hosts)
        engine, self._grouped = self.engines.training(len(x)), None
        if engine not in self._used:
            engine.set_rates(self.population.lr, self.population.decay)
            self._used.append(engine)
        engine.wire(self.rows)
        return engine.step(x, y)

    def forward(self, x: Tensor, rows: Tensor | None, alpha: Tensor | None) -> Tensor:
        """[R, B, O]. Rows of a caller's own run by the general path, with the weights of now."""
        if rows is None and alpha is None:
            return self.engines.evaluating(len(x)).forward(x, self._alone)
        self._grouped = self._grouped or Grouped(self.population)
        return self._grouped.forward(x, rows, alpha)

    def probe(self, rows: Tensor, alpha: Tensor, prefix: Prefix | None) -> Callable[[Tensor], Tensor]:
        kinds, life = self.engines.programs.kinds, self.population.life
        chosen = probe_rows(life, kinds, self.working, rows, alpha, prefix)
        return lambda x: self.engines.evaluating(len(x)).forward(x, chosen)

    @cached_property
    def _alone(self) -> Rows:
        slots = self.population.spec.slots
        return probe_rows(self.population.life, self.engines.programs.kinds, self.working, torch.arange(0),
                          torch.zeros(0, slots), None)

    def set_lr(self, lr: Tensor) -> None:
        for engine in self._used:
            engine.set_rates(lr, self.population.decay)

    def finish(self) -> None:
        """Note whose gradients were finite."""
        for engine in self._used:
            assert self.rows is not None
            self.population.life.record_gradients(*engine.health(self.rows))
