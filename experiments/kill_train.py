"""Is anything lost when training is killed? One run straight through, one killed at random moments and resumed each time.

    python -m experiments.kill_train --kills 10
    python -m experiments.kill_train --kills 10 --workers 2     the killed one is played by workers, which must end with it
"""

import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from esper.nissa import read
from experiments.shared import parser, write

TABLES = ("round", "step", "move", "head", "exam")
CODE = "import sys, torch; torch.set_num_threads(1); from esper.cli import main; sys.exit(main(sys.argv[1:]))"


def command(folder: Path, rounds: int, resume: bool, shards: int = 1, workers: int = 0) -> list[str]:
    words = ["train", "--out", str(folder), "--preset", "quick", "--rows", "4", "--rounds", str(rounds), "--shards", str(shards)]
    return [sys.executable, "-c", CODE, *words, "--workers", str(workers), *["--resume"] * resume]


def rows(folder: Path, table: str) -> list[tuple[Any, ...]]:
    """Everything but how long it took and when it ended."""
    found = read(folder / "run.db", f"SELECT name FROM pragma_table_info('{table}') WHERE name NOT IN ('seconds', 'ended')")
    return read(folder / "run.db", f"SELECT {', '.join(name for (name,) in found)} FROM {table}")


def main() -> None:
    options_of = parser(__doc__)
    options_of.add_argument("--kills", type=int, default=10)
    options_of.add_argument("--workers", type=int, default=0)
    options = options_of.parse_args()
    workers, shards, moments = options.workers, max(1, options.workers), (8, 24) if options.workers else (4, 9)
    rounds, chance, hits = 3 * options.kills, random.Random(0), 0
    with tempfile.TemporaryDirectory() as name:
        straight, killed = Path(name) / "straight", Path(name) / "killed"
        subprocess.run(command(straight, rounds, False, shards), check=True, stdout=subprocess.DEVNULL)
        while True:
            words = command(killed, rounds, (killed / "run.json").exists(), shards, workers)
            process = subprocess.Popen(words, stdout=subprocess.DEVNULL)
            if hits < options.kills:
                time.sleep(chance.uniform(*moments))
                process.kill()
            if process.wait() == 0:
                break
            hits += 1
            print(f"killed {hits} times", flush=True)
        same = (straight / "agent.safetensors").read_bytes() == (killed / "agent.safetensors").read_bytes()
        tables = {table: rows(straight, table) == rows(killed, table) for table in TABLES}
    result = {"workers": workers, "kills": hits, "rounds": rounds, "same agent": same, "same tables": tables}
    print(result)
    write(options, "kill_train-workers" if workers else "kill_train", result)


if __name__ == "__main__":
    main()
