"""Kill an environment with SIGKILL at random moments and continue it from its checkpoint: nothing may differ.

    python -m experiments.kill_resume --trials 20

Each trial is killed up to three times; what it leaves in the end must equal the uninterrupted run byte for byte.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from esper.kasmina import Host
from esper.tamiyo import Random
from esper.tolaria import Family, Kind, MorphogeneticEnv

KINDS = (Kind("plain"), Kind("wrong", label_noise=0.3))
FAMILY = Family("kill", "digits", Host("mlp", inputs=(64,)), KINDS, horizons=(10,), batch=50)


def work(path: Path) -> None:
    torch.set_num_threads(1)
    env, decide = MorphogeneticEnv(FAMILY, 24), Random(1)
    if path.exists():
        env.load(path)
    else:
        env.reset(FAMILY.scenarios(24))
    print("ready", flush=True)
    while not bool(env.done.all()):
        env.step(decide(env.view()))
        env.save(path)


def start(path: Path) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "experiments.kill_resume", "--work", str(path)]
    job = subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert job.stdout is not None
    job.stdout.readline()
    return job


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--work", type=Path)
    options = parser.parse_args()
    if options.work:
        work(options.work)
        return
    random.seed(0)
    kills = 0
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder) / "whole.safetensors"
        begun = time.perf_counter()
        start(whole).wait()
        seconds = time.perf_counter() - begun
        for trial in range(options.trials):
            path = Path(folder) / f"{trial}.safetensors"
            for _ in range(random.randint(1, 3)):
                job = start(path)
                time.sleep(random.uniform(0, 0.4 * seconds))
                kills += job.poll() is None
                job.send_signal(signal.SIGKILL)
                job.wait()
            start(path).wait()
            assert path.read_bytes() == whole.read_bytes(), f"trial {trial} differs"
            print(f"trial {trial}: identical", flush=True)
    print(f"{options.trials} trials, killed {kills} times while running: all identical to the uninterrupted run")


if __name__ == "__main__":
    main()
