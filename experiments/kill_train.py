"""Is anything lost when training is killed? One run straight through, one killed at random moments and resumed each time.

    python -m experiments.kill_train --kills 10
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


def command(folder: Path, rounds: int, resume: bool) -> list[str]:
    words = ["train", "--out", str(folder), "--preset", "quick", "--rows", "4", "--rounds", str(rounds)]
    return [sys.executable, "-c", CODE, *words, *["--resume"] * resume]


def rows(folder: Path, table: str) -> list[tuple[Any, ...]]:
    """Everything but how long it took and when it ended."""
    found = read(folder / "run.db", f"SELECT name FROM pragma_table_info('{table}') WHERE name NOT IN ('seconds', 'ended')")
    return read(folder / "run.db", f"SELECT {', '.join(name for (name,) in found)} FROM {table}")


def main() -> None:
    options_of = parser(__doc__)
    options_of.add_argument("--kills", type=int, default=10)
    options = options_of.parse_args()
    rounds, chance, hits = 3 * options.kills, random.Random(0), 0
    with tempfile.TemporaryDirectory() as name:
        straight, killed = Path(name) / "straight", Path(name) / "killed"
        subprocess.run(command(straight, rounds, False), check=True, stdout=subprocess.DEVNULL)
        while True:
            process = subprocess.Popen(command(killed, rounds, (killed / "run.json").exists()), stdout=subprocess.DEVNULL)
            if hits < options.kills:
                time.sleep(chance.uniform(4, 9))
                process.kill()
            if process.wait() == 0:
                break
            hits += 1
            print(f"killed {hits} times", flush=True)
        same = (straight / "agent.safetensors").read_bytes() == (killed / "agent.safetensors").read_bytes()
        tables = {table: rows(straight, table) == rows(killed, table) for table in TABLES}
    result = {"kills": hits, "rounds": rounds, "same agent": same, "same tables": tables}
    print(result)
    write(options, "kill_train", result)


if __name__ == "__main__":
    main()
