"""Is anything lost when the disk is full? Runs on a small file system that is almost full, each resumed once there is room.

    mount -t tmpfs -o size=16m tmpfs DIR; python -m experiments.full_disk DIR

Every run must stop with exit code 2 and one sentence, and end with the agent of a run that had room from the start.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from experiments.shared import parser, write

CODE = "import sys, torch; torch.set_num_threads(1); from esper.cli import main; sys.exit(main(sys.argv[1:]))"
ROOM = (0, 16, 64, 96, 128, 256, 2048, 3072, 4096)
"""KiB that are free at first: too little for a description, a store, a first checkpoint or a second one."""


def train(folder: Path) -> subprocess.CompletedProcess[str]:
    """Begin a run, or go on with the one that is there as its own hint says."""
    resume = (folder / "run.json").exists()
    words = ["--resume"] if resume else ["--preset", "quick", "--rows", "4", "--rounds", "3", "--seed", "1"]
    return subprocess.run([sys.executable, "-c", CODE, "train", "--out", str(folder), *words], capture_output=True, text=True)


def fill(folder: Path, room: int) -> Path:
    """A file that leaves so many bytes."""
    ballast, state = folder / "ballast", os.statvfs(folder)
    ballast.write_bytes(bytes(max(0, state.f_bavail * state.f_frsize - room)))
    return ballast


def interrupted(small: Path, room: int) -> tuple[str, bytes]:
    """(what a run that begins with so little room says, the agent it ends with once there is more)."""
    folder, ballast = small / "run", fill(small, room)
    stopped = train(folder)
    told = stopped.stderr.strip()
    assert stopped.returncode == 2, (room, stopped)
    assert told.startswith("esper train: cannot "), told
    assert "\n" not in told, told
    assert not list(folder.glob("*.writing"))
    ballast.unlink()
    again = train(folder)
    assert again.returncode == 0, again.stderr
    agent = (folder / "agent.safetensors").read_bytes()
    shutil.rmtree(folder)
    return told.replace(str(small), "DIR"), agent


def main() -> None:
    options_of = parser(__doc__)
    options_of.add_argument("small", type=Path, help="folder of its own on a file system of some MiB")
    options = options_of.parse_args()
    said = {}
    with tempfile.TemporaryDirectory() as name:
        assert train(Path(name) / "run").returncode == 0
        expected = (Path(name) / "run" / "agent.safetensors").read_bytes()
    for room in ROOM:
        told, agent = interrupted(options.small, 1024 * room)
        assert agent == expected, f"{room} KiB: another agent"
        said[f"{room} KiB"] = told
        print(f"{room:5} KiB free: {told}; the same agent in the end", flush=True)
    write(options, "full_disk", {"same agent": len(said), "said": said})


if __name__ == "__main__":
    main()
