"""One training step of a pack: forward, gradient, clip, update. On CUDA it becomes a graph to replay."""

import functools
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from esper.kasmina.objectives import Objective
from esper.kasmina.optim import OptimConfig, update
from esper.kasmina.packing import Pack, Pass, as_inputs


class Stepper:
    """Trains a pack in place. Its wiring is fixed: on CUDA the second step is captured, later ones replay."""

    def __init__(self, pack: Pack, main: Pass | None, shadow: Pass | None, optim: OptimConfig,
                 objective: Objective) -> None:
        """Without a main pass only incubating seeds learn, and losses are those of the shadow rows."""
        self.pack, self.main, self.shadow, self.optim, self.objective = pack, main, shadow, optim, objective
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: tuple[Tensor, Tensor] | None = None
        self._losses: Tensor | None = None

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        losses = self._step_on_cuda(x, y) if x.is_cuda else self._step(as_inputs(x, self.pack.dtype), y)
        self.pack.steps_taken += 1
        return losses

    def _step(self, x: Tensor, y: Tensor) -> Tensor:
        pack, losses = self.pack, []
        pack.refresh()
        for chosen in (p for p in (self.main, self.shadow) if p is not None):
            samples, labels = (t if columns is None else t.index_select(1, columns)
                               for t, columns in zip((x, y), chosen.columns, strict=True))
            losses.append(self.objective.losses(chosen(samples), labels))
        total = torch.stack([loss.sum() for loss in losses]).sum() if len(losses) > 1 else losses[0].sum()
        pack.finite &= update(self.optim, pack.segments, pack.gradient(total)).isfinite()
        if self.main is not None:
            pack.keep(self.main.statistics)
        return losses[0].detach()

    def _step_on_cuda(self, x: Tensor, y: Tensor) -> Tensor:
        if self._inputs is None or self._inputs[0].shape != x.shape:
            self._inputs, self._graph = (as_inputs(x, self.pack.dtype).clone(), y.clone()), None
            return self._warm_up()
        self._inputs[0].copy_(x)
        self._inputs[1].copy_(y)
        if self._graph is None:
            self._graph = torch.cuda.CUDAGraph()
            self.pack.renew_leaves()  # capture has a stream of its own
            with capturing(self._graph, pool=_anchor(x.device).pool()):
                self._losses = self._step(*self._inputs)
        self._graph.replay()
        assert self._losses is not None
        return self._losses.clone()

    def _warm_up(self) -> Tensor:
        """The first step runs eagerly on a side stream, as capture wants it; it counts like any other."""
        assert self._inputs is not None
        self.pack.renew_leaves()
        stream = _side_stream(self._inputs[0].device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            losses = self._step(*self._inputs)
        torch.cuda.current_stream().wait_stream(stream)
        return losses


@contextmanager
def capturing(graph: torch.cuda.CUDAGraph, **options: Any) -> Iterator[None]:
    """What happens inside becomes the graph. The collector rests: it might destroy a graph."""
    collects = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, **options):
            yield
    finally:
        if collects:
            gc.enable()


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Always the same one: the allocator keeps memory per stream. Not the stream of capture: graphs go on
    using its cuBLAS workspace, which is dropped with any of them (pytorch#193402). A workspace from a capture
    lies in the anchor's pool and stays mapped; one from an eager step would not."""
    return torch.cuda.Stream(device)


@functools.cache
def _anchor(device: torch.device) -> torch.cuda.CUDAGraph:
    """A graph that is never dropped: its memory pool serves every later graph, so memory does not grow."""
    graph = torch.cuda.CUDAGraph()
    with capturing(graph):
        torch.zeros(1, device=device)
    return graph
