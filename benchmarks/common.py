"""What benchmarks share: a command line, the loop they compare with, clocks, and the origin of a result."""

import dataclasses
import datetime
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
import tyro
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from esper.cli.machine import choose_threads, keep_freed_memory
from esper.kasmina import Population
from esper.leyline import EsperError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
Result = dict[str, Any]


def check_dtype(dtype: str) -> None:
    if dtype not in DTYPES:
        raise EsperError(f"no --dtype {dtype!r}; choose from {', '.join(DTYPES)}")


def hardware(device: str) -> str:
    if device != "cpu":
        return torch.cuda.get_device_name(device)
    known = Path("/proc/cpuinfo")
    lines = known.read_text().splitlines() if known.exists() else []
    models = [line.split(":")[1].strip() for line in lines if "model name" in line]
    return f"{models[0] if models else platform.machine()}, {os.cpu_count()} cores"


def head_commit() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    except OSError:  # no git
        return "unknown"
    return done.stdout.strip() if done.returncode == 0 else "unknown"


@dataclass(frozen=True)
class Results:
    """Where results are written, and what is said about where they come from."""

    out: Path = Path(__file__).parent / "results"
    """Folder of result files."""
    commit: str = ""
    """Commit that is measured; by default git's HEAD."""

    def stamp(self, device: str) -> Result:
        """When, on what and by which code something was measured."""
        return {"torch": torch.__version__, "python": platform.python_version(),
                "threads": torch.get_num_threads(), "date": datetime.date.today().isoformat(),
                "commit": self.commit or head_commit(), "hardware": hardware(device)}

    def publish(self, name: str, result: Result) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        (self.out / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")


@dataclass(frozen=True)
class Bench(Results):
    """The options that every benchmark has; each adds its sizes."""

    json: bool = False
    """Print one JSON object as the last line."""
    write: bool = False
    """Measure every published figure instead, and write a file of each to the folder."""
    device: str = "cpu"
    """cpu, or cuda."""

    @property
    def name(self) -> str:
        """Of its result file."""
        raise NotImplementedError

    def sizes(self) -> Result:
        """What is measured, without what becomes of the result."""
        ours = {f.name for f in dataclasses.fields(Bench)} - {"device"}
        return {name: value for name, value in dataclasses.asdict(self).items() if name not in ours}


B = TypeVar("B", bound=Bench)
Published = Mapping[str, Sequence[Mapping[str, Any]]]
"""cpu, cuda -> sizes of every figure that is published for it."""


def main(bench: type[B], measure: Callable[[B], Result], show: Callable[[Result], Table],
         published: Published) -> int:
    """Read the command line, measure once or everything that is published, tell, and return the exit code."""
    keep_freed_memory()
    choose_threads()  # as commands do
    script, console = Path(sys.argv[0]).name, Console(highlight=False, soft_wrap=not sys.stdout.isatty())
    try:
        options = tyro.cli(bench, prog=script)
        for sizes in asked(options, published):
            one = dataclasses.replace(options, **sizes)
            result = measure(one) | one.stamp(one.device)
            if options.write:
                options.publish(one.name, result)
            console.print(show(result))
    except EsperError as error:
        print(f"{script}: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps(result))
    return 0


def asked(options: Bench, published: Published) -> Sequence[Mapping[str, Any]]:
    """Sizes to measure one after the other: those of the command line, or all that are published."""
    if not options.write:
        return [{}]
    if options.sizes() != type(options)().sizes():
        raise EsperError("--write measures what is published, on CUDA where it is there; leave out all sizes")
    return published["cuda" if torch.cuda.is_available() else "cpu"]


def now(device: str | torch.device) -> float:
    """Seconds, once the device has done what it was told."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def timed(work: Callable[[], object], device: str | torch.device) -> float:
    started = now(device)
    work()
    return now(device) - started


class Loop:
    """The same hosts as plain modules, one after the other, with the fastest optimiser and clipping we know.

    AdamW is elementwise, so one fused optimiser serves all hosts. Clipping is per host and per seed: on CUDA
    a `clip_grad_norm_` for each is fastest, on the CPU one batched pass over all of them is.
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
        settings = (config.lr, config.betas, config.eps, config.weight_decay)
        self.optim = torch.optim.AdamW(self.parameters, *settings, fused=True)

    @staticmethod
    def _parts(net: nn.Module) -> list[list[nn.Parameter]]:
        seeds = [list(graft.parameters()) for graft in net.grafts]
        return [list(dict.fromkeys([*net.stages.parameters(), *net.head.parameters()])), *seeds]

    def run(self, x: Tensor, y: Tensor, steps: int) -> None:
        for _ in range(steps):
            self.step(x, y)

    def step(self, x: Tensor, y: Tensor) -> None:
        self.optim.zero_grad(set_to_none=True)
        for i, net in enumerate(self.nets):
            logits = net(x[:, i]).to(torch.promote_types(self.dtype, torch.float32))
            F.cross_entropy(logits.flatten(0, -2), y[:, i].flatten()).backward()  # of every token, if there are
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
