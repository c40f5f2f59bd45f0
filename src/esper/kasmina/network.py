"""A grown network: one row of a population as a plain module, with nothing of the population left inside."""

from torch import Tensor, nn


class GrownNetwork(nn.Module):
    """Stages with the seeds that grew after them. `grafts[i]` is `nn.Identity` where nothing lives."""

    def __init__(self, stages: nn.ModuleList, grafts: nn.ModuleList, head: nn.Module) -> None:
        super().__init__()
        self.stages, self.grafts, self.head = stages, grafts, head

    def forward(self, x: Tensor) -> Tensor:
        for stage, graft in zip(self.stages, self.grafts, strict=True):
            x = graft(stage(x))
        out: Tensor = self.head(x)
        return out
