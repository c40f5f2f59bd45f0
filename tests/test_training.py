"""The training loop and its command: runs that go on bit for bit, and a store that tells all of it."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from esper.simic.growth import TOLD
from esper.train_cli import PRESETS, Train, begun, resolved, resumed
from rich.console import Console
from safetensors import SafetensorError

from esper.cli import main
from esper.karn import panel, summary
from esper.leyline import EsperError, LifecycleOp
from esper.nissa import Store, read
from esper.simic import PPOConfig
from esper.simic.training import CHECKPOINT, TrainConfig, Training
from esper.tamiyo import NetworkConfig, Wait
from esper.tolaria import Family, MorphogeneticEnv, PreviewConfig
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


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), SafetensorError("I/O error: os error 28")])
def test_a_full_disk_is_one_sentence_and_costs_nothing(error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(tensors: object, path: Path, header: object) -> None:
        path.write_bytes(b"half a file")
        raise error

    trained(tmp_path / "straight", stop_after=2)
    trained(tmp_path / "full", stop_after=1)
    path = tmp_path / "full" / CHECKPOINT
    before = path.read_bytes()
    with monkeypatch.context() as patched:
        patched.setattr("esper.leyline.storage.save_file", full)
        with pytest.raises(EsperError, match=rf"^cannot write {path}: .*28.*free some space.*resume the run") as told:
            trained(tmp_path / "full")
    assert "\n" not in str(told.value)
    assert path.read_bytes() == before
    assert {p.suffix for p in path.parent.iterdir()} <= {".safetensors", ".db", ".db-wal", ".db-shm"}, "nothing half written"
    trained(tmp_path / "full", stop_after=2)
    assert path.read_bytes() == (tmp_path / "straight" / CHECKPOINT).read_bytes()


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
    for troubles in ([], [f"entropy_collapse {head}" for head in state.entropies] * 4):
        shown = replace(state, anomalies=troubles, left=1e6)
        console = Console(width=80, record=True, file=io.StringIO())
        console.print(panel(shown))
        lines = console.export_text().splitlines()
        assert max(map(len, lines)) <= 80
        told = {line.split()[0]: line for line in lines if line.split()}
        assert {"round", "decisions", "entropies", "seeds", "anomalies"} <= told.keys()
        text = " ".join(" ".join(lines).split())
        assert all(f"{op} {share:.0%}" in text for op, share in state.ops.items())
        assert all(f"{head} {value:.2f}" in told["entropies"] for head, value in state.entropies.items())
        assert f"germinated {state.funnel['GERMINATED']} >" in told["seeds"]
        assert text.count("entropy_collapse") == 2 * len(troubles), "in the line and in the table"
        assert ("none" in told["anomalies"]) == (not troubles)
    assert LifecycleOp.WAIT.name in state.ops


@pytest.mark.parametrize(("text", "message"), [
    ("fame = 1", "has no use for fame"), ("[ppo]\nfame = 1", r"\[ppo\] has no use for fame"),
    ("rounds = 'two'", "rounds is 'two'"), ("rounds = ", "cannot read --config"), ("rounds = 0", "must be at least 1"),
    ("reward = 'fame'", "choose a reward from"), ("ppo = 3", r"\[ppo\] is 3"), ("[ppo]\nexplore = 0.1", r"explore is 0.1"),
    ("[ppo]\nexplore = ['a', 'b']", "explore is"), ("[ppo]\ngamma = 'high'", "gamma is 'high'"),
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
    assert main(["train", "--out", out, "--family", "mnist1d", "--resume"]) == 2
    assert "has another family; resume it with its own options" in capsys.readouterr().err
    assert main(["train", "--out", out, "--resume"]) == 0, "its own options are in its folder"
    assert main(["train", "--out", str(tmp_path / "none"), "--resume"]) == 2
    assert "holds no run to resume" in capsys.readouterr().err
    assert main(["train", "--out", out, "--family", "cats"]) == 2


def test_a_run_is_resumed_as_it_was_begun(tmp_path: Path) -> None:
    file, out = tmp_path / "config.toml", tmp_path / "run"
    file.write_text("exam_every = 3\n[ppo]\nlearning_rate = [1e-3, 1e-5]\n")
    first = begun(Train(out, "mnist1d", "cpu", file, rounds=5, seed=4))
    assert resumed(Train(out, resume=True)) == first
    assert resumed(Train(out, "mnist1d", "cpu", file, rounds=5, resume=True)) == first
    file.write_text("exam_every = 4\n")
    for other in ({"preset": "quick"}, {"config": file}, {"rounds": 6}, {"rows": 63}, {"seed": 5}):
        with pytest.raises(EsperError, match="has another config"):
            resumed(Train(out, resume=True, **other))  # type: ignore[arg-type]
    with pytest.raises(EsperError, match="has another family and config"):
        resumed(Train(out, "mlp", rounds=6, resume=True))


def test_a_run_can_be_made_longer(tmp_path: Path) -> None:
    out = tmp_path / "run"
    (family, config), short = begun(Train(out, "mlp", rounds=2)), replace(CONFIG, rounds=2)
    assert resumed(Train(out, resume=True, more=3)) == (family, replace(config, rounds=5))
    assert resumed(Train(out, resume=True)) == (family, config), "only when it has begun to run"
    (out / CHECKPOINT).write_bytes(b"broken")
    assert main(["train", "--out", str(out), "--resume", "--more", "3"]) == 2
    assert resumed(Train(out, resume=True)) == (family, config), "what fails changes nothing"
    (out / CHECKPOINT).unlink()
    for wrong in ({"more": 1}, {"more": -1, "resume": True}):
        with pytest.raises(EsperError, match="--more is a number of rounds for a run to --resume"):
            Train(out, **wrong)  # type: ignore[arg-type]
    tiny = ["--config", str(tmp_path / "tiny.toml"), "--rounds", "1", "--out", str(tmp_path / "tiny")]
    (tmp_path / "tiny.toml").write_text("rows = 4\nexam_rows = 2\nexam_every = 0\n")
    assert main(["train", *tiny]) == 0
    assert main(["train", "--out", str(tmp_path / "tiny"), "--resume", "--more", "1"]) == 0
    told = json.loads((tmp_path / "tiny" / "run.json").read_text())
    assert (told["declared"], told["config"]["rounds"]) == ([1], 2)
    assert read(tmp_path / "tiny" / "run.db", "SELECT count(*) FROM round") == [(2,)]
    Training(FAMILY, short, tmp_path).run()
    training = Training(FAMILY, CONFIG, tmp_path)
    assert training.agent.updates == 2
    expected = training.agent.config.learning_rate[0] / 3 + training.agent.config.learning_rate[1] * 2 / 3
    assert training.agent.scheduled(training.agent.config.learning_rate) == pytest.approx(expected)
    training.run()
    assert training.agent.updates == 3


@pytest.mark.parametrize("damage", [
    lambda told: "", lambda told: "[1]", lambda told: json.dumps(told)[:-40], lambda told: json.dumps(told | {"family": ["mlp"]}),
    lambda told: json.dumps(told | {"family": "cats"}), lambda told: json.dumps({"family": "mlp"}),
    lambda told: json.dumps(told | {"config": 3}), lambda told: json.dumps(told | {"config": {"rounds": 2}}),
    lambda told: json.dumps(told | {"config": told["config"] | {"ppo": None}}),
    lambda told: json.dumps(told | {"config": told["config"] | {"rows": "many"}}),
    lambda told: json.dumps(told | {"config": told["config"] | {"fame": 1}}), lambda told: "\udcff",
])
def test_a_damaged_description_is_one_sentence(damage: Callable[[dict[str, Any]], str], tmp_path: Path,
                                               capsys: pytest.CaptureFixture[str]) -> None:
    begun(Train(tmp_path))
    path = tmp_path / "run.json"
    path.write_text(damage(json.loads(path.read_text())), errors="surrogateescape")
    assert main(["train", "--out", str(tmp_path), "--resume"]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"esper train: {path} is damaged: ")
    assert told.count("\n") == 1
    assert not (tmp_path / "run.db").exists()


def test_a_description_that_cannot_be_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("esper.leyline.storage.os.replace", lambda *paths: (_ for _ in ()).throw(OSError(28, "no space")))
    with pytest.raises(EsperError, match=r"cannot write .*run.json: .*no space; free some space"):
        begun(Train(tmp_path / "run"))
    assert not list((tmp_path / "run").iterdir())


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


def test_scenarios_that_are_met_again_keep_their_twins(tmp_path: Path) -> None:
    """Two rounds' worth of scenarios for four rounds: their twins are computed twice, and a resumed run is the same."""
    config = replace(CONFIG, rounds=4, scenarios=20, exam_every=0)  # whole rounds: 16
    straight = Training(FAMILY, config, tmp_path, Store(tmp_path / "run.db"))
    straight.run()
    pool = FAMILY.scenarios(16)
    assert straight.world.twins.epochs == int(pool.horizon.sum())
    keys = [row[0] for row in read(tmp_path / "run.db", "SELECT scenario FROM step WHERE round = 3 AND epoch = 1 ORDER BY row")]
    assert keys == pool.key[8:].tolist()
    epochs = [row[0] for row in read(tmp_path / "run.db", "SELECT host_epochs FROM round ORDER BY round")]
    assert epochs == [2 * int(pool.horizon[:8].sum()), 2 * int(pool.horizon[8:].sum()), int(pool.horizon[:8].sum()),
                      int(pool.horizon[8:].sum())]
    (tmp_path / "again").mkdir()
    stopped = Training(FAMILY, config, tmp_path / "again")
    stopped.run(stop=lambda: stopped.agent.updates >= 3)
    resumed_run = Training(FAMILY, config, tmp_path / "again")
    resumed_run.run()
    assert resumed_run.world.twins.epochs == 0, "they lie beside the checkpoint"
    assert (tmp_path / "again" / CHECKPOINT).read_bytes() == (tmp_path / CHECKPOINT).read_bytes()
    other = toy_family(horizons=(6, 7), prices=(2e-4,), flop_prices=(0.01,))
    with pytest.raises(EsperError, match="holds twins of another family"):
        Training(other, config, tmp_path / "again")


def test_the_critic_and_nothing_else_is_told_what_is_hidden(tmp_path: Path) -> None:
    training = Training(FAMILY, CONFIG, tmp_path)
    world, controller = training.world, training.agent.controller
    training.recorded.begin(0)
    shown, drawn = world.look(), world.env.scenarios
    assert shown.told is not None
    assert shown.told.shape == (CONFIG.rows, len(TOLD))
    told = dict(zip(TOLD, shown.told.unbind(1), strict=True))
    torch.testing.assert_close(told["label_noise"], drawn.of_kind("label_noise").float())
    torch.testing.assert_close(told["frozen"], drawn.impairments(FAMILY.host.stages).frozen.float().mean(1))
    last = world.twin[torch.arange(CONFIG.rows), drawn.horizon - 1, 1]
    torch.testing.assert_close(told["twin_accuracy"], 5 * (last - 0.5))
    hidden = controller.network.get_initial_hidden(CONFIG.rows)
    (_, one), (_, other) = (controller.act(g, hidden) for g in (shown, shown._replace(told=shown.told + 1)))
    assert torch.equal(one.actions, other.actions)
    assert torch.equal(one.log_prob, other.log_prob)
    assert bool((one.value != other.value).any())
    blind = Training(FAMILY, replace(CONFIG, tell=False), tmp_path / "blind")
    blind.recorded.begin(0)
    assert blind.world.look().told is None
    assert blind.agent.network.config.told == 0
    with pytest.raises(EsperError, match="told follows from tell"):
        replace(CONFIG, network=NetworkConfig(told=3))
    with pytest.raises(EsperError, match="this one expects"):
        blind.agent.controller.act(shown, hidden)
