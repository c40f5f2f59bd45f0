"""Measures what a dashboard with two open tabs costs the training that it looks at, and prints the figures.

    python benchmarks/eyes.py --pairs 3

Trains the same run with and without viewers, in turns (ABBA), and compares the seconds of its rounds. The viewers are two threads
that ask for what the page asks for: news, and on news the overview or the population with one host. With `--browser` they are two
tabs of Chromium (playwright), whose drawing is then part of the cost.
"""

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from common import hardware, head_commit
from esper.karn.serving import Dashboard, serve
from esper.nissa import read

ASKED = {"overview": ["panels?page=overview"], "population": ["panels?names=hosts,lives", "panels?page=host&row=2"]}
"""tab -> what it asks for when there is news."""
SKIPPED = 2
"""Rounds at the beginning that are not counted: caches fill, and viewers arrive."""
LINE = 0.03


@dataclass(frozen=True)
class Eyes:
    pairs: int = 2
    """How often each of the two is measured."""
    rounds: int = 12
    """Of each training."""
    browser: bool = False
    """Two tabs of Chromium instead of two threads."""


def look(page: Dashboard, asked: list[str]) -> None:
    """A tab, until the dashboard ends."""
    base, token = page.url.split("?")
    try:
        with urllib.request.urlopen(f"{base}api/events?{token}") as events:
            for line in events:
                for path in ["runs", *asked] if line.startswith(b"data") else ():
                    separator = "&" if "?" in path else "?"
                    urllib.request.urlopen(f"{base}api/{path}{separator}{token}").read()
    except OSError:
        return


def watch(stack: ExitStack, run: Path, browser: bool) -> None:
    page = stack.enter_context(serve([run]))
    if not browser:
        for asked in ASKED.values():
            threading.Thread(target=look, args=(page, asked), daemon=True).start()
        return
    from playwright.sync_api import sync_playwright

    chromium = stack.enter_context(sync_playwright()).chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
    stack.callback(chromium.close)
    for tab in ASKED:
        chromium.new_page().goto(f"{page.url}#page={tab}")


def train(folder: Path, options: Eyes, watched: bool) -> dict[str, Any]:
    command = [sys.executable, "-m", "esper.cli", "train", "--family", "mlp", "--preset", "quick", "--rounds", str(options.rounds), "--out", str(folder)]
    with ExitStack() as stack:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        while not (folder / "run.db").exists() and process.poll() is None:
            time.sleep(0.05)
        began = time.process_time()
        if watched:
            watch(stack, folder, options.browser)
        if process.wait() != 0:
            sys.exit(process.stderr.read() if process.stderr else "the training failed")
        spent = time.process_time() - began
    seconds = [each for (each,) in read(folder / "run.db", "SELECT seconds FROM round WHERE round >= ? ORDER BY round", SKIPPED)]
    return {"watched": watched, "median_round_s": statistics.median(seconds), "sum_s": sum(seconds), "viewer_cpu_s": spent if watched else 0.0}


def main() -> None:
    options = tyro.cli(Eyes, description=__doc__)
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(2 * options.pairs):
            found.append(train(Path(folder) / str(number), options, number % 4 in (1, 2)))
            print(json.dumps(found[-1]), file=sys.stderr, flush=True)
    alone, seen = (statistics.fmean(each["sum_s"] for each in found if each["watched"] is which) for which in (False, True))
    cpu = statistics.fmean(each["viewer_cpu_s"] for each in found if each["watched"]) / seen
    print(json.dumps({"bench": "eyes", "viewers": "chromium" if options.browser else "threads", "rounds": options.rounds, "pairs": options.pairs,
                      "cost": seen / alone - 1, "viewer_cpu_share": cpu, "held": seen / alone - 1 < LINE, "hardware": hardware("cpu"),
                      "commit": head_commit(), "trainings": found}))


if __name__ == "__main__":
    main()
