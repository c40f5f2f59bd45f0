"""Rules that a person would write: grow when learning stalls, keep what pays, prune what does not.

Legend: N rows, S slots, K blueprints.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from esper.leyline import EsperError, Facts, Head, LifecycleOp, SeedStage, View
from esper.tamiyo.masks import action_masks
from esper.tamiyo.scripts import developing, growing

_URGENCY = (LifecycleOp.WAIT, LifecycleOp.GERMINATE, LifecycleOp.SET_ALPHA_TARGET, LifecycleOp.ADVANCE,
            LifecycleOp.PRUNE, LifecycleOp.FOSSILIZE)  # from least to most urgent


@dataclass(frozen=True)
class HeuristicConfig:
    patience: int = 1  # epochs without progress before a seed germinates
    progress: float = 0.2  # share by which the validation loss must fall to count as progress
    least_left: int = 6  # epochs; a seed born with fewer left would not be kept in time
    doubt: float = 1.0  # standard errors by which a contribution must pass its price, but at the last moment
    hoped: float = 0.05  # gain in score of a seed as large as its host, without a preview; less if smaller


class Heuristic:
    """Manages every slot of every row; one decision per row and epoch, the most urgent first."""

    memory = ("best", "stale", "tried")  # what it remembers of rows: the door keeps these in its files

    def __init__(self, config: HeuristicConfig | None = None) -> None:
        self.config = config or HeuristicConfig()
        self.best, self.stale, self.tried = torch.empty(0), torch.empty(0), torch.empty(0)

    def __call__(self, view: View) -> Tensor:
        facts, spec = view.facts, view.spec
        if facts is None:
            raise EsperError("the heuristic reads measurements, and this view has none")
        self._watch(view, facts)
        worth, never = self._worth(view, facts), torch.zeros_like(view.seeds.fading)
        need = worth.amax(2)  # [N, S]: of slots with equal wishes the neediest goes first
        wishes = self._wishes(view, facts, need > 0)
        wished = torch.stack([wishes.get(op, never) for op in spec.ops], 1)  # [N, O, S]
        rank = torch.tensor([float(_URGENCY.index(op)) for op in spec.ops])[:, None]
        rank = rank + 0.5 * need.argsort(1).argsort(1)[:, None] / spec.slots
        most, best = torch.where(action_masks(view).slot & wished, rank, 0.0).flatten(1).max(1)
        slot = torch.where(most > 0, best % spec.slots, spec.defaults[Head.SLOT])
        op = torch.where(most > 0, torch.tensor(spec.ops)[best // spec.slots], int(LifecycleOp.WAIT))
        every, grows = torch.arange(len(op)), op == LifecycleOp.GERMINATE
        blueprint = worth[every, slot].argmax(1)
        self.tried[every[grows], slot[grows], blueprint[grows]] += 1
        self.stale[grows] = 0
        return growing(view, op, slot, blueprint)

    def _watch(self, view: View, facts: Facts) -> None:
        """Count the epochs in which each row made no progress."""
        new, shape = view.clock == 0, (len(view.clock), *facts.prices.shape[:2])
        if self.tried.shape != shape:
            self.best, self.stale = torch.full(shape[:1], torch.inf), torch.zeros(shape[0])
            self.tried = torch.zeros(shape)
        self.best[new], self.stale[new], self.tried[new] = torch.inf, 0, 0
        loss = torch.where(facts.scores[:, 0].isfinite(), facts.scores[:, 0], torch.inf)
        progress = loss < self.best * (1 - self.config.progress)
        self.stale = torch.where(progress | new, 0, self.stale + 1)
        self.best = torch.minimum(self.best, loss)

    def _wishes(self, view: View, facts: Facts, pays: Tensor) -> dict[LifecycleOp, Tensor]:
        """bool [N, S] for every op: where it would be done if allowed; `pays` [N, S]: could a seed there?"""
        seeds, left, config = view.seeds, view.horizon - view.clock, self.config
        seen, preview = facts.contribution, facts.preview
        cost = view.price[:, None] * facts.costs[..., 0]
        gain, doubt = seen.value - cost, config.doubt * seen.standard_error
        late = (left <= 2)[:, None] | (seeds.dwell >= config.patience + 1)
        holding = (seeds.stage == SeedStage.HOLDING) & seen.known
        hopeless = preview.known & (preview.value + config.doubt * preview.standard_error < 0)
        grow = (self.stale >= config.patience) & (left >= config.least_left) & ~developing(view)
        stuck = (seeds.stage == SeedStage.TRAINING) & hopeless & (seeds.dwell > config.patience)
        return {LifecycleOp.FOSSILIZE: holding & ((gain > doubt) | (late & (gain > 0))),
                LifecycleOp.PRUNE: (holding & ((gain < -doubt) | (late & (gain <= 0)))) | stuck,
                LifecycleOp.ADVANCE: ~hopeless, LifecycleOp.GERMINATE: grow[:, None] & pays}

    def _worth(self, view: View, facts: Facts) -> Tensor:
        """[N, S, K]: expected gain of each candidate, by its preview if any, or its size, less its price."""
        size = facts.prices[..., 0] / max(facts.host.params, 1)
        gain = (self.config.hoped * size / (size + 0.2)).expand_as(self.tried)
        if facts.candidates is not None:
            gain = torch.where(facts.candidates.known, facts.candidates.value, gain)
        real = torch.tensor([name != "noop" for name in view.spec.blueprints])
        worth = gain / (1 + self.tried) - view.price[:, None, None] * facts.prices[..., 0]
        return torch.where(real, worth, -torch.inf)
