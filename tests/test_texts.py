"""The list of texts keeps its rule, the command makes the tasks it lists or says in one sentence why not, and the gap of plans on
them is found where there is one."""

import hashlib
import json
import sys
import tarfile
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from experiments import texts, texts_gap

from esper.simic.proof.plans import Plan
from esper.simic.proof.surveyed import PlanTable
from esper.tolaria import Task, load_task
from esper.tolaria.own import NAME, known
from esper.tolaria.tasks import remove_task

FIRST, SECOND = b"what comes first, " * 4_000, b"and what follows. " * 4_000
LISTED = json.loads(texts.LIST.read_text())["sources"]


def test_the_list_is_well_formed_and_no_package_is_in_two_sources() -> None:
    for source in LISTED:
        assert source.keys() == {"name", "package", "files", "about", "split", "digest"}
        assert NAME.fullmatch(texts.task_of(source))
    for what in ("name", "package", "digest"):
        assert len({source[what] for source in LISTED}) == len(LISTED)


def test_the_splits_follow_the_rule() -> None:
    free = sorted((hashlib.sha256(b"esper universe 2 " + source["name"].encode()).hexdigest(), source["split"])
                  for source in LISTED if source["name"] != "moby")
    assert [split for _, split in free] == ["test"] * 12 + ["validation"] * 6 + ["training"] * (len(free) - 18)
    assert {source["split"] for source in LISTED if source["name"] == "moby"} == {"training"}


def test_stretches_are_spread_over_the_whole_text_and_shuffled() -> None:
    text = b"".join(number.to_bytes(4, "big") for number in range(50_000))
    kept = texts.stretches(text)
    each = [kept[at : at + 512] for at in range(0, len(kept), 512)]
    places = [text.find(stretch) for stretch in each]
    assert len(set(each)) == 128
    assert (min(places), max(places)) == (0, len(text) - 512)
    assert max(np.diff(sorted(places))) <= min(np.diff(sorted(places))) + 1, "evenly spaced"
    assert places != sorted(places)
    assert places[0] != 0


def pack(folder: Path, **files: bytes) -> None:
    """A package of these files, as `npm pack` writes it."""
    with tarfile.open(folder / "made-up-1.0.0.tgz", "w:gz") as held:
        for name, content in files.items():
            entry = tarfile.TarInfo(f"package/{name}.txt")
            entry.size = len(content)
            held.addfile(entry, BytesIO(content))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of two files that are read and one that is not, and a list that was fixed by it."""
    monkeypatch.setenv("ESPER_DATA", str(tmp_path / "data"))
    monkeypatch.setattr(texts, "LIST", tmp_path / "texts.json")
    pack(tmp_path, part_b=SECOND, part_a=FIRST, other=b"#" * 9_000)
    source = {"name": "toy", "package": "@made/up@1.0.0", "files": "package/part*.txt", "about": "nothing"}
    texts.LIST.write_text(json.dumps({"about": [], "sources": [source]}))
    call(monkeypatch, tmp_path, "--fix")
    return tmp_path


def call(monkeypatch: pytest.MonkeyPatch, *words: object) -> None:
    monkeypatch.setattr(sys, "argv", ["texts", *map(str, words)])
    texts.main()


def refusal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: object) -> str:
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        call(monkeypatch, *words)
    assert ended.value.code == 2
    line, = capsys.readouterr().err.splitlines()
    return line


def test_a_text_becomes_a_task_of_the_files_that_are_named(folder: Path) -> None:
    (source,) = json.loads(texts.LIST.read_text())["sources"]
    assert source["split"] == "test"
    task = load_task("toy-t").task
    assert (task.host, task.inputs, task.digest) == ("gpt", (16,), source["digest"])
    assert str(ord("#")) not in task.names
    assert texts.read(folder, source) == texts.stretches(FIRST + SECOND)


def test_what_is_there_needs_no_package_and_what_is_not_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch,
                                                                 capsys: pytest.CaptureFixture[str]) -> None:
    call(monkeypatch, folder / "nowhere")
    assert "test: 1 texts: toy-t" in capsys.readouterr().out
    remove_task("toy-t")
    assert refusal(monkeypatch, capsys, folder / "nowhere").endswith("with: npm pack @made/up@1.0.0")
    (folder / "made-up-1.0.0.tgz").write_bytes(b"none")
    assert "cannot read toy" in refusal(monkeypatch, capsys, folder)
    assert not known("toy-t")


def test_another_text_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    remove_task("toy-t")
    pack(folder, part_a=FIRST, part_b=SECOND[::-1])
    assert "toy-t became another task than the list says; is it @made/up@1.0.0?" in refusal(monkeypatch, capsys, folder)
    pack(folder, part_a=b"short")
    assert "toy has 5 bytes, too few" in refusal(monkeypatch, capsys, folder)
    assert not known("toy-t")
    Task.from_text("toy-t", FIRST.decode(), 16)
    assert "there is another task toy-t; remove it" in refusal(monkeypatch, capsys, folder)


def made_up(gain: np.ndarray, noise: float) -> PlanTable:
    """Twelve texts with four runs each, on which plans gain so much [12, 3], and no parameters or FLOPs to pay for."""
    rng, group = np.random.default_rng(0), np.repeat(np.arange(12), 4)
    runs = np.zeros((48, 4, 3))
    runs[:, 1:, 0] = gain[group] + noise * rng.normal(size=(48, 3))
    plans = (Plan((None, None)), Plan(("glu", None)), Plan((None, "glu")), Plan(("norm", None)))
    return PlanTable(plans, group, np.tile([12, 12, 18, 18], 12), rng.normal(size=(48, 3, 2)), runs)


def worth(table: PlanTable) -> dict[str, float]:
    regime, half = np.tile([0, 1, 0, 1], 12), np.tile([0, 0, 1, 1], 12)
    return {name: float(each.mean()) for name, each in texts_gap.levels(table, [(0.0, 0.0)], regime, half).items()}


def test_what_knowing_the_text_is_worth_is_found_where_there_is_something_and_only_there() -> None:
    side = np.arange(12)[:, None] % 2
    differ = worth(made_up(np.concatenate([0.06 * side, 0.06 * (1 - side), 0.01 + 0 * side], 1), 0.001))
    drawn = "for each price and text, drawn towards the others"
    assert differ["one fixed plan"] < 0.035
    assert min(differ["for each price and text"], differ[drawn], differ["for each price, text and regime"]) > 0.055
    alike = worth(made_up(np.tile([0.03, 0.02, 0.0], (12, 1)), 0.02))
    assert alike["one fixed plan"] == alike["for each price"] == pytest.approx(0.03, abs=0.007)
    assert alike["for each price and text"] < alike[drawn], "few runs mislead who believes them alone"
    assert alike[drawn] == pytest.approx(alike["one fixed plan"], abs=0.003)
    assert alike["the same, chosen and scored on the same runs"] > alike["one fixed plan"] + 0.003, "it flatters itself"
