"""One thing of every kind that a package can bring."""

import numpy as np
import torch
from torch import Tensor, nn

import esper
from esper.kasmina.objectives import Classification
from esper.leyline import View
from esper.simic.rewards import RewardInputs


class Squared(Classification):
    """Brier's score instead of the cross-entropy."""

    def losses(self, outputs: Tensor, labels: Tensor) -> Tensor:
        wanted = nn.functional.one_hot(labels.t(), outputs.shape[2])
        return (outputs.softmax(2) - wanted).square().sum(2).mean(1)


class Grafter:
    """Looks at one epoch, germinates, and waits."""

    def __call__(self, view: View) -> Tensor:
        graft, wait = view.spec.action("GERMINATE", blueprint="cutting"), view.spec.action("WAIT")
        return torch.tensor([graft if clock == 1 else wait for clock in view.clock.tolist()])


def make_plot() -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(0).normal(size=(400, 2))
    return x, (x[:, 0] * x[:, 1] > 0).astype(int)


def harvest(now: RewardInputs) -> dict[str, Tensor]:
    return {"gain": now.score}


esper.register_blueprint("cutting", lambda channels: nn.Sequential(nn.Linear(channels, channels), nn.Tanh()), "mlp")
esper.register_objective("squared", Squared())
esper.register_task("plot", make_plot, "squared")
esper.register_reward("harvest", harvest)
esper.register_policy("grafter", Grafter)
trellis = esper.Host.of(lambda: nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 2)), slots=["1"],
                        example=torch.zeros(4, 2), name="trellis")
esper.register_family(esper.Family("allotment", "plot", trellis, (esper.Kind("all"),), horizons=(6,), batch=50,
                                   samples=200, validation=50))
