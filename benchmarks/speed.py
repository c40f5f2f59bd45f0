"""How fast a whole environment is on a GPU, beside an earlier version of the package in the same run.

    python benchmarks/speed.py                              # this version alone, one JSON object per figure
    python benchmarks/speed.py --before SRC --out FILE      # SRC: the earlier version's folder src

Every figure is measured in a process of its own, the versions in turn. Kernels and busy share are of one profiled
epoch. Times include training, shadow rows, evaluation with counterfactuals, and the random policy.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

FIGURES = {
    "env_mnist1d_192": ("env", "mnist1d", 192), "env_mnist1d_1024": ("env", "mnist1d", 1024),
    "env_mlp_192": ("env", "mlp", 192), "env_mlp_1024": ("env", "mlp", 1024),
    "cnn_256x128_seeds": ("cnn", "cnn", 256),
}


def environment(family: str, rows: int, rounds: int, device: str) -> dict[str, Any]:
    """Host-epochs per second of whole episodes by the random policy: the median over rounds of epochs."""

    from esper.tamiyo import Random
    from esper.tolaria import MorphogeneticEnv, find_family

    drawn = find_family(family)
    env, policy = MorphogeneticEnv(drawn, rows, device=device), Random()
    captures = count_captures()
    epochs, number, started = [], 0, time.perf_counter()
    while len(epochs) < 20 + rounds * max(drawn.horizons):
        env.reset(drawn.scenarios(rows, start=number * rows))
        number += 1
        while not bool(env.done.all()):
            begin = clock(device)
            env.step(policy(env.view()))
            epochs.append(clock(device) - begin)
            if len(epochs) == 1:
                first = time.perf_counter() - started
    warm = epochs[20:]
    length = max(drawn.horizons)
    rates = [rows * length / sum(warm[at : at + length]) for at in range(0, len(warm) - length + 1, length)]
    env.reset(drawn.scenarios(rows, start=number * rows))
    for _ in range(4):
        env.step(policy(env.view()))
    made = captures[0]
    profile = profiled(lambda: env.step(policy(env.view())), device)
    return {"rate": statistics.median(rates[:rounds]), "rates": rates[:rounds], "first_epoch_s": first,
            "captures": made, "epochs": len(epochs), "memory": memory(device), **profile}


def cnn(rows: int, rounds: int, device: str) -> dict[str, Any]:
    """Samples per second of cnn hosts with three seeds of any kind and style, redrawn every 30 steps."""
    import torch

    from esper.kasmina import Host, Population
    from esper.leyline import LifecycleOp, Style

    before = "compile" if os.environ.get("ESPER_BEFORE") else ""
    population = Population(Host("cnn"), rows, device=device, compute_dtype="bfloat16", compile=bool(before))
    generator, rates = torch.Generator().manual_seed(0), []
    x = torch.randn(128, rows, 3, 32, 32, device=device, dtype=torch.bfloat16)
    y = torch.randint(10, (128, rows), device=device)

    def redraw() -> None:
        """Reset every row and fill every slot: blueprints (but noop) and styles drawn uniformly, alpha 1."""
        every, shape = torch.arange(rows), (rows, 3)
        blueprint = 1 + torch.randint(len(population.spec.blueprints) - 1, shape, generator=generator)
        style = torch.randint(len(Style), shape, generator=generator)
        population.reset(every, torch.randint(2**62, (rows,), generator=generator))
        population.install(every, blueprint, style, torch.ones(shape))
        population.begin_epoch(torch.tensor([population.spec.action(LifecycleOp.WAIT)]).repeat(rows, 1))

    for _ in range(3 + rounds):
        redraw()
        begin = clock(device)
        for _ in range(30):
            population.train_step(x, y)
        rates.append(30 * 128 * rows / (clock(device) - begin))
        population.end_epoch()
    redraw()
    population.train_step(x, y)
    population.train_step(x, y)
    profile = profiled(lambda: population.train_step(x, y), device)
    return {"rate": statistics.median(rates[3:]), "rates": rates[3:], "memory": memory(device), **profile}


def clock(device: str) -> float:
    import torch

    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter()


def memory(device: str) -> int:
    import torch

    return torch.cuda.max_memory_allocated() if device != "cpu" else 0


def count_captures() -> list[int]:
    """A list whose one number counts graphs that are captured from now on."""
    import torch

    made, begin = [0], torch.cuda.CUDAGraph.capture_begin

    def counted(self: Any, *args: Any, **kwargs: Any) -> None:
        made[0] += 1
        begin(self, *args, **kwargs)

    torch.cuda.CUDAGraph.capture_begin = counted  # type: ignore[method-assign]
    return made


def profiled(work: Any, device: str) -> dict[str, Any]:
    """Kernels of a piece of work, and the share of its time in which the device is busy."""
    import torch

    if device == "cpu":
        return {}
    work()
    begin = clock(device)
    work()
    wall = clock(device) - begin
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        work()
        torch.cuda.synchronize()
    events = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    busy = sum(e.device_time_total for e in events) / 1e6
    top: dict[str, list[float]] = {}
    for event in events:
        entry = top.setdefault(event.name[:60], [0, 0.0])
        entry[0] += 1
        entry[1] += event.device_time_total / 1e3
    largest = sorted(top.items(), key=lambda item: -item[1][1])[:14]
    return {"kernels": len(events), "busy": busy / wall, "seconds": wall,
            "top": [(name, int(count), round(ms, 3)) for name, (count, ms) in largest]}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--before", type=Path)
    options.add_argument("--out", type=Path)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--device", default="cuda")
    options.add_argument("--only", nargs="*", default=list(FIGURES))
    options.add_argument("--one", choices=FIGURES, help=argparse.SUPPRESS)
    chosen = options.parse_args()
    if chosen.one:
        kind, name, rows = FIGURES[chosen.one]
        work = environment(name, rows, chosen.rounds, chosen.device) if kind == "env" else cnn(
            rows, chosen.rounds, chosen.device)
        print("RESULT " + json.dumps(work))
        return
    results: dict[str, Any] = {}
    versions = {"after": Path(__file__).parent.parent / "src"} | (
        {"before": chosen.before} if chosen.before else {})
    for figure in chosen.only:
        for version, source in versions.items():
            environ = os.environ | {"PYTHONPATH": str(source)}
            environ |= {"ESPER_BEFORE": "1"} if version == "before" else {}
            command = [sys.executable, __file__, "--one", figure, "--rounds", str(chosen.rounds), "--device",
                       chosen.device]
            done = subprocess.run(command, env=environ, capture_output=True, text=True)
            lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
            if not lines:
                print(figure, version, "failed:", done.stderr[-3000:], flush=True)
                continue
            result = json.loads(lines[0].removeprefix("RESULT "))
            results.setdefault(figure, {})[version] = result
            brief = {k: v for k, v in result.items() if k not in ("top", "rates")}
            print(figure, version, json.dumps(brief), flush=True)
            for row in result.get("top", ()):
                print("     ", *row, flush=True)
            if chosen.out:
                chosen.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
