"""Trackers are told what the store keeps."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from esper.cli import main
from esper.leyline.telemetry import UPDATE_METRICS
from esper.nissa import Tracked, read
from tests.test_training import OWN


class Writer:
    """As TensorBoard's."""

    def __init__(self, folder: str) -> None:
        self.path = Path(folder) / "events"
        self.path.parent.mkdir()

    def add_scalar(self, name: str, value: float, step: int) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps([step, name, value]) + "\n")

    def flush(self) -> None: ...


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_they_are_told_the_figures_of_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    board: Any = ModuleType("torch.utils.tensorboard")
    board.SummaryWriter = Writer
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", board)
    (tmp_path / "own.toml").write_text(OWN.replace("exam_every = 0", "exam_every = 2"))
    out, log = tmp_path / "run", tmp_path / "log.jsonl"
    told = ["--log", f"jsonl:{log}", "--log", f"tensorboard:{tmp_path / 'board'}"]
    assert main(["train", "--out", str(out), "--config", str(tmp_path / "own.toml"), *told]) == 0
    logged = lines(log)
    assert [each["step"] for each in logged] == [1, 2, 2, 2, 2]
    stored = read(out / "run.db", "SELECT round + 1, utility, entropy, kl, host_epochs FROM round")
    names = ("step", "train/return", "train/entropy", "train/kl", "train/host_epochs")
    assert [tuple(each[name] for name in names) for each in logged[:2]] == stored
    assert {f"train/{name}" for name in UPDATE_METRICS} <= {name for each in logged for name in each}
    exams = dict(read(out / "run.db", "SELECT policy, avg(utility) FROM exam GROUP BY policy"))
    assert logged[2]["eval/gain"] == logged[3]["eval/gain"] == pytest.approx(exams["learned"])
    assert logged[4]["eval/heuristic/gain"] == pytest.approx(exams["heuristic"])
    flat = [[each["step"], *pair] for each in logged for pair in each.items() if pair[0] != "step"]
    assert len(flat) > 40
    assert lines(tmp_path / "board" / "events") == flat


def test_they_are_told_what_was_kept_and_is_a_number() -> None:
    told: list[tuple[int, Mapping[str, float]]] = []

    class Mine:
        def log(self, step: int, values: Mapping[str, float]) -> None:
            told.append((step, values))

    class Full:
        def write(self, table: str, columns: Mapping[str, object]) -> None: ...

        def commit(self) -> None:
            if full:
                raise OSError("no room")

    full, row = True, dict.fromkeys(("seconds", "episodes", "host_epochs", "utility", "utility_error", *UPDATE_METRICS), 1.0)
    sink = Tracked(Full(), [Mine()])
    sink.write("round", {"round": 6, **row, "kl": float("nan"), "ratio_max": float("inf")})
    with pytest.raises(OSError, match="no room"):
        sink.commit()
    assert not told
    full = False
    sink.commit()
    sink.commit()
    assert [step for step, _ in told] == [7]
    assert {"train/kl", "train/ratio_max"} & set(told[0][1]) == set()
    assert told[0][1]["train/return"] == 1.0


@pytest.mark.parametrize(("asked", "sentence"), [
    ("wandb:x", "is not KIND:PATH with KIND one of jsonl, tensorboard"), ("jsonl", "is not KIND:PATH"),
    ("jsonl:/no/such/folder/x", "cannot write --log jsonl:/no/such/folder/x"),
    ("tensorboard:x", "cannot write --log tensorboard:x: import of torch.utils.tensorboard")])
def test_what_cannot_be_meant_is_one_sentence(asked: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                              capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    assert main(["train", "--out", str(tmp_path / "run"), "--log", asked]) == 2
    assert sentence in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
