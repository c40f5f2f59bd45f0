"""How fast the package is on a GPU, beside an earlier version of it in the same run.

    python benchmarks/speed.py                                        # this version; figures are told, not kept
    python benchmarks/speed.py --before SRC --out DIR --limit 540     # SRC: the earlier version's folder src
    python benchmarks/speed.py --only train_gpu --device cpu --sizes rows=16 updates=2     # a try on the CPU

Figures are measured in their order, the versions in turn, each in a process of its own. Files are written after every
figure: speed-CHIP.json, scaling-CHIP.json and one for each population; calls with the same --commit share them. Rates of
environments count hosts whose episode was running, over whole episodes of the random policy, resets included; `all_rows`
counts every row. Kernels, busy share and synchronisations are those of one epoch in which every row runs.
"""

import argparse
import collections
import contextlib
import functools
import gc
import importlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import MagicMock

ROOT = Path(__file__).resolve().parent.parent
COUNTED = 20
"""Epochs of a fresh environment in which captures are counted; then it is warm."""
Json = dict[str, Any]


class Asked(NamedTuple):
    """What a process measures with."""

    device: str = "cuda"
    before: bool = False
    sizes: dict[str, Any] = {}


# Environments


def episode(env: Any, number: int, device: str) -> Iterator[tuple[int, float]]:
    """(hosts whose episode runs, seconds) of each epoch; the first one's seconds include the reset."""
    from esper.tamiyo import Random

    policy, begin = Random(), clock(device)
    env.reset(env.family.scenarios(env.rows, start=number * env.rows))
    while not bool(env.done.all()):
        running = int((~env.done).sum())
        env.step(policy(env.view()))
        yield running, clock(device) - begin
        begin = clock(device)


def rates_of(env: Any, numbers: range, device: str) -> Json:
    """Host-epochs per second of episodes, and their medians."""
    rates, every = [], []
    for number in numbers:
        running, seconds = zip(*episode(env, number, device), strict=True)
        rates.append(sum(running) / sum(seconds))
        every.append(env.rows * len(running) / sum(seconds))
    return {"rate": statistics.median(rates), "rates": rates, "all_rows": statistics.median(every)}


def profile_of(env: Any, number: int, device: str) -> Json:
    """Of the seventh epoch: by then hosts hold seeds of all ages."""
    from esper.tamiyo import Random

    policy = Random()
    env.reset(env.family.scenarios(env.rows, start=number * env.rows))
    for _ in range(4):
        env.step(policy(env.view()))
    return profiled(lambda: env.step(policy(env.view())), device)


def environment(asked: Asked, family: str, rows: int, rounds: int) -> Json:
    """Rates of so many episodes, after a warm-up of whole ones."""
    from esper.tolaria import MorphogeneticEnv, find_family

    captures, started = count_captures(), clock(asked.device)
    env = MorphogeneticEnv(find_family(family), rows, device=asked.device)
    seconds, early, warm = list[float](), 0, 0
    while len(seconds) < COUNTED:
        for _, took in episode(env, warm, asked.device):
            seconds.append(took)
            early = captures[0] if len(seconds) <= COUNTED else early
        warm += 1
    ready = clock(asked.device) - started
    rates = rates_of(env, range(warm, warm + rounds), asked.device)
    made = captures[0]
    told = rates | {"first_epoch_s": seconds[0], "warm_up_s": ready, "captures": early, "captures_in_all": made,
                    **memory(asked.device)}
    tell(told)
    return told | profile_of(env, warm + rounds, asked.device)


def scaling(asked: Asked, family: str, many: tuple[int, ...], rounds: int) -> Json:
    """By number of rows: rate, seconds of a host-epoch, memory, busy share; after one episode to warm up."""
    import torch

    from esper.tolaria import MorphogeneticEnv, find_family

    found: Json = {}
    for rows in many:
        if asked.device != "cpu":
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        try:
            env = MorphogeneticEnv(find_family(family), rows, device=asked.device)
            collections.deque(episode(env, 0, asked.device), 0)
            rates = rates_of(env, range(1, 1 + rounds), asked.device)
            used = memory(asked.device)
            profile = profile_of(env, 1 + rounds, asked.device)
        except RuntimeError as error:  # out of memory, as a rule
            found[str(rows)] = {"error": str(error)[:300]}
            break
        profile.pop("top", None)
        found[str(rows)] = rates | {"seconds_per_host_epoch": 1 / rates["rate"], **used, **profile}
        tell(found)
        del env
    return found


# Populations


def cnn(asked: Asked, rows: int, batch: int, steps: int, rounds: int) -> Json:
    """Samples per second of cnn hosts with three seeds of any kind and style, redrawn every few steps."""
    import torch

    from esper.kasmina import Host, Population
    from esper.leyline import LifecycleOp, Style

    population = Population(Host("cnn"), rows, device=asked.device, compute_dtype="bfloat16", compile=asked.before)
    generator, rates = torch.Generator().manual_seed(0), []
    x = torch.randn(batch, rows, 3, 32, 32, device=asked.device, dtype=torch.bfloat16)
    y = torch.randint(10, (batch, rows), device=asked.device)

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
        begin = clock(asked.device)
        for _ in range(steps):
            population.train_step(x, y)
        rates.append(steps * batch * rows / (clock(asked.device) - begin))
        population.end_epoch()
    told = {"rate": statistics.median(rates[3:]), "rates": rates[3:], **memory(asked.device)}
    tell(told)
    redraw()
    population.train_step(x, y)
    population.train_step(x, y)
    return told | profiled(lambda: population.train_step(x, y), asked.device)


def hosts(asked: Asked, host: str) -> Json:
    """A figure of `population.py` as that script publishes it, beside a loop over the same modules."""
    import population

    published = next(sizes for sizes in population.PUBLISHED["cuda"] if sizes["host"] == host)
    known = {name: size for name, size in asked.sizes.items() if name in population.PopulationBench.__dataclass_fields__}
    bench = population.PopulationBench(**published | {"device": asked.device} | known)
    return {"file": bench.name} | population.measure(bench)


# Training


def training(asked: Asked, family: str, rows: int, updates: int) -> Json:
    """`esper train --family FAMILY --preset gpu`: start-up, and seconds of a round with twins that are known.

    The command's own config, store and checkpoints, with fewer rounds and one round's scenarios: the first round
    computes their twins and captures what is captured; those that follow are as all later rounds.
    """
    from dataclasses import replace

    from esper.cli.train import resolve_config
    from esper.nissa import Store, read
    from esper.simic.ppo import PPOAgent
    from esper.simic.training import Training
    from esper.tolaria import Twins

    options = collections.defaultdict(lambda: None, family=family, preset="gpu", device=asked.device, rows=rows, rounds=updates)
    config = resolve_config(_Named(options))  # type: ignore[arg-type]
    config = replace(config, scenarios=config.rows)
    twins, learning = timed_calls(Twins, "_compute", asked.device), timed_calls(PPOAgent, "update", asked.device)
    captures, ends = count_captures(), [clock(asked.device)]
    with tempfile.TemporaryDirectory() as folder, contextlib.closing(Store(Path(folder) / "run.db")) as store:
        run = Training(config, Path(folder), store)
        ends.append(clock(asked.device))
        run.run(watch=lambda number: ends.append(clock(asked.device)))
        told = read(Path(folder) / "run.db", "SELECT seconds, host_epochs FROM worker ORDER BY round")
    rounds = [after - before for before, after in itertools.pairwise(ends[1:])]
    played, epochs = zip(*told, strict=True)
    return {"round_s": statistics.median(rounds[1:]), "rounds_s": rounds, "start_up_s": ends[1] - ends[0],
            "twins_s": sum(twins), "update_s": statistics.median(learning[1:]), "play_s": statistics.median(played[1:]),
            "rate": statistics.median(count / seconds for count, seconds in zip(epochs[1:], rounds[1:], strict=True)),
            "captures": captures[0], **memory(asked.device)}


class _Named:
    """Options of a command, of which most are not given."""

    def __init__(self, options: Json) -> None:
        self._options = options

    def __getattr__(self, name: str) -> Any:
        return self._options[name]


def timed_calls(owner: type, name: str, device: str) -> list[float]:
    """A list to which every later call of a method adds its seconds."""
    seconds, method = list[float](), getattr(owner, name)

    @functools.wraps(method)
    def timed(*args: Any, **kwargs: Any) -> Any:
        begin = clock(device)
        try:
            return method(*args, **kwargs)
        finally:
            seconds.append(clock(device) - begin)

    setattr(owner, name, timed)
    return seconds


def workers(asked: Asked, family: str, rows: int, updates: int) -> Json:
    """Rounds of four shards, played here and by one, two and four processes on one device; and in other parts."""
    from dataclasses import replace

    from experiments.many_workers import CONFIG, compared

    from esper.tolaria import EnvConfig, find_family

    env = EnvConfig(find_family(family), device=asked.device)
    config = replace(CONFIG, env=env, rows=rows, scenarios=rows, rounds=updates)
    return compared(config, told=lambda found: tell({"ways": found}))


# Clocks and counters


def clock(device: str) -> float:
    import torch

    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter()


def memory(device: str) -> Json:
    """Bytes at most: of tensors, and of what the allocator took for them and for graphs."""
    import torch

    if device == "cpu":
        return {"memory": 0, "reserved": 0}
    return {"memory": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}


def count_captures() -> list[int]:
    """A list whose one number counts graphs that are captured from now on."""
    import torch

    made, begin = [0], torch.cuda.CUDAGraph.capture_begin

    def counted(self: Any, *args: Any, **kwargs: Any) -> None:
        made[0] += 1
        begin(self, *args, **kwargs)

    torch.cuda.CUDAGraph.capture_begin = counted  # type: ignore[method-assign]
    return made


def synchronisations(work: Callable[[], object]) -> int:
    """How often torch waits for the device during some work."""
    import torch

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            work()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("called a synchronizing" in str(one.message) for one in told)


def profiled(work: Callable[[], object], device: str) -> Json:
    """Kernels of some work, the share of its time in which the device is busy, and waits for it in two countings."""
    import torch

    if device == "cpu":
        work()
        return {}
    waits = synchronisations(work)
    begin = clock(device)
    work()
    wall = clock(device) - begin
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        work()
        torch.cuda.synchronize()  # one of the waits
    events = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    calls = collections.Counter(e.name for e in profile.events() if "Synchronize" in e.name)
    busy = sum(e.device_time_total for e in events) / 1e6
    top: dict[str, list[float]] = {}
    for event in events:
        entry = top.setdefault(event.name[:60], [0, 0.0])
        entry[0] += 1
        entry[1] += event.device_time_total / 1e3
    largest = sorted(top.items(), key=lambda item: -item[1][1])[:14]
    return {"kernels": len(events), "busy": busy / wall, "seconds": wall, "synchronisations": waits, "waits": dict(calls),
            "top": [(name, int(count), round(ms, 3)) for name, (count, ms) in largest]}


# Processes and files


class Figure(NamedTuple):
    """What is measured; files are named after it."""

    work: Callable[..., Json]
    sizes: Json
    file: str = "speed"
    both: bool = False
    """With the earlier version too?"""


MANY = (64, 128, 256, 512, 1024, 2048, 4096)
FIGURES = {
    **{f"env_{family}_{rows}": Figure(environment, {"family": family, "rows": rows, "rounds": 5}, both=True)
       for family in ("mnist1d", "mlp") for rows in (192, 1024)},
    "cnn_256x128_seeds": Figure(cnn, {"rows": 256, "batch": 128, "steps": 30, "rounds": 5}, both=True),
    "population_resnet": Figure(hosts, {"host": "resnet"}, "population"),
    "population_gpt": Figure(hosts, {"host": "gpt"}, "population"),
    "train_gpu": Figure(training, {"family": "mnist1d", "rows": 192, "updates": 3}, both=True),
    "workers_mlp": Figure(workers, {"family": "mlp", "rows": 512, "updates": 4}),
    "scaling_mnist1d": Figure(scaling, {"family": "mnist1d", "many": MANY, "rounds": 2}, "scaling"),
    "scaling_mlp": Figure(scaling, {"family": "mlp", "many": MANY, "rounds": 2}, "scaling"),
    "workers_mnist1d": Figure(workers, {"family": "mnist1d", "rows": 256, "updates": 3}),
}
"""In the order in which they are measured: the most important first."""
SIGN = "RESULT "


def tell(result: Json) -> None:
    """What is known so far; the process that asked takes the last that it hears."""
    print(SIGN + json.dumps(result), flush=True)


def measure(figure: Figure, asked: Asked, commit: str) -> None:
    """In a process of its own."""
    try:
        importlib.import_module("tyro")
    except ImportError:  # commands read their options with it, which nobody does here
        sys.modules["tyro"] = sys.modules["tyro.conf"] = MagicMock()
    sizes = figure.sizes | {name: size for name, size in asked.sizes.items() if name in figure.sizes}
    result = figure.work(asked, **sizes)
    if not asked.before:
        from common import Results

        result["stamp"] = Results(commit=commit).stamp(asked.device)
    tell(result)


def measured(name: str, version: str, options: argparse.Namespace, seconds: float) -> Json | str:
    """What a process of its own says, for as long as it may; else what went wrong."""
    source = options.before if version == "before" else ROOT / "src"
    paths = [str(Path(source).resolve()), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    sizes = options.sizes + (options.sizes_before if version == "before" else [])
    command = [sys.executable, __file__, "--one", name, "--device", options.device, "--commit", options.commit,
               *(["--as-before"] if version == "before" else []), "--sizes", *sizes]
    try:
        done = subprocess.run(command, env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)}, capture_output=True, text=True,
                              timeout=seconds)
        out, wrong = done.stdout, done.stderr[-3000:] if done.returncode else ""
    except subprocess.TimeoutExpired as late:
        out = late.stdout.decode(errors="replace") if isinstance(late.stdout, bytes) else late.stdout or ""
        wrong = f"no end within {seconds:.0f} s"
    lines = out.splitlines()
    if not (results := [line for line in lines if line.startswith(SIGN)]):
        return "\n".join([*lines[-5:], wrong])
    result: Json = json.loads(results[-1].removeprefix(SIGN))
    return result | ({"cut short": wrong[-500:]} if wrong else {})


def keep(files: dict[str, Json], name: str, version: str, result: Json, options: argparse.Namespace) -> None:
    """Put a result where it belongs, and write that file."""
    stamp, figure = result.pop("stamp", {}), FIGURES[name]
    chip = "cpu" if options.device == "cpu" else stamp.get("hardware", "gpu").split()[-1].lower()
    file = result.pop("file", f"{figure.file}-{chip}")
    if figure.file == "population":
        files[file] = result | stamp
    else:
        if version == "before":  # of the same figure, which this version has begun
            file = next((known for known, each in files.items() if name in each), file)
        if file not in files:
            files[file] = {"bench": figure.file} | _begun(options, file)
        kept = files[file]
        kept |= stamp
        if version == "before":
            kept["commit_before"] = options.commit_before
        if figure.file == "scaling":
            kept[name.removeprefix("scaling_")] = result
        else:
            kept.setdefault(name, {})[version] = result
        if name == "env_mnist1d_192":
            kept.setdefault("captures", {})[version] = result["captures"]
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / f"{file}.json").write_text(json.dumps(files[file], indent=1) + "\n")


def _begun(options: argparse.Namespace, file: str) -> Json:
    """What an earlier call with the same --commit has put into a file."""
    path = options.out / f"{file}.json" if options.out else None
    known: Json = json.loads(path.read_text()) if path and options.commit and path.exists() else {}
    return known if known.get("commit") == options.commit else {}


def number_of(words: list[str]) -> Json:
    """NAME=NUMBER, or NAME=NUMBER,NUMBER."""
    pairs = [word.split("=") for word in words]
    return {name: tuple(map(int, value.split(","))) if name == "many" else int(value) for name, value in pairs}


def main(arguments: list[str] | None = None) -> int:
    options_of = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options_of.add_argument("--before", type=Path, metavar="SRC", help="measure an earlier version too")
    options_of.add_argument("--out", type=Path, metavar="DIR", help="write files of what is measured to this folder")
    options_of.add_argument("--device", default="cuda")
    options_of.add_argument("--only", nargs="+", metavar="NAME", default=list(FIGURES), help=f"of {', '.join(FIGURES)}")
    options_of.add_argument("--limit", type=float, default=float("inf"), metavar="S",
                            help="seconds after which no figure is begun, and one that runs has 30 left")
    options_of.add_argument("--longest", type=float, default=240.0, metavar="S", help="seconds that one process may take")
    options_of.add_argument("--sizes", nargs="*", default=[], metavar="NAME=N", help="other sizes, for figures that have them")
    options_of.add_argument("--sizes-before", nargs="*", default=[], metavar="NAME=N", help="of the earlier version alone")
    options_of.add_argument("--commit", default="", help="that is measured; by default git's HEAD")
    options_of.add_argument("--commit-before", default="", help="of the earlier version")
    options_of.add_argument("--one", choices=FIGURES, help=argparse.SUPPRESS)
    options_of.add_argument("--as-before", action="store_true", help=argparse.SUPPRESS)
    options = options_of.parse_args(arguments)
    if options.one:
        measure(FIGURES[options.one], Asked(options.device, options.as_before, number_of(options.sizes)), options.commit)
        return 0
    if unknown := [name for name in options.only if name not in FIGURES]:
        options_of.error(f"no figure {unknown[0]!r}; choose from {', '.join(FIGURES)}")
    started, files, failed = time.monotonic(), dict[str, Json](), 0
    for name in options.only:
        for version in ("after", *["before"] * (options.before is not None and FIGURES[name].both)):
            begun = time.monotonic()
            if begun - started > options.limit:
                print(f"{name} {version}: left out, {options.limit:.0f} s are over", flush=True)
                continue
            result = measured(name, version, options, min(options.longest, options.limit + 30 + started - begun))
            took = f"({time.monotonic() - begun:.0f} s)"
            if isinstance(result, str):
                failed += 1
                print(f"{name} {version} {took}: failed: {result}", flush=True)
                continue
            keep(files, name, version, result, options)
            brief = {k: v for k, v in result.items() if k not in ("top", "rates", "rounds_samples_per_second", "curve")}
            print(f"{name} {version} {took}: {json.dumps(brief)}", flush=True)
            for row in result.get("top", ()):
                print("     ", *row, flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
