"""Epochs of the environment, evidence included, against a Python loop over plain modules.

    python benchmarks/env.py --json      # one measurement, here and now
    python benchmarks/env.py --write     # every published figure, to benchmarks/results/
"""

import resource
import statistics
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from rich.table import Table
from torch import Tensor

from common import DTYPES, Bench, Loop, Result, check_dtype, main, now
from esper.kasmina import Host, OptimConfig
from esper.kasmina.devices import check_device
from esper.leyline import EsperError, Head
from esper.tamiyo import Wait
from esper.tolaria import FAMILIES, Family, Kind, MorphogeneticEnv, evaluate

_CUDA = {"host": "conv1d", "rows": 1024, "loop_rows": 8, "rounds": 5, "device": "cuda"}
PUBLISHED: dict[str, list[dict[str, Any]]] = {
    "cpu": [{"host": "conv1d", "rounds": 5}, {"host": "mlp", "rounds": 5}],
    "cuda": [_CUDA | {"dtype": dtype} for dtype in DTYPES],
}


@dataclass(frozen=True)
class EnvBench(Bench):
    """Play epochs of hosts that hold live seeds: as an environment, and as loops.

    Example: python benchmarks/env.py --host mlp --rows 32 --json
    """

    host: str = "conv1d"
    """On mnist1d: conv1d (the host of the mnist1d family) or mlp."""
    rows: int = 32
    """Hosts in the environment."""
    loop_rows: int = 0
    """Hosts in the loop; 0 is as many as in the environment."""
    seeds: int = 1
    """Live seeds of each host: random blueprints in random slots, in the default style."""
    samples: int = 3000
    """Training samples of an epoch, in batches of 100."""
    rounds: int = 3
    """Interleaved rounds of one epoch each; the median counts."""
    dtype: str = "float32"
    """float32, or bfloat16 for the products (the loop's weights too)."""

    def __post_init__(self) -> None:
        if self.host not in ("conv1d", "mlp"):
            raise EsperError(f"no --host {self.host!r} for mnist1d; choose from conv1d, mlp")
        if min(self.rows, self.rounds) < 1 or self.loop_rows < 0:
            raise EsperError("--rows and --rounds must be at least 1, --loop-rows at least 0")
        if not 100 <= self.samples <= 3000 or not 1 <= self.seeds <= 3:
            raise EsperError("--samples must be 100 to 3000, --seeds 1 to 3")
        if self.loop_rows > self.rows:
            raise EsperError("--loop-rows cannot exceed --rows: the loop trains the environment's own hosts")
        check_device(self.device)
        check_dtype(self.dtype)

    @property
    def name(self) -> str:
        return f"env-{self.host}-{self.device}-{self.dtype}"


def _plant(env: MorphogeneticEnv, seeds: int, generator: torch.Generator) -> None:
    """New episodes with so many random seeds in each row, alpha 1."""
    rows, slots = env.population.life.alpha.shape
    env.reset(env.family.scenarios(rows, start=int(torch.randint(2**20, (), generator=generator))))
    real = torch.tensor([i for i, name in enumerate(env.spec.blueprints) if name != "noop"])
    blueprint = real[torch.randint(len(real), (rows, slots), generator=generator)]
    chosen = torch.rand(rows, slots, generator=generator).argsort(1) < seeds
    style = torch.full((rows, slots), env.spec.defaults[Head.STYLE])
    planted = torch.where(chosen, blueprint, -1)
    env.population.install(torch.arange(rows), planted, style, torch.ones(rows, slots))


class LoopOfEpochs:
    """The same epoch, one plain network after the other: train it, then measure it as the environment does.

    The naive loop trains each network as if it were alone: it shuffles, fetches its batches, and has its own
    optimiser. The tight loop gets its batches for nothing, and updates and clips all networks at once.
    """

    def __init__(self, env: MorphogeneticEnv, rows: int) -> None:
        self.env, self.loop = env, Loop(env.population, rows)
        optim = env.population.optim
        settings = (optim.lr, optim.betas, optim.eps, optim.weight_decay)
        self.optims = [torch.optim.AdamW(net.parameters(), *settings, fused=True) for net in self.loop.nets]
        env.feed.begin_epoch(env.clock)
        self.batches = [env.feed.train(step) for step in range(env.feed.steps)]
        self.validation = list(env.validation())

    def naive(self) -> None:
        places, feed = 1 + len(self.env.population.prototypes), self.env.feed
        for row, (net, optim) in enumerate(zip(self.loop.nets, self.optims, strict=True)):
            parts = self.loop.parts[row * places : (row + 1) * places]
            clipped = [(part, clip) for part, clip in zip(parts, self.loop.limits, strict=False) if part]
            samples, labels = feed.x.view(-1, *feed.inputs).to(self.loop.dtype), feed.labels[row]
            order = torch.randperm(len(samples), device=feed.device)[: feed.steps * feed.batch]
            for batch in order.split(feed.batch):
                optim.zero_grad(set_to_none=True)
                F.cross_entropy(net(samples[batch]).float(), labels[batch]).backward()
                for part, clip in clipped:
                    torch.nn.utils.clip_grad_norm_(part, clip)
                optim.step()
        self._measure()

    def tight(self) -> None:
        for x, y in self.batches:
            self.loop.step(x.to(self.loop.dtype), y)
        self._measure()

    def _measure(self) -> None:
        with torch.no_grad():
            for row, net in enumerate(self.loop.nets):
                grafts = [graft for graft in net.grafts if hasattr(graft, "alpha")]
                whole = [graft.alpha for graft in grafts]
                cases = [whole, *([a * (i != off) for i, a in enumerate(whole)] for off in range(len(whole)))]
                if len(whole) > 1:
                    cases.append([0.0] * len(whole))
                for alphas in cases:
                    for graft, alpha in zip(grafts, alphas, strict=True):
                        graft.alpha = alpha
                    for x, y in self.validation:
                        logits = net(x[:, row].to(self.loop.dtype)).float()
                        (logits.argmax(1) == y[:, row]).float().mean()
                        F.cross_entropy(logits, y[:, row])
                for graft, alpha in zip(grafts, whole, strict=True):
                    graft.alpha = alpha


def measure(config: EnvBench) -> Result:
    """Epochs of a host per second, of the environment and of both loops, over rounds that take turns."""
    generator, loop_rows = torch.Generator().manual_seed(0), config.loop_rows or config.rows
    host = FAMILIES["mnist1d"].host if config.host == "conv1d" else Host("mlp")
    family = Family("bench", "mnist1d", host, (Kind("plain"),), horizons=(1000,), samples=config.samples,
                    optim=OptimConfig(lr=1e-3), lrs=(1e-3,))
    env = MorphogeneticEnv(family, config.rows, device=config.device, compute_dtype=DTYPES[config.dtype])
    rates: dict[str, list[float]] = {"environment": [], "naive loop": [], "tight loop": []}
    for number in range(config.rounds + 1):  # the first is a rehearsal
        _plant(env, config.seeds, generator)
        loop = LoopOfEpochs(env, loop_rows)
        started = now(config.device)
        env.step(Wait()(env.view()))
        rates["environment"].append(config.rows / (now(config.device) - started))
        loops = [("naive loop", loop.naive), ("tight loop", loop.tight)]
        for name, epoch in loops if number % 2 else reversed(loops):  # the first finds untouched networks
            started = now(config.device)
            epoch()
            rates[name].append(loop_rows / (now(config.device) - started))
    rates = {name: values[1:] for name, values in rates.items()}
    resident = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "bench": "env",
        **config.sizes(),
        "host_epochs_per_second": {way: statistics.median(values) for way, values in rates.items()},
        "rounds_host_epochs_per_second": rates,
        "ratio": _ratio(rates, "naive loop"),
        "tight_ratio": _ratio(rates, "tight loop"),
        "counterfactuals": _counterfactuals(env, generator, config),
        "peak_memory_bytes": torch.cuda.max_memory_allocated() if config.device != "cpu" else resident,
    }


def _ratio(rates: dict[str, list[float]], loop: str) -> float:
    return statistics.median(a / b for a, b in zip(rates["environment"], rates[loop], strict=True))


def _counterfactuals(env: MorphogeneticEnv, generator: torch.Generator, config: EnvBench) -> dict[str, float]:
    """Seconds of a plain evaluation, and of one with three seeds left out one by one and all at once."""
    _plant(env, 3, generator)
    chunks = list(env.validation())
    seconds: dict[str, list[float]] = {"plain": [], "with counterfactuals": []}
    for _ in range(4):
        started = now(config.device)
        _plain(env, chunks)
        between = now(config.device)
        evaluate(env.population, chunks)
        seconds["plain"].append(between - started)
        seconds["with counterfactuals"].append(now(config.device) - between)
    medians = {name: statistics.median(values[1:]) for name, values in seconds.items()}
    return medians | {"ratio": medians["with counterfactuals"] / medians["plain"]}


def _plain(env: MorphogeneticEnv, chunks: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """Loss, accuracy and probability of all rows, [3, N], and nothing else."""
    total = torch.zeros(())
    for x, y in chunks:
        logits = env.population.forward(x).float()
        loss = logits.logsumexp(2) - logits.gather(2, y[..., None]).squeeze(2)
        right = (logits.argmax(2) == y).float()
        total = total.to(loss) + torch.stack([loss.sum(0), right.sum(0), (-loss).exp().sum(0)])
    return total.cpu()


def show(result: Result) -> Table:
    title = "{host} on mnist1d, {samples} samples, evidence included"
    table = Table("way", "hosts", "host-epochs/s", "ratio", title=title.format(**result),
                  title_justify="left")
    rates, loops = result["host_epochs_per_second"], str(result["loop_rows"] or result["rows"])
    table.add_row("environment", str(result["rows"]), f"{rates['environment']:,.1f}", "")
    for way, ratio in (("naive loop", result["ratio"]), ("tight loop", result["tight_ratio"])):
        table.add_row(way, loops, f"{rates[way]:,.1f}", f"{ratio:.1f}x")
    evidence, memory = result["counterfactuals"]["ratio"], result["peak_memory_bytes"] / 2**30
    table.caption = f"evidence on three seeds costs {evidence:.1f} evaluations; {memory:.1f} GiB at most"
    return table


if __name__ == "__main__":
    sys.exit(main(EnvBench, measure, show, PUBLISHED))
