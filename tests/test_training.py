"""The training loop and its command: runs that go on bit for bit, and a store that tells all of it."""

import hashlib
import io
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from esper.cli import main
from esper.cli.options import Train
from esper.cli.runs import load_controller, load_run, make_folder, use_plugins, write_description
from esper.cli.train import PRESETS, _resumed, resolve_config
from esper.karn import panel, summary
from esper.kasmina import BLUEPRINTS
from esper.leyline import EsperError, LifecycleOp, StateFormatError
from esper.leyline.codec import to_dict
from esper.leyline.storage import locked, read_json, read_state, write_json
from esper.leyline.telemetry import Nowhere
from esper.nissa import Store, read
from esper.simic import PPOConfig
from esper.simic.config import LATER
from esper.simic.training import CHECKPOINT, PREVIOUS, TrainConfig, Training
from esper.simic.workers import PREPARATIONS, Processes
from esper.simic.world import PRIVILEGED
from esper.tamiyo import NetworkConfig, Wait
from esper.tamiyo.controller import PolicyInput
from esper.tolaria import (
    FAMILIES,
    EnvConfig,
    MorphogeneticEnv,
    PreviewConfig,
    Scenarios,
    find_family,
    register_family,
)
from tests.workshop import toy_data, toy_family

FAMILY = toy_family(horizons=(6, 7), prices=(1e-4,), flop_prices=(0.01,))
CONFIG = TrainConfig(EnvConfig(FAMILY, previews=PreviewConfig(3, 2)), rounds=3, rows=8, exam_every=2, exam_rows=6,
                     network=NetworkConfig(16, 8, 6, 12), ppo=PPOConfig(epochs=2, minibatches=2))


def toys(config: EnvConfig, rows: int) -> MorphogeneticEnv:
    """Environments on made-up data."""
    return MorphogeneticEnv(config, rows, toy_data(inputs=config.family.host.inputs))


def shorten(patch: pytest.MonkeyPatch) -> None:
    """The family that commands take by default, with few epochs and samples, and a preset that examines few hosts."""
    patch.setitem(FAMILIES, "mlp", replace(FAMILIES["mlp"], horizons=(8, 9), samples=200, validation=100))
    patch.setitem(PRESETS, "quick", PRESETS["quick"] | {"exam_rows": 2})


def trained(folder: Path, stop_after: int = 99, config: TrainConfig = CONFIG) -> Training:
    folder.mkdir(exist_ok=True)
    training = Training(config, folder, Store(folder / "run.db"), make=toys)
    training.run(stop=lambda: training.agent.updates >= stop_after)
    return training


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Training]:
    """A run of three rounds, to be read and not to be written."""
    folder = tmp_path_factory.mktemp("runs") / "straight"
    return folder, trained(folder)


def everything(folder: Path, table: str) -> list[tuple[Any, ...]]:
    """All rows but for how long they took, and when they ended."""
    names = [name for (name,) in read(folder / "run.db", f"SELECT name FROM pragma_table_info('{table}')") if name not in ("seconds", "ended")]
    return read(folder / "run.db", f"SELECT {', '.join(names)} FROM {table}")


def test_runs_that_knew_no_shards_are_read_as_what_they_were(tmp_path: Path) -> None:
    config = replace(CONFIG, env=replace(CONFIG.env, family=replace(CONFIG.env.family, task="digits")))
    write_description(tmp_path, config)
    body = read_json(tmp_path / "run.json", "run")
    old = {name: value for name, value in body["config"].items() if name not in LATER}
    write_json(tmp_path / "run.json", "run", {**{name: body[name] for name in ("task", "made with", "declared")}, "config": old})
    assert load_run(tmp_path) == (config, {"made with": body["made with"], "declared": []})
    text = json.dumps(old | {"rounds": 0}, sort_keys=True)
    assert config.identity == hashlib.sha256(text.encode()).hexdigest()[:32], "its checkpoint says the same"
    assert len({replace(config, **{name: 2}).identity for name in ("shards", "threads")} | {config.identity}) == 3


def test_a_run_that_was_stopped_goes_on_bit_for_bit(straight: tuple[Path, Training], tmp_path: Path) -> None:
    stopped = tmp_path / "stopped"
    trained(stopped, stop_after=1)
    store = Store(stopped / "run.db")  # a round that was killed in its middle had written some epochs
    store.write("step", {"round": 1, "epoch": 1, "row": 0, "reward": 0.5})
    store.commit()
    trained(stopped)
    for name in (CHECKPOINT, PREVIOUS):
        assert (straight[0] / name).read_bytes() == (stopped / name).read_bytes(), name
    for table in ("step", "move", "head", "exam", "round"):
        rows = [everything(folder, table) for folder in (straight[0], stopped)]
        assert rows[0] == rows[1], table
        assert rows[0], table


def test_the_checkpoint_before_is_kept(tmp_path: Path) -> None:
    trained(tmp_path / "run", stop_after=1)
    first = (tmp_path / "run" / CHECKPOINT).read_bytes()
    assert not (tmp_path / "run" / PREVIOUS).exists()
    trained(tmp_path / "run", stop_after=2)
    assert (tmp_path / "run" / PREVIOUS).read_bytes() == first
    assert read_state(tmp_path / "run" / CHECKPOINT, "agent")[0]["updates"] == 2


def test_a_run_is_known_by_its_config(straight: tuple[Path, Training], tmp_path: Path) -> None:
    folder, training = straight
    assert read_state(folder / CHECKPOINT, "agent")[0]["run"] == CONFIG.identity == training.config.identity
    assert replace(CONFIG, rounds=9).identity == CONFIG.identity, "it may be made longer"
    other = replace(CONFIG, seed=1)
    assert other.identity != CONFIG.identity
    with pytest.raises(EsperError, match=r"agent.safetensors belongs to another run than the run.json beside it"):
        Training(other, folder, make=toys)
    with pytest.raises(EsperError, match="belongs to another run"):
        load_controller(folder, other, "cpu")
    with pytest.raises(EsperError, match=r"is not over: 3 of 9 rounds are done; go on with: esper train"):
        load_controller(folder, replace(CONFIG, rounds=9), "cpu")
    with pytest.raises(EsperError, match="has no controller"):
        load_controller(tmp_path, CONFIG, "cpu")
    assert len(load_controller(folder, CONFIG, "cpu")[1]) == 64


def test_a_full_disk_is_one_sentence_and_costs_nothing(straight: tuple[Path, Training], tmp_path: Path,
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write

    def full(file: int, data: bytes) -> int:
        real(file, data[:11])
        raise OSError(28, "No space left on device")

    trained(tmp_path / "full", stop_after=1)
    path = tmp_path / "full" / CHECKPOINT
    before = path.read_bytes()
    with monkeypatch.context() as patched:
        patched.setattr("esper.leyline.storage.os.write", full)
        with pytest.raises(EsperError, match=r"^cannot write .*: No space left.*free some space.*resume the run") as told:
            trained(tmp_path / "full")
    assert "\n" not in str(told.value)
    assert path.read_bytes() == before
    assert {p.suffix for p in path.parent.iterdir()} <= {".safetensors", ".db", ".db-wal", ".db-shm"}, "nothing half written"
    trained(tmp_path / "full")
    assert path.read_bytes() == (straight[0] / CHECKPOINT).read_bytes()


def test_the_store_tells_every_epoch_and_its_terms_sum(straight: tuple[Path, Training]) -> None:
    training, path = straight[1], straight[0] / "run.db"
    horizons = [FAMILY.scenarios(8, start=8 * r).horizon.sum() for r in range(3)]
    assert read(path, "SELECT count(*) FROM step")[0][0] == int(sum(horizons)), "one row per running row and epoch"
    parts = " - ".join(f"ifnull(reward_{name}, 0)" for name in ("gain", "size", "compute", "credit", "potential"))
    assert read(path, f"SELECT max(abs(reward - {parts})) FROM step")[0][0] < 1e-5
    returns = read(path, "SELECT sum(reward) FROM step WHERE round = 2 GROUP BY row ORDER BY row")
    torch.testing.assert_close(torch.tensor([r[0] for r in returns]), training.rounds.player.world(training.config.env.family).total, atol=1e-5, rtol=0)
    mean = read(path, "SELECT utility, episodes FROM round WHERE round = 2")[0]
    assert mean[0] == pytest.approx(float(training.rounds.player.world(training.config.env.family).total.mean()), abs=1e-6)
    born = read(path, "SELECT count(*) FROM move WHERE target = 'GERMINATED'")[0][0]
    assert born == read(path, "SELECT count(*) FROM step WHERE op = 'GERMINATE'")[0][0] > 0
    assert read(path, "SELECT count(*) FROM step WHERE op = 'GERMINATE' AND blueprint IS NULL") == [(0,)]
    assert read(path, "SELECT DISTINCT slot FROM step WHERE op = 'WAIT'") == [(None,)]
    assert read(path, "SELECT count(*), count(DISTINCT round) FROM exam WHERE policy = 'learned'") == [(6, 1)]


def test_the_store_tells_what_the_controller_thought_and_every_seed(straight: tuple[Path, Training]) -> None:
    path = straight[0] / "run.db"
    parts = " * ".join(f"ifnull(chance_{head}, 1)" for head in ("op", "slot", "blueprint"))
    assert read(path, f"SELECT max(abs(chance - {parts})), min(chance) > 0 FROM step")[0] == (pytest.approx(0, abs=1e-5), 1)
    assert read(path, "SELECT count(*) FROM step WHERE value IS NULL") == [(0,)]
    assert read(path, "SELECT count(DISTINCT value) > 1, count(chance_blueprint) > 0 FROM step") == [(1, 1)]
    assert read(path, "SELECT count(*) FROM step WHERE op != 'GERMINATE' AND chance_blueprint IS NOT NULL") == [(0,)]
    entered = read(path, "SELECT m.target, s.stage, count(*) FROM move m LEFT JOIN seed s USING (round, epoch, row, slot) "
                         "WHERE m.target IN ('BLENDING', 'FOSSILIZED') GROUP BY 1, 2")
    assert entered
    assert all(target == stage for target, stage, _ in entered), "seeds are as the epoch left them"
    known = read(path, "SELECT stage, count(contribution), count(preview), count(*), max(error) < 1 FROM seed GROUP BY stage")
    told = {stage: counts for stage, *counts in known}
    assert told["TRAINING"][0] == 0 < told["TRAINING"][1]
    assert told["BLENDING"][1] == 0 < told["BLENDING"][0]
    assert all(small in (1, None) for *_, small in told.values())
    assert read(path, "SELECT count(*) FROM seed WHERE stage = 'DORMANT'") == [(0,)]


def test_examinations_pay_no_growth_nothing_but_its_previews(tmp_path: Path) -> None:
    training = trained(tmp_path / "run", stop_after=0)
    utility = training.examine("wait", lambda spec: Wait(), 0)
    assert bool((utility <= 0).all())
    spent = training.exam[0][0].env.spent.float()
    assert bool((spent > 0).any())
    torch.testing.assert_close(utility, -0.01 * spent)


def test_views_read_the_store_alone(straight: tuple[Path, Training]) -> None:
    state = summary(straight[0] / "run.db", 3)
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
        assert text.count("entropy_collapse") == shown.line().count("entropy_collapse") == len(troubles)
        assert ("none" in told["anomalies"]) == (not troubles)
    assert LifecycleOp.WAIT.name in state.ops


@pytest.mark.parametrize(("text", "message"), [
    ("fame = 1", "has no use for fame"), ("[ppo]\nfame = 1", "ppo has no use for fame"),
    ("rounds = 'two'", "rounds is 'two'"), ("rounds = ", "cannot read --config"), ("rounds = 0", "must be at least 1"),
    ("reward = 'fame'", "choose a reward from"), ("ppo = 3", "ppo is 3"), ("[ppo]\nexplore = 0.1", r"explore is 0.1"),
    ("[env]\nfamily = 'cats'", "no family 'cats'"), ("[env.family]\nname = 'x'", "env.family lacks task, host, kinds"),
    ("env = 3", "env is 3"), ("[env]\nincubation = 'magic'", "no incubation 'magic'"),
    ("[env.previews]\nevery = 0", "at least 1"),
    ("[network]\nprivileged = 3", "network.privileged follows from privileged"),
    ("[ppo]\nexplore = ['a', 'b']", "explore, 0 is 'a'"), ("[ppo]\ngamma = 'high'", "gamma is 'high'"),
])
def test_bad_configs_are_refused(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text(text)
    with pytest.raises(EsperError, match=message):
        resolve_config(Train(tmp_path / "run", config=file))
    assert not (tmp_path / "run").exists()


def test_configs_are_layered(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text("rounds = 7\nrows = 24\n[ppo]\nepochs = 2\nlearning_rate = [1e-3, 1e-5]\n[network]\nhidden = 32\n")
    config = resolve_config(Train(tmp_path / "run", config=file, rows=12, seed=3))
    assert (config.rounds, config.rows, config.seed, config.ppo.epochs, config.network.hidden) == (7, 12, 3, 2, 32)
    assert config.ppo.learning_rate == (1e-3, 1e-5)
    assert config.env.previews is None, "false takes a part away"
    assert resolve_config(Train(tmp_path / "run", preset="cpu"), config).env.previews is None, "as often as it is said"
    file.write_text("[env.previews]\nevery = 4\n")
    assert resolve_config(Train(tmp_path / "run", config=file)).env.previews == PreviewConfig(4, 20), "else as by default"
    assert config.exam_every == PRESETS["quick"]["exam_every"]


TINY = ["--rounds", "2", "--rows", "4", "--preset", "quick"]
"""Of the family that is the default."""


def test_the_command_trains_and_refuses_to_mix_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    shorten(monkeypatch)
    out = str(tmp_path / "run")
    assert main(["train", "--out", out, *TINY]) == 0
    text = capsys.readouterr().out
    assert "round 2/2" in text
    assert "learned:" in text
    assert "heuristic:" in text
    described = read_json(tmp_path / "run" / "run.json", "run")
    assert {"config", "made with", "declared"} <= set(described)
    assert {"torch", "python", "threads", "commit", "command", "version", "hardware"} <= set(described["made with"])
    assert described["config"]["env"]["family"] == to_dict(find_family("mlp"))
    assert main(["train", "--out", out, *TINY]) == 2
    assert "already holds a run; add --resume" in capsys.readouterr().err
    assert main(["train", "--out", out, *TINY, "--seed", "5", "--resume"]) == 2
    assert "has another seed; resume it with its own options, or with none" in capsys.readouterr().err
    assert main(["train", "--out", out, "--family", "mnist1d", "--resume"]) == 2
    assert "has another env.family.name, env.family.task" in capsys.readouterr().err
    assert main(["train", "--out", out, "--resume"]) == 0, "its own options are in its folder"
    assert main(["train", "--out", str(tmp_path / "none"), "--resume"]) == 2
    assert "holds no run to resume" in capsys.readouterr().err
    assert main(["train", "--out", out, "--family", "cats"]) == 2


def begun(options: Train) -> TrainConfig:
    """The folder of a run that has not trained yet."""
    config = resolve_config(options)
    make_folder(options.out)
    write_description(options.out, config)
    return config


def resumed(options: Train) -> TrainConfig:
    with ExitStack() as stack:
        return _resumed(options, Console(file=io.StringIO()), stack).config


def test_a_run_is_resumed_as_it_was_begun(tmp_path: Path) -> None:
    file, out = tmp_path / "config.toml", tmp_path / "run"
    file.write_text("exam_every = 3\n[ppo]\nlearning_rate = [1e-3, 1e-5]\n")
    first = begun(Train(out, "mlp", "cpu", file, rounds=5, seed=4, rows=4))
    assert resumed(Train(out, resume=True)) == first
    assert resumed(Train(out, "mlp", "cpu", file, rounds=5, rows=4, resume=True)) == first
    file.write_text("exam_every = 4\n")
    for other, name in (({"preset": "quick"}, "exam_rows"), ({"config": file}, "exam_every"), ({"rounds": 6}, "rounds"),
                        ({"rows": 64}, "rows"), ({"seed": 5}, "seed")):
        with pytest.raises(EsperError, match=rf"has another .*\b{name}\b"):
            resumed(Train(out, resume=True, **other))  # type: ignore[arg-type]
    with pytest.raises(EsperError, match=r"has another env.family.name, .*rounds; resume it with its own"):
        resumed(Train(out, "mnist1d", rounds=6, resume=True))


def test_one_process_at_a_time_works_in_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    begun(Train(tmp_path, rows=4))
    with locked(tmp_path):
        assert main(["train", "--out", str(tmp_path), "--resume"]) == 2
    assert f"another esper process works in {tmp_path}" in capsys.readouterr().err


def test_a_run_can_be_made_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shorten(monkeypatch)
    out = tmp_path / "run"
    config = begun(Train(out, "mlp", rounds=2, rows=4))
    (out / CHECKPOINT).write_bytes(b"broken")
    assert main(["train", "--out", str(out), "--resume", "--more", "3"]) == 2
    assert load_run(out)[0] == config, "what fails changes nothing"  # type: ignore[index]
    (out / CHECKPOINT).unlink()
    for wrong in (["--more", "1"], ["--more", "-1", "--resume"]):
        assert main(["train", "--out", str(out), *wrong]) == 2
    assert load_run(out) == (config, load_run(out)[1])  # type: ignore[index]
    assert resumed(Train(out, resume=True, more=3)) == replace(config, rounds=5)
    told = read_json(out / "run.json", "run")
    assert (told["declared"], told["config"]["rounds"]) == ([2], 5)
    assert resumed(Train(out, resume=True)) == replace(config, rounds=5)
    tiny = ["--config", str(tmp_path / "tiny.toml"), "--rounds", "1", "--out", str(tmp_path / "tiny")]
    (tmp_path / "tiny.toml").write_text("rows = 4\nexam_rows = 2\nexam_every = 0\n")
    assert main(["train", *tiny]) == 0
    assert main(["train", "--out", str(tmp_path / "tiny"), "--resume", "--more", "1"]) == 0
    told = read_json(tmp_path / "tiny" / "run.json", "run")
    assert (told["declared"], told["config"]["rounds"]) == ([1], 2)
    assert read(tmp_path / "tiny" / "run.db", "SELECT count(*) FROM round") == [(2,)]


def test_schedules_end_with_the_last_round_of_a_longer_run(tmp_path: Path) -> None:
    Training(replace(CONFIG, rounds=2), tmp_path, make=toys).run()
    training = Training(CONFIG, tmp_path, make=toys)
    assert training.agent.updates == 2
    expected = training.agent.config.learning_rate[0] / 3 + training.agent.config.learning_rate[1] * 2 / 3
    assert training.agent.scheduled(training.agent.config.learning_rate) == pytest.approx(expected)
    training.run()
    assert training.agent.updates == 3


def changed(told: dict[str, Any], **config: Any) -> dict[str, Any]:
    return told | {"config": told["config"] | config}


@pytest.mark.parametrize("damage", [
    lambda told: "", lambda told: "[1]", lambda told: json.dumps(told)[:-40], lambda told: json.dumps({"config": told["config"]}),
    lambda told: json.dumps(changed(told, rounds=3)), lambda told: json.dumps(told | {"schema": 1}), lambda told: "\udcff",
    lambda told: "[" * 100_000,
])
def test_a_damaged_description_is_one_sentence(damage: Callable[[dict[str, Any]], str], tmp_path: Path,
                                               capsys: pytest.CaptureFixture[str]) -> None:
    begun(Train(tmp_path))
    path = tmp_path / "run.json"
    path.write_text(damage(json.loads(path.read_text())), errors="surrogateescape")
    assert main(["train", "--out", str(tmp_path), "--resume"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("esper train: ")
    assert str(path) in told
    assert told.count("\n") == 1
    assert not (tmp_path / "run.db").exists()


@pytest.mark.parametrize(("damage", "message"), [
    (lambda told: told | {"config": 3}, "is 3; expected a table"), (lambda told: told | {"config": {"rounds": 2}}, "lacks env"),
    (lambda told: changed(told, ppo=None), "ppo is None"), (lambda told: changed(told, rows="many"), "rows is 'many'"),
    (lambda told: changed(told, fame=1), "no use for fame"), (lambda told: changed(told, rows=2**70), "at most 63 bits"),
    (lambda told: changed(told, env=told["config"]["env"] | {"family": "mlp"}), "family is 'mlp'; expected a table"),
    (lambda told: changed(told, env=told["config"]["env"] | {"device": "tpu"}), "tpu"),
    (lambda told: {name: value for name, value in told.items() if name != "config"}, "does not describe a run"),
    (lambda told: {name: value for name, value in told.items() if name != "declared"}, "does not describe a run"),
])
def test_a_description_of_something_else_is_one_sentence(damage: Callable[[dict[str, Any]], dict[str, Any]], message: str,
                                                         tmp_path: Path) -> None:
    """Whole, with its digest, and yet no run."""
    begun(Train(tmp_path))
    harmed = damage(read_json(tmp_path / "run.json", "run"))
    write_json(tmp_path / "run.json", "run", {name: value for name, value in harmed.items() if name not in ("kind", "schema")})
    with pytest.raises(EsperError, match=message) as caught:
        load_run(tmp_path)
    assert "\n" not in str(caught.value)
    with pytest.raises(StateFormatError, match="expected a declaration"):
        read_json(tmp_path / "run.json", "declaration")


def test_a_description_that_cannot_be_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("esper.leyline.storage.os.replace", lambda *paths: (_ for _ in ()).throw(OSError(28, "no space")))
    with pytest.raises(EsperError, match=r"cannot write .*run.json: no space; free some space"):
        begun(Train(tmp_path / "run"))
    assert not list((tmp_path / "run").iterdir())


KILLED = """
import os, signal, sys, torch
torch.set_num_threads(1)
from esper.cli import main
from esper.simic.training import Training
kept = Training._checkpoint
def dies(self, fresh):
    if self.agent.updates == 2:  # the store has the round, its checkpoint is not written
        os.kill(os.getpid(), signal.SIGKILL)
    kept(self, fresh)
Training._checkpoint = dies
sys.exit(main(sys.argv[1:]))
"""


def test_a_killed_command_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """Killed between two files, with no chance to tidy up: a round that has no checkpoint is played again."""
    file = tmp_path / "tiny.toml"
    file.write_text(OWN.replace("rounds = 2", "rounds = 3"))

    def words(name: str) -> list[str]:
        return ["train", "--out", str(tmp_path / name), "--config", str(file)]

    assert main(words("straight")) == 0
    killed = subprocess.run([sys.executable, "-c", KILLED, *words("killed")], capture_output=True, env=os.environ)
    assert killed.returncode == -signal.SIGKILL
    assert read_state(tmp_path / "killed" / CHECKPOINT, "agent")[0]["updates"] == 1
    assert read(tmp_path / "killed" / "run.db", "SELECT count(*) FROM step WHERE round = 1")[0][0] > 0
    assert main([*words("killed"), "--resume"]) == 0
    assert (tmp_path / "straight" / CHECKPOINT).read_bytes() == (tmp_path / "killed" / CHECKPOINT).read_bytes()
    for table in ("step", "round", "exam"):
        assert everything(tmp_path / "straight", table) == everything(tmp_path / "killed", table), table


def played(training: Training) -> list[int]:
    """Scenarios whose twins were computed, as they are counted from now on."""
    counted: list[int] = []
    compute = training.rounds.player.world(training.config.env.family).twins._compute

    def counting(scenarios: Scenarios) -> None:
        counted.extend(scenarios.key.tolist())
        compute(scenarios)

    training.rounds.player.world(training.config.env.family).twins._compute = counting  # type: ignore[method-assign]
    return counted


def test_scenarios_that_are_met_again_keep_their_twins(tmp_path: Path) -> None:
    """Two rounds' worth of scenarios for four rounds: their twins are computed twice, and a resumed run is the same."""
    config = replace(CONFIG, rounds=4, scenarios=20, exam_every=0)  # whole rounds: 16
    straight = Training(config, tmp_path, Store(tmp_path / "run.db"), make=toys)
    computed = played(straight)
    straight.run()
    pool = FAMILY.scenarios(16)
    assert sorted(computed) == sorted(pool.key.tolist())
    keys = [row[0] for row in read(tmp_path / "run.db", "SELECT scenario FROM step WHERE round = 3 AND epoch = 1 ORDER BY row")]
    assert keys == pool.key[8:].tolist()
    epochs = [row[0] for row in read(tmp_path / "run.db", "SELECT host_epochs FROM round ORDER BY round")]
    assert epochs == [2 * int(pool.horizon[:8].sum()), 2 * int(pool.horizon[8:].sum()), int(pool.horizon[:8].sum()),
                      int(pool.horizon[8:].sum())]
    (tmp_path / "again").mkdir()
    stopped = Training(config, tmp_path / "again", make=toys)
    stopped.run(stop=lambda: stopped.agent.updates >= 3)
    resumed_run = Training(config, tmp_path / "again", make=toys)
    computed = played(resumed_run)
    resumed_run.run()
    assert computed == [], "they lie beside the checkpoint"
    assert (tmp_path / "again" / CHECKPOINT).read_bytes() == (tmp_path / CHECKPOINT).read_bytes()
    other = toy_family(horizons=(6, 7), prices=(2e-4,), flop_prices=(0.01,))
    (tmp_path / "again" / CHECKPOINT).unlink()
    with pytest.raises(EsperError, match="holds twins of another family"):
        Training(replace(config, env=EnvConfig(other)), tmp_path / "again", make=toys)


def test_the_critic_and_nothing_else_is_told_what_is_hidden(tmp_path: Path) -> None:
    training = Training(CONFIG, tmp_path, make=toys)
    world, controller = training.rounds.player.world(training.config.env.family), training.agent.controller
    buffer = training.agent.buffer(world.steps, CONFIG.rows)
    drawn = FAMILY.scenarios(CONFIG.rows)
    world.collect(training.agent, drawn, buffer, (CONFIG.seed,))
    first = buffer["privileged"][0]
    assert first.shape == (CONFIG.rows, len(PRIVILEGED))
    told = dict(zip(PRIVILEGED, first.unbind(1), strict=True))
    torch.testing.assert_close(told["label_noise"], drawn.of_kind("label_noise").float())
    torch.testing.assert_close(told["frozen"], drawn.impairments(FAMILY.host.stages).frozen.float().mean(1))
    last = world.twin[torch.arange(CONFIG.rows), drawn.horizon - 1, 1]
    torch.testing.assert_close(told["twin_score"], 5 * (last - 0.5))
    hidden = controller.network.get_initial_hidden(CONFIG.rows)
    world.env.reset(drawn)
    shown = PolicyInput.of(world.env.view(), (CONFIG.seed,), training.agent.device)._replace(privileged=first)
    (_, one), (_, other) = (controller.act(g, hidden) for g in (shown, shown._replace(privileged=first + 1)))
    assert torch.equal(one.actions, other.actions)
    assert torch.equal(one.log_prob, other.log_prob)
    assert bool((one.value != other.value).any())
    blind = Training(replace(CONFIG, privileged=False), tmp_path / "blind", make=toys)
    assert blind.agent.network.config.privileged == 0
    empty = blind.agent.buffer(world.steps, CONFIG.rows)
    blind.rounds.player.world(blind.config.env.family).collect(blind.agent, drawn, empty, (CONFIG.seed,), privileged=False)
    assert empty.filled == world.steps
    with pytest.raises(EsperError, match="privileged follows from privileged"):
        replace(CONFIG, network=NetworkConfig(privileged=3))
    with pytest.raises(EsperError, match=r"privileged inputs have shape \[1, 8, 12\]; this critic expects \[1, 8, 0\]"):
        blind.agent.controller.act(shown, hidden)


OWN = """
rounds = 2
rows = 4
exam_every = 0
exam_rows = 2
[ppo]
minibatches = 2
[env]
previews = false
[env.family]
name = "mine"
task = "digits"
batch = 50
samples = 200
validation = 100
prices = [0.0, 1e-4]
horizons = [7]
kinds = [{name = "plain"}, {name = "wrong", label_noise = 0.3}]
[env.family.host]
kind = "mlp"
inputs = [64]
widths = [8, 8]
"""


def test_a_family_of_ones_own_is_a_table_of_the_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It trains, goes on, and is put before the court; nobody had to register it."""
    file, out = tmp_path / "own.toml", tmp_path / "run"
    file.write_text(OWN)
    assert main(["train", "--config", str(file), "--out", str(out), "--rounds", "1"]) == 0
    config, _ = load_run(out)  # type: ignore[misc]
    family = config.env.family
    assert (family.name, family.host.widths, [kind.name for kind in family.kinds]) == ("mine", (8, 8), ["plain", "wrong"])
    assert config.env.spec.slots == 2
    assert "mine" not in FAMILIES
    assert main(["train", "--out", str(out), "--resume", "--config", str(file)]) == 2
    assert "has another rounds" in capsys.readouterr().err, "the file says 2"
    assert main(["train", "--out", str(out), "--resume", "--more", "1"]) == 0
    file.write_text(OWN.replace("samples = 200", "samples = 150"))
    assert main(["train", "--out", str(out), "--resume", "--config", str(file)]) == 2
    assert "has another env.family.samples;" in capsys.readouterr().err
    assert read(out / "run.db", "SELECT count(*) FROM round") == [(2,)]
    court = ["prove", "--rehearsal", "--minds", str(out), "--scenarios", "2", "--pilot", "2", "--rows", "64"]
    assert main([*court, "--out", str(tmp_path / "court")]) == 0
    assert "rehearsal: it proves nothing" in capsys.readouterr().out
    assert read_json(tmp_path / "court" / "rehearsal.json", "rehearsal")["family"] == "mine"


PLUGIN = """
from dataclasses import replace
from torch import nn
from esper.kasmina import Host, register_blueprint
from esper.tolaria import Family, Kind, register_family

register_blueprint("theirs", lambda channels: nn.Sequential(nn.Linear(channels, channels), nn.Tanh()), ("mlp",))
register_family(Family("garden", "digits", Host("mlp", (64,), (8, 8)), (Kind("plain"),), horizons=(7,), samples=200,
                       validation=100, batch=50))
"""


@pytest.fixture
def plugin(tmp_path: Path) -> Iterator[Path]:
    file = tmp_path / "plugin.py"
    file.write_text(PLUGIN)
    yield file
    forget()


def forget() -> None:
    """As in a process that has not run the plugin."""
    FAMILIES.pop("garden", None)
    BLUEPRINTS.pop(("mlp", "theirs"), None)
    PREPARATIONS.clear()


def test_a_plugin_brings_families_and_blueprints(plugin: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = tmp_path / "tiny.toml", tmp_path / "run"
    file.write_text("rows = 4\nexam_every = 0\nexam_rows = 2\n[ppo]\nminibatches = 2\n")
    words = ["train", "--out", str(out), "--config", str(file), "--rounds", "1"]
    assert main([*words, "--family", "garden"]) == 2
    assert "no family 'garden'" in capsys.readouterr().err
    assert main([*words, "--family", "garden", "--plugin", str(plugin)]) == 0
    config, _ = load_run(out)  # type: ignore[misc]
    assert config.env.family is FAMILIES["garden"] or config.env.family == FAMILIES["garden"]
    assert "theirs" in config.env.spec.blueprints
    forget()
    assert main(["train", "--out", str(out), "--resume", "--more", "1"]) == 2
    assert "theirs" in capsys.readouterr().err, "what it needs is named"
    assert main(["train", "--out", str(out), "--resume", "--more", "1", "--plugin", str(plugin)]) == 0
    assert main(["train", "--out", str(tmp_path / "x"), "--plugin", str(tmp_path / "none.py")]) == 2
    assert "is not a Python file" in capsys.readouterr().err


def test_workers_know_what_plugins_registered(plugin: Path) -> None:
    use_plugins([plugin])
    with Processes(1) as workers:
        assert [(done.name, done.value) for done in workers.run({"asked": known})] == [("asked", True)]


def known() -> bool:
    """Asked in a worker."""
    return "garden" in FAMILIES and ("mlp", "theirs") in BLUEPRINTS


def test_names_are_registered_once() -> None:
    with pytest.raises(EsperError, match="the family 'mlp' exists already; give yours another name"):
        register_family(find_family("mlp"))
    with pytest.raises(EsperError, match="must be a Family, not a str"):
        register_family("mlp")  # type: ignore[arg-type]


def test_hosts_that_break_in_their_first_epoch_stop_no_update(tmp_path: Path) -> None:
    """A rate of 3,000 breaks every eighth host at once; its rewards are numbers, and every update learns."""
    told: list[dict[str, Any]] = []
    alarms: list[dict[str, Any]] = []

    class Rounds(Nowhere):
        def write(self, table: str, columns: Any) -> None:
            told.extend([dict(columns)] * (table == "round"))
            alarms.extend([dict(columns)] * (table == "anomaly"))

    family = toy_family(horizons=(6,), lrs=(1e-2,) * 7 + (3000.0,))
    config = TrainConfig(env=EnvConfig(family), rounds=2, rows=16, exam_every=0, ppo=PPOConfig(minibatches=4))
    training = Training(config, tmp_path, Rounds(), make=toys)
    training.run()
    assert any(rollback.epoch == 1 for rollback in training.rounds.player.world(training.config.env.family).env.rollbacks)
    assert sum(alarm["value"] for alarm in alarms if alarm["kind"] == "rollback") == len(training.rounds.player.world(training.config.env.family).env.rollbacks)
    assert [(row["skipped"], row["steps"] > 0, math.isfinite(row["utility"])) for row in told] == [(0, True, True)] * 2
