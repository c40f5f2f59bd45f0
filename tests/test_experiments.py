"""Every experiment can be imported and says how it is used; what several share is right."""

import argparse
import copy
import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch
from experiments import deeper, kill_train, shallow, shared

from esper.nissa import Store
from esper.tamiyo.minds import read_mind

FOLDER = Path(__file__).parent.parent / "experiments"
MODULES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "__init__")


@pytest.mark.parametrize("name", MODULES)
def test_every_experiment_can_be_imported_and_asked_for_help(name: str, monkeypatch: pytest.MonkeyPatch,
                                                             capsys: pytest.CaptureFixture[str]) -> None:
    module = import_module(f"experiments.{name}")
    assert module.__doc__
    if not hasattr(module, "main"):
        return
    assert f"python -m experiments.{name}" in module.__doc__
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        module.main()
    assert ended.value.code == 0
    assert module.__doc__.splitlines()[0][:40] in capsys.readouterr().out


def test_an_experiment_is_run_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "experiments.kill_train", "--help"], capture_output=True, text=True,
                          cwd=FOLDER.parent)
    assert done.returncode == 0, done.stderr
    assert "--kills" in done.stdout


def test_results_carry_where_they_come_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/there/experiments/ladder.py", "--seeds", "2"])
    shared.write(argparse.Namespace(out=tmp_path / "new", device="cpu", commit="abc"), "ladder", {"points": 3})
    told = json.loads((tmp_path / "new" / "ladder.json").read_text())
    assert {"date", "torch", "python", "hardware", "version", "threads"} <= told.keys()
    assert (told["commit"], told["points"], told["command"]) == ("abc", 3, "python -m experiments.ladder --seeds 2")


def test_runs_are_compared_in_everything_but_seconds(tmp_path: Path) -> None:
    for name, seconds, utility in (("a", 1.0, 0.5), ("b", 2.0, 0.5), ("c", 1.0, 0.6)):
        (tmp_path / name).mkdir()
        store = Store(tmp_path / name / "run.db")
        store.write("round", {"round": 0, "seconds": seconds, "utility": utility})
        store.commit()
        store.close()
    a, b, c = (kill_train.rows(tmp_path / name, "round") for name in "abc")
    assert a == b != c
    assert "round" in kill_train.TABLES


def test_blocks_that_sleep_wake_as_if_they_were_inserted_then() -> None:
    x = torch.randint(9, (4, 64), generator=torch.Generator().manual_seed(1))
    nets, optimizers = [], []
    for blocks in (4, 1):
        torch.manual_seed(0)
        nets.append(deeper.Model(9, 4).double())
        nets[-1].blocks = nets[-1].blocks[:blocks]
        optimizers.append(torch.optim.AdamW(nets[-1].parameters(), lr=1e-2))
    shallow.Waking(nets[0], optimizers[0], 8, (0.25, 0.5))
    for count in range(1, 9):
        losses = []
        for net, optimizer in zip(nets, optimizers, strict=True):
            optimizer.zero_grad()
            losses.append(deeper.loss_of(net, (x, x)))
            losses[-1].backward()
            optimizer.step()
        assert losses[0].item() == losses[1].item()
        if count in (2, 4):
            fresh = [copy.deepcopy(block) for block in nets[1].blocks]
            nets[1].blocks = torch.nn.ModuleList(each for pair in zip(nets[1].blocks, fresh, strict=True) for each in pair)
            optimizers[1].param_groups[0]["params"].extend(p for block in fresh for p in block.parameters())
    assert all(torch.equal(a, b) for a, b in zip(*(net.parameters() for net in nets), strict=True))


def test_shipped_members_know_their_environment() -> None:
    for member in read_mind("tamiyo-small"):
        env = shared.env_of(member)
        assert env.family.name == member.about["family"]
        assert set(member.controller.network.spec.blueprints) <= set(env.spec.blueprints)
