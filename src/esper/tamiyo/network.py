"""The controller's network: slots and candidates are encoded alike, so it runs on any number of them.

Legend: T steps, B rows, S slots, K blueprints, O ops, A ops that name a slot, H hidden, Z trunk.
Sequences are [T, B, ...].

    candidates -> encoder --+-> pooled --+
    slots ------> encoder --+-> pooled --+-> features -> LSTM -> norm -+-> value
                                                                       +-> op
                            slot encodings --------- trunk(op, slot) --+-> slot and blueprint pointers, heads
"""

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from esper.leyline import ALPHA_SPEEDS, RELEVANCE, ActionSpec, EsperError, Head, Observation, ObservationSpec
from esper.tamiyo.distributions import ActionDistribution, ActionLogits, Scored, by_speed
from esper.tamiyo.masks import ActionMasks
from esper.tamiyo.observing import OBSERVATION

WIDEST = 4096  # a config that asks for wider layers is a mistake, and is refused before memory is


@dataclass(frozen=True)
class NetworkConfig:
    """Sizes of the controller's network."""

    hidden: int = 128
    """Width of the features and of the memory."""
    slot: int = 64
    """Width of a slot's encoding."""
    candidate: int = 16
    """Width of a candidate's encoding."""
    trunk: int = 64
    """Width behind which the heads split."""
    memory: bool = True
    """Without it the LSTM forgets everything before each step."""
    privileged: int = 0
    """Numbers that the value head alone sees while it learns; a controller that only acts needs none."""

    def __post_init__(self) -> None:
        for name, least in (("hidden", 1), ("slot", 1), ("candidate", 1), ("trunk", 1), ("privileged", 0)):
            size = getattr(self, name)
            if not isinstance(size, int) or not least <= size <= WIDEST:
                raise EsperError(f"{name} is {size!r}; expected a whole number from {least} to {WIDEST}")


@contextmanager
def exact() -> Iterator[None]:
    """No TF32 in here, whatever it is outside: replay must agree with acting."""
    places: tuple[Any, ...] = (torch.backends.cudnn.rnn, torch.backends.cuda.matmul)
    before = [place.fp32_precision for place in places]
    try:
        for place in places:
            place.fp32_precision = "ieee"
        yield
    finally:
        for place, precision in zip(places, before, strict=True):
            place.fp32_precision = precision


def emptied(hidden: Tensor, reset: Tensor) -> Tensor:
    """Zeros in the rows to reset."""
    return torch.where(reset[:, None, None], 0.0, hidden)


class Decided(NamedTuple):
    """What the network says of a sequence."""

    logits: ActionLogits
    value: Tensor  # [T, B]


class Acted(NamedTuple):
    """What acting leaves for learning. These tensors carry no gradient."""

    actions: Tensor  # [B, heads]
    log_prob: Tensor  # [B] joint
    head_log_probs: Tensor  # [B, heads]
    relevant: Tensor  # [B, heads]
    value: Tensor  # [B]
    hidden: Tensor  # [B, 2, H]


class Evaluated(NamedTuple):
    """Given actions under the network as it is now, with gradients."""

    scored: Scored
    distribution: ActionDistribution
    value: Tensor  # [T, B]


def _encoder(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, outputs), nn.LayerNorm(outputs), nn.ReLU())


def _head(inputs: int, inner: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, inner), nn.ReLU(), nn.Linear(inner, outputs))


def _state(hidden: Tensor) -> tuple[Tensor, Tensor]:
    """As the LSTM wants it, [1, B, H] each."""
    return hidden[None, :, 0].contiguous(), hidden[None, :, 1].contiguous()


class FactoredRecurrentActorCritic(nn.Module):
    """One mind for all slots: V(s), and a distribution over factored actions."""

    value_scale: Tensor
    """The unit in which the value head works."""

    def __init__(self, spec: ActionSpec, config: NetworkConfig | None = None,
                 observation: ObservationSpec = OBSERVATION) -> None:
        super().__init__()
        self.spec, self.config, self.observation = spec, config or NetworkConfig(), observation
        size, (row, slot, candidate) = self.config, observation.widths
        self.acting = [op for op in spec.ops if RELEVANCE[op, Head.SLOT]]
        self.candidate_encoder = nn.Sequential(nn.Linear(candidate, size.candidate), nn.ReLU())
        self.slot_encoder = _encoder(slot + 2 * size.candidate, size.slot)
        self.feature_net = _encoder(row + 2 * size.slot, size.hidden)
        self.lstm = nn.LSTM(size.hidden, size.hidden)
        self.lstm_norm = nn.LayerNorm(size.hidden)
        self.op_head = _head(size.hidden, size.trunk, len(spec.ops))
        self.value_head = _head(size.hidden + size.privileged, size.trunk, 1)
        self.trunk_state = nn.Linear(size.hidden, size.trunk)
        self.trunk_slot = nn.Linear(size.slot, size.trunk, bias=False)
        self.trunk_op = nn.Parameter(torch.zeros(len(self.acting), size.trunk))
        self.slot_pointer = nn.Linear(size.trunk, 1, bias=False)
        widths = {**spec.head_sizes, Head.BLUEPRINT: size.candidate}  # its pointer has a query
        if Head.ALPHA_SPEED in spec.heads:
            widths[Head.ALPHA_CURVE] *= len(ALPHA_SPEEDS)
        self.heads = nn.ModuleDict({head.name.lower(): nn.Linear(size.trunk, widths[head])
                                    for head in sorted({head for _, head in spec.pairs})})
        self.register_buffer("value_scale", torch.tensor(0.01))  # near zero at birth, in any unit of reward
        self._initialise()

    def _initialise(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.orthogonal_(module.weight, math.sqrt(2))
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        for layer in (self.op_head[-1], self.slot_pointer, *self.heads.values()):
            nn.init.orthogonal_(layer.weight, 0.01)  # type: ignore[arg-type]
        nn.init.orthogonal_(self.value_head[-1].weight, 1.0)  # type: ignore[arg-type]
        nn.init.orthogonal_(self.trunk_op, 1.0)
        hidden, (inward, inner, *biases) = self.config.hidden, self.lstm.parameters()
        for gate in (*inward.detach().split(hidden), *inner.detach().split(hidden)):
            nn.init.orthogonal_(gate)
        for bias in biases:
            nn.init.zeros_(bias)
        biases[0].detach()[hidden : 2 * hidden].fill_(1.0)  # the forget gate starts open

    @torch.no_grad()
    def rescale_value(self, scale: Tensor) -> None:
        """Let the value head work in other units; what it says stays the same."""
        for parameter in self.value_head[-1].parameters():
            parameter.mul_(self.value_scale / scale)
        self.value_scale.copy_(scale)

    def bound_to(self, spec: ActionSpec) -> "FactoredRecurrentActorCritic":
        """The same weights for a host with other slots or blueprints."""
        if spec.ops != self.spec.ops or spec.heads != self.spec.heads:
            mine, theirs = (f"{[o.name for o in s.ops]} x {[h.name for h in s.heads]}"
                            for s in (self.spec, spec))
            raise EsperError(f"this controller chooses {mine}; it cannot act in a space of {theirs}")
        bound = copy.copy(self)
        bound.spec = spec
        return bound

    def get_initial_hidden(self, rows: int) -> Tensor:
        """Zeros [rows, 2, H] on the device and in the dtype of the weights."""
        return self.trunk_op.new_zeros(rows, 2, self.config.hidden)

    def encode(self, seen: Observation) -> tuple[Tensor, Tensor, Tensor]:
        """In front of the memory: features [T, B, H], slots [T, B, S, ...], candidates [T, B, S, K, ...]."""
        candidate = self.candidate_encoder(seen.candidate)
        pooled = torch.cat([seen.slot, candidate.mean(-2), candidate.max(-2).values], -1)
        slot = self.slot_encoder(pooled)
        features = self.feature_net(torch.cat([seen.row, slot.mean(-2), slot.max(-2).values], -1))
        return features, slot, candidate

    def remember(self, features: Tensor, hidden: Tensor,
                 reset: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """(outputs [T, B, H], hidden behind them, unknown if there are resets) of the LSTM; `reset` [T, B]
        empties the memory in front of a step: every stretch is a sequence of its own, all run in one call."""
        if not self.config.memory:
            reset = torch.ones(features.shape[:2], dtype=torch.bool, device=features.device)
        if reset is None:
            out, (h, c) = self.lstm(features, _state(hidden))
            return out, torch.stack([h[0], c[0]], 1)
        steps, rows = reset.shape
        begins = reset.clone()
        begins[0] = True
        stretch = begins.t().flatten().cumsum(0).view(rows, steps).t() - 1  # [T, B] number of the stretch
        clock = torch.arange(steps, device=reset.device)[:, None].expand(steps, rows)
        place = clock - torch.where(begins, clock, 0).cummax(0).values  # [T, B] step within it
        count, longest = (torch.stack([stretch[-1, -1], place.max()]) + 1).tolist()
        inputs = features.new_zeros(longest, count, features.shape[2]).index_put((place, stretch), features)
        empty = hidden.new_zeros(count, *hidden.shape[1:])
        out, _ = self.lstm(inputs, _state(empty.index_put((stretch[0],), emptied(hidden, reset[0]))))
        return out[place, stretch], None

    def decide(self, memory: Tensor, slot: Tensor, candidate: Tensor,
               privileged: Tensor | None = None) -> Decided:
        """Everything behind the memory. `privileged` [T, B, W] reaches the value alone; None is zeros."""
        state = self.lstm_norm(memory)
        trunk = self.trunk_state(state)[..., None, None, :] + self.trunk_slot(slot)[..., None, :, :]
        trunk = (trunk + self.trunk_op[:, None]).relu()  # [T, B, A, S, Z]
        pointed = self.slot_pointer(trunk).squeeze(-1)  # [T, B, A, S]
        slots = [torch.zeros_like(pointed[..., 0, :])] * len(self.spec.ops)
        for number, op in enumerate(self.acting):
            slots[self.spec.ops.index(op)] = pointed[..., number, :]
        values = {}
        for op, head in self.spec.pairs:
            out = self.heads[head.name.lower()](trunk[..., self.acting.index(op), :, :])  # [T, B, S, width]
            if head == Head.BLUEPRINT:
                out = (candidate * out.unsqueeze(-2)).sum(-1)
            elif by_speed(self.spec, head):
                out = out.unflatten(-1, (len(ALPHA_SPEEDS), -1))
            values[op, head] = out
        logits = ActionLogits(self.op_head(state), torch.stack(slots, -2), values)
        if privileged is None:
            privileged = state.new_zeros(*state.shape[:-1], self.config.privileged)
        value = self.value_head(torch.cat([state, privileged], -1)).squeeze(-1)
        return Decided(logits, self.value_scale * value)

    def forward(self, seen: Observation, hidden: Tensor | None = None, reset: Tensor | None = None,
                privileged: Tensor | None = None) -> tuple[Decided, Tensor | None]:
        """(logits and values of a sequence [T, B, ...], hidden behind it if there were no resets)."""
        self._check(seen, hidden, reset, privileged)
        hidden = self.get_initial_hidden(seen.row.shape[1]) if hidden is None else hidden
        features, slot, candidate = self.encode(seen)
        memory, behind = self.remember(features, hidden, reset)
        return self.decide(memory, slot, candidate, privileged), behind

    def _check(self, seen: Observation, hidden: Tensor | None, reset: Tensor | None,
               privileged: Tensor | None) -> None:
        (row, slot, candidate), rows = self.observation.widths, tuple(seen.row.shape[:2])
        places, weights = (*rows, self.spec.slots), self.trunk_op
        shapes = ((*rows, row), (*places, slot), (*places, len(self.spec.blueprints), candidate))
        for name, tensor, shape in zip(Observation._fields, seen, shapes, strict=True):
            if tensor.shape != shape:
                raise EsperError(f"observation {name!r} has shape {list(tensor.shape)}; "
                                 f"expected [T, B, ...] = {list(shape)}")
            if tensor.dtype != weights.dtype or tensor.device != weights.device:
                raise EsperError(f"observation {name!r} is {tensor.dtype} on {tensor.device}; "
                                 f"the controller's weights are {weights.dtype} on {weights.device}")
        for name, told, size, dtype in (("hidden", hidden, (rows[1], 2, self.config.hidden), weights.dtype),
                                        ("reset", reset, rows, torch.bool)):
            if told is not None and (told.shape != size or told.dtype != dtype):
                raise EsperError(f"{name} is {told.dtype} {list(told.shape)}; expected {dtype} {list(size)}")
        if privileged is not None and privileged.shape != (*rows, self.config.privileged):
            raise EsperError(f"privileged inputs have shape {list(privileged.shape)}; this critic expects "
                             f"{[*rows, self.config.privileged]}")

    def step(self, seen: Observation, hidden: Tensor, privileged: Tensor | None) -> tuple[Decided, Tensor]:
        """`forward` of one step, all without T; the hidden behind a mind without memory is empty."""
        told = None if privileged is None else privileged[None]
        decided, behind = self.forward(Observation(*(part[None] for part in seen)), hidden, privileged=told)
        op, slot, values = decided.logits
        logits = ActionLogits(op[0], slot[0], {pair: said[0] for pair, said in values.items()})
        return Decided(logits, decided.value[0]), torch.zeros_like(hidden) if behind is None else behind

    @torch.no_grad()
    @exact()
    def get_action(self, seen: Observation, masks: ActionMasks, hidden: Tensor, u: Tensor | None,
                   explore: Tensor | float = 0.0, privileged: Tensor | None = None) -> Acted:
        """Actions of one step [B, ...] by uniform numbers u [B, heads], or the likeliest for None."""
        (logits, value), behind = self.step(seen, hidden, privileged)
        distribution = ActionDistribution(self.spec, logits, masks, explore)
        actions = distribution.mode() if u is None else distribution.sample(u)
        scored = distribution.score(actions)
        if not bool((scored.joint.isfinite() & value.isfinite()).all()):
            raise EsperError("what the controller says is not finite; its weights or observations are broken")
        return Acted(actions, *scored, value, behind)

    def evaluate_actions(self, seen: Observation, masks: ActionMasks, actions: Tensor, hidden: Tensor | None,
                         reset: Tensor | None = None, explore: Tensor | float = 0.0, validate: bool = True,
                         privileged: Tensor | None = None) -> Evaluated:
        """Score actions [T, B, heads] of sequences that began at `hidden`, with gradients."""
        decided, _ = self.forward(seen, hidden, reset, privileged)
        distribution = ActionDistribution(self.spec, decided.logits, masks, explore, validate)
        return Evaluated(distribution.score(actions), distribution, decided.value)
