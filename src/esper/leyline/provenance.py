"""Where a number comes from: the one stamp on runs, proofs, sweeps, experiments and benchmarks."""

import datetime
import platform
import subprocess
import sys
from typing import Any

import torch

VERSION = "0.2.0"


def provenance(device: str = "cpu", commit: str = "") -> dict[str, Any]:
    """Date, commit, versions, command and hardware of what is computed now."""
    threads = torch.get_num_threads()
    return {"date": datetime.date.today().isoformat(), "commit": commit or _commit(), "version": VERSION,
            "command": " ".join(["esper", *sys.argv[1:]]), "python": platform.python_version(),
            "torch": torch.__version__, "threads": threads,
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "hardware": (torch.cuda.get_device_name() if device.startswith("cuda")
                         else f"{platform.machine()}, {threads} threads")}


def _commit() -> str:
    """Of the working directory; empty where there is none, or no git."""
    try:
        return subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], stderr=subprocess.DEVNULL,
                                       text=True).strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
