"""`esper bench population`: the population against a Python loop over plain modules, in one run."""

import functools
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from esper.kasmina import Host, OptimConfig, Population
from esper.leyline import EsperError, Head, LifecycleOp, Style

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def check_device(device: str) -> None:
    if device != "cpu" and not (device.startswith("cuda") and torch.cuda.is_available()):
        raise EsperError(f"no --device {device!r} here; choose from cpu{', cuda' * torch.cuda.is_available()}")


@dataclass(frozen=True)
class PopulationBench:
    """Train hosts that hold three seeds each: as a population, and as a loop.

    Example: esper bench population --host mlp --rows 64 --json
    """

    host: str = "conv1d"
    """Host kind: mlp, conv1d or cnn."""
    rows: int = 64
    """Hosts in the population."""
    loop_rows: int = 0
    """Hosts in the loop; 0 is as many as in the population."""
    batch: int = 100
    """Samples per host and step."""
    steps: int = 30
    """Steps per epoch."""
    rounds: int = 5
    """Interleaved rounds; the median counts."""
    warm_up: int = 3
    """Epochs before the first round. Libraries plan for shapes they have not met; after a few epochs shapes recur."""
    device: str = "cpu"
    """cpu, or cuda."""
    dtype: str = "float32"
    """float32, or bfloat16 (the loop's weights too, which is its fastest way; the population's stay float32)."""
    compile: bool = False
    """Run the population's host stages through torch.compile."""
    json: bool = False
    """Print one JSON object as the last line."""

    def __post_init__(self) -> None:
        if min(self.rows, self.batch, self.steps, self.rounds, self.warm_up) < 1 or self.loop_rows < 0:
            raise EsperError("--rows, --batch, --steps, --rounds and --warm-up must be at least 1, --loop-rows at least 0")
        if self.loop_rows > self.rows:
            raise EsperError("--loop-rows cannot exceed --rows: the loop trains some of the population's own hosts")
        check_device(self.device)
        if self.dtype not in DTYPES:
            raise EsperError(f"no --dtype {self.dtype!r}; choose from {', '.join(DTYPES)}")


def random_topology(population: Population, generator: torch.Generator) -> None:
    """Reset every row and fill every slot: blueprints (but noop) and styles drawn uniformly, alpha 1."""
    shape = (population.rows, len(population.prototypes))
    choices = torch.tensor([i for i, name in enumerate(population.spec.blueprints) if name != "noop"])
    blueprint = choices[torch.randint(len(choices), shape, generator=generator)]
    style = torch.randint(len(Style), shape, generator=generator)
    every = torch.arange(population.rows)
    population.reset(every, torch.randint(2**62, (population.rows,), generator=generator))
    population.install(every, blueprint, style, torch.ones(shape))
    population.begin_epoch(torch.tensor([population.spec.action(LifecycleOp.WAIT)]).repeat(population.rows, 1))


class Loop:
    """The same hosts as plain modules, one after the other, with the fastest optimiser and clipping we know.

    AdamW is elementwise, so one fused optimiser serves all hosts. Clipping is per host and per seed: on CUDA a
    `clip_grad_norm_` for each is fastest, on the CPU one batched pass over all of them is.
    """

    def __init__(self, population: Population, rows: int) -> None:
        self.dtype, config = population.compute_dtype, population.optim
        self.nets = [population.extract(i).to(self.dtype) for i in range(rows)]
        self.parts = [part for net in self.nets for part in self._parts(net)]
        self.parameters = [p for part in self.parts for p in part]
        owners = [number for number, part in enumerate(self.parts) for _ in part]
        self.owner = torch.tensor(owners, device=population.device)
        self.limits = [config.host_clip, *[config.seed_clip] * len(population.prototypes)] * rows
        self.clips = torch.tensor(self.limits, device=population.device)
        self.optim = torch.optim.AdamW(self.parameters, config.lr, config.betas, config.eps, config.weight_decay, fused=True)

    @staticmethod
    def _parts(net: nn.Module) -> list[list[nn.Parameter]]:
        seeds = [list(graft.parameters()) for graft in net.grafts]  # type: ignore[union-attr]
        return [[*net.stages.parameters(), *net.head.parameters()], *seeds]  # type: ignore[union-attr]

    def run(self, x: Tensor, y: Tensor, steps: int) -> None:
        for _ in range(steps):
            self.step(x, y)

    def step(self, x: Tensor, y: Tensor) -> None:
        self.optim.zero_grad(set_to_none=True)
        for i, net in enumerate(self.nets):
            F.cross_entropy(net(x[:, i]).to(torch.promote_types(self.dtype, torch.float32)), y[:, i]).backward()
        self._clip()
        self.optim.step()

    def _clip(self) -> None:
        if self.clips.is_cuda:
            for part, clip in zip(self.parts, self.limits, strict=True):
                nn.utils.clip_grad_norm_(part, clip)
            return
        grads = [p.grad for p in self.parameters if p.grad is not None]
        norms = torch.stack(torch._foreach_norm(grads)).to(torch.promote_types(self.dtype, torch.float32))
        squares = norms.new_zeros(len(self.clips)).index_add_(0, self.owner, norms * norms)
        scales = (self.clips / (squares.sqrt() + 1e-6)).clamp(max=1.0)[self.owner]
        torch._foreach_mul_(grads, scales.tolist())


def _timed(work: Callable[[], object], device: str) -> float:
    if device != "cpu":
        torch.cuda.synchronize()
    started = time.perf_counter()
    work()
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def run_population_bench(config: PopulationBench, report: Callable[[str], None]) -> dict[str, Any]:
    """Samples per second of both ways and their ratio; `report` gets a line per round."""
    loop_rows = config.loop_rows or config.rows
    generator = torch.Generator().manual_seed(0)
    population = Population(Host(config.host), config.rows, optim=OptimConfig(lr=1e-3), device=config.device,
                            compute_dtype=DTYPES[config.dtype], compile=config.compile)
    x = torch.randn(config.batch, config.rows, *population.host.inputs, generator=generator)
    x = x.to(config.device, DTYPES[config.dtype])
    y = torch.randint(population.host.classes, (config.batch, config.rows), generator=generator).to(config.device)
    def epoch() -> None:
        random_topology(population, generator)
        for _ in range(config.steps):
            population.train_step(x, y)
        population.end_epoch()

    warm_up = [_timed(epoch, config.device) for _ in range(config.warm_up)]
    rates: dict[str, list[float]] = {"population": [], "loop": []}
    for number in range(1, config.rounds + 1):
        rates["population"].append(config.rows * config.batch * config.steps / _timed(epoch, config.device))
        random_topology(population, generator)
        loop = Loop(population, loop_rows)
        population.end_epoch()
        loop.step(x, y)
        seconds = _timed(functools.partial(loop.run, x, y, config.steps), config.device)
        rates["loop"].append(loop_rows * config.batch * config.steps / seconds)
        report(f"round {number}: population {rates['population'][-1]:,.0f} samples/s, loop {rates['loop'][-1]:,.0f}")
    return {
        "bench": "population",
        **asdict(config),
        "samples_per_second": {way: statistics.median(values) for way, values in rates.items()},
        "rounds_samples_per_second": rates,
        "ratio": statistics.median(a / b for a, b in zip(*rates.values(), strict=True)),
        "structural_seconds": _structural(population, x, y, config.device),
        "warm_up_seconds": warm_up,
        "compiled_variants": _compiled_variants() if config.compile else 0,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
    }


def _compiled_variants() -> int:
    from torch._dynamo.utils import counters  # slow to import, and only there once something was compiled

    return int(counters["stats"]["unique_graphs"])


def _structural(population: Population, x: Tensor, y: Tensor, device: str) -> dict[str, float]:
    """What it costs to germinate and to prune a seed in every row, beside one training step of those rows."""
    every = torch.arange(population.rows)
    actions = torch.tensor([population.spec.action(LifecycleOp.WAIT)]).repeat(population.rows, 1)
    actions[:, Head.BLUEPRINT] = 1 + every % (len(population.spec.blueprints) - 1)
    seconds: dict[str, list[float]] = {"germinate": [], "step": [], "prune": []}
    for _ in range(4):  # the first time is a rehearsal
        population.reset(every, every)
        for op in (LifecycleOp.GERMINATE, LifecycleOp.PRUNE):
            actions[:, Head.OP] = op
            seconds[op.name.lower()].append(_timed(functools.partial(population.begin_epoch, actions), device))
            if op is LifecycleOp.GERMINATE:
                steps = [_timed(functools.partial(population.train_step, x, y), device) for _ in range(4)]
                seconds["step"].append(statistics.median(steps[2:]))
            population.end_epoch()
    return {name: statistics.median(values[1:]) for name, values in seconds.items()}


def bench_table(result: dict[str, Any]) -> Table:
    title = "{host} hosts with three seeds each, batch {batch}, {dtype} on {device}"
    table = Table(title=title.format(**result), title_justify="left")
    for name in ("way", "hosts", "samples/s"):
        table.add_column(name, justify="left" if name == "way" else "right")
    rates = result["samples_per_second"]
    table.add_row("population", str(result["rows"]), f"{rates['population']:,.0f}")
    table.add_row("loop of modules", str(result["loop_rows"] or result["rows"]), f"{rates['loop']:,.0f}")
    table.add_section()
    table.add_row("ratio", "", f"{result['ratio']:.1f}x")
    table.caption = "all rows: " + ", ".join(f"{name} {1e3 * s:.1f} ms" for name, s in result["structural_seconds"].items())
    return table


def run(config: PopulationBench, console: Console) -> None:
    result = run_population_bench(config, console.print)
    console.print(bench_table(result))
    if config.json:
        print(json.dumps(result))
