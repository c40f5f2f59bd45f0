"""`esper doctor`: it says what is here, and whatever is broken it calls broken."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import esper
from esper.cli import main
from esper.nissa import Store
from esper.tamiyo import minds


def test_all_is_well_in_eighty_columns(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    for words in (f"esper {esper.__version__}, Python 3", f"torch {torch.__version__}", f"numpy {np.__version__}", "cores", "CUDA",
                  "GiB free", "digits (built in)", "missing: ", "tamiyo-small with 3 controllers", "run by the", "all is well"):
        assert words in said, words
    assert max(map(len, said.splitlines())) <= 80


def a_damaged_mind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (path,) = (shutil.copy(file, tmp_path) for file in minds.shipped().values())
    held = bytearray(Path(path).read_bytes())
    held[-5] ^= 1
    Path(path).write_bytes(held)
    monkeypatch.setattr(minds, "FOLDER", tmp_path)


def seeds_without_effect(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    begin = esper.Population.begin_epoch
    monkeypatch.setattr(esper.Population, "begin_epoch", lambda self, actions: begin(self, actions[[1, 1]]))


def seeds_that_disturb(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    forward = esper.Population.forward
    monkeypatch.setattr(esper.Population, "forward", lambda self, x: forward(self, x) + torch.tensor([0.0, 0.1])[:, None])


def a_forgetful_store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(Store, "commit", lambda self: None)


@pytest.mark.parametrize(("breaks", "row"), [
    (a_damaged_mind, "minds"), (seeds_without_effect, "growing"), (seeds_that_disturb, "growing"), (a_forgetful_store, "store")])
def test_what_is_broken_is_called_so(breaks, row: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,  # type: ignore[no-untyped-def]
                                     capsys: pytest.CaptureFixture[str]) -> None:
    breaks(monkeypatch, tmp_path)
    assert main(["doctor"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if "FAILS: " in line] == [row], "and nothing else is"
    assert lines[-1] == "something fails"
