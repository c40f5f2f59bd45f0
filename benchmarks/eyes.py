"""Measures what viewers cost the training that they look at: `esper watch` in a terminal and two open tabs of `esper dashboard`.

    python benchmarks/eyes.py            # under six minutes; needs playwright and a chromium of the system

Trains one run twice, bit for bit the same. Viewers look during every other stretch of rounds, in the second training during those
that were quiet in the first; in between they are stopped (SIGSTOP). So every round is played once watched and once not, with equal
work. Both tabs are visible, the overview and the population, and draw on the same processors as the training. The first round of a
stretch is not counted, since it began before the switch. The result goes to benchmarks/results/eyes.json.
"""

import datetime
import fcntl
import json
import math
import os
import pty
import re
import shutil
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import tyro

from common import hardware, head_commit
from esper.karn.run_report import T95
from esper.karn.stores import stamp
from esper.nissa import read

LIMIT = 0.03
TABS = ("overview", "population")
ESPER = (sys.executable, "-m", "esper.cli")
TICK = os.sysconf("SC_CLK_TCK")
Times = dict[str, float]  # what is a viewer's process -> seconds of a processor


@dataclass(frozen=True)
class Eyes:
    rounds: int = 104
    """That are counted, of each training."""
    stretch: int = 13
    """Rounds between two switches."""
    warm: int = 12
    """Rounds before the first one, in which viewers are started."""
    out: Path = Path(__file__).parent / "results" / "eyes.json"


class Viewers:
    """A dashboard with two tabs and a terminal, each a process or a tree of them."""

    def __init__(self, stack: ExitStack, run: Path) -> None:
        from playwright.sync_api import sync_playwright

        dashboard = subprocess.Popen([*ESPER, "dashboard", str(run)], stdout=subprocess.PIPE, text=True)
        end(stack, dashboard)
        assert dashboard.stdout is not None
        url = dashboard.stdout.readline().strip()
        self.own = {"esper dashboard": dashboard.pid, "esper watch": _terminal(stack, run)}
        playwright = stack.enter_context(sync_playwright())
        chromium = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        stack.callback(chromium.close)
        for tab in TABS:
            page = chromium.new_context(viewport={"width": 1280, "height": 800}).new_page()  # a window of its own
            page.goto(f"{url.split('#')[0]}#page={tab}")
            page.locator("#live").filter(has_text="live").wait_for()
            assert page.evaluate("document.visibilityState") == "visible"
        stack.callback(self.look, True)  # before all that ends them

    def _pids(self) -> dict[int, str]:
        parents = {pid: int(about[1]) for pid, about in _processes().items()}
        found = {pid: name for name, pid in self.own.items()}
        for pid in parents:
            each = pid
            while each in parents and each != os.getpid():
                each = parents[each]
            if each == os.getpid() and "chromium" in _program(pid):
                found[pid] = "chromium"
        return found

    def look(self, now: bool) -> None:
        for pid in self._pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT if now else signal.SIGSTOP)

    def times(self) -> Times:
        known, found = _processes(), dict[str, float]()
        for pid, name in self._pids().items():
            if pid in known:
                found[name] = found.get(name, 0) + sum(map(int, known[pid][11:13])) / TICK
        return found


def _processes() -> dict[int, list[str]]:
    """Fields of /proc/PID/stat behind the name, of all that live."""
    found = {}
    for path in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            found[int(path.name)] = (path / "stat").read_text().rpartition(")")[2].split()
    return {pid: about for pid, about in found.items() if about[0] != "Z"}


def _program(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().partition("\0")[0]
    return ""


def end(stack: ExitStack, process: subprocess.Popen[str]) -> None:
    stack.callback(process.wait)
    stack.callback(process.terminate)


def _terminal(stack: ExitStack, run: Path) -> int:
    """`esper watch` in a pseudo terminal of 80 x 24, whose output is read."""
    mine, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    process = subprocess.Popen([*ESPER, "watch", str(run)], stdin=theirs, stdout=theirs, stderr=theirs, text=True,
                               env={**os.environ, "TERM": "xterm-256color"}, start_new_session=True)
    end(stack, process)
    os.close(theirs)
    shown = threading.Event()

    def drain() -> None:
        with suppress(OSError):
            while told := os.read(mine, 65536):
                if re.search(rb"running", told):
                    shown.set()

    threading.Thread(target=drain, daemon=True).start()
    if not shown.wait(60):
        sys.exit("esper watch does not show a running training")
    return process.pid


def rounds_done(store: Path) -> int:
    return int(read(store, "SELECT 1 + ifnull(max(round), -1) FROM round")[0][0])


def train(folder: Path, options: Eyes, first: bool) -> tuple[list[float], dict[str, float]]:
    """Seconds of every round; the share of a processor that each kind of viewer took while it looked. Watched are the stretches
    0, 2, .. of the first training and 1, 3, .. of the second."""
    total, store = options.warm + options.rounds, folder / "run.db"
    command = [*ESPER, "train", "--family", "mlp", "--preset", "quick", "--rounds", str(total), "--out", str(folder)]
    spent, watched, looking, begun = dict[str, float](), 0.0, True, time.monotonic()
    with ExitStack() as stack:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        end(stack, process)
        while process.poll() is None and not (store.exists() and rounds_done(store)):
            time.sleep(0.2)
        viewers = Viewers(stack, folder)
        if (done := rounds_done(store)) > options.warm:
            sys.exit(f"viewers were ready after {done} rounds only; choose a larger --warm")
        seen, before = None, viewers.times()
        while process.poll() is None and done < total:
            time.sleep(0.05)
            if seen == (seen := stamp(store)):
                continue
            done = rounds_done(store)
            wanted = done < options.warm or ((done - options.warm) // options.stretch % 2 == 0) == first
            if wanted != looking:
                now, at = viewers.times(), time.monotonic()
                if looking and done > options.warm:
                    watched += at - begun
                    spent = {name: spent.get(name, 0) + now[name] - before[name] for name in now}
                looking, before, begun = wanted, now, at
                viewers.look(wanted)
            elif done <= options.warm:
                before, begun = viewers.times(), time.monotonic()
        viewers.look(True)
        if process.wait() != 0:
            sys.exit(process.stderr.read() if process.stderr else "the training failed")
    seconds = [each for (each,) in read(store, "SELECT seconds FROM round ORDER BY round")]
    return seconds, {name: value / max(watched, 1e-9) for name, value in spent.items()}


def main() -> None:
    options = tyro.cli(Eyes, description=__doc__)
    with tempfile.TemporaryDirectory() as folder:
        trainings = [train(Path(folder) / name, options, name == "first") for name in ("first", "second")]
    ratios, sums = [], [0.0, 0.0]
    for number in range(options.rounds // options.stretch):
        start = options.warm + number * options.stretch + 1  # the round before it saw the switch
        parts = [sum(seconds[start:start + options.stretch - 1]) for seconds, _ in trainings]
        seen, quiet = parts if number % 2 == 0 else reversed(parts)
        ratios.append(seen / quiet - 1)
        sums = [sums[0] + seen, sums[1] + quiet]
    half = T95[min(len(ratios), len(T95) + 1) - 2] * statistics.stdev(ratios) / math.sqrt(len(ratios)) if len(ratios) > 1 else math.nan
    mean, counted = statistics.fmean(ratios), len(ratios) * (options.stretch - 1)
    result = {
        "bench": "eyes", "viewers": "esper watch in 80 x 24, two visible tabs of Chromium (overview, population) and their server",
        "cost": mean, "low": mean - half, "high": mean + half, "limit": LIMIT, "held": mean < LIMIT, "cost by stretch": ratios,
        "seconds watched": sums[0], "seconds quiet": sums[1], "rounds counted": counted, "quiet round, s": sums[1] / counted,
        "cores of viewers": {name: statistics.fmean(share[name] for _, share in trainings) for name in trainings[0][1]},
        "hardware": hardware("cpu"), "threads": os.environ.get("OMP_NUM_THREADS", "as esper train chooses"), "commit": head_commit(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat()}
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    sys.exit(0 if result["held"] else 1)


if __name__ == "__main__":
    main()
