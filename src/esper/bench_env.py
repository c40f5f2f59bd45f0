"""`esper bench env`: epochs of the environment, evidence included, against a Python loop over plain modules."""

import json
import platform
import resource
import statistics
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

from esper.bench import DTYPES, Loop, check_device
from esper.kasmina import Host, OptimConfig
from esper.leyline import EsperError, Head
from esper.tamiyo import Wait
from esper.tolaria import FAMILIES, Family, Kind, MorphogeneticEnv, evaluate


@dataclass(frozen=True)
class EnvBench:
    """Play epochs of hosts that hold live seeds: as an environment, and as loops.

    Example: esper bench env --host mlp --rows 32 --json
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
    device: str = "cpu"
    """cpu, or cuda."""
    dtype: str = "float32"
    """float32, or bfloat16 for the products (the loop's weights too)."""
    json: bool = False
    """Print one JSON object as the last line."""

    def __post_init__(self) -> None:
        if self.host not in ("conv1d", "mlp"):
            raise EsperError(f"no --host {self.host!r} for mnist1d; choose from conv1d, mlp")
        if min(self.rows, self.rounds) < 1 or self.loop_rows < 0 or not 100 <= self.samples <= 3000 or not 1 <= self.seeds <= 3:
            raise EsperError("--rows and --rounds must be at least 1, --samples 100 to 3000, --seeds 1 to 3")
        if self.loop_rows > self.rows:
            raise EsperError("--loop-rows cannot exceed --rows: the loop trains some of the environment's own hosts")
        check_device(self.device)
        if self.dtype not in DTYPES:
            raise EsperError(f"no --dtype {self.dtype!r}; choose from {', '.join(DTYPES)}")


def _plant(env: MorphogeneticEnv, seeds: int, generator: torch.Generator) -> None:
    """New episodes with so many random seeds in each row, alpha 1."""
    rows, slots = env.population.life.alpha.shape
    env.reset(env.family.scenarios(rows, start=int(torch.randint(2**20, (), generator=generator))))
    real = torch.tensor([i for i, name in enumerate(env.spec.blueprints) if name != "noop"])
    blueprint = real[torch.randint(len(real), (rows, slots), generator=generator)]
    chosen = torch.rand(rows, slots, generator=generator).argsort(1) < seeds
    style = torch.full((rows, slots), env.spec.defaults[Head.STYLE])
    env.population.install(torch.arange(rows), torch.where(chosen, blueprint, -1), style, torch.ones(rows, slots))


class LoopOfEpochs:
    """The same epoch, one plain network after the other: train, then measure it whole, without each seed, and bare.

    The naive loop trains each network as if it were alone: it shuffles, fetches its batches, and has an optimiser of its own. The
    tight loop gets its batches for nothing, and updates and clips all networks at once.
    """

    def __init__(self, env: MorphogeneticEnv, rows: int) -> None:
        self.env, self.loop = env, Loop(env.population, rows)
        config = env.population.optim
        self.optims = [torch.optim.AdamW(net.parameters(), config.lr, config.betas, config.eps, config.weight_decay, fused=True)
                       for net in self.loop.nets]
        env.feed.begin_epoch(env.clock)
        self.batches = [env.feed.train(step) for step in range(env.feed.steps)]
        self.validation = list(env.validation())

    def naive(self) -> None:
        places, feed = 1 + len(self.env.population.prototypes), self.env.feed
        for row, (net, optim) in enumerate(zip(self.loop.nets, self.optims, strict=True)):
            parts = self.loop.parts[row * places : (row + 1) * places]
            clipped = [(part, clip) for part, clip in zip(parts, self.loop.limits, strict=False) if part]
            samples, labels = feed.x.view(-1, *feed.inputs).to(self.loop.dtype), feed.labels[row]
            for batch in torch.randperm(len(samples), device=feed.device)[: feed.steps * feed.batch].split(feed.batch):
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
                grafts = [graft for graft in net.grafts if hasattr(graft, "alpha")]  # type: ignore[union-attr]
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


def _clocked(device: str) -> float:
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter()


def run_env_bench(config: EnvBench) -> dict[str, Any]:
    generator, loop_rows = torch.Generator().manual_seed(0), config.loop_rows or config.rows
    host = FAMILIES["mnist1d"].host if config.host == "conv1d" else Host("mlp")
    family = Family("bench", "mnist1d", host, (Kind("plain"),), horizons=(1000,), samples=config.samples,
                    optim=OptimConfig(lr=1e-3), lrs=(1e-3,))
    env = MorphogeneticEnv(family, config.rows, device=config.device, compute_dtype=DTYPES[config.dtype])
    rates: dict[str, list[float]] = {"environment": [], "naive loop": [], "tight loop": []}
    for number in range(config.rounds + 1):  # the first is a rehearsal
        _plant(env, config.seeds, generator)
        loop = LoopOfEpochs(env, loop_rows)
        started = _clocked(config.device)
        env.step(Wait()(env.view()))
        rates["environment"].append(config.rows / (_clocked(config.device) - started))
        loops = [("naive loop", loop.naive), ("tight loop", loop.tight)]
        for name, epoch in loops if number % 2 else reversed(loops):  # the first finds networks that nothing has touched
            started = _clocked(config.device)
            epoch()
            rates[name].append(loop_rows / (_clocked(config.device) - started))
    rates = {name: values[1:] for name, values in rates.items()}
    resident = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    memory = torch.cuda.max_memory_allocated() if config.device != "cpu" else resident
    return {
        "bench": "env", **asdict(config), "host_epochs_per_second": {k: statistics.median(v) for k, v in rates.items()},
        "rounds_host_epochs_per_second": rates,
        **{name: statistics.median(a / b for a, b in zip(rates["environment"], rates[loop], strict=True))
           for name, loop in (("ratio", "naive loop"), ("tight_ratio", "tight loop"))},
        "counterfactuals": _counterfactuals(env, generator, config), "peak_memory_bytes": memory,
        "torch": torch.__version__, "python": platform.python_version(), "threads": torch.get_num_threads(),
    }


def _counterfactuals(env: MorphogeneticEnv, generator: torch.Generator, config: EnvBench) -> dict[str, float]:
    """Seconds of a plain evaluation, and of one with three seeds left out one by one and all at once."""
    _plant(env, 3, generator)
    chunks = list(env.validation())
    seconds: dict[str, list[float]] = {"plain": [], "with counterfactuals": []}
    for _ in range(4):
        started = _clocked(config.device)
        _plain(env, chunks)
        between = _clocked(config.device)
        evaluate(env.population, chunks)
        seconds["plain"].append(between - started)
        seconds["with counterfactuals"].append(_clocked(config.device) - between)
    medians = {name: statistics.median(values[1:]) for name, values in seconds.items()}
    return medians | {"ratio": medians["with counterfactuals"] / medians["plain"]}


def _plain(env: MorphogeneticEnv, chunks: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """Loss, accuracy and probability of all rows, [3, N], and nothing else."""
    total = torch.zeros(())
    for x, y in chunks:
        logits = env.population.forward(x).float()
        loss = logits.logsumexp(2) - logits.gather(2, y[..., None]).squeeze(2)
        total = total.to(loss) + torch.stack([loss.sum(0), (logits.argmax(2) == y).float().sum(0), (-loss).exp().sum(0)])
    return total.cpu()


def run(config: EnvBench, console: Console) -> None:
    with console.status("epochs of the environment and of the loop, one after the other"):
        result = run_env_bench(config)
    table = Table("way", "hosts", "host-epochs/s", title=f"{config.host} on mnist1d, {config.samples} samples, evidence included",
                  title_justify="left")
    table.add_row("environment", str(config.rows), f"{result['host_epochs_per_second']['environment']:,.1f}")
    for name in ("naive loop", "tight loop"):
        table.add_row(name, str(config.loop_rows or config.rows), f"{result['host_epochs_per_second'][name]:,.1f}")
    console.print(table)
    console.print(f"the environment is {result['ratio']:.1f} times as fast as the naive loop, "
                  f"{result['tight_ratio']:.1f} times as fast as the tight one")
    console.print(f"evidence on three seeds costs {result['counterfactuals']['ratio']:.1f} plain evaluations; "
                  f"peak memory {result['peak_memory_bytes'] / 2**30:.1f} GiB")
    if config.json:
        print(json.dumps(result))
