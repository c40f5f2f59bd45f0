"""Shared set-up: one thread, data in a folder of the session's own, and a device for every test that takes one."""

import itertools
import os
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anybody imports Triton: its kernels are tested on the CPU
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.fixture(scope="session", autouse=True)
def data_directory(tmp_path_factory: pytest.TempPathFactory) -> None:
    os.environ["ESPER_DATA"] = str(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="session")
def ledgers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One after the other."""
    folder = tmp_path_factory.mktemp("ledgers")
    return (folder / str(number) / "openings.json" for number in itertools.count())


@pytest.fixture(autouse=True)
def _own_ledger(ledgers: Iterator[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test begins with test splits that nobody has opened."""
    path = next(ledgers)
    monkeypatch.setattr(import_module("esper.tolaria.openings"), "ledger", lambda: path)


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)
