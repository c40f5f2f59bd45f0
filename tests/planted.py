"""A planted run: facts that every view of it must show, written by the real store.

Three rounds of four hosts with two slots and four epochs. In the last round a `norm` seed is born at epoch 3 in slot 1
of row 2, and row 0 keeps the `mixer` that was born at epoch 1 in its slot 0. Row 1 is rolled back at epoch 2 of round 1.
The head `slot` is starved from round 1 on; the entropy of `op` collapsed in round 0 and recovered. No seed is ever an
`attention`. Utilities by round: 0.01, 0.02, 0.04 (standard error 0.005).
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from esper.nissa import Store

ROUNDS, ROWS, EPOCHS = 3, 4, 4
ENDED = 1_700_000_000.0
"""When round 0 was over; each takes ten seconds."""
BIRTH = {"round": 2, "epoch": 3, "row": 2, "slot": 1, "blueprint": "norm"}
FACTS = {"family": "toys", "seed": 5, "rounds": 4, "slots": ["stem", "tail"], "blueprints": ["attention", "mixer", "norm"],
         "heads": ["op", "slot", "blueprint"], "group": "abc", "version": "0.0"}
KEPT = ("TRAINING", "BLENDING", "HOLDING", "FOSSILIZED")
"""Stages of the mixer of row 0 in round 2, by epoch."""


def plant(folder: Path, gain: float = 0.0, seed: int = 5) -> Path:
    """A folder with the run; `gain` is added to what its controller gets in every examination."""
    folder.mkdir(parents=True, exist_ok=True)
    store = Store(folder / "run.db")
    facts = FACTS | {"seed": seed}
    store.write("fact", {"round": 0, "name": list(facts), "value": [json.dumps(value) for value in facts.values()]})
    for number in range(ROUNDS):
        for epoch in range(1, EPOCHS + 1):
            _epoch(store, number, epoch)
        store.write("round", {
            "round": number, "seconds": 10.0, "ended": ENDED + 10 * number, "host_epochs": 2 * ROWS * EPOCHS, "episodes": ROWS,
            "utility": (0.01, 0.02, 0.04)[number], "utility_error": 0.005, "entropy": 1.5 - number / 4, "kl": 0.01 * (1 + number),
            "clip_fraction": 0.1, "value_error": 0.5, "explained_variance": 0.25 * number, "grad_norm": 1.0, "learning_rate": 0.001})
        store.write("head", {"round": number, "head": ["op", "slot", "blueprint"], "entropy": [(0.02, 0.5, 0.5)[number], 0.75, 1.0],
                             "grad_norm": [1.0, 0.0 if number else 1.0, 1.0], "learnable": [1.0, 0.5, 0.25]})
        if number == 0:
            store.write("anomaly", {"round": 0, "kind": "entropy_collapse", "place": "op", "value": 0.02})
        else:
            store.write("anomaly", {"round": number, "kind": "starved", "place": "slot gradient", "value": 0.0})
        if number == 1:
            store.write("anomaly", {"round": 1, "kind": "rollback", "place": "hosts", "value": 1})
        if number == ROUNDS - 1:
            store.write("exam", {"round": ROUNDS, "policy": "heuristic", "scenario": [0, 1, 2, 3], "utility": [0.0, 0.02, 0.0, 0.02]})
        store.write("exam", {"round": number + 1, "policy": "learned", "scenario": [0, 1, 2, 3],
                             "utility": [gain + 0.01 * number, gain + 0.01 * number + 0.02] * 2})
        store.commit()
    store.close()
    return folder


def _epoch(store: Store, number: int, epoch: int) -> None:
    ops: list[tuple[str, int | None, str | None]] = [("WAIT", None, None)] * ROWS
    last = number == ROUNDS - 1
    if last and epoch == 1:
        ops[0] = "GERMINATE", 0, "mixer"
    if last and epoch == BIRTH["epoch"]:
        ops[2] = "GERMINATE", 1, "norm"
    if last and epoch == EPOCHS:
        ops[0] = "FOSSILIZE", 0, None
    free = [op != "WAIT" for op, *_ in ops]
    store.write("step", {
        "round": number, "epoch": epoch, "row": list(range(ROWS)), "scenario": [100 * number + row for row in range(ROWS)],
        "op": [op for op, *_ in ops], "slot": [slot for _, slot, _ in ops], "blueprint": [name for *_, name in ops],
        "chance": [0.25 if each else 0.5 for each in free], "chance_op": 0.5, "chance_slot": [0.5 if each else None for each in free],
        "chance_blueprint": [0.5 if name else None for *_, name in ops], "value": 0.125,
        "reward": [0.0625 - 0.03125 * (op == "GERMINATE") for op, *_ in ops], "reward_gain": 0.0625,
        "reward_size": [-0.03125 * (op == "GERMINATE") for op, *_ in ops], "reward_compute": 0.0,
        "score": [0.5 + row / 16 for row in range(ROWS)], "twin": 0.5, "loss": 1.0, "smooth": 0.5, "train_loss": 1.0,
        "params": [10 * (op != "WAIT") for op, *_ in ops], "spent": 0.0,
        "rolled_back": [number == 1 and epoch == 2 and row == 1 for row in range(ROWS)], "done": epoch == EPOCHS})
    if not last:
        return
    stage = KEPT[epoch - 1]
    store.write("seed", {"round": number, "epoch": epoch, "row": 0, "slot": 0, "stage": stage, "blueprint": "mixer",
                         "alpha": (0.0, 0.5, 1.0, 1.0)[epoch - 1], "contribution": 0.03125 if epoch > 1 else None,
                         "preview": 0.0625 if epoch == 1 else None, "error": 0.015625})
    moves = {1: [("DORMANT", "GERMINATED"), ("GERMINATED", "TRAINING")], 2: [("TRAINING", "BLENDING")],
             3: [("BLENDING", "HOLDING")], 4: [("HOLDING", "FOSSILIZED")]}[epoch]
    for source, target in moves:
        store.write("move", {"round": number, "epoch": epoch, "row": 0, "slot": 0, "source": source, "target": target})
    if epoch >= BIRTH["epoch"]:
        store.write("seed", {"round": number, "epoch": epoch, "row": 2, "slot": 1, "stage": "TRAINING", "blueprint": "norm",
                             "alpha": 0.0, "preview": 0.015625, "error": 0.0078125})
    if epoch == BIRTH["epoch"]:
        store.write("move", {"round": number, "epoch": epoch, "row": 2, "slot": 1, "source": ["DORMANT", "GERMINATED"],
                             "target": ["GERMINATED", "TRAINING"]})


@contextmanager
def held(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that works in a folder, until it is killed."""
    hold = "import fcntl, sys, time; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); print('held', flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-S", "-c", hold, str(folder / ".lock")], stdout=subprocess.PIPE, text=True) as trainer:
        try:
            assert trainer.stdout is not None
            assert trainer.stdout.readline() == "held\n"
            yield trainer
        finally:
            trainer.kill()
