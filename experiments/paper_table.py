"""Static hosts on MNIST-1D against the table of its paper (Greydanus & Kobak, 2024): our trainer, their sizes.

    python -m experiments.paper_table --device cuda

4,000 training samples, batch 100, 150 epochs (6,000 steps), several inits of each host, ordered and shuffled sequences, all
trained side by side. Writes experiments/results/paper_table.json.
"""

import itertools

import torch
from torch import nn

from esper.kasmina import HOSTS, Host
from esper.kasmina.hosts import Staged
from esper.tamiyo import Wait
from esper.tolaria import TASKS, Family, Kind, MorphogeneticEnv, ProofKey, load_task, open_test, play
from experiments.shared import parser, write


def _linear(host: Host) -> nn.Module:
    """Maps in a row, nothing in between."""
    sizes = (host.inputs[0], *host.widths)
    return Staged([nn.Linear(a, b) for a, b in itertools.pairwise(sizes)], nn.Linear(sizes[-1], host.classes))


HOSTS["linear"] = HOSTS["mlp"]._replace(module=_linear)

PAPER = {"linear": 0.32, "mlp": 0.68, "conv1d": 0.94}
ARCHITECTURES = {
    "linear": Host("linear", inputs=(40,), widths=(40,)),  # two linear maps in a row are one
    "mlp": Host("mlp", inputs=(40,), widths=(100, 100)),
    "conv1d": Host("conv1d", widths=(25, 25, 25), taps=5),
}


def measure(name: str, inits: int, epochs: int, device: str) -> dict[str, object]:
    """Test accuracies of one host kind, ordered and shuffled."""
    kinds = (Kind("ordered"), Kind("shuffled", shuffle=True))
    family = Family(f"paper {name}", "mnist1d", ARCHITECTURES[name], kinds, horizons=(epochs,), lrs=(1e-2,), floor=0.01)
    scenarios = family.scenarios(2 * inits)
    scenarios.kind = torch.arange(2 * inits) % 2
    env = MorphogeneticEnv(family, 2 * inits, device=device, data=load_task("mnist1d", whole=True))
    play(env, Wait(), scenarios)
    x, y = open_test("mnist1d", ProofKey("the paper's own table: no choice is made with it"))
    accuracy = env.evaluate(env.held_out(x, y)).all_on.score
    rows = {kind.name: accuracy[number::2].tolist() for number, kind in enumerate(kinds)}
    return {"paper": PAPER[name], "parameters": family.host.layout.size, "rollbacks": len(env.rollbacks),
            **{kind: {"mean": sum(values) / inits, "all": values} for kind, values in rows.items()}}


def main() -> None:
    command = parser(__doc__)
    command.add_argument("--inits", type=int, default=8)
    command.add_argument("--epochs", type=int, default=150)
    options = command.parse_args()
    result: dict[str, object] = {"epochs": options.epochs, "samples": 4000, "test": TASKS["mnist1d"].sizes[2]}
    for name in ARCHITECTURES:
        result[name] = measure(name, options.inits, options.epochs, options.device)
        print(name, result[name], flush=True)
    write(options, "paper_table", result)


if __name__ == "__main__":
    main()
