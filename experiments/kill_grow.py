"""Is anything lost when `esper.grow(folder=...)` is killed? One run straight through, one killed at random moments and called again.

    python -m experiments.kill_grow --kills 10

SIGKILL comes at a random moment after the first epoch of each attempt. Compared are the bytes of the last checkpoint: model, optimizer,
schedule, seeds, random states, and every epoch's score and decision.
"""

import json
import multiprocessing
import random
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import esper
from experiments.shared import parser, write


def grow(folder: Path, epochs: int, told: Connection) -> None:
    """A model of two rings, which no linear map parts; the number of every epoch is told when it ends."""
    torch.set_num_threads(1)
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(0)
    x = torch.randn(400, 2)
    y = (x.norm(dim=1) > 1.2).long()
    model = nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.05), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    train, validation = (DataLoader(TensorDataset(x[part], y[part]), 20, shuffle=True) for part in (slice(300), slice(300, 400)))
    esper.grow(model, train, validation, lambda net, batch: cross_entropy(net(batch[0]), batch[1]), slots=["0", "2"], epochs=epochs, lr=2e-2,
               score=lambda net, batch: (net(batch[0]).argmax(1) == batch[1]).double(), shadow_steps=6, folder=folder,
               tell=lambda report: told.send(report.epoch))


def measure(place: Path, kills: int, epochs: int) -> dict[str, Any]:
    """Both runs; a kill comes within two epochs of an attempt's first one."""
    server = multiprocessing.get_context("forkserver")  # imports once; every attempt is a fresh fork of that
    server.set_forkserver_preload([__name__])
    chance, moments, times = random.Random(0), [], []

    def attempt(name: str, kill: bool) -> int:
        told, tell = server.Pipe(duplex=False)
        process = server.Process(target=grow, args=(place / name, epochs, tell))
        process.start()
        tell.close()
        epoch = told.recv()
        if kill:
            time.sleep(chance.uniform(0, 2 * (times[-1] - times[0]) / epochs))
            process.kill()
        for _ in range(0 if kill else epochs - epoch):
            times.append(time.perf_counter())
            epoch = told.recv() if epoch < epochs - 1 else epoch
        process.join()
        moments.extend([epoch] * (process.exitcode == -9))
        return int(process.exitcode or 0)

    assert attempt("straight", False) == 0
    while len(moments) < kills:
        assert attempt("killed", True) == -9, "it was over before; ask for more epochs"
    assert attempt("killed", False) == 0
    files = [place / name / "grow.safetensors" for name in ("straight", "killed")]
    with safe_open(files[0], "pt") as file:
        history = json.loads(file.metadata()["esper"])["history"]
    return {"kills": len(moments), "epochs": epochs, "killed after epoch": moments, "grown parameters": history[-1]["params"],
            "decisions": [report["decision"] for report in history if report["decision"] != "WAIT"],
            "same file": files[0].read_bytes() == files[1].read_bytes()}


def main() -> None:
    options_of = parser(__doc__)
    options_of.add_argument("--kills", type=int, default=10)
    options = options_of.parse_args()
    with tempfile.TemporaryDirectory() as name:
        result = measure(Path(name), options.kills, 4 * options.kills)
    print(result)
    write(options, "kill_grow", result)


if __name__ == "__main__":
    main()
