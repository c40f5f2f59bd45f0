"""The engine trains and evaluates a population by a fixed list of launches, captured once as a CUDA graph.

Legend: N rows of the population, R rows that the buffers hold, S slots, B samples of a batch. Which row runs
what is data: a change of topology writes new whole numbers into tensors that the kernels read.
"""

import functools
import itertools
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from esper.kasmina.engine.program import Code, Op, Programs
from esper.kasmina.engine.rows import Rows
from esper.kasmina.hosts import Host
from esper.kasmina.objectives import Objective
from esper.kasmina.optim import OptimConfig
from esper.kasmina.packing import Bank
from esper.kasmina.stepping import capturing

PROGRAMS = 4096
"""Programs of a launch that keep a device busy; few rows are split by samples to come near it."""
PART = 65536
"""Numbers of a value that are worth a program of their own in any case: rows hold seeds of unlike cost, and
nobody should wait long for the last."""


class _Place:
    """A stage, a slot or the head: its ops, its weights, and the values between its ops."""

    def __init__(self, bank: Bank, programs: list[list[Op]], size: int, slot: int,
                 device: torch.device) -> None:
        self.bank, self.slot, self.size, self.levels = bank, slot, size, max(map(len, programs))
        ops = [list(dict.fromkeys(p[at] for p in programs if at < len(p))) for at in range(self.levels)]
        table = [[ops[at].index(p[at]) if at < len(p) else -1 for at in range(self.levels)] for p in programs]
        self.table = torch.tensor(table, dtype=torch.int32).to(device)
        self.sizes = [max([1, *(op.size for op in level if not op.last)]) for level in ops]
        self.ops = [{"OPS": tuple(map(int, itertools.chain(*level))), "COUNT": len(level)} for level in ops]
        self.warps = [_warps(level) for level in ops]  # of a launch backward; forward has four


def _warps(level: list[Op]) -> int:
    """By trying: hosts' maps and small norms have no use for four where samples are series."""
    op = level[0]
    small = op.numbers_tile <= 512 and op.code in (Code.MAP, Code.NORM)
    return 2 if small and len(level) == 1 else 4


class Engine:
    """Kernels and buffers for one population and one size of batch."""

    def __init__(self, host: Host, programs: Programs, banks: list[Bank], trainable: Tensor,
                 optim: OptimConfig, objective: Objective, dtype: torch.dtype, batch: int) -> None:
        self.host, self.programs, self.banks, self.trainable = host, programs, banks, trainable
        self.optim, self.objective, self.dtype, self.batch = optim, objective, dtype, batch
        weights = banks[0].weights
        self.rows, self.device, self.slots = len(weights), weights.device, len(banks) - 1
        shapes = [shape.channels * math.prod(shape.extent) for shape in host.slots.shapes]
        self.places = [place for slot in range(self.slots) for place in (
            _Place(banks[0], [programs.stages[slot]], shapes[slot], -1, self.device),
            _Place(banks[1 + slot], programs.seeds[slot], shapes[slot], slot, self.device))]
        self.places.append(_Place(banks[0], [programs.head], host.classes, -1, self.device))
        self.usual = 3 * self.rows  # rows of a pass
        self.widest = max(size for place in self.places for size in place.sizes)
        # Not by the capacity: how gradients are added up would depend on what neighbours hold.
        pieces = max(min(8, PROGRAMS // self.usual), min(16, batch * self.widest // PART))
        self.per = -(-batch // max(1, min(pieces, batch // 8)))
        self.chunks = -(-batch // self.per)
        per_place = (self.rows, 1 + self.slots)
        self.lr, self.decay = (torch.zeros(per_place, device=self.device) for _ in range(2))
        self.finite = torch.ones(per_place, dtype=torch.int8, device=self.device)
        self.x = torch.zeros(self.rows, batch, math.prod(host.inputs), dtype=dtype, device=self.device)
        self.y = torch.zeros(batch, self.rows, dtype=objective.label_dtype, device=self.device)
        sizes = [[host.layout.size], *programs.sizes]
        self.sizes = [torch.tensor(each, dtype=torch.int32).to(self.device) for each in sizes]
        self.capacity, self.captures = 0, 0
        self.wired: Rows | None = None
        self._compiling = False

    def set_rates(self, lr: Tensor, decay: Tensor) -> None:
        """Learning rates and decays, [N, 1 + S] each: the host's, then each slot's."""
        self.lr.copy_(lr)
        self.decay.copy_(decay)

    def health(self, rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
        """(rows, slots, finite) of the seeds that learned: were all gradients finite since the last call?"""
        mine, slot = rows.live[:, 1:].nonzero().unbind(1)
        env, finite = rows.env[mine], self.finite.cpu() > 0
        self.finite.fill_(1)
        return env, slot, finite[env, 1 + slot]

    def wire(self, rows: Rows) -> None:
        """Let the next steps run these rows."""
        if rows is self.wired:
            return
        self.wired = rows
        if len(rows.env) > self.capacity:
            hosts = self.usual if bool(rows.live[:, 0].any()) else 0  # counterfactual rows will follow
            self._allocate(max(len(rows.env), hosts, 3 * self.capacity // 2))
        count, total, slots = len(rows.env), self.capacity, torch.arange(self.slots)
        every = torch.arange(count)
        begins, learns = rows.start[:, None], rows.live[:, :1]
        stage = torch.where(slots > begins, 0, -2)  # does it run this stage?
        seed = torch.where(slots >= begins, rows.kind, -2)
        live = torch.stack([learns.expand(-1, self.slots), rows.live[:, 1:]], 2).flatten(1)
        live = torch.cat([live, learns], 1)  # [R, places] in the order of the places
        passes = live.int().cumsum(1) - live.int() > 0
        kinds = torch.cat([torch.stack([stage, seed], 2).flatten(1), torch.zeros(count, 1)], 1)
        flags = (live + 2 * passes) * (kinds >= -1)
        sources = torch.where(slots == begins, rows.origin[:, None], every[:, None])
        table = torch.full((self._wiring.shape[0], total), -2, dtype=torch.int32)
        parts = torch.cat([rows.env[:, None], rows.origin[:, None], sources, kinds, flags], 1)
        table[:, :count] = parts.t()
        table[: 2 + self.slots, count:] = 0
        self._wiring.copy_(table, non_blocking=True)
        self.alpha[:count].copy_(rows.alpha.to(self.alpha.dtype), non_blocking=True)
        trains = torch.zeros(2, 1 + self.slots, self.rows, dtype=torch.int32)  # flags, kinds
        for place in range(1 + self.slots):
            mine = rows.live[:, place]
            trains[0, place, rows.env[mine]] = 1
            if place:
                trains[1, place, rows.env[mine]] = rows.kind[mine, place - 1].int()
        self._trains.copy_(trains, non_blocking=True)
        self.count = count

    def _allocate(self, total: int) -> None:
        """Buffers for so many rows, or some more: addresses are even, or kernels would be compiled once more.
        What was captured for fewer is gone."""
        total = self.capacity = -(-total // 64) * 64
        self._graphs: dict[str, torch.cuda.CUDAGraph] = {}
        self._results: dict[str, Tensor] = {}
        places, device = len(self.places), self.device
        self._wiring = torch.zeros(2 + self.slots + 2 * places, total, dtype=torch.int32, device=device)
        self.env, self.origin = self._wiring[:2]
        self.sources = self._wiring[2 : 2 + self.slots]
        self.kinds, self.flags = self._wiring[2 + self.slots :].split(places)
        self._trains = torch.zeros(2, 1 + self.slots, self.rows, dtype=torch.int32, device=device)
        self.alpha = torch.zeros(total, self.slots, device=device)
        self.itself = torch.arange(total, dtype=torch.int32, device=device)

        def buffer(size: int) -> Tensor:
            return torch.zeros(total, self.batch, size, dtype=self.dtype, device=device)

        self.values = self.out = self.out_grad = self.between = self.grads = []  # before there are others
        self.values = [[buffer(size) for size in place.sizes[:-1]] for place in self.places]
        self.out = [buffer(place.size) for place in self.places]  # of a stage, of a slot, or logits
        self.out_grad = [buffer(place.size) for place in self.places if place.slot >= 0]  # by slot
        self.between = [buffer(self.widest), buffer(self.widest)]  # gradients inside a place
        self.grads = [torch.zeros(self.chunks, *bank.weights.shape, device=device) for bank in self.banks]

    def _forward(self) -> Tensor:
        from esper.kasmina.engine.forward import forward

        read = (self.x, self.origin, *_strides(self.x))
        for number, place in enumerate(self.places):
            seed = place.slot >= 0
            host, out = self.out[number - seed], self.out[number]
            rows = self.sources[place.slot] if seed else self.itself
            for level in range(place.levels):
                to = out if level == place.levels - 1 else self.values[number][level]
                self._launch(
                    forward, (self.capacity, self.chunks), *read, to, *_strides(to), host, rows,
                    *_strides(host), out, *self._weights(number), place.table, level, place.levels,
                    self.kinds[number], self.env, *self._alphas(place), place.size, self.batch, self.per,
                    BLEND=seed, FIRST=level == 0, num_warps=4, **self._arithmetic(),
                    **place.ops[level])
                read = (to, self.itself, *_strides(to))
            behind = None if seed or number + 1 == len(self.places) else self.places[number + 1]
            read = (out, self.itself if behind is None else self.sources[behind.slot], *_strides(out))
        return self.out[-1]

    def _backward(self, logits_grad: Tensor) -> None:
        from esper.kasmina.engine.backward import backward

        for number in reversed(range(len(self.places))):
            place, seed = self.places[number], self.places[number].slot >= 0
            host = self.out[number - seed]
            rows = self.sources[place.slot] if seed else self.itself
            above = self.out_grad[min(number // 2, self.slots - 1)]  # behind the slot, then in front of it
            final = logits_grad if number == len(self.places) - 1 else above
            for level in reversed(range(place.levels)):
                g = final if level == place.levels - 1 and not seed else self.between[level % 2]
                read, d = (self.x, self.origin, *_strides(self.x)), self.between[1]
                if level:
                    value, d = self.values[number][level - 1], self.between[(level - 1) % 2]
                    read = (value, self.itself, *_strides(value))
                elif number:
                    value = self.out[number - 1]
                    d = self.between[0] if seed else self.out_grad[number // 2 - 1]
                    read = (value, rows, *_strides(value))
                self._launch(
                    backward, (self.capacity, self.chunks), *read, host, rows, *_strides(host), above, g,
                    *_strides(g), d, *_strides(d), *self._weights(number), self.grads[1 + place.slot],
                    self.rows, place.table, level, place.levels, self.kinds[number], self.flags[number],
                    self.env, *self._alphas(place), self.batch, self.per, BLEND=seed, FIRST=level == 0,
                    num_warps=place.warps[level], **self._arithmetic(), **place.ops[level])

    def _weights(self, number: int) -> tuple[Tensor, int]:
        weights = self.places[number].bank.weights
        return weights, weights.shape[1]

    def _alphas(self, place: _Place) -> tuple[Tensor, int]:
        return self.alpha[:, max(place.slot, 0)], self.slots

    def _update(self) -> None:
        from esper.kasmina.engine.update import update

        config, momentum = self.optim, self.optim.kind == "sgd"
        beta1, beta2 = (config.momentum, 0.5) if momentum else config.betas
        for place, (bank, grads, sizes) in enumerate(zip(self.banks, self.grads, self.sizes, strict=True)):
            self._launch(
                update, (self.rows,), bank.weights, bank.first, bank.second, bank.steps, grads,
                self.trainable, sizes, self._trains[1, place], self._trains[0, place],
                self.finite[:, place], self.lr[:, place], self.decay[:, place], 1 + self.slots, self.rows,
                bank.weights.shape[1], self.chunks,
                CLIP=config.seed_clip if place else config.host_clip, BETA1=beta1, BETA2=beta2,
                LOG1=_log(beta1), LOG2=_log(beta2), EPS=config.eps, SGD=momentum,
                FROZEN=not place, BLOCK=512, num_warps=4)

    def _launch(self, kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        if self._compiling:
            kernel.warmup(*args, grid=grid, num_stages=1, **constants)
        else:
            kernel[grid](*args, num_stages=1, **constants)

    def _compile(self) -> None:
        """All kernels at once, on many threads: a minute otherwise, the first time on a machine."""
        import triton

        self._compiling = True
        with ThreadPoolExecutor() as executor, triton.AsyncCompileMode(executor):
            self._forward()
            self._backward(self.out[-1])
            self._update()
        self._compiling = False

    def _arithmetic(self) -> dict[str, Any]:
        """In which numbers matrices are multiplied. Three products of TF32 are as exact as one of float32."""
        import triton.language as tl

        exact = self.dtype is torch.float32
        return {"MATRIX": tl.float32 if exact else tl.bfloat16, "PRECISION": "tf32x3" if exact else "ieee"}

    def _step(self) -> Tensor:
        logits = self._forward().detach().requires_grad_()
        losses = self.objective.losses(logits, self.y.index_select(1, self.origin))
        (grad,) = torch.autograd.grad(losses.sum(), logits)
        self._backward(grad.contiguous())
        self._update()
        return losses.detach()

    def _read(self, x: Tensor) -> None:
        self.x[: x.shape[1], : len(x)].copy_(x.flatten(2).transpose(0, 1))

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        """Train the rows that are wired on a batch; their losses [R] before it."""
        self._read(x)
        self.y[:, : y.shape[1]].copy_(y)
        return self._run("train", self._step)[: self.count]

    @torch.no_grad()
    def forward(self, x: Tensor, rows: Rows) -> Tensor:
        """Logits [R, B, classes] of these rows, for any number of samples."""
        self.wire(rows)
        parts = []
        for piece in x.split(self.batch):
            self._read(piece)
            parts.append(self._run("forward", self._forward)[: self.count, : len(piece)])
        return torch.cat(parts, 1)

    def _run(self, name: str, work: Callable[[], Tensor]) -> Tensor:
        """The first time eagerly, on a side stream; then captured; and replayed from then on."""
        if self.device.type != "cuda":
            return work().clone()
        if name not in self._graphs:
            if not self._graphs:
                self._compile()
            stream = _stream(self.device)
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                result = work().clone()
            torch.cuda.current_stream().wait_stream(stream)
            self._graphs[name] = graph = torch.cuda.CUDAGraph()
            with capturing(graph, stream=stream):
                self._results[name] = work()
            self.captures += 1
            return result
        self._graphs[name].replay()
        return self._results[name].clone()


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """The engines' own, apart from that of the general path: dropping a graph frees what its stream keeps."""
    return torch.cuda.Stream(device)


def _log(beta: float) -> float:
    return math.log(beta) if beta else -1e30  # of which any power is 0


def _strides(buffer: Tensor) -> tuple[int, int]:
    return buffer.stride(0), buffer.stride(1)
