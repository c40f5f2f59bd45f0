"""Put trained controllers into the package as one mind.

    python experiments/ship.py tamiyo-small --member runs/mnist1d-0 proof/mnist1d/proof.json --member runs/mlp-0 -

Each member is the folder of a run that is over, and the proof.json that names it, or - if nothing was proven about it.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from esper.leyline import EsperError
from esper.nissa import read
from esper.runs import STORE, stored, trained
from esper.tamiyo.minds import FOLDER, Member, write_mind

from shared import parser  # isort: skip


def member(folder: Path, proof: str) -> Member:
    found = stored(folder)
    if found is None:
        raise EsperError(f"{folder} holds no run")
    family, config = found
    known = trained(folder, config, "cpu")
    episodes, epochs = read(folder / STORE, "SELECT sum(episodes), sum(host_epochs) FROM round")[0]
    run = json.loads((folder / "run.json").read_text())
    about: dict[str, Any] = {"family": family.name, "host": family.host.kind, "run": run, "agent sha256": known.digest,
                             "episodes": episodes, "host-epochs": epochs, "proof": None}
    if proof != "-":
        text = Path(proof).read_bytes()
        told = json.loads(text)
        mine = [name for name, each in told["controllers"].items() if each["sha256"] == known.digest]
        if not mine:
            raise EsperError(f"{proof} is about other controllers than the one in {folder}")
        about["proof"] = {"sha256": hashlib.sha256(text).hexdigest(), "controller": mine[0],
                          **{name: told[name] for name in ("verdict", "reason", "scenarios", "date", "commit")}}
    return Member(known.controller, about)


def main() -> None:
    options_of = parser(__doc__)
    options_of.add_argument("name")
    options_of.add_argument("--member", nargs=2, action="append", required=True, metavar=("RUN", "PROOF"))
    options = options_of.parse_args()
    path = FOLDER / f"{options.name}.safetensors"
    write_mind(path, [member(Path(folder), proof) for folder, proof in options.member])
    print(f"{path.stat().st_size:,} bytes in {path}")


if __name__ == "__main__":
    main()
