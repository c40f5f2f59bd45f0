"""The population against a Python loop over plain modules.

    python benchmarks/population.py --json      # one measurement, here and now
    python benchmarks/population.py --write     # every published figure, to benchmarks/results/
"""

import functools
import statistics
import sys
from dataclasses import dataclass
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from common import DTYPES, Bench, Loop, Result, check_dtype, main, timed
from esper.kasmina import Host, OptimConfig, Population
from esper.kasmina.devices import check_device
from esper.leyline import EsperError, Head, LifecycleOp, Style

PUBLISHED: dict[str, list[dict[str, Any]]] = {
    "cpu": [{"host": "conv1d"}, {"host": "mlp"}],
    "cuda": [{"host": "cnn", "rows": 256, "loop_rows": 64, "batch": 128, "device": "cuda",
              "dtype": "bfloat16", "compile": True},
             {"host": "conv1d", "rows": 256, "loop_rows": 64, "device": "cuda"},
             {"host": "resnet", "rows": 32, "loop_rows": 8, "batch": 128, "device": "cuda", "dtype": "bfloat16"},
             {"host": "gpt", "widths": (48, 48, 48), "classes": 65, "rows": 64, "loop_rows": 16, "batch": 32,
              "device": "cuda", "dtype": "bfloat16"}],
}


@dataclass(frozen=True)
class PopulationBench(Bench):
    """Train hosts that hold three seeds each: as a population, and as a loop.

    Example: python benchmarks/population.py --host mlp --rows 64 --json
    """

    host: str = "conv1d"
    """Host kind: mlp, conv1d, cnn, resnet or gpt."""
    widths: tuple[int, ...] = ()
    """Of the host's stages; by default the kind's own."""
    classes: int = 10
    """Classes, or tokens of a gpt's vocabulary."""
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
    """Epochs before the first round. Libraries plan for shapes that are new to them; soon shapes recur."""
    dtype: str = "float32"
    """float32, or bfloat16 (the loop's weights too, which is fastest; the population's stay float32)."""
    compile: bool = False
    """Run the population's host stages through torch.compile."""

    def __post_init__(self) -> None:
        if min(self.rows, self.batch, self.steps, self.rounds, self.warm_up) < 1 or self.loop_rows < 0:
            raise EsperError("--rows, --batch, --steps, --rounds and --warm-up must be at least 1, "
                             "--loop-rows at least 0")
        if self.loop_rows > self.rows:
            raise EsperError("--loop-rows cannot exceed --rows: the loop trains the population's own hosts")
        check_device(self.device)
        check_dtype(self.dtype)

    @property
    def name(self) -> str:
        return "-".join(["population", self.host, self.device, self.dtype, *["compiled"] * self.compile])


def random_topology(population: Population, generator: torch.Generator) -> None:
    """Reset every row and fill every slot: blueprints (but noop) and styles drawn uniformly, alpha 1."""
    shape = (population.rows, len(population.prototypes))
    choices = torch.tensor([i for i, name in enumerate(population.spec.blueprints) if name != "noop"])
    blueprint = choices[torch.randint(len(choices), shape, generator=generator)]
    style = torch.randint(len(Style), shape, generator=generator)
    every = torch.arange(population.rows)
    population.reset(every, torch.randint(2**62, (population.rows,), generator=generator))
    population.install(every, blueprint, style, torch.ones(shape))
    wait = torch.tensor([population.spec.action(LifecycleOp.WAIT)])
    population.begin_epoch(wait.repeat(population.rows, 1))


def measure(config: PopulationBench) -> Result:
    """Samples per second of both ways and their ratio, over rounds that take turns."""
    loop_rows = config.loop_rows or config.rows
    generator = torch.Generator().manual_seed(0)
    population = Population(Host(config.host, widths=config.widths, classes=config.classes), config.rows, optim=OptimConfig(lr=1e-3), device=config.device,
                            compute_dtype=DTYPES[config.dtype], compile=config.compile)
    x = torch.randn(config.batch, config.rows, *population.host.inputs, generator=generator)
    x = x.to(config.device, DTYPES[config.dtype])
    if population.host.tokens:
        x = torch.randint(population.host.classes, x.shape, generator=generator).to(config.device)
    labels = population.objective.label_shape(x)
    y = torch.randint(population.host.classes, labels, generator=generator).to(config.device)

    def epoch() -> None:
        random_topology(population, generator)
        for _ in range(config.steps):
            population.train_step(x, y)
        population.end_epoch()

    warm_up = [timed(epoch, config.device) for _ in range(config.warm_up)]
    rates: dict[str, list[float]] = {"population": [], "loop": []}
    for number in range(1, config.rounds + 1):
        rates["population"].append(config.rows * config.batch * config.steps / timed(epoch, config.device))
        random_topology(population, generator)
        loop = Loop(population, loop_rows)
        population.end_epoch()
        loop.step(x, y)
        seconds = timed(functools.partial(loop.run, x, y, config.steps), config.device)
        rates["loop"].append(loop_rows * config.batch * config.steps / seconds)
        told = [f"{way} {values[-1]:,.0f} samples/s" for way, values in rates.items()]
        print(f"round {number}: {', '.join(told)}", flush=True)
    return {
        "bench": "population",
        **config.sizes(),
        "parameters": population.host.cost.params,
        "samples_per_second": {way: statistics.median(values) for way, values in rates.items()},
        "rounds_samples_per_second": rates,
        "ratio": statistics.median(a / b for a, b in zip(*rates.values(), strict=True)),
        "structural_seconds": _structural(population, x, y, config.device),
        "warm_up_seconds": warm_up,
        "compiled_variants": _compiled_variants() if config.compile else 0,
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
            seconds[op.name.lower()].append(timed(functools.partial(population.begin_epoch, actions), device))
            if op is LifecycleOp.GERMINATE:
                steps = [timed(functools.partial(population.train_step, x, y), device) for _ in range(4)]
                seconds["step"].append(statistics.median(steps[2:]))
            population.end_epoch()
    return {name: statistics.median(values[1:]) for name, values in seconds.items()}


def show(result: Result) -> Table:
    title = "{host} hosts with three seeds each, batch {batch}, {dtype} on {device}"
    table = Table(title=title.format(**result), title_justify="left")
    for name in ("way", "hosts", "samples/s"):
        table.add_column(name, justify="left" if name == "way" else "right")
    rates = result["samples_per_second"]
    table.add_row("population", str(result["rows"]), f"{rates['population']:,.0f}")
    table.add_row("loop of modules", str(result["loop_rows"] or result["rows"]), f"{rates['loop']:,.0f}")
    table.add_section()
    table.add_row("ratio", "", f"{result['ratio']:.1f}x")
    costs = [f"{name} {1e3 * seconds:.1f} ms" for name, seconds in result["structural_seconds"].items()]
    table.caption = f"all rows: {', '.join(costs)}"
    return table


if __name__ == "__main__":
    sys.exit(main(PopulationBench, measure, show, PUBLISHED))
