"""Put trained controllers into the package as one mind.

    python -m experiments.ship tamiyo-small --member runs/mlp-1 controls.json - --member ...

Each member is the folder of a run that is over, the controls that were tuned for its family (`controls.json` of a proof), and the
proof.json that names it, or - if nothing was proven about it.
"""

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

from esper.cli.runs import STORE, load_controller, load_run
from esper.leyline import EsperError
from esper.leyline.codec import to_dict
from esper.leyline.storage import read_json
from esper.nissa import read
from esper.simic.proof.baselines import Tuned, family_digest
from esper.tamiyo.minds import FOLDER, Member, write_mind
from experiments.shared import env_of, parser


def member(folder: Path, controls: Path, proof: str) -> Member:
    found = load_run(folder)
    if found is None:
        raise EsperError(f"{folder} holds no run")
    config, made = found
    family, previews, (controller, digest) = config.env.family, config.env.previews, load_controller(folder, config, "cpu")
    episodes, epochs = read(folder / STORE, "SELECT sum(episodes), sum(host_epochs) FROM round")[0]
    looked = {"preview_every": previews.every if previews else 0, "preview_steps": previews.steps if previews else 0}
    run = {"config": to_dict(config) | looked, **made}
    about: dict[str, Any] = {"family": family.name, "host": family.host.kind, "run": run, "agent sha256": digest,
                             "episodes": episodes, "host-epochs": epochs, "proof": None}
    tuned = Tuned.load(controls)
    if tuned.family_digest != family_digest(family):
        raise EsperError(f"{controls} was tuned for another family than {family.name}")
    about["plan"] = {"seeds": tuned.fixed.seeds, "start": tuned.fixed.start, "episodes": tuned.episodes["best fixed"]}
    if proof != "-":
        text, told = Path(proof).read_bytes(), read_json(proof, "proof")
        mine = [name for name, each in told["controllers"].items() if each["sha256"] == digest]
        if not mine:
            raise EsperError(f"{proof} is about other controllers than the one in {folder}")
        about["proof"] = {"sha256": hashlib.sha256(text).hexdigest(), "controller": mine[0],
                          **{name: told[name] for name in ("verdict", "reason", "scenarios", "date", "commit")}}
    shipped = Member(controller, about)
    if env_of(shipped) != replace(config.env, device="cpu"):
        raise EsperError(f"{folder} was trained in another environment than {family.name} has by default; it cannot be shipped")
    return shipped


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
