"""Several processes that train one model. DistributedDataParallel reduces the gradients that it knows, and
seeds are born later: here theirs are reduced, and all ranks decide alike."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Ranks:
    """The processes of a model; alone, everything is left as it is."""

    def __init__(self, model: nn.Module) -> None:
        wrapped = any(isinstance(each, nn.parallel.DistributedDataParallel) for each in model.modules())
        self.several = wrapped and dist.get_world_size() > 1
        self.device = next((p.device for p in model.parameters()), None)

    def mean(self, grad: Tensor) -> Tensor:
        """The mean over all ranks, in place."""
        if self.several:
            dist.all_reduce(grad)
            grad /= dist.get_world_size()
        return grad

    def reduce(self, parameters: Iterable[nn.Parameter]) -> None:
        """Let gradients of these be means over ranks from now on; a mean of means is what it was, so that
        accumulated gradients are right, too."""
        for parameter in parameters if self.several else ():
            parameter.register_post_accumulate_grad_hook(self._reduced)

    def _reduced(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self.mean(parameter.grad)

    def agree(self, tensors: Iterable[Tensor]) -> None:
        """All ranks go on with what the first one measured."""
        for tensor in tensors if self.several else ():
            shared = tensor.to(self.device, torch.float64)  # NCCL knows no tensors on the CPU
            dist.broadcast(shared, 0)
            tensor.copy_(shared)

    def all_true(self, sound: bool) -> bool:
        """Is it so on every rank?"""
        counted = torch.tensor([float(sound)], device=self.device)
        if self.several:
            dist.all_reduce(counted, dist.ReduceOp.MIN)
        return bool(counted > 0)
