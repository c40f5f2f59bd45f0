"""`esper prove` on runs of `esper train`: it plays what was trained, tells all of it, and refuses bad runs before it tunes."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from esper.prove_cli import Prove, candidate
from esper.simic.controls import Tuned, tune
from esper.simic.trials import Delivered, Trials
from experiments.orchard import FAMILY, Orchard
from rich.console import Console

from esper import __version__, prove_cli
from esper.cli import main
from esper.leyline import EsperError
from esper.nissa import Store, read
from esper.simic import sweep, training, trials
from esper.simic.ppo import PPOAgent
from esper.simic.training import CHECKPOINT
from esper.tamiyo import Learned
from esper.tolaria import PreviewConfig, ProofKey, families, open_test

ROUNDS, ROWS, SCENARIOS, PREVIEWS = 2, 8, 6, PreviewConfig(4, 2)
CONFIG = f"""rounds = {ROUNDS}
rows = {ROWS}
preview_every = {PREVIEWS.every}
preview_steps = {PREVIEWS.steps}
exam_every = 0
exam_rows = 2
network = {{ hidden = 16, slot = 8, candidate = 6, trunk = 12 }}
"""


@pytest.fixture(scope="module", autouse=True)
def _in_the_orchard() -> Iterator[None]:
    """Everybody trains and plays where scores are a table; commands know its family."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (sweep, trials, training):
            patch.setattr(module, "MorphogeneticEnv", Orchard)
        patch.setitem(families.FAMILIES, "orchard", FAMILY)
        yield


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two trained controllers, a and b."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "config.toml").write_text(CONFIG)
    for name, seed in (("a", 0), ("b", 1)):
        arguments = ["--family", "orchard", "--config", str(folder / "config.toml"), "--seed", str(seed)]
        assert main(["train", *arguments, "--out", str(folder / name)]) == 0
    return folder


@pytest.fixture(scope="module")
def asked() -> list[int]:
    """Episodes that controls were tuned with."""
    return []


@pytest.fixture(scope="module")
def proof(runs: Path, asked: list[int], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a proof about both and one that was not trained."""
    def quickly(family: Any, episodes: int, rows: int, **options: Any) -> Tuned:
        asked.append(episodes)
        return tune(family, episodes, rows, preview_steps=0, **options)

    out = tmp_path_factory.mktemp("proof") / "made" / "by it"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prove_cli, "tune", quickly)
        assert main(["prove", "--minds", f"{runs / 'a'}/", str(runs / "b"), "wait", "--rows", "64", "--scenarios", str(SCENARIOS),
                     "--pilot", "2", "--out", str(out)]) == 0
    return out


def strict(path: Path) -> dict[str, Any]:
    """JSON as the standard has it."""
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    told: dict[str, Any] = json.loads(path.read_text(), parse_constant=refuse)
    return told


def replay(run: Path, previews: PreviewConfig, greedy: bool) -> Delivered:
    court = Trials(FAMILY, previews, open_test(FAMILY.task, ProofKey("a test of the proof")))
    policy = Learned.load(run / CHECKPOINT, court.environment(1).spec, greedy=greedy)
    return court.play(policy, FAMILY.scenarios(SCENARIOS, "test"), previews=True)


def same(store: Path, name: str, done: Delivered) -> tuple[bool, bool]:
    """Is what a controller's arm (delivered, decided) the same?"""
    mine = "WHERE controller = ? AND arm = 'learned' ORDER BY scenario"
    rows = read(store, f"SELECT utility, score, params, flops FROM arm {mine}", name)
    decided = read(store, f"SELECT scenario, epoch, op, slot, blueprint FROM decision {mine}", name)
    delivered = torch.stack([done.utility, done.score, done.params.float(), done.flops], 1)
    return torch.equal(torch.tensor(rows), delivered), sorted(decided) == sorted(done.decisions)


def test_what_is_played_is_what_was_trained(runs: Path, proof: Path, asked: list[int]) -> None:
    """The controller of the checkpoint at its likeliest, with its own previews, against controls with as many episodes."""
    assert asked == [ROUNDS * ROWS]
    for name in ("a", "b"):
        assert same(proof / "proof.db", name, replay(runs / name, PREVIEWS, greedy=True)) == (True, True)
        assert same(proof / "proof.db", name, replay(runs / name, PREVIEWS, greedy=False)) == (False, False)
    assert not same(proof / "proof.db", "a", replay(runs / "a", PreviewConfig(4, 3), greedy=True))[0]
    assert not any(same(proof / "proof.db", "a", replay(runs / "b", PREVIEWS, greedy=True)))


def test_every_call_gives_a_policy_without_memories(runs: Path) -> None:
    mind, spec = candidate(str(runs / "a"), "cpu").mind, Orchard(FAMILY, 1).spec
    first, second = mind.make(spec), mind.make(spec)
    assert isinstance(first, Learned)
    assert isinstance(second, Learned)
    Trials(FAMILY).play(first, FAMILY.scenarios(2))
    assert first.hidden is not None
    assert second.hidden is None
    assert first.greedy
    assert second.greedy


def test_every_figure_is_in_one_file(runs: Path, proof: Path) -> None:
    result, store = strict(proof / "proof.json"), proof / "proof.db"
    assert result["version"] == __version__
    assert (result["family"], result["scenarios"]) == ("orchard", SCENARIOS)
    arms = {(row["controller"], row["arm"]): row for row in result["summary"]}
    assert set(arms) == set(read(store, "SELECT controller, arm FROM summary"))
    assert {controller for controller, _ in arms} == {"a", "b", "wait", "pooled"}
    figures = {"gain", "low", "high", "middle", "utility", "score", "params", "flops", "episodes"}
    assert all(figures <= row.keys() for row in arms.values())
    mean = read(store, "SELECT avg(utility) FROM arm WHERE controller = 'a' AND arm = 'learned'")[0][0]
    assert arms["a", "learned"]["utility"] == pytest.approx(mean, abs=1e-6)
    assert len(result["claims"]) == read(store, "SELECT count(*) FROM claim")[0][0] > 0
    for name in ("a", "b"):
        cost = read(runs / name / "run.db", "SELECT sum(host_epochs), sum(seconds) FROM round")[0]
        about = result["controllers"][name]
        assert (about["host_epochs"], about["seconds"], about["episodes"], about["rounds"]) == (*cost, ROUNDS * ROWS, ROUNDS)
    assert result["controllers"]["wait"] == {"run": None, "sha256": None} | dict.fromkeys(
        ("rounds", "episodes", "host_epochs", "seconds"), 0)
    assert len({about["sha256"] for about in result["controllers"].values()}) == 3
    assert not list(proof.glob("*.writing"))


def test_what_was_not_measured_is_null(tmp_path: Path) -> None:
    prove_cli._write(tmp_path / "proof.json", {"a": [{"b": float("nan"), "c": (1.5, float("-inf"))}]})
    assert strict(tmp_path / "proof.json") == {"a": [{"b": None, "c": [1.5, None]}]}


def test_a_full_disk_leaves_no_half_proof(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, text: str) -> None:
        path.write_bytes(text.encode()[:9])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(EsperError, match=r"cannot write .*proof.json: .*No space left.*free some space"):
        prove_cli._write(tmp_path / "proof.json", {"a": 1})
    assert not list(tmp_path.iterdir())


def test_the_commit_is_the_working_directorys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert prove_cli._commit() == ""
    who = ["-c", "user.name=n", "-c", "user.email=e"]
    for command in (["init", "-q"], [*who, "commit", "-q", "--allow-empty", "-m", "first"]):
        subprocess.run(["git", *command], check=True)
    assert len(prove_cli._commit()) >= 7
    monkeypatch.setenv("PATH", "")
    assert prove_cli._commit() == ""


Damage = Callable[[Path], object]


def described(**change: object) -> Damage:
    def damage(run: Path) -> None:
        told = json.loads((run / "run.json").read_text())
        config = {name: value for name, value in change.items() if name in told["config"]}
        rest = {name: value for name, value in change.items() if name not in config}
        (run / "run.json").write_text(json.dumps(told | {"config": told["config"] | config} | rest))

    return damage


def set_back(run: Path) -> None:
    agent = PPOAgent.load(run / CHECKPOINT)
    agent.updates = ROUNDS - 1
    agent.save(run / CHECKPOINT)


def forget(run: Path) -> None:
    store = Store(run / "run.db")
    store.connection.execute("DELETE FROM round WHERE round = 0")
    store.close()


DAMAGES: dict[str, tuple[str, Damage]] = {
    "bytes": ("run.json is damaged: ", lambda run: (run / "run.json").write_bytes(b"\xff")),
    "depth": ("run.json is damaged: ", lambda run: (run / "run.json").write_text("[" * 100_000)),
    "folder": ("cannot read ", lambda run: ((run / "run.json").unlink(), (run / "run.json").mkdir())),
    "family": ("does not name a family", described(family=["mlp"])),
    "no family": ("no family 'cats'", described(family="cats")),
    "previews": ("preview_every is 'x'", described(preview_every="x")),
    "nothing": ("is neither the folder of a run nor one of wait, random, heuristic", lambda run: (run / "run.json").unlink()),
    "no store": ("there is no run store", lambda run: (run / "run.db").unlink()),
    "half a store": ("tells of 1 of 2 rounds", forget),
    "no checkpoint": ("has no controller: ", lambda run: (run / CHECKPOINT).unlink()),
    "torn": ("cannot read a", lambda run: (run / CHECKPOINT).write_bytes((run / CHECKPOINT).read_bytes()[:999])),
    "stopped": ("is not over: 1 of 2 rounds", set_back),
    "other family": ("must be of one family; found mlp, orchard", described(family="mlp")),
    "other previews": ("with the same previews", described(preview_steps=3)),
    "pooled": ("cannot be called pooled", lambda run: run.rename(run.parent / "pooled")),
    "all": ("cannot be called all", lambda run: run.rename(run.parent / "all")),
}


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """What the command says, in one line."""
    capsys.readouterr()
    assert main(["prove", *map(str, arguments)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("esper prove: ")
    assert said.count("\n") == 1
    return said


@pytest.fixture
def _untuned(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*arguments: object, **options: object) -> None:
        raise AssertionError("it was tuned for nothing")

    monkeypatch.setattr(prove_cli, "tune", never)


@pytest.mark.usefixtures("_untuned")
@pytest.mark.parametrize("kind", DAMAGES)
def test_bad_runs_are_one_sentence_before_anything_is_tuned(kind: str, runs: Path, tmp_path: Path,
                                                            capsys: pytest.CaptureFixture[str]) -> None:
    message, damage = DAMAGES[kind]
    shutil.copytree(runs / "b", tmp_path / "c")
    damage(tmp_path / "c")
    (folder,) = tmp_path.iterdir()
    assert message in refused(capsys, "--minds", runs / "a", folder, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("_untuned")
def test_one_controller_is_not_two(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(runs / "a", tmp_path / "c")
    said = refused(capsys, "--minds", runs / "a", runs / "b", tmp_path / "c", "--out", tmp_path / "out")
    assert "--minds a and c are the same controller; train it with another --seed" in said


@pytest.mark.usefixtures("_untuned")
@pytest.mark.parametrize(("message", "arguments"), [
    ("cannot make --out /proc/x/y: ", ["--out", "/proc/x/y"]), ("cannot make --out /dev/null/x: ", ["--out", "/dev/null/x"]),
    ("is a file; name a folder", ["--out", "/dev/null"]), ("cannot make --out", ["--out", f"/tmp/{'x' * 300}"]),
    ("--effect is nan", ["--effect", "nan"]), ("--effect is inf", ["--effect", "inf"]), ("--effect is 0", ["--effect", "0"]),
    ("--effect is 1e-300", ["--effect", "1e-300"]), ("a proof needs scenarios", ["--scenarios", "0"]),
    ("a pilot of at least 2", ["--pilot", "1"]), ("cannot open the run store", ["--out", "/proc"]),
    ("neither the folder", ["--minds", "/dev/null"]), ("cannot read xxx", ["--minds", "x" * 300]),
])
def test_bad_options_are_one_sentence_before_anything_is_tuned(message: str, arguments: list[str], tmp_path: Path,
                                                               capsys: pytest.CaptureFixture[str]) -> None:
    given = {"--minds": "wait", "--family": "orchard", "--out": str(tmp_path / "out")} | dict([arguments])
    assert message in refused(capsys, *(word for pair in given.items() for word in pair))
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("_untuned")
def test_what_lies_in_the_way_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--minds", "wait", "--family", "orchard", "--out", tmp_path]
    (tmp_path / "proof.db").mkdir()
    assert "cannot remove what an earlier proof left" in refused(capsys, *options)
    (tmp_path / "proof.db").rmdir()
    (tmp_path / "controls.json").write_text("[]")
    assert "cannot read tuned controls" in refused(capsys, *options)


def test_a_controller_that_cannot_act_there_is_refused(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from esper.tamiyo import controller

    seen = controller.OBSERVATION
    monkeypatch.setattr(controller, "OBSERVATION", type(seen)(seen.row[:-1], seen.slot, seen.candidate))
    with pytest.raises(EsperError, match="sees other row fields"):
        prove_cli.run(Prove((str(runs / "a"),), tmp_path / "out"), Console(file=sys.stderr))
    assert not (tmp_path / "out").exists()


def test_a_rehearsal_is_no_proof_and_leaves_its_controls_to_one(runs: Path, proof: Path, tmp_path: Path,
                                                                capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copy(proof / "controls.json", tmp_path)
    words = ["prove", "--minds", str(runs / "a"), "--scenarios", str(SCENARIOS), "--pilot", "2", "--out", str(tmp_path)]
    assert main([*words, "--rehearsal"]) == 0
    told = json.loads((tmp_path / "rehearsal.json").read_text())
    assert told["verdict"] == "rehearsal"
    assert "it proves nothing" in told["reason"]
    page = (tmp_path / "rehearsal.html").read_text()
    assert "<h1>Rehearsal: orchard</h1>" in page
    assert not (tmp_path / "proof.json").exists()
    before = (tmp_path / "controls.json").read_bytes()
    assert main(words) == 0
    assert (tmp_path / "controls.json").read_bytes() == before
    assert "<h1>Proof: orchard</h1>" in (tmp_path / "proof.html").read_text()
    capsys.readouterr()
    assert main([*words, "--rehearsal"]) == 2
    assert "already holds a rehearsal" in capsys.readouterr().err
