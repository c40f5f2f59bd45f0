"""Does the demo's training improve, whatever its seed? The mean utility of its last third of rounds against its first.

    python -m experiments.demo_runs --seeds 10

Runs `esper demo` with few held-out scenarios, two at a time with one thread each.
"""

import os
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from esper.nissa import read
from experiments.shared import parser, write


def demo(seed: int) -> dict[str, float]:
    """Points above no growth in the first and the last third of rounds."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "esper.cli", "demo", "--seed", str(seed), "--hosts", "2", "--out", folder]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL,
                       env=os.environ | {"OMP_NUM_THREADS": "1"})
        rounds = read(Path(folder) / "run" / "run.db", "SELECT 100 * utility FROM round ORDER BY round")
    third = len(rounds) // 3
    first, last = (statistics.fmean(utility for (utility,) in part) for part in (rounds[:third], rounds[-third:]))
    print(f"seed {seed}: {first:+.2f}, then {last:+.2f}", flush=True)
    return {"first third": first, "last third": last}


def main() -> None:
    options_of = parser(__doc__)
    options_of.add_argument("--seeds", type=int, default=10)
    options = options_of.parse_args()
    with ThreadPoolExecutor(2) as pool:
        runs = list(pool.map(demo, range(options.seeds)))
    better = sum(run["last third"] > run["first third"] for run in runs)
    print(f"{better} of {len(runs)} improve")
    write(options, "demo", {"improve": better, "seeds": {str(seed): run for seed, run in enumerate(runs)}})


if __name__ == "__main__":
    main()
