"""Runs a block of code as if it had been pasted into a new interpreter; imports nothing itself."""

import os
import sys
import traceback
import warnings
from pathlib import Path


def run_pasted(code: str, folder: Path) -> None:
    """In a process of its own, in this folder; what it says is in the file `said`. Warnings are errors."""
    said = os.open(folder / "said", os.O_WRONLY | os.O_CREAT)
    os.dup2(said, 1)
    os.dup2(said, 2)
    os.chdir(folder)
    warnings.simplefilter("error")
    try:
        exec(compile(code, "pasted", "exec"), {"__name__": "__main__"})
        sys.stdout.flush()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
