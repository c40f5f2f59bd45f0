"""Measures what the run store costs while a run writes it, and writes the figures to benchmarks/results/.

    python benchmarks/store.py

Rounds of 256 environments and 30 epochs, each committed and sealed in one transaction, as `Training` does it, but as fast as it
goes; meanwhile another process looks for news again and again and asks for the panels that a viewer shows. Limits hold for the
time that the processes themselves take, since others may keep the cores busy; wall time stands beside it.
"""

import multiprocessing
import os
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import tyro

from common import Results
from esper.karn import open_run
from esper.leyline import LifecycleOp
from esper.nissa import TABLES, Store

ROWS, EPOCHS, ROUNDS = 256, 30, 20
PAUSE = 0.01
"""Seconds between two questions of the reader."""
LULL = 0.1
"""Seconds of training between two rounds, in which the reader sees each of them."""
ASKED = ("state", "learning", "incidents", "actions")
LINES = {"commit_ms": 5.0, "bytes_per_environment_epoch": 1024.0, "query_ms": 50.0}
"""figure -> what it must stay below: a commit for each epoch of its round, and all panels of a viewer once."""
SLOTS, LIVE = 3, 0.5  # of a host, and the share of them that is not empty


def columns(rows: int, round: int, epoch: int) -> dict[str, object]:
    """A full epoch of random facts, a tenth of the environments doing something."""
    ops = [list(LifecycleOp)[op].name for op in (torch.rand(rows) < 0.1) * torch.randint(1, len(LifecycleOp), (rows,))]
    reward = {f"reward_{name}": torch.randn(rows) / 10 for name in ("gain", "size", "compute")}
    none = torch.zeros(rows, dtype=torch.int64)
    return {"round": round, "epoch": epoch, "row": torch.arange(rows), "scenario": torch.randint(2**60, (rows,)), "op": ops,
            "slot": [None if op == "WAIT" else 1 for op in ops],
            "blueprint": ["low_rank" if op == "GERMINATE" else None for op in ops], "reward": sum(reward.values()), **reward,
            "chance": torch.rand(rows), "value": torch.randn(rows), "chance_op": torch.rand(rows),
            "chance_slot": [None if op == "WAIT" else 0.5 for op in ops],
            "chance_blueprint": [0.5 if op == "GERMINATE" else None for op in ops],
            "score": torch.rand(rows), "twin": torch.rand(rows), "loss": torch.rand(rows), "smooth": torch.rand(rows),
            "train_loss": torch.rand(rows), "params": torch.randint(2000, (rows,)), "spent": torch.rand(rows),
            "rolled_back": none > 0, "done": none > 0}


def write_epoch(store: Store, round: int, epoch: int) -> None:
    """As `Training` does: every environment's step, every seed, and the moves of some seeds."""
    store.write("step", columns(ROWS, round, epoch))
    row, slot = (torch.rand(ROWS, SLOTS) < LIVE).nonzero().unbind(1)
    store.write("seed", {"round": round, "epoch": epoch, "row": row, "slot": slot, "stage": "BLENDING", "blueprint": "low_rank",
                         "alpha": torch.rand(len(row)), "contribution": torch.randn(len(row)), "error": torch.rand(len(row))})
    moved = torch.randperm(ROWS)[: ROWS // 8]
    store.write("move", {"round": round, "epoch": epoch, "row": moved, "slot": 1, "source": "TRAINING", "target": "BLENDING"})


def write_round(store: Store, round: int) -> None:
    """As `Training` does behind an update."""
    numbers = {name: 0.5 for name, metric in TABLES["round"].items() if metric.kind == "REAL"}
    store.write("round", numbers | {"round": round, "seconds": 60.0, "host_epochs": 2 * ROWS * EPOCHS, "episodes": ROWS})
    store.write("head", {"round": round, "head": ["op", "slot", "blueprint"], "entropy": 0.5, "grad_norm": 0.1, "learnable": 0.5})
    store.write("exam", {"round": round, "policy": "learned", "scenario": torch.arange(128), "utility": torch.rand(128)})


def clocked(work: Callable[[], object]) -> tuple[float, float]:
    """Milliseconds of this process, and of the wall."""
    started, wall = time.process_time(), time.perf_counter()
    work()
    return 1000 * (time.process_time() - started), 1000 * (time.perf_counter() - wall)


def watch(path: Path, pipe: Connection) -> None:
    """In another process: what every look at news takes until it is told to stop, sent back."""
    seconds = []
    with open_run(path) as run:
        pipe.send("ready")
        while not pipe.poll(PAUSE):
            if run.changed():
                seconds.append(clocked(lambda: [run.panel(name) for name in ASKED]))
    pipe.send(seconds)


def measure(path: Path) -> dict[str, Any]:
    store, took = Store(path), {"prepare": [], "commit": []}
    write_round(store, 0)  # there is something to ask for
    store.commit()
    context = multiprocessing.get_context("spawn")
    mine, its = context.Pipe()
    reader = context.Process(target=watch, args=(path, its))
    reader.start()
    assert mine.recv() == "ready"
    for round in range(ROUNDS):
        for epoch in range(1, EPOCHS + 1):
            took["prepare"].append(clocked(lambda r=round, e=epoch: write_epoch(store, r, e)))
        write_round(store, round)
        took["commit"].append(tuple(each / EPOCHS for each in clocked(store.commit)))
        time.sleep(LULL)
    mine.send("stop")
    took["query"] = mine.recv()
    reader.join()
    store.close()
    found: dict[str, Any] = {"bytes_per_environment_epoch": path.stat().st_size / (ROWS * EPOCHS * ROUNDS)}
    for name, times in took.items():
        own, wall = zip(*times, strict=True)
        found |= {f"{name}_ms": statistics.median(own), f"{name}_ms_95th": statistics.quantiles(own, n=20)[-1],
                  f"{name}_ms_wall": statistics.median(wall)}
    return found | {"queries": len(took["query"]), "held": all(found[name] < line for name, line in LINES.items())}


def main() -> None:
    results = tyro.cli(Results, description=__doc__)
    torch.manual_seed(0)
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        result = measure(Path(folder) / "run.db")
    about = {"bench": "store", "environments": ROWS, "epochs": EPOCHS, "rounds": ROUNDS, "lines": LINES,
             "load_before": load, "sqlite": sqlite3.sqlite_version}
    results.publish("store", about | result | results.stamp("cpu"))
    print(result, flush=True)


if __name__ == "__main__":
    main()
