"""`esper prove` on runs of `esper train`: plays what was trained, tells it all, refuses bad runs at once."""

import functools
import json
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from experiments.orchard import FAMILY, Orchard
from rich.console import Console

from esper import __version__
from esper.cli import main, prove, train
from esper.cli.options import Prove
from esper.cli.prove import load_candidates, resolve_env
from esper.cli.runs import load_run, write_description
from esper.leyline import EsperError, provenance
from esper.leyline.codec import to_dict
from esper.leyline.storage import read_json, write_json
from esper.nissa import Store, read
from esper.simic.ppo import PPOAgent
from esper.simic.proof.baselines import Tuned, tune
from esper.simic.proof.claims import FEWEST
from esper.simic.proof.evaluator import Evaluator
from esper.simic.training import CHECKPOINT
from esper.tamiyo import Learned, controller
from esper.tolaria import FAMILIES, EnvConfig, Episodes, PreviewConfig, ProofKey, open_test, openings

ROUNDS, ROWS, PREVIEWS = 2, 8, PreviewConfig(4, 2)
CONFIG = f"""rounds = {ROUNDS}
rows = {ROWS}
exam_every = 0
exam_rows = 2
network = {{ hidden = 16, slot = 8, candidate = 6, trunk = 12 }}
env = {{ previews = {{ every = {PREVIEWS.every}, steps = {PREVIEWS.steps} }} }}
"""
SIZES = ["--scenarios", str(FEWEST), "--pilot", "2", "--effect", "1"]
"""The least that can be asked for: no pilot needs more to find an effect of 1."""


@pytest.fixture(scope="module", autouse=True)
def _in_the_orchard() -> Iterator[None]:
    """Everybody trains and plays where scores are a table; commands know its family; proofs begin with 0."""
    with pytest.MonkeyPatch.context() as patch:
        for module, name in ((prove, "prove"), (prove, "Evaluator"), (train, "Training")):
            patch.setattr(module, name, functools.partial(getattr(module, name), make=Orchard))
        patch.setitem(FAMILIES, "orchard", FAMILY)
        patch.setattr(secrets, "randbits", lambda bits: 0)
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
    def quickly(evaluator: Evaluator, episodes: int, rows: int, **options: Any) -> Tuned:
        asked.append(episodes)
        return tune(evaluator, episodes, rows, preview_steps=0, **options)

    out = tmp_path_factory.mktemp("proof") / "made" / "by it"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prove, "tune", quickly)
        assert main(["prove", "--minds", f"{runs / 'a'}/", str(runs / "b"), "wait", "--rows", "256", *SIZES,
                     "--out", str(out)]) == 1
    return out


def strict(path: Path) -> dict[str, Any]:
    """JSON as the standard has it."""
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    told: dict[str, Any] = json.loads(path.read_text(), parse_constant=refuse)
    return told


def replay(run: Path, previews: PreviewConfig, greedy: bool) -> Episodes:
    held = open_test(FAMILY.task, ProofKey("a test of the proof"))
    court = Evaluator(EnvConfig(FAMILY, previews=previews), held, Orchard)
    policy = Learned.load(run / CHECKPOINT, court.config.spec, greedy=greedy)
    return court.play(policy, FAMILY.scenarios(FEWEST, "test"), previews=True)


def same(store: Path, name: str, done: Episodes) -> tuple[bool, bool]:
    """Is what a controller's arm (delivered, decided) the same?"""
    mine = "WHERE controller = ? AND arm = 'learned' ORDER BY scenario"
    rows = read(store, f"SELECT utility, score, params, flops FROM arm {mine}", name)
    decided = read(store, f"SELECT scenario, epoch, op, slot, blueprint FROM decision {mine}", name)
    delivered = torch.stack([done.utility(), done.delivered.score, done.params.float(), 1 + done.spent], 1)
    return torch.equal(torch.tensor(rows), delivered), sorted(decided) == sorted(done.decisions())


def test_what_is_played_is_what_was_trained(runs: Path, proof: Path, asked: list[int]) -> None:
    """The checkpoint's controller at its likeliest, with its own previews; controls had as many episodes."""
    assert asked == [ROUNDS * ROWS]
    for name in ("a", "b"):
        assert same(proof / "proof.db", name, replay(runs / name, PREVIEWS, greedy=True)) == (True, True)
        assert same(proof / "proof.db", name, replay(runs / name, PREVIEWS, greedy=False)) == (False, False)
    assert not same(proof / "proof.db", "a", replay(runs / "a", PreviewConfig(4, 3), greedy=True))[0]
    assert not any(same(proof / "proof.db", "a", replay(runs / "b", PREVIEWS, greedy=True)))


def test_every_call_gives_a_policy_without_memories(runs: Path) -> None:
    (one,) = load_candidates(str(runs / "a"), "cpu")
    first, second = (one.make(EnvConfig(FAMILY).spec) for _ in range(2))
    assert isinstance(first, Learned)
    assert isinstance(second, Learned)
    Evaluator(FAMILY, make=Orchard).play(first, FAMILY.scenarios(2))
    assert first.hidden is not None
    assert second.hidden is None
    assert first.greedy
    assert second.greedy


def test_every_figure_is_in_one_file(runs: Path, proof: Path) -> None:
    result, store = strict(proof / "proof.json"), proof / "proof.db"
    assert result["version"] == __version__
    assert (result["family"], result["scenarios"]) == ("orchard", FEWEST)
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
        found = tuple(about[what] for what in ("host_epochs", "seconds", "episodes", "rounds"))
        assert found == (*cost, ROUNDS * ROWS, ROUNDS)
    assert result["controllers"]["wait"] == {"run": None, "sha256": None} | dict.fromkeys(
        ("rounds", "episodes", "host_epochs", "seconds"), 0)
    assert len({about["sha256"] for about in result["controllers"].values()}) == 3
    assert not list(proof.glob("*.writing"))


def test_what_was_not_measured_is_null(tmp_path: Path) -> None:
    told = {"a": [{"b": float("nan"), "c": (1.5, float("-inf"))}]}
    write_json(tmp_path / "proof.json", "proof", prove._finite(told))
    assert strict(tmp_path / "proof.json")["a"] == [{"b": None, "c": [1.5, None]}]


def test_a_full_disk_leaves_no_half_proof(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write

    def full(file: int, data: bytes) -> int:
        real(file, data[:9])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(EsperError, match=r"cannot write .*proof.json: .*No space left.*free some space"):
            write_json(tmp_path / "proof.json", "proof", {"a": 1})
    assert not list(tmp_path.iterdir())


def test_the_commit_is_the_working_directorys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert provenance._commit() == ""
    who = ["-c", "user.name=n", "-c", "user.email=e"]
    for command in (["init", "-q"], [*who, "commit", "-q", "--allow-empty", "-m", "first"]):
        subprocess.run(["git", *command], check=True)
    assert len(provenance._commit()) >= 7
    monkeypatch.setenv("PATH", "")
    assert provenance._commit() == ""


Damage = Callable[[Path], object]


def described(**change: object) -> Damage:
    """Its description says something else about the environment, and is signed."""
    def damage(run: Path) -> None:
        told = read_json(run / "run.json", "run")
        told["config"]["env"] |= change
        write_json(run / "run.json", "run", {name: told[name] for name in told if name not in ("kind", "schema")})

    return damage


def trained_with(**change: Any) -> Damage:
    """As if it had been trained with other settings from the beginning."""
    def damage(run: Path) -> None:
        found = load_run(run)
        assert found is not None
        config, about = found
        env = {name: value for name, value in change.items() if hasattr(config.env, name)}
        rest = {name: value for name, value in change.items() if name not in env}
        other = replace(config, env=replace(config.env, **env), **rest)
        write_description(run, other, about)
        saved(run, PPOAgent.load(run / CHECKPOINT))

    return damage


def saved(run: Path, agent: PPOAgent) -> None:
    found = load_run(run)
    assert found is not None
    agent.save(run / CHECKPOINT, run=found[0].identity, env=to_dict(found[0].env))


def set_back(run: Path) -> None:
    agent = PPOAgent.load(run / CHECKPOINT)
    agent.updates = ROUNDS - 1
    saved(run, agent)


def forget(run: Path) -> None:
    store = Store(run / "run.db")
    store.connection.execute("DELETE FROM round WHERE round = 0")
    store.close()


def begin_again(run: Path) -> None:
    for path in run.glob("run.db*"):
        path.unlink()
    store = Store(run / "run.db")
    store.write("round", {"round": 0, "episodes": ROWS})
    store.commit()
    store.close()


def edit(run: Path) -> None:
    text = (run / "run.json").read_text()
    (run / "run.json").write_text(text.replace('"rounds": 2', '"rounds": 1'))


NOBODY = "is neither the folder of a run nor one of tamiyo-small, wait, random, heuristic"
DAMAGES: dict[str, tuple[str, Damage]] = {
    "bytes": ("cannot read a run from ", lambda run: (run / "run.json").write_bytes(b"\xff")),
    "depth": ("cannot read a run from ", lambda run: (run / "run.json").write_text("[" * 100_000)),
    "folder": ("it is not a file", lambda run: ((run / "run.json").unlink(), (run / "run.json").mkdir())),
    "edited": ("run.json does not match its checksum", edit),
    "family": ("family is ['mlp']; expected a table of keys", described(family=["mlp"])),
    "no task": ("no task 'cats'", described(family=to_dict(FAMILY) | {"task": "cats"})),
    "previews": ("every is 'x'; expected a whole number", described(previews={"every": "x", "steps": 1})),
    "nothing": (NOBODY, lambda run: (run / "run.json").unlink()),
    "no store": ("there is no run store", lambda run: (run / "run.db").unlink()),
    "a store with a hole": ("run.db is damaged: the rows of round 0", forget),
    "half a store": ("tells of 1 of 2 rounds", begin_again),
    "no checkpoint": ("has no controller; ", lambda run: (run / CHECKPOINT).unlink()),
    "torn": ("cannot read a", lambda run: (run / CHECKPOINT).write_bytes((run / CHECKPOINT).read_bytes()[:999])),
    "stopped": ("is not over: 1 of 2 rounds", set_back),
    "other run": ("belongs to another run", described(incubation="straight_through")),
    "other family": ("must be of one family; found orchard, p", trained_with(family=replace(FAMILY, name="p"))),
    "other previews": ("trained in equal environments", trained_with(previews=PreviewConfig(4, 3))),
    "other seed": ("are runs of one seed, so they are not independent", trained_with(seed=0)),
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

    monkeypatch.setattr(prove, "tune", never)


@pytest.mark.usefixtures("_untuned")
@pytest.mark.parametrize("kind", DAMAGES)
def test_bad_runs_are_one_sentence_before_anything_is_tuned(kind: str, runs: Path, tmp_path: Path,
                                                            capsys: pytest.CaptureFixture[str]) -> None:
    message, damage = DAMAGES[kind]
    shutil.copytree(runs / "b", tmp_path / "c")
    damage(tmp_path / "c")
    (folder,) = tmp_path.iterdir()
    assert message in refused(capsys, "--rehearsal", "--minds", runs / "a", folder, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("_untuned")
def test_one_controller_is_not_two(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(runs / "a", tmp_path / "c")
    said = refused(capsys, "--minds", runs / "a", runs / "b", tmp_path / "c", "--out", tmp_path / "out")
    assert "--minds a and c are the same controller, so they are not independent; train one with another" in said


@pytest.mark.usefixtures("_untuned")
def test_fewer_than_three_leave_the_test_split_closed(runs: Path, tmp_path: Path,
                                                      capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "--minds", runs / "a", runs / "b", "--out", tmp_path / "out")
    assert "2 controllers are no finding, which needs 3; the test split stays closed. Add --rehearsal" in said
    assert openings(FAMILY.task) == []
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("_untuned")
@pytest.mark.parametrize(("message", "arguments"), [
    ("cannot make --out '/proc/x/y': ", ["--out", "/proc/x/y"]),
    ("cannot make --out '/dev/null/x': ", ["--out", "/dev/null/x"]),
    ("is a file; name a folder", ["--out", "/dev/null"]), ("cannot make --out", ["--out", f"/tmp/{'x' * 300}"]),
    ("--effect is nan", ["--effect", "nan"]), ("--effect is inf", ["--effect", "inf"]),
    ("--effect is 0", ["--effect", "0"]), ("--effect is 1e-300", ["--effect", "1e-300"]),
    ("a proof needs scenarios", ["--scenarios", "0"]),
    ("a pilot of at least 2", ["--pilot", "1"]), ("cannot lock /proc: ", ["--out", "/proc"]),
    ("neither the folder", ["--minds", "/dev/null"]), ("neither the folder", ["--minds", "x" * 300]),
])
def test_bad_options_are_one_sentence_before_anything_is_tuned(message: str, arguments: list[str], tmp_path: Path,
                                                               capsys: pytest.CaptureFixture[str]) -> None:
    given = {"--minds": "wait", "--family": "orchard", "--out": str(tmp_path / "out")} | dict([arguments])
    assert message in refused(capsys, "--rehearsal", *(word for pair in given.items() for word in pair))
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("_untuned")
def test_what_lies_in_the_way_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--minds", "wait", "random", "heuristic", "--family", "orchard", "--out", tmp_path]
    (tmp_path / "proof.db").mkdir()
    assert "cannot remove what an earlier proof left" in refused(capsys, *options)
    (tmp_path / "proof.db").rmdir()
    (tmp_path / "controls.json").write_text("[]")
    assert "cannot read tuned controls" in refused(capsys, *options)


@pytest.mark.usefixtures("_untuned")
def test_a_proof_removes_what_is_its_own_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                               monkeypatch: pytest.MonkeyPatch) -> None:
    mine = ("rehearsal.db", "rehearsal.db-wal", "rehearsal.db-shm")
    others = ("rehearsal.db.backup", "proof.db", "proof.db-wal")
    for name in (*mine, *others):
        (tmp_path / name).write_text(f"{name} as it was")

    def stop(*arguments: object, **options: object) -> None:
        raise EsperError("that is enough")

    monkeypatch.setattr(prove, "tune", stop)
    options = ["--rehearsal", "--minds", "wait", "--family", "orchard", "--out", tmp_path]
    assert "that is enough" in refused(capsys, *options)
    assert all((tmp_path / name).read_text() == f"{name} as it was" for name in others)
    assert read(tmp_path / "rehearsal.db", "SELECT count(*) FROM arm") == [(0,)]
    assert not any((tmp_path / name).exists() and b"as it was" in (tmp_path / name).read_bytes() for name in mine)


def test_what_is_asked_is_declared_before_the_pilot(proof: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                    capsys: pytest.CaptureFixture[str]) -> None:
    """A proof that did not end can be taken up again, but not with another question."""
    declared: list[dict[str, Any]] = []

    def pilot(*arguments: object, **options: object) -> None:
        declared.append(read_json(tmp_path / "declaration.json", "declaration"))
        raise EsperError("the pilot was about to begin")

    monkeypatch.setattr(prove, "prove", pilot)
    shutil.copy(proof / "controls.json", tmp_path)
    options = ["--minds", "wait", "random", "heuristic", "--family", "orchard", "--out", tmp_path]
    for _ in range(2):
        assert "the pilot was about to begin" in refused(capsys, *options, "--effect", "0.03")
    assert declared[0] == declared[1]
    assert (declared[0]["effect"], declared[0]["scenarios"], declared[0]["pilot"]) == (0.03, 256, 64)
    assert declared[0]["family"] == to_dict(FAMILY)
    assert list(declared[0]["controllers"]) == ["wait", "random", "heuristic"]
    said = refused(capsys, *options, "--effect", "0.04", "--scenarios", "99")
    assert "declaration.json declared another effect, scenarios; keep to it, or choose another --out" in said
    assert len(declared) == 2


def test_a_shipped_mind_can_be_named() -> None:
    """It has a controller for every family, each in an environment like the one it was trained in."""
    members = load_candidates("tamiyo-small", "cpu")
    assert [one.name for one in members] == [f"tamiyo-small ({name})" for name in ("mlp", "mnist1d", "fashion")]
    with pytest.raises(EsperError, match="must be of one family; found fashion, mlp, mnist1d"):
        resolve_env(members, "", "cpu")
    (nobody,) = load_candidates("wait", "cpu")
    for one, previews in zip(members, (None, PreviewConfig(20, 20), PreviewConfig(20, 20)), strict=True):
        env = resolve_env([one, nobody], "", "cpu")
        assert (env.previews, one.episodes > 6000) == (previews, True)
        assert isinstance(one.make(env.spec), Learned)


def test_a_mind_without_a_member_for_the_family_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["prove", "--minds", "tamiyo-small", "--family", "digits", "--rehearsal", "--out", str(tmp_path / "proof")]
    assert main(arguments) == 2
    assert "none of --minds tamiyo-small was trained on the family digits" in capsys.readouterr().err
    assert not (tmp_path / "proof").exists()


def test_a_controller_that_cannot_act_there_is_refused(runs: Path, tmp_path: Path,
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    eyes = controller.EYES["family"]
    seen = eyes.spec
    monkeypatch.setitem(controller.EYES, "family", eyes._replace(spec=type(seen)(seen.row[:-1], seen.slot, seen.candidate)))
    with pytest.raises(EsperError, match="sees other row fields"):
        prove.run(Prove((str(runs / "a"),), tmp_path / "out", rehearsal=True), Console(file=sys.stderr))
    assert not (tmp_path / "out").exists()


def test_a_rehearsal_is_no_proof_and_leaves_its_controls_to_one(runs: Path, proof: Path, tmp_path: Path,
                                                                capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copy(proof / "controls.json", tmp_path)
    words = ["prove", *SIZES, "--out", str(tmp_path), "--minds", str(runs / "a")]
    assert main([*words, "--rehearsal"]) == 0
    told = json.loads((tmp_path / "rehearsal.json").read_text())
    assert told["verdict"] == "rehearsal"
    assert "it proves nothing" in told["reason"]
    assert told["openings of the test split"] == "none: it is closed"
    assert openings(FAMILY.task) == []
    page = (tmp_path / "rehearsal.html").read_text()
    assert "<h1>Rehearsal: orchard</h1>" in page
    assert not (tmp_path / "proof.json").exists()
    assert not (tmp_path / "declaration.json").exists()
    before = (tmp_path / "controls.json").read_bytes()
    assert main([*words, "wait", "random"]) == 1
    assert (tmp_path / "controls.json").read_bytes() == before
    assert "<h1>Proof: orchard</h1>" in (tmp_path / "proof.html").read_text()
    capsys.readouterr()
    assert main([*words, "--rehearsal"]) == 2
    assert "already holds a rehearsal" in capsys.readouterr().err
