"""Train several seeds side by side, in processes of their own, for a limited time; run it again to go on.

    python -m experiments.seeds mnist1d 0 1 2 --preset gpu --seconds 520 --runs runs

Runs lie in RUNS/FAMILY-SEED, with what they print beside them. On CUDA start the MPS daemon first (`nvidia-cuda-mps-control -d`):
without it processes take turns on the device. A run stops after the round that it is in.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from esper.cli.runs import load_run

ONE = """
import json
import sys
from pathlib import Path
from rich.console import Console
from esper.cli.machine import keep_freed_memory
from esper.cli.options import Train
from esper.cli.train import run
keep_freed_memory()
asked = json.loads(sys.argv[1])
sys.argv[1:] = ["train"] + [word for name, value in asked.items() for word in (f"--{name}", str(value)) if word != "True"]
run(Train(Path(asked.pop("out")), **asked), Console(highlight=False, width=100))
"""


def main() -> None:
    options_of = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options_of.add_argument("family")
    options_of.add_argument("seeds", type=int, nargs="+")
    options_of.add_argument("--preset", default="gpu")
    options_of.add_argument("--runs", type=Path, default=Path("runs"))
    options_of.add_argument("--seconds", type=float, default=float("inf"), help="after which runs are asked to stop")
    options_of.add_argument("--rounds", type=int, default=0, help="make runs so long, if they were declared shorter")
    options_of.add_argument("--threads", default="4", help="of each process")
    options = options_of.parse_args()
    options.runs.mkdir(parents=True, exist_ok=True)
    started, running = time.monotonic(), {}
    for seed in options.seeds:
        folder = options.runs / f"{options.family}-{seed}"
        found = load_run(folder)
        if found is None:
            asked = {"family": options.family, "preset": options.preset, "seed": seed, "out": str(folder)}
            asked |= {"rounds": options.rounds} if options.rounds else {}
        else:
            asked = {"out": str(folder), "resume": True, "more": max(0, options.rounds - found[0].rounds)}
        with open(f"{folder}.log", "a") as log:
            running[folder] = subprocess.Popen([sys.executable, "-c", ONE, json.dumps(asked)], stdout=log,
                                               stderr=subprocess.STDOUT, env=os.environ | {"OMP_NUM_THREADS": options.threads})
    while any(process.poll() is None for process in running.values()):
        time.sleep(1)
        if time.monotonic() - started > options.seconds:
            for process in running.values():
                process.send_signal(signal.SIGINT)
            break
    for folder, process in running.items():
        print(folder, "exit", process.wait())
        print("".join(Path(f"{folder}.log").read_text().splitlines(keepends=True)[-4:]))


if __name__ == "__main__":
    main()
