"""The training loop and its command: runs that go on bit for bit, and a store that tells all of it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from esper.cli import main
from esper.karn import panel, summary
from esper.leyline import EsperError, LifecycleOp
from esper.nissa import Store, read
from esper.simic import PPOConfig
from esper.simic.training import CHECKPOINT, TrainConfig, Training
from esper.tamiyo import NetworkConfig, Wait
from esper.tolaria import Family, MorphogeneticEnv, PreviewConfig
from esper.train_cli import PRESETS, Train, resolved
from tests.workshop import toy_data, toy_family

FAMILY = toy_family(horizons=(6, 7), prices=(1e-4,), flop_prices=(0.01,))
CONFIG = TrainConfig(rounds=3, rows=8, preview_every=3, preview_steps=2, exam_every=2, exam_rows=6,
                     network=NetworkConfig(16, 8, 6, 12), ppo=PPOConfig(epochs=2, minibatches=2))


@pytest.fixture(autouse=True)
def _toys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Environments of the loop play on made-up data."""
    def environment(config: TrainConfig, family: Family, rows: int, previews: bool = True) -> MorphogeneticEnv:
        if family is not FAMILY:
            return real(config, family, rows, previews)
        wanted = PreviewConfig(config.preview_every, config.preview_steps) if previews else None
        return MorphogeneticEnv(family, rows, previews=wanted, data=toy_data(inputs=family.host.inputs))

    real = TrainConfig.environment
    monkeypatch.setattr(TrainConfig, "environment", environment)


def trained(folder: Path, stop_after: int = 99) -> Training:
    folder.mkdir(exist_ok=True)
    training = Training(FAMILY, CONFIG, folder, Store(folder / "run.db"))
    training.run(stop=lambda: training.agent.updates >= stop_after)
    return training


def test_a_run_that_was_stopped_goes_on_bit_for_bit(tmp_path: Path) -> None:
    trained(tmp_path / "straight")
    trained(tmp_path / "stopped", stop_after=1)
    store = Store(tmp_path / "stopped" / "run.db")  # a round that was killed in its middle had written some epochs
    store.write("step", {"round": 1, "epoch": 1, "row": 0, "reward": 0.5})
    store.commit()
    trained(tmp_path / "stopped")
    straight, stopped = ((tmp_path / name / CHECKPOINT).read_bytes() for name in ("straight", "stopped"))
    assert straight == stopped
    for table in ("step", "move", "head", "exam"):
        rows = [read(tmp_path / name / "run.db", f"SELECT * FROM {table}") for name in ("straight", "stopped")]
        assert rows[0] == rows[1], table
        assert rows[0], table


def test_the_store_tells_every_epoch_and_its_terms_sum(tmp_path: Path) -> None:
    training = trained(tmp_path / "run")
    path = tmp_path / "run" / "run.db"
    horizons = [FAMILY.scenarios(8, start=8 * r).horizon.sum() for r in range(3)]
    assert read(path, "SELECT count(*) FROM step")[0][0] == int(sum(horizons)), "one row per running row and epoch"
    parts = " - ".join(f"ifnull(reward_{name}, 0)" for name in ("gain", "size", "compute", "credit", "potential"))
    assert read(path, f"SELECT max(abs(reward - {parts})) FROM step")[0][0] < 1e-5
    returns = read(path, "SELECT sum(reward) FROM step WHERE round = 2 GROUP BY row ORDER BY row")
    torch.testing.assert_close(torch.tensor([r[0] for r in returns]), training.world.total, atol=1e-5, rtol=0)
    mean = read(path, "SELECT utility, episodes FROM round WHERE round = 2")[0]
    assert mean[0] == pytest.approx(float(training.world.total.mean()), abs=1e-6)
    born = read(path, "SELECT count(*) FROM move WHERE target = 'GERMINATED'")[0][0]
    assert born == read(path, "SELECT count(*) FROM step WHERE op = 'GERMINATE'")[0][0] > 0
    assert read(path, "SELECT count(*) FROM step WHERE op = 'GERMINATE' AND blueprint IS NULL") == [(0,)]
    assert read(path, "SELECT DISTINCT slot FROM step WHERE op = 'WAIT'") == [(None,)]
    assert read(path, "SELECT count(*), count(DISTINCT round) FROM exam WHERE policy = 'learned'") == [(6, 1)]


def test_examinations_pay_no_growth_nothing_but_its_previews(tmp_path: Path) -> None:
    training = trained(tmp_path / "run", stop_after=0)
    utility = training.examine("wait", Wait(), 0)
    assert bool((utility <= 0).all())
    spent = training.exam.standing
    assert spent is not None
    torch.testing.assert_close(utility, -0.01 * spent.spent)


def test_views_read_the_store_alone(tmp_path: Path) -> None:
    trained(tmp_path / "run")
    state = summary(tmp_path / "run" / "run.db", 3)
    assert state is not None
    assert (state.rounds, state.planned) == (3, 3)
    assert sum(state.ops.values()) == pytest.approx(1)
    assert set(state.entropies) == {"op", "slot", "blueprint"}
    assert state.funnel["GERMINATED"] > 0
    assert len(state.line()) < 110
    assert panel(state) is not None
    assert LifecycleOp.WAIT.name in state.ops


@pytest.mark.parametrize(("text", "message"), [
    ("fame = 1", "has no use for fame"), ("[ppo]\nfame = 1", r"\[ppo\] has no use for fame"),
    ("rounds = 'two'", "rounds is 'two'"), ("rounds = ", "cannot read --config"), ("rounds = 0", "must be at least 1"),
    ("reward = 'fame'", "choose a reward from"),
])
def test_bad_configs_are_refused(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text(text)
    with pytest.raises(EsperError, match=message):
        resolved(Train(tmp_path / "run", config=file))
    assert not (tmp_path / "run").exists()


def test_configs_are_layered(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text("rounds = 7\nrows = 24\n[ppo]\nepochs = 2\nlearning_rate = [1e-3, 1e-5]\n[network]\nhidden = 32\n")
    config = resolved(Train(tmp_path / "run", config=file, rows=12, seed=3))
    assert (config.rounds, config.rows, config.seed, config.ppo.epochs, config.network.hidden) == (7, 12, 3, 2, 32)
    assert config.ppo.learning_rate == (1e-3, 1e-5)
    assert config.exam_every == PRESETS["quick"]["exam_every"]


TINY = ["--rounds", "2", "--rows", "4", "--preset", "quick"]


def test_the_command_trains_and_refuses_to_mix_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "run")
    assert main(["train", "--out", out, *TINY]) == 0
    text = capsys.readouterr().out
    assert "round 2/2" in text
    assert "learned:" in text
    assert "heuristic:" in text
    described = json.loads((tmp_path / "run" / "run.json").read_text())
    assert {"family", "config", "torch", "python", "precision", "command"} <= set(described)
    assert main(["train", "--out", out, *TINY]) == 2
    assert "already holds a run; add --resume" in capsys.readouterr().err
    assert main(["train", "--out", out, *TINY, "--seed", "5", "--resume"]) == 2
    assert "has another config" in capsys.readouterr().err
    assert main(["train", "--out", str(tmp_path / "none"), "--resume"]) == 2
    assert "holds no run to resume" in capsys.readouterr().err
    assert main(["train", "--out", out, "--family", "cats"]) == 2


def test_a_killed_command_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """Killed in the middle of a round, with no chance to tidy up."""
    code = "import sys; import torch; torch.set_num_threads(1); from esper.cli import main; sys.exit(main(sys.argv[1:]))"

    def run(name: str, *more: str) -> list[str]:
        return [sys.executable, "-c", code, "train", "--out", str(tmp_path / name), *TINY, "--rounds", "3", *more]

    subprocess.run(run("straight"), check=True, capture_output=True, env=os.environ)
    process = subprocess.Popen(run("killed"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ)
    store = tmp_path / "killed" / "run.db"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if (tmp_path / "killed" / CHECKPOINT).exists() and read(store, "SELECT count(*) FROM step WHERE round = 1")[0][0] > 0:
            break
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, "it was still running"
    kept = read(store, "SELECT count(*) FROM step WHERE round < 1")[0][0]
    assert kept > 0
    subprocess.run(run("killed", "--resume"), check=True, capture_output=True, env=os.environ)
    straight, killed = ((tmp_path / name / CHECKPOINT).read_bytes() for name in ("straight", "killed"))
    assert straight == killed
    everything = [read(tmp_path / name / "run.db", "SELECT * FROM step") for name in ("straight", "killed")]
    assert everything[0] == everything[1]
