"""What does a trained controller look at? Blind it to one group of fields at a time, or empty its memory before each step.

    python -m experiments.ablation runs/mnist1d-0 runs/mnist1d-1 runs/mnist1d-2 --device cuda

A blinded field is zero, which is the mean of what is scaled. Controllers were trained with everything, so this says what they
use, not what could be learned without it. Validation scenarios that no training was examined on.
"""

import copy
from dataclasses import replace
from pathlib import Path

import torch

from esper.cli.machine import keep_freed_memory
from esper.cli.runs import load_controller, load_run
from esper.leyline import EsperError, Observation
from esper.simic.proof.claims import interval
from esper.simic.proof.evaluator import Evaluator
from esper.simic.proof.proving import SPARE
from esper.simic.training import TrainConfig
from esper.tamiyo import Controller, Learned, Normaliser, Wait
from experiments.shared import parser, write

GROUPS = {
    "scores": {"row": ("measured", "scores", "gap", "moving", "slopes")},
    "clock": {"row": ("epoch", "progress", "epochs_left", "horizon")},
    "prices": {"row": ("price", "flop_price", "cost"), "slot": ("cost",), "candidate": ("cost",)},
    "contributions of seeds": {"slot": ("contributes", "contribution", "contribution_error", "previewed", "preview",
                                        "preview_error")},
    "previews of candidates": {"candidate": ("previewed", "drop", "drop_error")},
    "which blueprint is which": {"slot": ("descriptor",), "candidate": ("descriptor", "size", "flops")},
    "which slot is which": {"slot": ("position",)},
}
"""What is hidden together, by part of the observation."""


class Blinded(Normaliser):
    """Scales as another does, then hides some fields."""

    def __init__(self, of: Normaliser, group: dict[str, tuple[str, ...]]) -> None:
        super().__init__(of.spec, of.device, of.limit)
        self.stats = of.stats
        self.hidden = [self._columns(getattr(of.spec, part), group.get(part, ())) for part in Observation._fields]

    @staticmethod
    def _columns(fields: tuple, names: tuple[str, ...]) -> torch.Tensor:
        if unknown := set(names) - {field.name for field in fields}:
            raise EsperError(f"there is no field {', '.join(sorted(unknown))}")
        return torch.tensor([field.name in names for field in fields for _ in range(field.width)], dtype=torch.bool)

    def __call__(self, observation: Observation) -> Observation:
        seen = super().__call__(observation)
        return Observation(*(part.masked_fill(hide.to(part.device), 0.0) for part, hide in zip(seen, self.hidden, strict=True)))


def forgetful(controller: Controller) -> Controller:
    network = copy.copy(controller.network)
    network.config = replace(network.config, memory=False)
    return Controller(network, controller.normaliser)


def described(folder: Path) -> TrainConfig:
    found = load_run(folder)
    if found is None:
        raise EsperError(f"{folder} holds no run")
    return found[0]


def main() -> None:
    options_of = parser(__doc__)
    options_of.add_argument("runs", type=Path, nargs="+")
    options_of.add_argument("--scenarios", type=int, default=128)
    options = options_of.parse_args()
    keep_freed_memory()
    configs = {run: described(run) for run in options.runs}
    env = replace(configs[options.runs[0]].env, device=options.device)
    evaluator, drawn = Evaluator(env), env.family.scenarios(options.scenarios, "validation", SPARE)
    bare = evaluator.play(Wait(), drawn).utility()
    result: dict[str, dict[str, list[float]]] = {}
    for run, config in configs.items():
        whole = load_controller(run, config, options.device)[0].bound_to(env.spec)
        minds = {"everything": whole, "no memory": forgetful(whole)}
        blinded = {name: Blinded(whole.normaliser, group) for name, group in GROUPS.items()}
        minds |= {f"without {name}": Controller(whole.network, scales) for name, scales in blinded.items()}
        utility = {name: evaluator.play(Learned(mind, greedy=True), drawn, previews=True).utility()
                   for name, mind in minds.items()}
        for name, mine in utility.items():
            difference = 100 * (mine - (bare if name == "everything" else utility["everything"])).double().numpy()
            result.setdefault(name, {})[run.name] = [float(difference.mean()), *interval(difference)]
            print(f"{run.name:12} {name:34} {difference.mean():+.2f}", flush=True)
    write(options, f"ablation-{env.family.name}", {"scenarios": options.scenarios, "everything": "points above no growth",
                                                   "others": "points above everything", "points": result})


if __name__ == "__main__":
    main()
