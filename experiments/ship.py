"""Put trained controllers into the package as one mind.

    python -m experiments.ship tamiyo-small --member runs/mlp-1 controls.json - --member ...

Each member is the folder of a run that is over, the controls that were tuned for its family (`controls.json` of a proof), and the
proof.json that names it, or - if nothing was proven about it.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from esper.runs import STORE, stored, trained
from esper.simic.controls import Tuned
from esper.simic.controls import about as digest_of

from esper.leyline import EsperError
from esper.nissa import read
from esper.tamiyo.minds import FOLDER, Member, write_mind
from experiments.shared import parser


def member(folder: Path, controls: Path, proof: str) -> Member:
    found = stored(folder)
    if found is None:
        raise EsperError(f"{folder} holds no run")
    family, config = found
    known = trained(folder, config, "cpu")
    episodes, epochs = read(folder / STORE, "SELECT sum(episodes), sum(host_epochs) FROM round")[0]
    run = json.loads((folder / "run.json").read_text())
    about: dict[str, Any] = {"family": family.name, "host": family.host.kind, "run": run, "agent sha256": known.digest,
                             "episodes": episodes, "host-epochs": epochs, "proof": None}
    tuned = Tuned.load(controls)
    if tuned.about != digest_of(family):
        raise EsperError(f"{controls} was tuned for another family than {family.name}")
    about["plan"] = {"seeds": tuned.fixed.seeds, "start": tuned.fixed.start, "episodes": tuned.episodes["best fixed"]}
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
    options_of.add_argument("--member", nargs=3, action="append", required=True, metavar=("RUN", "CONTROLS", "PROOF"))
    options = options_of.parse_args()
    path = FOLDER / f"{options.name}.safetensors"
    write_mind(path, [member(Path(run), Path(controls), proof) for run, controls, proof in options.member])
    print(f"{path.stat().st_size:,} bytes in {path}")


if __name__ == "__main__":
    main()
