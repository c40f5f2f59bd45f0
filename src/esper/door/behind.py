"""What happens behind the stopped model: seeds learn there before they join, and candidates are tried out."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from esper.door.evidence import LOSS, note
from esper.kasmina.blending import Graft
from esper.leyline import ALPHA_TARGETS, Contribution, EsperError, Head, SeedStage
from esper.leyline.keys import mix

if TYPE_CHECKING:
    from esper.door.growing import Growing

CLIP = 1.0
"""Largest gradient norm of a seed."""
HIGHEST = 1e-2
"""Learning rate of AdamW behind the model at the most: a user's SGD has higher ones."""


class Compute:
    """Extra training FLOPs, as shares of training the bare model: what was spent, and may be."""

    def __init__(self, host: int, epochs: int, most: float) -> None:
        self.host, self.epochs, self.most, self.spent = max(host, 1), epochs, most, 0.0

    def share(self, flops: float, epochs: float, behind: int = 0) -> float:
        """Of training seeds with these forward FLOPs so long, and of running the model again for those
        `behind` it: three times the forward, and two."""
        return (3 * flops + 2 * behind * self.host) * epochs / (3 * self.host * self.epochs)


@contextmanager
def alone(growing: "Growing", slot: int, graft: Graft, alpha: float) -> Iterator[None]:
    """A seed that is not live runs at this alpha, beside what is."""
    graft.alpha.fill_(alpha)
    growing.active[slot] = graft
    try:
        yield
    finally:
        graft.alpha.fill_(0.0)
        del growing.active[slot]


def learn(growing: "Growing", slot: int, graft: Graft, alpha: float) -> None:
    """Train a seed for a while, and nothing else; batches whose loss is no number are left out."""
    own = [parameter for parameter in graft.seed.parameters() if parameter.requires_grad]
    loss_of, lr = growing.asked.loss, growing.group(slot)["lr"]
    assert loss_of is not None
    if not own:
        return
    tiny = max((torch.finfo(p.dtype).tiny for p in own), default=0.0)  # 1e-8 is 0 in float16, and 0 / 0 NaN
    optim = torch.optim.AdamW(own, lr=min(float(lr) or HIGHEST / 10, HIGHEST), eps=max(1e-8, tiny))
    learned = False
    with alone(growing, slot, graft, alpha), torch.enable_grad():
        for batch in growing.asked.batches():
            loss = loss_of(growing.model.eval(), batch)
            if not isinstance(loss, Tensor) or loss.dim() or not loss.requires_grad:
                raise EsperError("loss(model, batch) must return one number that has a gradient")
            grads = torch.autograd.grad(loss, own, allow_unused=True)
            for parameter, grad in zip(own, grads, strict=True):
                parameter.grad = None if grad is None else growing.ranks.mean(grad)
            if bool(nn.utils.clip_grad_norm_(own, CLIP).isfinite()):
                learned = True
                optim.step()
    graft.seed.zero_grad()
    if not learned:
        raise EsperError("loss(model, batch) or its gradient is not a number, on every batch of data")


def incubate(growing: "Growing", epoch: float) -> None:
    """Seeds in training learn, `epoch` being the share of an epoch that this takes; the compute of live seeds
    is promised already."""
    compute = growing.compute
    for slot in growing.incubating if growing.asked.loss is not None else ():
        if compute.spent + growing.promised + (again := compute.share(0, epoch, behind=1)) <= compute.most:
            compute.spent += again
            learn(growing, slot, growing.grafts[slot], float(growing.life.target[0, slot]))


def preview(growing: "Growing", whole: Tensor, epoch: float) -> Contribution | None:
    """[1, S, K] loss drops of every blueprint in every empty slot, after it learned for a while; None if the
    budget forbids it. `whole` are the samples' scores without any of them."""
    compute, found = growing.compute, growing.unknown(len(growing.spec.blueprints))
    empty = (growing.life.stage[0] == SeedStage.DORMANT).nonzero().flatten().tolist()
    tried = [(slot, number) for slot in empty for number, kind in enumerate(growing.prototypes[slot])
             if kind.cost.params]
    flops = sum(growing.prototypes[slot][number].cost.flops for slot, number in tried)
    cost = compute.share(flops, epoch, behind=len(tried))
    if compute.spent + growing.promised + cost > compute.most:
        return None
    compute.spent += cost
    alpha = ALPHA_TARGETS[growing.spec.defaults[Head.ALPHA_TARGET]]
    for slot, number in tried:
        key = mix(torch.tensor([growing.asked.seed]), 1 + slot, growing.life.germinations[:, slot] + 1)
        kind = growing.prototypes[slot][number]
        graft = growing.graft(slot, kind, kind.fresh(key)[0])
        learn(growing, slot, graft, alpha)
        with alone(growing, slot, graft, alpha), torch.no_grad():
            note(found, (slot, number), whole[LOSS] - growing.judged(len(whole[0]))[LOSS])
    return found
