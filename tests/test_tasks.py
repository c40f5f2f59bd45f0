"""Tasks: real samples, fixed splits, a test split under lock, and one sentence for everything that can be wrong with a file."""

import gzip
import hashlib
import json
import random
import re
import shutil
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import Tensor

import esper
from esper import cli
from esper.cli.options import TasksAddData, TasksList
from esper.cli.tasks import run
from esper.leyline import EsperError
from esper.tolaria import files, tasks
from esper.tolaria.tasks import (
    TASKS,
    Files,
    ProofKey,
    TaskData,
    add_data,
    load_task,
    open_test,
    where,
)

KEY = ProofKey("tests")
DEBIAN = Path("/usr/share/datasets/fashion-mnist")
BUILT_IN = ["mnist1d", "digits", "diabetes"]
SMALL, FEW = (30, 10, 20), (40, 10, 10)
CHECK_DIGEST = files.check_digest


@pytest.fixture(scope="session")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data directory with both built-in tasks, made by their packages once."""
    folder = tmp_path_factory.mktemp("generated") / "made" / "on demand"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ESPER_DATA", str(folder))
        for name in BUILT_IN:
            load_task(name)
    return folder


@pytest.fixture
def kept(generated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This test's own copy of it, on a machine where neither package is installed."""
    shutil.copytree(generated, tmp_path / "kept")
    monkeypatch.setenv("ESPER_DATA", str(tmp_path / "kept"))
    for module in ("mnist1d", "mnist1d.data", "sklearn", "sklearn.datasets"):
        monkeypatch.setitem(sys.modules, module, None)
    return tmp_path / "kept"


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty data directory, and file tasks of a few samples whose checksums nobody knows."""
    monkeypatch.setenv("ESPER_DATA", str(tmp_path / "data"))
    monkeypatch.setattr(files, "check_digest", lambda *_: None)
    for name in ("mnist", "fashion", "cifar10"):
        source = TASKS[name].source
        assert isinstance(source, Files)
        monkeypatch.setitem(TASKS, name, replace(TASKS[name], sizes=FEW if name == "cifar10" else SMALL,
                                                 source=replace(source, places=())))
    return tmp_path / "data"


def known(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on the files of this folder are the originals, and checksums are checked."""
    source = TASKS[name].source
    assert isinstance(source, Files)
    originals = tuple(replace(file, sha256=hashlib.sha256((folder / file.name).read_bytes()).hexdigest())
                      for file in source.files)
    monkeypatch.setitem(TASKS, name, replace(TASKS[name], source=replace(source, files=originals)))
    monkeypatch.setattr(files, "check_digest", CHECK_DIGEST)


def write_idx(folder: Path, pack: Callable[[bytes], bytes] = bytes, suffix: str = "") -> Path:
    folder.mkdir()
    generator = np.random.default_rng(0)
    for stem, count in (("train", 40), ("t10k", 20)):
        images = generator.integers(0, 256, (count, 28, 28), np.uint8)
        labels = (np.arange(count) % 10).astype(np.uint8)
        header = struct.pack(">4I", 2051, *images.shape)
        (folder / f"{stem}-images-idx3-ubyte{suffix}").write_bytes(pack(header + images.tobytes()))
        (folder / f"{stem}-labels-idx1-ubyte{suffix}").write_bytes(pack(struct.pack(">2I", 2049, count) + labels.tobytes()))
    return folder


def write_cifar(folder: Path) -> Path:
    folder.mkdir()
    for batch, name in enumerate([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]):
        records = np.full((10, 3073), batch, np.uint8)
        records[:, 0] = np.arange(10)
        records[:, 1025:2049] += 100
        (folder / f"{name}.bin").write_bytes(records.tobytes())
    return folder


def rows(x: Tensor) -> set[bytes]:
    return {sample.numpy().tobytes() for sample in x}


@pytest.mark.parametrize("name", BUILT_IN)
def test_splits_are_disjoint_standardised_and_always_the_same(name: str, kept: Path) -> None:
    task, first, second = TASKS[name], load_task(name), load_task(name)
    test_x, test_y = open_test(name, KEY)
    parts = [(first.x, first.y), (first.validation_x, first.validation_y), (test_x, test_y)]
    numbers = task.objective == "regression"
    for (x, y), size in zip(parts, task.sizes, strict=True):
        labels = torch.float32 if numbers else torch.int64
        assert (x.shape, x.dtype, y.shape, y.dtype) == ((size, *task.inputs), torch.float32, (size,), labels)
        assert numbers or torch.equal(y.unique(), torch.arange(task.classes))
    if numbers:
        assert abs(first.y.double().mean()) < 1e-6
        assert abs(first.y.double().std(correction=0) - 1) < 1e-6
    assert len(set.union(*(rows(x) for x, _ in parts))) == sum(task.sizes)
    assert abs(first.x.double().mean()) < 1e-6
    assert abs(first.x.double().std() - 1) < 1e-3
    assert 1e-4 < abs(test_x.double().mean()) < 0.1, "the test split is scaled by the training split's statistics, not its own"
    assert torch.equal(first.x, second.x)
    assert torch.equal(first.validation_y, second.validation_y)


def test_the_whole_of_mnist1d_is_the_papers_4000(kept: Path) -> None:
    part, whole = load_task("mnist1d"), load_task("mnist1d", whole=True)
    assert len(whole.x) == len(whole.y) == 4000
    assert torch.equal(whole.x, torch.cat([part.x, part.validation_x]))
    assert torch.equal(whole.validation_x, part.validation_x)
    assert not rows(whole.x) & rows(open_test("mnist1d", KEY)[0])


def test_cache_equals_the_generator_and_its_randomness_stays_inside(generated: Path, tmp_path: Path,
                                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ESPER_DATA", str(tmp_path))
    generator, seen = import_module("mnist1d.data"), []
    make = generator.make_dataset
    monkeypatch.setattr(generator, "make_dataset", lambda arguments: seen.append((arguments, make(arguments))) or seen[-1][1])
    random.seed(3)
    np.random.seed(3)
    expected = random.random(), np.random.rand()
    random.seed(3)
    np.random.seed(3)
    made = load_task("mnist1d")
    assert (random.random(), np.random.rand()) == expected
    for part in ("train", "test"):
        assert (tmp_path / f"mnist1d-{part}.safetensors").read_bytes() == (generated / f"mnist1d-{part}.safetensors").read_bytes()
    [(arguments, paper)] = seen
    assert vars(arguments) == vars(generator.get_dataset_args()), "the published defaults"
    np.testing.assert_array_equal(made.validation_y.numpy(), paper["y"][3000:])
    np.testing.assert_array_equal(open_test("mnist1d", KEY)[1].numpy(), paper["y_test"])
    assert abs(np.corrcoef(made.x.numpy().ravel(), paper["x"][:3000].ravel())[0, 1] - 1) < 1e-9


def test_without_package_and_cache_it_says_what_to_install(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert where(TASKS["digits"]) == "built in"
    (kept / "digits-train.safetensors").unlink()
    assert where(TASKS["digits"]) is None
    with pytest.raises(EsperError, match=r"install scikit-learn$"):
        load_task("digits")
    assert not (kept / "digits-train.safetensors").exists()


def test_a_generator_that_orders_samples_differently_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ESPER_DATA", str(tmp_path / "none"))
    changed = replace(TASKS["digits"].source, labels="0" * 64)  # type: ignore[arg-type]
    monkeypatch.setitem(TASKS, "digits", replace(TASKS["digits"], source=changed))
    with pytest.raises(EsperError, match="other digits samples"):
        load_task("digits")
    assert not (tmp_path / "none").exists()


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("harm", [flip_a_byte, lambda path: path.write_bytes(path.read_bytes()[:-9]),
                                  lambda path: path.write_bytes(b""),
                                  lambda path: shutil.copy(path.with_name("mnist1d-test.safetensors"), path)],
                         ids=["flipped", "truncated", "empty", "test as train"])
def test_a_damaged_cache_is_refused(harm: Callable[[Path], object], kept: Path) -> None:
    harm(kept / "mnist1d-train.safetensors")
    with pytest.raises(EsperError, match=r"mnist1d-train\.safetensors .*; delete it"):
        load_task("mnist1d")


@pytest.mark.parametrize("key", [None, "proof", object(), ProofKey])
def test_the_test_split_opens_with_a_key_alone(key: object, kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "read_cache", lambda *_: pytest.fail("read before the key was checked"))
    with pytest.raises(EsperError, match="ProofKey"):
        open_test("digits", key)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", BUILT_IN)
def test_loaded_data_holds_no_test_sample(name: str, kept: Path) -> None:
    """Not in an attribute, and not in the memory that an attribute is a view of."""
    data = load_task(name)
    locked = rows(open_test(name, KEY)[0])
    tensors = [value for value in vars(data).values() if isinstance(value, Tensor)]
    assert set(vars(data)) == set(TaskData.__dataclass_fields__)
    assert len(tensors) == len(vars(data)) - 1
    size = int(np.prod(TASKS[name].inputs))
    for tensor in tensors[::2]:
        memory = torch.tensor([]).set_(tensor.untyped_storage())  # type: ignore[call-overload]
        assert len(memory) == sum(TASKS[name].sizes[:2]) * size
        assert not rows(memory.reshape(-1, size)) & locked


def test_only_the_proof_can_open_the_test_split() -> None:
    """No other source constructs a key, names one, opens the split, or reads task files behind the lock's back."""
    root = Path(esper.__file__).parent
    sources = {path.relative_to(root).as_posix(): path.read_text() for path in root.rglob("*.py")}
    others = {name: text for name, text in sources.items() if name != "simic/proof/proving.py"}
    assert len(others) == len(sources) - 1
    assert [name for name, text in others.items() if "ProofKey(" in text] == []
    lock = {"tolaria/__init__.py", "tolaria/tasks.py"}
    assert {name for name, text in others.items() if re.search(r"\b(ProofKey|open_test)\b", text)} <= lock
    behind = re.compile(r"tolaria(\.| import .*\b)(files|own|readers|sources)\b|\bread_(cache|idx|cifar)\b|\.source\.(read|verify)\b|\bcache_path\b")
    ledger = "tolaria/openings.py"  # lies beside the data, and asks for nothing else
    assert {name for name, text in others.items() if behind.search(text)} <= {*lock, ledger, *(f"tolaria/{name}.py" for name in ("files", "own", "readers", "sources"))}
    assert set(re.findall(r"\bfiles\.(\w+)", others[ledger])) == {"data_directory"}


def test_gzipped_and_plain_idx_files_are_equal(data: Path, tmp_path: Path) -> None:
    loaded = []
    for folder in (write_idx(tmp_path / "plain"), write_idx(tmp_path / "packed", gzip.compress, ".gz")):
        assert add_data("mnist", folder) == folder
        assert where(TASKS["mnist"]) == str(folder)
        loaded.append((load_task("mnist"), open_test("mnist", KEY)))
    (plain, plain_test), (packed, packed_test) = loaded
    assert plain.x.shape == (30, 1, 28, 28)
    assert torch.equal(plain.y, torch.arange(30) % 10)
    assert torch.equal(plain.x, packed.x)
    assert torch.equal(plain.validation_x, packed.validation_x)
    assert torch.equal(plain_test[0], packed_test[0])


def test_cifar_batches_are_joined_in_order_and_scaled_per_channel(data: Path, tmp_path: Path) -> None:
    add_data("cifar10", write_cifar(tmp_path / "cifar"))
    loaded, (test_x, test_y) = load_task("cifar10"), open_test("cifar10", KEY)
    assert loaded.x.shape == (40, 3, 32, 32)
    assert torch.equal(loaded.validation_y, torch.arange(10))
    assert torch.equal(test_y, torch.arange(10))
    step = 1.25**-0.5  # batches 0 to 3 train: mean 1.5, variance 1.25, and channel 1 is only shifted
    for x, batch in ((loaded.x[:10], 0), (loaded.x[30:], 3), (loaded.validation_x, 4), (test_x, 5)):
        torch.testing.assert_close(x, torch.full_like(x, (batch - 1.5) * step))


def own_data(**changed: object) -> TaskData:
    """A user's own samples for the mlp host of `digits`."""
    x, y = torch.randn(12, 64, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 10
    given: dict[str, object] = {"x": x[:8], "y": y[:8], "validation_x": x[8:], "validation_y": y[8:]}
    return TaskData(TASKS["digits"], **(given | changed))  # type: ignore[arg-type]


def test_own_data_may_be_arrays_and_any_whole_numbers() -> None:
    expected = own_data()
    for kind in (np.int8, np.uint8, np.int32, np.int64, np.float32):
        y = expected.y.numpy().astype(kind)
        x = expected.x.numpy().astype(">f8")[::-1].copy()
        made = own_data(x=x[::-1], y=y, validation_x=expected.validation_x.tolist())
        assert (made.x.dtype, made.y.dtype) == (torch.float32, torch.int64)
        assert torch.equal(made.x, expected.x)
        assert torch.equal(made.y, expected.y)
        assert torch.equal(made.validation_x, expected.validation_x)
    assert expected.x.data_ptr() == own_data(x=expected.x).x.data_ptr(), "what is right is not copied"
    assert not own_data(x=expected.x.clone().requires_grad_()).x.requires_grad
    frozen = expected.x.numpy().copy()
    frozen.flags.writeable = False
    assert torch.equal(own_data(x=frozen).x, expected.x)


X, Y = torch.zeros(8, 64), torch.arange(8)


@pytest.mark.parametrize(("changed", "message"), [
    ({"y": Y[:7]}, r"y has shape \[7\]; expected a label for each of 8 samples"),
    ({"y": Y[:, None]}, r"y has shape \[8, 1\]"),
    ({"x": X[:0], "y": Y[:0]}, r"x has shape \[0, 64\]; expected .* at least one sample"),
    ({"validation_x": X[:0], "validation_y": Y[:0]}, r"validation_x has shape \[0, 64\]"),
    ({"x": X[:, 0]}, r"x has shape \[8\]"),
    ({"x": X[:, :3]}, r"a sample of x has shape \[3\], one of validation_x \[64\]"),
    ({"y": Y + 0.5}, r"y is torch.float32 and holds numbers that are not whole; expected labels from 0 to 9"),
    ({"y": torch.where(Y == 3, torch.nan, Y.float())}, "not whole"),
    ({"y": Y - 1}, "y has labels from -1 to 6; expected 0 to 9"),
    ({"y": Y + 3}, "y has labels from 3 to 10; expected 0 to 9"),
    ({"y": ["a"] * 8}, "y is a list that holds no numbers"),
    ({"x": None}, "x is a NoneType that holds no numbers"),
    ({"x": X + 1j}, "x is torch.complex64; expected real numbers"),
    ({"y": Y + 0j + 1j}, "not whole"),
    ({"x": torch.where(X == 0, torch.nan, X)}, "x reaches from nan to nan; expected finite numbers"),
    ({"validation_x": np.full((4, 64), -np.inf)}, "validation_x reaches from -inf to -inf"),
    ({"x": X + 1.1e6}, "x reaches from 1.1e.06 to 1.1e.06; expected .*: standardise them"),
])
def test_own_data_that_cannot_be_learned_from_is_refused(changed: dict[str, object], message: str) -> None:
    with pytest.raises(EsperError, match=message) as caught:
        own_data(**changed)
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(not DEBIAN.is_dir(), reason="dataset-fashion-mnist is not installed")
def test_debians_fashion_mnist_is_found_and_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ESPER_DATA", str(tmp_path / "data"))
    assert where(TASKS["fashion"]) == str(DEBIAN)
    loaded = load_task("fashion")
    assert loaded.y.bincount().min() > 4900
    assert len(open_test("fashion", KEY)[0]) == 10_000
    folder = tmp_path / "harmed"
    shutil.copytree(DEBIAN, folder)
    labels = bytearray(gzip.decompress((folder / "train-labels-idx1-ubyte.gz").read_bytes()))
    labels[8:10] = labels[9], labels[8]
    (folder / "train-labels-idx1-ubyte").write_bytes(labels)
    refused("fashion", folder, "train-labels-idx1-ubyte has the wrong sha256 checksum")
    assert not (tmp_path / "data").exists(), "nothing was kept"


def refused(name: str, folder: Path, message: str) -> None:
    with pytest.raises(EsperError) as caught:
        add_data(name, folder)
    sentence = str(caught.value)
    assert message in sentence
    assert "; " in sentence, "says what to do"
    assert "\n" not in sentence
    assert not sentence.endswith(".")


IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"


@pytest.mark.parametrize(("file", "harm", "message"), [
    (IMAGES, lambda b: None, f"no {IMAGES} or {IMAGES}.gz in"),
    (IMAGES, lambda b: b[:-5], "truncated"),
    (IMAGES, lambda b: b[:10], "by its own header"),
    (IMAGES, lambda b: b"", "starts with nothing"),
    (IMAGES, lambda b: b + b"\0", "too long"),
    (IMAGES, lambda b: b"\0\0\x08\x01" + b[4:], "starts with 00000801"),
    (IMAGES, lambda b: gzip.compress(b)[:-20], "truncated gzip"),
    (IMAGES, lambda b: b"\x1f\x8bnonsense", "gzip"),
    (IMAGES, lambda b: b[:16] + bytes(len(b) - 16), "are the same"),
    (LABELS, lambda b: b[:8] + b"\x0a" + b[9:], "labels from 0 to 10"),
    ("t10k-images-idx3-ubyte", lambda b: b[:4] + struct.pack(">I", 19) + b[8:], "20 x 28 x 28"),
    ("t10k-labels-idx1-ubyte", lambda b: b[:-1], "truncated"),
])
def test_bad_idx_files_are_one_sentence_and_nothing_is_written(file: str, harm: Callable[[bytes], bytes | None], message: str,
                                                               data: Path, tmp_path: Path) -> None:
    folder = write_idx(tmp_path / "mnist")
    content = harm((folder / file).read_bytes())
    (folder / file).unlink()
    if content is not None:
        (folder / file).write_bytes(content)
    refused("mnist", folder, message)
    assert not data.exists()


@pytest.mark.parametrize(("file", "harm", "message"), [
    ("data_batch_3.bin", lambda b: b[:-1], "data_batch_3.bin is truncated: 30729 bytes of 30730"),
    ("test_batch.bin", lambda b: b"\x0b" + b[1:], "labels from 1 to 11"),
    ("test_batch.bin", lambda b: bytes(len(b)), "labels from 0 to 0"),
])
def test_bad_cifar_files_are_refused(file: str, harm: Callable[[bytes], bytes], message: str, data: Path, tmp_path: Path) -> None:
    folder = write_cifar(tmp_path / "cifar")
    (folder / file).write_bytes(harm((folder / file).read_bytes()))
    refused("cifar10", folder, message)
    assert not data.exists()


@pytest.mark.parametrize(("name", "write"), [("mnist", write_idx), ("cifar10", write_cifar)])
def test_every_file_is_known_by_its_checksum(name: str, write: Callable[[Path], Path], data: Path,
                                             tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A flipped bit of any file, and a training batch in place of another or of the test batch."""
    folder = write(tmp_path / name)
    known(name, folder, monkeypatch)
    source = TASKS[name].source
    assert isinstance(source, Files)
    for file in source.files:
        content = (folder / file.name).read_bytes()
        harmed = [content[:-1] + bytes([content[-1] ^ 1])]
        if name == "cifar10":
            other = "data_batch_2.bin" if "1" in file.name else "data_batch_1.bin"
            harmed.append((folder / other).read_bytes())
        for wrong in harmed:
            (folder / file.name).write_bytes(wrong)
            refused(name, folder, f"{file.name} has the wrong sha256 checksum")
        (folder / file.name).write_bytes(content)
    assert not data.exists()
    add_data(name, folder)


@pytest.mark.parametrize("name", ["mnist", "fashion", "cifar10"])
def test_published_checksums_are_whole_and_differ(name: str) -> None:
    source = TASKS[name].source
    assert isinstance(source, Files)
    digests = [file.sha256 for file in source.files]
    assert all(re.fullmatch("[0-9a-f]{64}", digest) for digest in digests)
    assert len(set(digests)) == len(digests)
    assert [file.part for file in source.files] == sorted((file.part for file in source.files), reverse=True)


def test_made_up_files_are_not_mnist(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_idx(tmp_path / "mnist")
    monkeypatch.undo()
    monkeypatch.setenv("ESPER_DATA", str(data))
    refused("mnist", folder, "60000 x 28 x 28")
    monkeypatch.setitem(TASKS, "mnist", replace(TASKS["mnist"], sizes=SMALL))
    refused("mnist", folder, "wrong sha256 checksum")
    assert not data.exists()


@pytest.mark.parametrize(("name", "write"), [("mnist", write_idx), ("cifar10", write_cifar)])
def test_a_gzip_bomb_is_not_unpacked(name: str, write: Callable[[Path], Path], data: Path,
                                     tmp_path: Path) -> None:
    """64 MiB of zeros behind the right content: a reader that unpacks them all holds as many bytes."""
    folder = write(tmp_path / name)
    file = folder / ("train-images-idx3-ubyte" if name == "mnist" else "data_batch_1.bin")
    file.write_bytes(gzip.compress(file.read_bytes() + bytes(2**26), compresslevel=1))
    tracemalloc.start()
    refused(name, folder, "is too long: more than the")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**23


@pytest.mark.parametrize(("name", "path", "message"), [
    ("imagenet", ".", "no task 'imagenet'; choose from mnist1d, digits, diabetes, mnist, fashion, cifar10"),
    ("digits", ".", "digits is built in and takes no files"),
    ("mnist", "absent", "is not a folder"),
    ("mnist", __file__, "is not a folder"),
])
def test_bad_requests_are_one_sentence(name: str, path: str, message: str, data: Path) -> None:
    refused(name, Path(path), message)
    assert not data.exists()


def test_missing_files_and_unknown_tasks_are_named_at_load(data: Path, tmp_path: Path) -> None:
    with pytest.raises(EsperError, match=r"files of cifar10 are missing.* esper tasks add-data cifar10 DIR$"):
        load_task("cifar10")
    with pytest.raises(EsperError, match="no task 'noise'"):
        load_task("noise")
    assert not data.exists()
    folder = write_idx(tmp_path / "mnist")
    add_data("mnist", folder)
    (folder / LABELS).rename(folder / "elsewhere")
    assert where(TASKS["mnist"]) is None
    with pytest.raises(EsperError, match=f"no {LABELS} or {LABELS}.gz in {folder}"):
        load_task("mnist")


def test_a_damaged_register_or_an_unwritable_data_directory_is_named(data: Path, tmp_path: Path) -> None:
    folder = write_idx(tmp_path / "mnist")
    data.write_text("a file where a folder should be")
    refused("mnist", folder, "folders.json")
    data.unlink()
    data.mkdir()
    for nonsense in ("[", "[1]", '{"mnist": 3}'):
        (data / "folders.json").write_text(nonsense)
        refused("mnist", folder, "; delete it and run esper tasks add-data again")
        assert (data / "folders.json").read_text() == nonsense
        assert len(list(data.iterdir())) == 1, "no temporary file is left"


def test_the_data_directory_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    for name, value, expected in (("XDG_CACHE_HOME", "", "/home/someone/.cache/esper"), ("XDG_CACHE_HOME", "/x", "/x/esper"),
                                  ("ESPER_DATA", "~/d", "/home/someone/d")):
        monkeypatch.setenv(name, value)
        monkeypatch.setenv("ESPER_DATA", value if name == "ESPER_DATA" else "")
        assert files.data_directory() == Path(expected)


def test_the_list_fits_80_columns_and_names_what_is_missing(data: Path, tmp_path: Path,
                                                            capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(width=80, highlight=False, soft_wrap=True)
    run(TasksAddData("fashion", write_idx(tmp_path / "fashion")), console)
    capsys.readouterr()
    run(TasksList(), console)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if line.startswith("│")]
    name, status = "", dict[str, str]()
    for task, *_, text in cells:
        name = task or name
        status[name] = f"{status.get(name, '')} {text}".strip()
    assert status == {"mnist1d": "built in", "digits": "built in", "diabetes": "built in", "mnist": "missing: esper tasks add-data mnist DIR",
                      "fashion": "found", "cifar10": "missing: esper tasks add-data cifar10 DIR"}
    run(TasksList(json=True), console)
    listed = json.loads(capsys.readouterr().out)
    assert listed["fashion"]["data"] == str(tmp_path / "fashion")
    assert listed["mnist"]["data"] is None
    assert listed["mnist1d"]["sizes"] == [3000, 1000, 1000]


def test_the_command_exits_with_2_and_one_sentence(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["imagenet", "."], ["mnist", str(tmp_path / "absent")], ["digits", str(tmp_path)], ["cifar10", str(tmp_path)]):
        assert cli.main(["tasks", "add-data", *words]) == 2
        out, err = capsys.readouterr()
        assert not out
        assert err.startswith("esper tasks add-data: ")
        assert err.count("\n") == 1
    assert not data.exists()
    assert cli.main(["tasks", "add-data", "mnist", str(write_idx(tmp_path / "mnist"))]) == 0
    assert cli.main(["tasks"]) == 0
    assert "found" in capsys.readouterr().out


def test_rooms_import_with_torch_numpy_and_safetensors_alone() -> None:
    code = ("import sys, esper.kasmina, esper.tolaria, esper.tamiyo, esper.simic.proof.sweep, esper.simic.proof.value_of_information;"
            "print({'mnist1d', 'sklearn', 'scipy', 'matplotlib', 'tyro', 'rich', 'requests'} & set(sys.modules))")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize("name", TASKS)
def test_every_task_is_complete(name: str) -> None:
    task = TASKS[name]
    assert task.name == name
    assert task.host in esper.kasmina.HOSTS
    assert min(task.sizes) > 0
    assert re.search(r"\d%.*\(.+\)$", task.reference), "a score and who reports it"
    assert hash(task) == hash(tasks.find_task(name))
