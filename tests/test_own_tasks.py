"""Users' own tasks: every format through the command, splits without leakage, and one sentence for all that can be wrong."""

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import IterableDataset, TensorDataset

import esper
from esper.cli import main
from esper.tolaria import files, own, tasks
from esper.tolaria.tasks import ProofKey, Task, TaskData, find_task, load_task, open_test, task_digest, where
from tests.test_tasks import write_cifar

KEY = ProofKey("tests")
NUMBERS = np.random.default_rng(0)
X, Y = NUMBERS.normal(3, 2, (60, 4)), np.arange(60) % 3


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty data directory that does not exist yet."""
    monkeypatch.setenv("ESPER_DATA", str(tmp_path / "data"))
    return tmp_path / "data"


def added(path: Path, *words: str) -> tuple[Task, TaskData, tuple[torch.Tensor, torch.Tensor]]:
    assert main(["tasks", "add", "mine", str(path), *words]) == 0
    return find_task("mine"), load_task("mine"), open_test("mine", KEY)


def csv(path: Path, rows: list[Any], header: str = "a,b,label") -> Path:
    path.write_text("\n".join([header, *(",".join(map(str, row)) for row in rows)]) + "\n")
    return path


def image(path: Path, size: tuple[int, int] = (5, 4), mode: str = "RGB") -> None:
    path.parent.mkdir(exist_ok=True, parents=True)
    shape = size[::-1] if mode == "L" else (*size[::-1], 3)
    Image.fromarray(NUMBERS.integers(0, 256, shape, np.uint8)).save(path)


def pictures(folder: Path, modes: tuple[str, ...] = ("RGB",)) -> Path:
    for number in range(24):
        image(folder / ["cat", "dog"][number % 2] / f"{number}.png", mode=modes[number % len(modes)])
    (folder / "cat" / ".DS_Store").write_text("hidden")
    return folder


def test_npz(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", x=X, y=Y + 7)
    task, loaded, (test_x, _) = added(tmp_path / "x.npz")
    assert (task.host, task.inputs, task.classes, task.sizes) == ("mlp", (4,), 3, (36, 12, 12))
    assert (task.objective, task.names) == ("classification", ("7", "8", "9"))
    assert torch.allclose(loaded.x.mean(0), torch.zeros(4), atol=1e-5), "each feature by itself"
    assert torch.allclose(loaded.x.std(0, correction=0), torch.ones(4), atol=1e-5)
    assert test_x.shape == (12, 4)


def test_csv_of_classes_by_name(tmp_path: Path) -> None:
    rows = [(f"{a:.3f}", ["red", "blue"][i % 2], f" {b:.3f}") for i, (a, b) in enumerate(X[:, :2])]
    task, loaded, _ = added(csv(tmp_path / "x.csv", rows, "a,colour,b"), "--target", "colour")
    assert (task.names, task.inputs, task.objective) == (("blue", "red"), (2,), "classification")
    assert loaded.y.dtype == torch.int64


def test_csv_of_numbers_is_standardised_and_can_be_undone(tmp_path: Path) -> None:
    target = 1000 + 50 * X[:, 0]
    task, loaded, (_, test_y) = added(csv(tmp_path / "x.csv", [(*x[:2], y) for x, y in zip(X, target, strict=True)]))
    assert (task.objective, task.classes, loaded.y.dtype) == ("regression", 1, torch.float32)
    assert abs(float(loaded.y.mean())) < 1e-6
    assert abs(float(loaded.y.std(correction=0)) - 1) < 1e-6
    restored = torch.cat([loaded.y, loaded.validation_y, test_y]).double() * task.deviation + task.mean
    np.testing.assert_allclose(np.sort(restored), np.sort(target), rtol=1e-6)


@pytest.mark.parametrize(("count", "objective"), [(20, "classification"), (21, "regression")])
def test_few_whole_numbers_look_like_classes(count: int, objective: str, tmp_path: Path) -> None:
    rows = [(NUMBERS.normal(), 0, i % count) for i in range(800)]
    assert added(csv(tmp_path / "x.csv", rows))[0].objective == objective


def tsv(path: Path, count: int, first: int = 0) -> Path:
    lines = ("\t".join(map(str, [-1 if i % 2 else 1, *np.sin(np.arange(8.0) * (i + first + 1))])) for i in range(count))
    path.write_text("\n".join(lines))
    return path


def test_series_with_a_published_test_split(tmp_path: Path) -> None:
    path, beside = tsv(tmp_path / "A_TRAIN.tsv", 40), tsv(tmp_path / "A_TEST.tsv", 13, first=36)
    task, loaded, (test_x, test_y) = added(path)
    assert (task.host, task.inputs, task.names) == ("conv1d", (1, 8), ("-1", "1"))
    assert task.sizes == (27, 9, 13), "four samples that are also tests do not train"
    assert torch.equal(test_y, (torch.arange(13) + 1) % 2), "in the order of the file"
    assert not shared(loaded.x, test_x)
    beside.unlink()
    assert added(path, "--replace")[0].sizes == (24, 8, 8)


@pytest.mark.parametrize(("modes", "channels"), [(("RGB",), 3), (("L",), 1), (("RGB", "L"), 3)])
def test_a_folder_of_pictures(modes: tuple[str, ...], channels: int, tmp_path: Path) -> None:
    task, loaded, _ = added(pictures(tmp_path / "pets", modes))
    assert (task.host, task.inputs, task.names) == ("cnn", (channels, 4, 5), ("cat", "dog"))
    assert torch.allclose(loaded.x.mean((0, 2, 3)), torch.zeros(channels), atol=1e-5)


def test_text(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_bytes(text := b"to be or not to be, that is the question. " * 20)
    task, loaded, (test_x, test_y) = added(tmp_path / "x.txt", "--context", "8")
    vocabulary = sorted(set(text))
    assert (task.host, task.inputs, task.objective) == ("gpt", (8,), "next_token")
    assert (task.names, task.classes) == (tuple(map(str, vocabulary)), len(vocabulary))
    assert loaded.x.dtype == loaded.y.dtype == torch.int64
    parts = ((loaded.x, loaded.y, 0), (loaded.validation_x, loaded.validation_y, 672), (test_x, test_y, 756))
    for x, y, start in parts:
        told = bytes(vocabulary[token] for token in x.flatten())
        assert told == text[start:][: len(told)]
        assert torch.equal(x.flatten()[1:], y.flatten()[:-1])
    assert [len(x) for x, _, _ in parts] == [(672 - 1) // 8, (84 - 1) // 8, (84 - 1) // 8]
    shares = loaded.y.flatten().bincount() / loaded.y.numel()
    assert task.entropy == pytest.approx(-sum(p * math.log(p) for p in shares.tolist() if p), rel=1e-5)
    assert json.loads((own.folder() / "mine.json").read_text())["task"]["names"] == list(task.names)
    csv(tmp_path / "x.csv", [("abc", 1)] * 99)
    assert added(tmp_path / "x.csv", "--objective", "next-token", "--context", "4", "--replace")[0].host == "gpt"


def test_own_tokens_are_renumbered() -> None:
    tokens = NUMBERS.integers(0, 3, (20, 6)) * 1000
    task = Task.from_arrays("tokens", tokens, objective="next_token")
    loaded = load_task("tokens")
    assert (task.inputs, task.names, task.sizes) == ((5,), ("0", "1000", "2000"), (12, 4, 4))
    assert torch.equal(loaded.x[:, 1:], loaded.y[:, :-1])


def test_tensors_lists_and_datasets_make_the_same_task() -> None:
    first = Task.from_arrays("a", X, Y)
    for x, y in ((torch.from_numpy(X), torch.from_numpy(Y)), (X.tolist(), Y.tolist()), (X[::-1], Y[::-1])):
        assert Task.from_arrays("a", x, y) == first, "the order of samples does not matter either"
    assert Task.from_dataset("a", TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))) == first
    names = np.array(["u", "v", "w"], dtype=object)
    assert Task.from_arrays("b", X, names[Y]).names == ("u", "v", "w")


def shared(*parts: torch.Tensor) -> bool:
    """Does a sample lie in two of them?"""
    sets = [{sample.numpy().tobytes() for sample in part} for part in parts]
    return len(set.union(*sets)) < sum(map(len, sets))


@pytest.mark.parametrize("seed", range(5))
def test_splits_are_disjoint_by_content_and_duplicates_stay_together(seed: int) -> None:
    numbers = np.random.default_rng(seed)
    x = numbers.integers(0, 12, (100, 1))  # each of twelve samples about eight times
    task = Task.from_arrays("few", x, x[:, 0] % 2)
    loaded, (test_x, _) = load_task("few"), open_test("few", KEY)
    assert not shared(loaded.x, loaded.validation_x, test_x)
    assert sum(task.sizes) == 100
    assert all(abs(size - ideal) <= 15 for size, ideal in zip(task.sizes, (60, 20, 20), strict=True))
    mixed = numbers.permutation(x)
    assert Task.from_arrays("few", mixed, mixed[:, 0] % 2) == task, "in any order they fall into the same splits"


def test_splits_stay_as_they_are() -> None:
    """A change of this digest moves the splits of every user."""
    x = np.arange(40, dtype=np.float64).reshape(20, 2)
    assert Task.from_arrays("fixed", x, np.arange(20) % 2).digest.startswith("c02dd9f2b9c6bd92")


def test_a_constant_feature_is_divided_by_1() -> None:
    x = np.concatenate([X, np.full((60, 1), 0.1)], axis=1)
    Task.from_arrays("flat", x, Y)
    assert not load_task("flat").x[:, 4].any()


def test_large_numbers_keep_their_differences() -> None:
    Task.from_arrays("times", 1.7e9 + np.arange(60.0)[:, None], Y)
    assert len(load_task("times").x.unique()) == 36


def test_the_test_split_is_read_by_nobody_else(data: Path) -> None:
    task = Task.from_arrays("mine", X, Y)
    (path,) = data.glob("tasks/*.test.safetensors")
    path.write_bytes(b"nonsense")
    assert len(load_task("mine").x) == 36
    with pytest.raises(esper.EsperError, match=r"cannot be read as safetensors; run esper tasks add mine PATH --replace"):
        open_test("mine", KEY)
    with pytest.raises(esper.EsperError, match="opens with a ProofKey"):
        open_test("mine", "please")  # type: ignore[arg-type]
    path.unlink()
    assert where(task) is None
    Task.from_arrays("mine", X, Y)
    assert len(open_test("mine", KEY)[0]) == 12, "what was lost is put back"


def test_another_process_finds_the_task() -> None:
    digest = Task.from_arrays("mine", X, Y).digest
    code = "from esper.tolaria.tasks import load_task, task_digest; print(len(load_task('mine').x), task_digest('mine'))"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.split() == ["36", digest]


def test_a_name_keeps_its_meaning_unless_it_is_replaced(data: Path) -> None:
    first = Task.from_arrays("mine", X, Y)
    before = sorted(data.rglob("*"))
    with pytest.raises(esper.EsperError, match=r"there is already a task 'mine' with other data; replace it with --replace"):
        Task.from_arrays("mine", X + 1, Y)
    assert sorted(data.rglob("*")) == before
    assert task_digest("mine") == first.digest
    second = Task.from_arrays("mine", X + 1, Y, replace=True)
    assert task_digest("mine") == second.digest != first.digest
    assert len(list(data.glob("tasks/*"))) == 3, "nothing of the first is left"
    assert task_digest("digits") == ""


def test_the_list_and_remove(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Task.from_arrays("a", X, Y)
    Task.from_arrays("a-b", X, Y)
    assert main(["tasks", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert listed["a"] | {"data": 0, "digest": 0} == {
        "host": "mlp", "inputs": [4], "classes": 3, "sizes": [36, 12, 12], "objective": "classification",
        "reference": "own data", "digest": 0, "data": 0}
    assert main(["tasks", "remove", "a"]) == 0
    assert {path.name.split(".")[0] for path in data.glob("tasks/*")} == {"a-b"}
    assert main(["tasks"]) == 0
    assert "a-b" in capsys.readouterr().out
    for name in ("a", "digits", "../a-b"):
        assert main(["tasks", "remove", name]) == 2
        assert f"there is no task {name!r} of your own; there are a-b" in capsys.readouterr().err
    with pytest.raises(esper.EsperError, match=r"no task 'a'; choose from mnist1d, .*, cifar10, a-b$"):
        load_task("a")
    (own.folder() / "a-b.json").write_text("{}")
    with pytest.raises(esper.EsperError, match="esper tasks add a-b PATH --replace"):
        find_task("a-b")
    assert main(["tasks", "add-data", "a-b", "."]) == 2


@pytest.mark.parametrize("objective", ["classification", "regression"])
def test_a_family_plays_on_an_own_task(objective: str) -> None:
    task = Task.from_arrays("mine", X, Y, objective)
    host = esper.Host(task.host, task.inputs, (8, 8), classes=task.classes)
    family = esper.Family("own", "mine", host, (esper.Kind("plain"),), horizons=(2,), batch=12)
    env = esper.MorphogeneticEnv(family, rows=3)
    episodes = esper.play(env, esper.Random(), family.scenarios(3))
    assert family.objective == objective
    assert bool(episodes.utility().isfinite().all())


def test_a_run_is_not_resumed_on_other_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Task.from_arrays("mine", X, Y)
    (tmp_path / "own.toml").write_text("""
        rounds = 1
        rows = 2
        scenarios = 2
        exam_rows = 2
        ppo = {minibatches = 1}
        [env.family]
        name = "own"
        task = "mine"
        host = {kind = "mlp", inputs = [4], widths = [8], classes = 3}
        kinds = [{name = "plain"}]
        horizons = [2]
        batch = 12
    """)
    run = ["train", "--out", str(tmp_path / "run")]
    assert main([*run, "--config", str(tmp_path / "own.toml")]) == 0
    told = json.loads((tmp_path / "run" / "run.json").read_text())
    assert told["task"] == task_digest("mine")
    assert main([*run, "--resume"]) == 0
    Task.from_arrays("mine", X + 1, Y, replace=True)
    capsys.readouterr()
    for words in ([*run, "--resume"], ["prove", "--minds", str(tmp_path / "run"), "--out", str(tmp_path / "proof"), "--rehearsal"]):
        assert main(words) == 2
        said = capsys.readouterr().err
        assert "was begun when the task mine had other data; add that again: esper tasks add mine PATH --replace" in said
        assert said.count("\n") == 1


def changed(place: tuple[int, ...], value: float, of: np.ndarray = X) -> np.ndarray:
    copy = of.astype(np.float64)
    copy[place] = value
    return copy


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(())


def test_the_page_on_data_runs_and_names_every_digest() -> None:
    page = (Path(__file__).parent.parent / "docs" / "data.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(block, {})
    for task in tasks.TASKS.values():
        source = task.source
        assert not isinstance(source, tasks.Stored)
        digests = [file.sha256 for file in source.files] if isinstance(source, tasks.Files) else [source.labels]
        assert all(f"`{digest[:12]}`" in page for digest in digests)


BAD: dict[str, tuple[Callable[[], object], str]] = {
    "NaN": (lambda: Task.from_arrays("t", changed((3, 1), np.nan), Y), "x holds nan in sample 3, column 1"),
    "inf": (lambda: Task.from_arrays("t", changed((59, 3), -np.inf), Y), "x holds -inf in sample 59, column 3"),
    "too large": (lambda: Task.from_arrays("t", changed((0, 0), 1e39), Y), "x holds 1e.39 in sample 0"),
    "NaN in a picture": (lambda: Task.from_arrays("t", np.full((60, 1, 2, 2), np.nan), Y), "sample 0, column 0, 0, 0"),
    "NaN label": (lambda: Task.from_arrays("t", X, changed((2,), np.nan, Y)), "y holds nan in sample 2"),
    "outlier": (lambda: Task.from_arrays("t", changed((0, 0), 1e38), Y), "in size"),
    "not whole": (lambda: Task.from_arrays("t", X, Y + 0.5), "y holds 0.5, which is not whole"),
    "one class": (lambda: Task.from_arrays("t", X, Y * 0), "y holds '0' alone; a task needs at least two classes"),
    "too many classes": (lambda: Task.from_arrays("t", X, np.arange(60)), "y has 60 classes in 60 samples"),
    "rare class": (lambda: Task.from_arrays("t", np.arange(60.0)[:, None], np.arange(60) == 7), "class '1' has no sample in the training"),
    "few samples": (lambda: Task.from_arrays("t", X[:9], Y[:9]), "there are 9 samples; a task needs at least 10"),
    "a number": (lambda: Task.from_arrays("t", 5, 5), r"y has shape \[\] and x \[1\]"),
    "no samples": (lambda: Task.from_arrays("t", [], []), "0 samples"),
    "all the same": (lambda: Task.from_arrays("t", X * 0, Y > 0), "2 different samples to split; 3 splits need"),
    "lengths": (lambda: Task.from_arrays("t", X, Y[:-1]), r"y has shape \[59\] and x \[60, 4\]; expected y of shape \[60\]"),
    "2-d labels": (lambda: Task.from_arrays("t", X, Y[:, None]), r"y has shape \[60, 1\]"),
    "no labels": (lambda: Task.from_arrays("t", X), "y is missing"),
    "ragged": (lambda: Task.from_arrays("t", [[1, 2], [3]] * 9, [0] * 18), "x cannot be read as one array"),
    "None": (lambda: Task.from_arrays("t", [[None, "a"]] * 9, [0] * 9), "x cannot be read as one array"),
    "text as x": (lambda: Task.from_arrays("t", [["a"]] * 60, Y), "x holds text; expected numbers"),
    "complex": (lambda: Task.from_arrays("t", X + 1j, Y), "x holds complex128"),
    "flat": (lambda: Task.from_arrays("t", X[:, 0], Y), r"x has shape \[60\]; expected \[samples, features\]"),
    "five dimensions": (lambda: Task.from_arrays("t", np.ones((60, 1, 2, 2, 2)), Y), r"x has shape \[60, 1, 2, 2, 2\]"),
    "no features": (lambda: Task.from_arrays("t", np.ones((60, 0)), Y), r"x has shape \[60, 0\]"),
    "constant target": (lambda: Task.from_arrays("t", X, Y * 0.0, "regression"), "y is 0.0 in all training samples"),
    "text as number": (lambda: Task.from_arrays("t", X, ["a"] * 60, "regression"), "y holds text; expected numbers"),
    "objective": (lambda: Task.from_arrays("t", X, Y, "guessing"), "no objective 'guessing'"),
    "name": (lambda: Task.from_arrays("a b", X, Y), "cannot be called 'a b'; use letters, digits, - and _"),
    "path as name": (lambda: Task.from_arrays("../t", X, Y), "cannot be called"),
    "built-in name": (lambda: Task.from_arrays("digits", X, Y), "digits is a built-in task; choose another name"),
    "tokens in 3-d": (lambda: Task.from_arrays("t", np.ones((20, 2, 2)), objective="next_token"), "expected tokens"),
    "same tokens": (lambda: Task.from_arrays("t", np.ones((20, 3)), objective="next_token"), "holds '1' alone"),
    "short text": (lambda: Task.from_text("t", "a" * 649), "the text has 649 bytes; with a context of 64 it needs 650"),
    "no text": (lambda: Task.from_text("t", 5), "a text cannot be a int"),
    "huge label": (lambda: Task.from_arrays("t", X, Y * 1e30), "which is not whole"),
    "one letter": (lambda: Task.from_text("t", "a" * 999), "the text holds '97' alone"),
    "context": (lambda: Task.from_text("t", "ab" * 999, context=0), "a context of 0 tokens is impossible"),
    "no such dataset": (lambda: Task.from_dataset("t", Endless()), "a Endless cannot be read .*map-style"),
    "no pairs": (lambda: Task.from_dataset("t", TensorDataset(torch.ones(20, 2))), "of pairs"),
    "no arrays": (lambda: Task.from_dataset("t", [(Image.new("L", (2, 2)), 0)] * 20), "x of sample 0 is a Image.*transform"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arrays_are_one_sentence_and_leave_nothing_behind(case: str, data: Path) -> None:
    call, message = BAD[case]
    with pytest.raises(esper.EsperError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)
    assert not data.exists()


ROWS = [(f"{a:.3f}", f"{b:.3f}", i % 2) for i, (a, b) in enumerate(X[:, :2])]


def spoiled(row: int, column: int, cell: str) -> Callable[[Path], object]:
    rows = [list(each) for each in ROWS]
    rows[row][column] = cell
    return lambda path: csv(path, rows)


def damaged(path: Path) -> None:
    np.savez_compressed(path, x=X, y=Y)
    content = bytearray(path.read_bytes())
    content[200:400] = bytes(200)
    path.write_bytes(content)


def wrong_size(path: Path) -> None:
    image(pictures(path) / "dog" / "big.png", (6, 4))


def unreadable(path: Path) -> None:
    (pictures(path) / "dog" / "x.png").write_bytes(b"\x89PNG nonsense")


def deep(path: Path) -> None:
    Image.new("I;16", (5, 4)).save(pictures(path) / "dog" / "x.png")


BAD_FILES: dict[str, tuple[str, Callable[[Path], object], str, list[str]]] = {
    "absent": ("x.csv", lambda path: None, "there is no such file or folder", []),
    "empty": ("x.csv", lambda path: path.touch(), "the file is empty", []),
    "no rows": ("x.csv", lambda path: csv(path, []), "there is no line below the column names", []),
    "blank": ("x.csv", lambda path: path.write_text("\n\n"), "there is no line below the column names", []),
    "no header": ("x.csv", lambda path: csv(path, ROWS, "1,2,3"), "line 1 holds numbers alone", []),
    "no column": ("x.csv", lambda path: csv(path, ROWS), "no columns are called 'species'; there are a, b, label", ["--target", "species"]),
    "two columns": ("x.csv", lambda path: csv(path, ROWS, "a,b,b"), "2 columns are called 'b'", []),
    "one column": ("x.csv", lambda path: csv(path, [[1]] * 20, "a"), "there is no column beside 'a'", []),
    "missing cell": ("x.csv", spoiled(3, 1, ""), "line 5 has nothing in column 'b'", []),
    "missing label": ("x.csv", spoiled(3, 2, " "), "line 5 has nothing in column 'label'", []),
    "text in a feature": ("x.csv", spoiled(0, 0, "tall"), "line 2 has 'tall', which is no finite number, in column 'a'", []),
    "NaN in a cell": ("x.csv", spoiled(9, 0, "nan"), "line 11 has 'nan'", []),
    "NaN as label": ("x.csv", spoiled(9, 2, "nan"), "line 11 has 'nan', which is no finite number, in column 'label'", []),
    "ragged rows": ("x.csv", lambda path: csv(path, [*ROWS, (1, 2)]), "line 62 has 2 cells, and line 1 has 3", []),
    "bytes": ("x.csv", lambda path: path.write_bytes(b"a,b\n\xff\xfe,1"), "it is no table of text", []),
    "labels not whole": ("x.csv", lambda path: csv(path, [(a, b, b) for a, b, _ in ROWS]), "which is not whole", ["--objective", "classification"]),
    "objective": ("x.csv", lambda path: csv(path, ROWS), "no objective 'guess'", ["--objective", "guess"]),
    "no archive": ("x.npz", lambda path: path.write_bytes(b"PK nonsense"), "it is no .npz file of plain arrays", []),
    "damaged archive": ("x.npz", damaged, "it is no .npz file of plain arrays", []),
    "no y": ("x.npz", lambda path: np.savez(path, x=X, z=Y), "there is no array 'y' in it, but x, z", []),
    "pickles": ("x.npz", lambda path: np.savez(path, x=X, y=np.array([{}] * 60)), "it is no .npz file of plain arrays", []),
    "target of arrays": ("x.npz", lambda path: np.savez(path, x=X, y=Y), "--target names a column of a .csv file", ["--target", "y"]),
    "short series": ("x.tsv", lambda path: path.write_text("1\n2\n"), "x.tsv has no lines of a label, a tab and a series", []),
    "ragged series": ("x.tsv", lambda path: path.write_text("1\t2\n1\t2\t3\n"), "line 2 has 3 cells", []),
    "gap in a series": ("x.tsv", lambda path: path.write_text("1\t2\n1\tNaN\n"), "line 2 has 'NaN', which is no finite number, in column '2 of x.tsv'", []),
    "other tests": ("x_TRAIN.tsv", lambda path: (tsv(path, 20), path.with_name("x_TEST.tsv").write_text("1\t2\n")),
                    "its series have 8 numbers and those of x_TEST.tsv 1", []),
    "no classes": ("pets", lambda path: path.mkdir(), "there are no subfolders, one for each class", []),
    "empty class": ("pets", lambda path: (pictures(path) / "eel").mkdir(), "there is no picture in its subfolder 'eel'", []),
    "one class": ("pets", lambda path: [image(path / "cat" / f"{n}.png") for n in range(20)], "'cat' alone", []),
    "wrong size": ("pets", wrong_size, "big.png has 6 x 4 pixels, and", []),
    "unreadable": ("pets", unreadable, "x.png cannot be read as a picture", []),
    "folder in a class": ("pets", lambda path: (pictures(path) / "dog" / "puppies").mkdir(), "puppies cannot be read", []),
    "16 bits": ("pets", deep, "is a picture of mode I;16; expected 8 bits", []),
    "no file": ("x.txt", os.mkfifo, "there is no such file or folder", []),
    "name too long": ("x" * 300, lambda path: None, "cannot be read: File name too long", []),
    "empty text": ("x.txt", lambda path: path.touch(), "the file is empty", []),
    "classes of a text": ("x.txt", lambda path: path.write_text("a"), "text for the objective next-token, not regression", ["--objective", "regression"]),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_files_are_one_sentence_and_leave_nothing_behind(case: str, data: Path, tmp_path: Path,
                                                             capsys: pytest.CaptureFixture[str]) -> None:
    name, write, message, words = BAD_FILES[case]
    write(tmp_path / name)
    assert main(["tasks", "add", "mine", str(tmp_path / name), *words]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith(f"esper tasks add: {tmp_path / name}")
    assert message in err
    assert err.count("\n") == 1
    assert not data.exists()


def test_without_pillow_pictures_are_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = pictures(tmp_path / "pets")
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(esper.EsperError, match=r"need the Pillow package; run pip install 'esper-morph\[images\]'"):
        Task.from_file("mine", folder)


def test_a_full_disk_leaves_nothing_behind(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise esper.EsperError("no space left")

    monkeypatch.setattr(own, "write_json", full)
    with pytest.raises(esper.EsperError, match="no space left"):
        Task.from_arrays("mine", X, Y)
    assert not list(data.glob("tasks/*"))


def test_a_file_in_place_of_the_data_directory_is_one_sentence(data: Path) -> None:
    data.write_text("a file")
    with pytest.raises(esper.EsperError, match="set ESPER_DATA to a folder you can write to"):
        Task.from_arrays("mine", X, Y)
    assert data.read_text() == "a file"
    with pytest.raises(esper.EsperError, match="no task 5; choose from"):
        find_task(5)  # type: ignore[arg-type]


def sheets(folder: Path, originals: Path) -> Path:
    """CIFAR's files as the npm package has them."""
    folder.mkdir()
    labels: dict[str, list[int]] = {"train": [], "test": []}
    for path in sorted(originals.glob("*.bin")):
        records = np.frombuffer(path.read_bytes(), np.uint8).reshape(-1, 3073)
        labels["test" if "test" in path.name else "train"] += records[:, 0].tolist()
        Image.fromarray(records[:, 1:].reshape(-1, 3, 1024).transpose(0, 2, 1)).save(folder / f"{path.stem}.png")
    for split, some in labels.items():
        (folder / f"{split}_lables.json").write_text(json.dumps(some))
    return folder


def test_sheets_of_cifar_become_the_original_files(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checked = dict[str, bytes]()
    monkeypatch.setattr(files, "check_digest", lambda path, content, sha256: checked.update({path.name: content}))
    monkeypatch.setitem(tasks.TASKS, "cifar10", replace(tasks.TASKS["cifar10"], sizes=(40, 10, 10)))
    originals = write_cifar(tmp_path / "originals")
    package = sheets(tmp_path / "package", originals)
    assert tasks.add_data("cifar10", package) == data / "cifar10"
    for path in originals.iterdir():
        assert (data / "cifar10" / path.name).read_bytes() == path.read_bytes() == checked[path.with_suffix(".png").name]
    assert load_task("cifar10").x.shape == (40, 3, 32, 32)
    (package / "test_lables.json").write_text("[1, 2]")
    (data / "cifar10" / "test_batch.bin").unlink()
    with pytest.raises(esper.EsperError, match=r"test_batch.png and .*test_lables.json do not hold 32 x 32 pictures and a label for each"):
        tasks.add_data("cifar10", package)
    monkeypatch.undo()
    monkeypatch.setenv("ESPER_DATA", str(tmp_path / "other"))
    (package / "test_lables.json").write_text(json.dumps([3] * 10))
    with pytest.raises(esper.EsperError, match=r"data_batch_1.png has the wrong sha256 checksum"):
        tasks.add_data("cifar10", package)
    assert not (tmp_path / "other").exists()
