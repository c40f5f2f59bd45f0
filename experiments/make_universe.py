"""The universe of small hosts on many data sets, from the committed list of sources: no data decides anything.

    python -m experiments.make_universe            writes experiments/universe/small.toml

Series are for conv1d hosts, vectors for mlp hosts. Training meets every task of a training source with hosts of two sizes, each
source as often as any other, series twice as often as vectors. Of a validation or test source one task of each kind is used, with
hosts of one size; a hash of names chooses both.
"""

import argparse
import json
from pathlib import Path

from esper.leyline.storage import atomic_write
from experiments.sources import LIST, hashed

KINDS = {"-s": ("conv1d", 2.0), "-v": ("mlp", 1.0)}  # ending of a task -> kind of host, how often
SIZES = ("tiny", "small")


def families() -> dict[str, dict[str, float]]:
    """split -> name of a family -> how often it is met."""
    found: dict[str, dict[str, float]] = {"training": {}, "validation": {}, "test": {}}
    for source in json.loads(LIST.read_text())["sources"]:
        for ending, (kind, often) in KINDS.items():
            tasks = sorted((task for member in source["members"] for task in member["tasks"] if task.endswith(ending)), key=hashed)
            if source["split"] == "training":
                names = [f"{task}/{kind}/{size}" for task in tasks for size in SIZES]
            else:
                names = [f"{task}/{kind}/{SIZES[int(hashed(task), 16) % len(SIZES)]}" for task in tasks[:1]]
            found[source["split"]] |= dict.fromkeys(names, often / len(names) if names else 0.0)
    return found


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    lines = ['name = "small"', ""]
    made = families()
    for split, names in made.items():
        lines += [f"{split} = [", *(f'  "{name}",' for name in names), "]", ""]
    lines += ["# How often each training family is met: sources alike, series twice as often as vectors.",
              f"weights = [{', '.join(f'{weight:.4f}' for weight in made['training'].values())}]", ""]
    sources = {task: source["name"] for source in json.loads(LIST.read_text())["sources"] for member in source["members"]
               for task in member["tasks"]}
    lines += ["[sources]", *(f'{task} = "{source}"' for task, source in sources.items()), ""]
    atomic_write(Path(LIST).parent / "small.toml", "\n".join(lines))


if __name__ == "__main__":
    main()
