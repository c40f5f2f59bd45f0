"""Measures every published figure again and compares it with the committed one.

    python benchmarks/all.py --list
    python benchmarks/all.py --only store sweep-mlp

New results go to a folder of their own (--out); committed ones are never touched. Exit code 1: a figure differs by more than its
tolerance, which for speeds is wide, since machines are not alike. What this machine lacks (CUDA, Ray, data, the runs of a proof) is
named and left out.
"""

import argparse
import fnmatch
import importlib.util
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

ROOT = Path(__file__).parent.parent
BENCH, EXPERIMENTS = ROOT / "benchmarks" / "results", ROOT / "experiments" / "results"
SPEED = {"ratio": 0.35, "tight_ratio": 0.35}
LEARNT = {"*passed": 0.0}
GAINS = {"levels.*.utility": 0.02, "oracle_gap.value": 0.3}


class Figure(NamedTuple):
    """A command that writes result files to {out}, and how far numbers by their (dotted) keys may be from the committed ones."""

    command: str
    files: tuple[str, ...] = ()  # patterns; none: its exit code tells
    near: dict[str, float] = {}  # relative; 0 is equal
    minutes: float = 1  # on two quiet cores
    needs: str = ""
    kept: Path = EXPERIMENTS


def _experiment(name: str, near: dict[str, float], minutes: float, options: str = "", file: str = "", needs: str = "") -> Figure:
    return Figure(f"python -m experiments.{name} {options} --out {{out}}", (f"{file or name}.json",), near, minutes, needs)


def _sweep(family: str, inits: int, minutes: float, needs: str = "", heads: str = "--heads") -> Figure:
    called = family.replace("/", "-")
    return Figure(f"esper sweep --family {family} --inits {inits} {heads} --out {{out}}", (f"sweep-{called}.json",), GAINS, minutes, needs)


def _speed(name: str, device: str, minutes: float) -> Figure:
    near = SPEED | ({"transitions_per_second.esper": 0.35} if device == "cuda" else {})  # beside nobody else's
    return Figure(f"python benchmarks/{name}.py --write --out {{out}}", (f"{name}-*{device}*.json",), near, minutes,
                  "cuda" if device == "cuda" else "no cuda", BENCH)


FIGURES = {
    "pages": Figure("python -m experiments.tables --check", minutes=0.1),
    "same numbers": Figure("python -m experiments.same_numbers mlp mnist1d fashion --training", minutes=3, needs="fashion"),
    **{f"{name}, {device}": _speed(name, device, 4) for name in ("population", "env", "rl") for device in ("cpu", "cuda")},
    "vector": _speed("vector", "cpu", 3),
    "speed": Figure("python benchmarks/speed.py --out {out}", ("speed-*.json", "scaling-*.json"), {"*.after.rate": 0.35, "m*.*.rate": 0.35}, 15, "cuda", BENCH),
    "store": Figure("python benchmarks/store.py --out {out}", ("store.json",), {"held": 0.0, "bytes*": 0.05}, 1, kept=BENCH),
    "eyes": Figure("python benchmarks/eyes.py --out {out}/eyes.json", ("eyes.json",), {"held": 0.0}, 6, "playwright", BENCH),
    "universe_gap": _experiment("universe_gap", {"*.points": 0.3}, 1, "--scenarios 6 4"),
    "sweep-mlp": _sweep("mlp", 16, 3),
    "sweep-mnist1d": _sweep("mnist1d", 12, 25),
    "sweep-fashion": _sweep("fashion", 12, 40, "fashion"),
    "sweep-digits": _sweep("digits", 8, 4, heads=""),
    "sweep-diabetes": _sweep("diabetes", 8, 4, heads=""),
    "sweep-mnist1d-conv1d": _sweep("mnist1d/conv1d", 4, 8, heads=""),
    "ladder": _experiment("ladder", LEARNT, 40),
    "ladder-orchard": _experiment("ladder", LEARNT, 10, "--only orchard --seeds 4", "ladder-orchard"),
    "unfarmable": _experiment("unfarmable", {"utility": 0.0, "terminal": 0.0, "contribution": 0.0, "shaped": 0.0}, 10),
    "paper_table": _experiment("paper_table", {"*.mean": 0.05}, 40),
    "incubation": _experiment("incubation", {"*.accuracy": 0.03}, 10, "--families mlp", "incubation-mlp"),
    "reward_noise": _experiment("reward_noise", {"*noise": 0.1}, 4, "--inits 8"),
    "controls": _experiment("controls_table", {"*.kept": 0.0}, 10, "--family mlp --episodes 600", "controls-mlp"),
    "kill_train": _experiment("kill_train", {"same*": 0.0}, 5),
    "many_workers": _experiment("many_workers", {"same curve": 0.0}, 4, "--rounds 6"),
    "ray_cluster": _experiment("ray_cluster", {"same curve*": 0.0, "every shard once": 0.0}, 2, needs="ray"),
    "do_no_harm": _experiment("do_no_harm", {"combinations": 0.0, "delivered.*": 0.0}, 10, needs="transformers"),
    "door_worth": _experiment("door_worth", {"*.accuracy": 0.02}, 2),
    "corruptions": _experiment("corruptions", {"silent or broken": 0.0}, 15, "--count 750"),
    "demo": _experiment("demo_runs", {"improve": 0.0}, 10, "--seeds 10", "demo"),
    **{f"zero-shot-{family}": _experiment("zero_shot", {"*.grown parameters": 0.05}, 15, f"tamiyo-small --family {family}", f"zero-shot-{family}",
                                          "fashion" if family == "fashion" else "") for family in ("mlp", "mnist1d", "fashion")},
    **{f"proof of {family}": Figure(f"esper prove --minds runs/{family}-0 runs/{family}-1 runs/{family}-2 --out {{out}}", needs="runs", minutes=120)
       for family in ("mlp", "mnist1d", "fashion")},
}
"""name -> how it is measured. A proof opens a test split and draws new scenarios, so it is never repeated from here."""


def lacks(needs: str) -> str:
    """What this machine does not have for it, in words."""
    if needs in ("cuda", "no cuda"):
        return "" if torch.cuda.is_available() == (needs == "cuda") else f"this machine has {'no ' * (needs == 'cuda')}CUDA"
    if needs == "fashion":
        from esper.tolaria.tasks import TASKS, where

        return "" if where(TASKS["fashion"]) else "the data of fashion is not here (esper tasks add-data fashion PATH)"
    if needs == "runs":
        return "it needs the three runs, and opens the test split: run it yourself"
    return "" if not needs or importlib.util.find_spec(needs) else f"{needs} is not installed"


def leaves(value: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of all that is no table."""
    if isinstance(value, dict):
        for name, each in value.items():
            yield from leaves(each, f"{where}.{name}".strip("."))
    else:
        yield where, value


def differences(committed: dict[str, Any], measured: dict[str, Any], near: dict[str, float]) -> list[str]:
    now = dict(leaves(measured))
    return [f"{key}: committed {was}, now {now.get(key)}" for key, was in leaves(committed)
            for share in [share for pattern, share in near.items() if fnmatch.fnmatchcase(key, pattern)][:1]
            if not (now.get(key) == was or (share and isinstance(now.get(key), (int, float)) and abs(now[key] - was) <= share * abs(was)))]


def measure(figure: Figure, folder: Path) -> list[str]:
    """What is wrong with it; nothing if it is as it was."""
    program, *words = shlex.split(figure.command.format(out=shlex.quote(str(folder))))
    command = [sys.executable, *(["-m", "esper.cli"] if program == "esper" else []), *words]
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True)
    if done.returncode:
        return [f"exit code {done.returncode}: {(done.stderr or done.stdout).strip().splitlines()[-1:]}"]
    found = [path for pattern in figure.files for path in sorted(figure.kept.glob(pattern))]
    missing = [f"{path.name} was not measured" for path in found if not (folder / path.name).exists()]
    both = [(path, folder / path.name) for path in found if (folder / path.name).exists()]
    return missing + [f"{path.name}: {each}" for path, new in both
                      for each in differences(json.loads(path.read_text()), json.loads(new.read_text()), figure.near)]


def main(arguments: list[str] | None = None) -> int:
    options_of = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options_of.add_argument("--list", action="store_true", help="say what there is, and measure nothing")
    options_of.add_argument("--only", nargs="+", metavar="NAME", default=list(FIGURES))
    options_of.add_argument("--out", type=Path, default=None, help="folder for what is measured")
    options = options_of.parse_args(arguments)
    if unknown := [name for name in options.only if name not in FIGURES]:
        print(f"all.py: no figure {unknown[0]!r}; there are {', '.join(FIGURES)}", file=sys.stderr)
        return 2
    folder, wrong = options.out or Path(tempfile.mkdtemp(prefix="esper-figures-")), 0
    folder.mkdir(parents=True, exist_ok=True)
    for name in options.only:
        figure = FIGURES[name]
        if options.list:
            print(f"{name:24} {figure.minutes:5g} min  {figure.command.format(out='OUT')}")
        elif lacking := lacks(figure.needs):
            print(f"{name}: left out, {lacking}", flush=True)
        else:
            problems = measure(figure, folder.resolve())
            wrong += bool(problems)
            print(f"{name}: {'; '.join(problems) or 'as committed'}", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
