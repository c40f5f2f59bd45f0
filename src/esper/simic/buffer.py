"""The rollout: everything that learning needs of T steps of N rows, in tensors made once.

Legend: T steps, N rows, C chunks, L steps of a chunk, H hidden.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from esper.leyline import ActionSpec, EsperError, Observation, ObservationSpec
from esper.tamiyo import ActionMasks, FactoredRecurrentActorCritic
from esper.tamiyo.masks import mask_sizes
from esper.tamiyo.network import Acted


@dataclass(frozen=True)
class RolloutSpec:
    """The shape of a rollout. Learning sees `chunk` steps at a time, from the memory they began with."""

    steps: int
    rows: int
    spec: ActionSpec
    observation: ObservationSpec
    hidden: int
    chunk: int = 0  # all steps at once
    privileged: int = 0  # numbers that the value head alone sees

    def __post_init__(self) -> None:
        if self.steps < 1 or self.rows < 1 or self.chunk < 0 or (self.chunk and self.steps % self.chunk):
            raise EsperError(f"a rollout of {self.steps} steps x {self.rows} rows cannot be cut "
                             f"into chunks of {self.chunk}")

    @classmethod
    def of(cls, net: FactoredRecurrentActorCritic, steps: int, rows: int, chunk: int = 0) -> "RolloutSpec":
        hidden, privileged = net.config.hidden, net.config.privileged
        return cls(steps, rows, net.spec, net.observation, hidden, chunk, privileged)

    @property
    def length(self) -> int:
        return self.chunk or self.steps

    def tails(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Name -> (shape behind [T, N], dtype) of all that a step brings."""
        (row, slot, candidate), heads = self.observation.widths, len(self.spec.heads)
        slots, kinds = self.spec.slots, len(self.spec.blueprints)
        numbers = {"seen.row": (row,), "seen.slot": (slots, slot), "privileged": (self.privileged,),
                   "seen.candidate": (slots, kinds, candidate), "head_log_probs": (heads,),
                   **dict.fromkeys(("log_prob", "value", "reward", "bootstrap"), ())}
        flags = {"relevant": (heads,), **dict.fromkeys(("done", "truncated", "reset", "valid"), ()),
                 **{f"mask.{name}": size for name, size in mask_sizes(self.spec).items()}}
        return {"actions": ((heads,), torch.int64),
                **{name: (tail, torch.float32) for name, tail in numbers.items()},
                **{name: (tail, torch.bool) for name, tail in flags.items()}}


class Step(NamedTuple):
    """One step of all rows. `hidden` and `reset` are of before it, the rest of what came of it."""

    seen: Observation
    masks: ActionMasks
    acted: Acted
    reward: Tensor  # [N]
    done: Tensor  # [N] the episode ended here, for good
    truncated: Tensor  # [N] it was cut here and would have gone on
    bootstrap: Tensor  # [N] value of what came next where it was cut
    reset: Tensor  # [N] the memory was emptied in front of this step
    hidden: Tensor  # [N, 2, H]
    valid: Tensor  # [N] False: the row was over already and waited
    privileged: Tensor | None = None  # [N, W] what the value head alone saw; None where that is nothing


class Sequences(NamedTuple):
    """A batch of sequences, [L, B, ...]."""

    seen: Observation
    masks: ActionMasks
    actions: Tensor
    log_prob: Tensor
    head_log_probs: Tensor
    relevant: Tensor
    value: Tensor
    advantage: Tensor
    target: Tensor
    valid: Tensor
    privileged: Tensor
    clock: Tensor  # steps since its episode began, or the rollout if that was later
    reset: Tensor | None  # None: no memory is emptied behind the first step
    hidden: Tensor  # [B, 2, H] in front of the first step

    @property
    def chosen(self) -> Tensor:
        """bool [L, B]: a step that counts and had a choice."""
        return self.valid & self.relevant.any(-1)

    def pick(self, choose: Callable[..., Tensor], *which: Any) -> "Sequences":
        """Some of the sequences: choose(tensor, dimension, *which) of every tensor."""
        plain = {name: choose(part, int(name != "hidden"), *which)
                 for name, part in self._asdict().items() if isinstance(part, Tensor)}
        seen = Observation(*(choose(part, 1, *which) for part in self.seen))
        return self._replace(seen=seen, masks=self.masks.map(lambda t: choose(t, 1, *which)), **plain)


class TamiyoRolloutBuffer:
    """`add` all steps, then compute advantages, then draw sequences. What was not added cannot be reached."""

    def __init__(self, spec: RolloutSpec, device: torch.device | str = "cpu") -> None:
        self.spec, self.device = spec, torch.device(device)
        self._tails = spec.tails()
        own = {"advantage": torch.float32, "target": torch.float32, "clock": torch.int64}
        tails = self._tails | {name: ((), dtype) for name, dtype in own.items()}
        self._all = {name: torch.zeros(spec.steps, spec.rows, *tail, dtype=dtype, device=self.device)
                     for name, (tail, dtype) in tails.items()}
        self._hidden = torch.zeros(spec.steps // spec.length, spec.rows, 2, spec.hidden, device=self.device)
        self.reset()

    def reset(self) -> None:
        """Forget every step; the memory is used again."""
        self.filled, self._resets_inside, self._ready = 0, False, False

    def __getitem__(self, name: str) -> Tensor:
        """[filled, N, ...]: steps so far, by a name of `RolloutSpec.tails`, advantage, target or clock."""
        return self._all[name][: self.filled]

    @torch.no_grad()
    def add(self, step: Step) -> None:
        """Append a step of all rows; nothing is written if any part has another shape, dtype or device."""
        if self.filled == self.spec.steps:
            raise EsperError(f"this rollout already holds its {self.spec.steps} steps; "
                             "call reset before adding more")
        parts = {f"seen.{name}": part for name, part in step.seen._asdict().items()}
        parts |= {f"mask.{name}": part for name, part in step.masks.named().items()}
        parts |= {name: part for name, part in (step._asdict() | step.acted._asdict()).items()
                  if name in self._tails}
        if step.privileged is None:
            parts["privileged"] = step.reward.new_zeros(len(step.reward), 0)
        if missing := sorted(self._tails.keys() - parts.keys()):
            raise EsperError(f"the step has no {missing[0]!r}; nothing was added")
        for name, (tail, dtype) in self._tails.items():
            self._check(name, parts[name], (self.spec.rows, *tail), dtype)
        self._check("hidden", step.hidden, (self.spec.rows, 2, self.spec.hidden), self._hidden.dtype)
        step.masks.check(self.spec.spec, (self.spec.rows,), self.device)
        at = self.filled
        for name, part in parts.items():
            if part.is_floating_point():  # rows that wait may hold anything, and nothing may come of it
                part = torch.where(step.valid.view(-1, *[1] * (part.dim() - 1)), part, 0)
            self._all[name][at] = part
        self._all["clock"][at] = torch.where(step.reset, 0, self._all["clock"][at - 1] + 1) if at else 0
        if at % self.spec.length == 0:
            kept = (step.valid & ~step.reset)[:, None, None]
            self._hidden[at // self.spec.length] = torch.where(kept, step.hidden, 0)
        self._resets_inside = self._resets_inside or (at % self.spec.length > 0 and bool(step.reset.any()))
        self.filled, self._ready = at + 1, False

    def steps(self) -> dict[str, Tensor]:
        """Every step so far, [filled, N, ...] each, for `join` elsewhere; "hidden" is [chunks, N, 2, H]."""
        chunks = -(-self.filled // self.spec.length)
        return {**{name: self[name] for name in (*self._tails, "clock")}, "hidden": self._hidden[:chunks]}

    @torch.no_grad()
    def join(self, parts: Sequence[Mapping[str, Tensor]]) -> None:
        """Hold the `steps` of several rollouts, side by side; rows whose part ended earlier wait."""
        self.reset()
        self.filled = max(len(part["valid"]) for part in parts)
        places = pairwise(accumulate((part["valid"].shape[1] for part in parts), initial=0))
        for part, (first, last) in zip(parts, places, strict=True):
            count = len(part["valid"])
            for name in (*self._tails, "clock"):
                mine = self[name][:, first:last]
                mine[:count] = part[name]
                waits = mine.is_floating_point() or name in ("valid", "reset")
                mine[count:] = 0 if waits else mine[count - 1].clone()  # a mask must leave a choice
            self._hidden[: len(part["hidden"]), first:last] = part["hidden"]
            self._hidden[len(part["hidden"]) :, first:last] = 0
        inside = torch.arange(self.filled, device=self.device) % self.spec.length > 0
        self._resets_inside = bool(self["reset"][inside].any())

    def _check(self, name: str, part: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        if part.shape != shape or part.dtype != dtype or part.device.type != self.device.type:
            raise EsperError(f"step's {name!r} is {part.dtype} {list(part.shape)} on {part.device.type}; "
                             f"this rollout holds {dtype} {list(shape)} on {self.device.type}")
        if part.requires_grad:
            raise EsperError(f"step's {name!r} carries a gradient; collect under torch.no_grad")

    @torch.no_grad()
    def compute_advantages_and_returns(self, gamma: float, gae_lambda: float, last_value: Tensor) -> None:
        """Generalised advantages; `last_value` [N] is of what follows the last step, for rows that go on."""
        if not self.filled:
            raise EsperError("this rollout is empty; add steps before computing advantages")
        self._check("last_value", last_value, (self.spec.rows,), torch.float32)
        valid, value = self["valid"], self["value"]
        ended = self["done"] | self["truncated"]
        if bool((valid & ~ended)[:-1].logical_and(~valid[1:]).any()):
            raise EsperError("a row stopped without done or truncated; its next step is not valid")
        ahead = torch.where(self["truncated"], self["bootstrap"], torch.cat([value[1:], last_value[None]]))
        following = torch.where(self["done"], 0.0, ahead)
        delta = torch.where(valid, self["reward"] + gamma * following - value, 0.0)
        weight = gamma * gae_lambda * (~ended & valid)
        running, advantage = torch.zeros_like(last_value), self["advantage"]
        for step in reversed(range(self.filled)):
            running = torch.addcmul(delta[step], weight[step], running)
            advantage[step] = running
        torch.add(advantage, value, out=self["target"])
        self._ready = True

    @torch.no_grad()
    def check_numbers(self, largest: float) -> None:
        """Raise for what no update may learn from; no reward may be larger. Rows that wait hold zeros."""
        seen = (f"seen.{name}" for name in Observation._fields)
        names = ("reward", "value", "bootstrap", "target", "privileged", *seen)
        bad = {name: ~self[name].isfinite() for name in names}
        bad["reward"] |= self["reward"].abs() > largest
        for name, found in zip(bad, torch.stack([part.any() for part in bad.values()]).tolist(), strict=True):
            if found:
                step, row, *rest = bad[name].nonzero()[0].tolist()
                limit = f" of size {largest:g} at most" if name == "reward" else ""
                value = float(self[name][step, row, *rest])
                raise EsperError(f"{name!r} is {value:g} at step {step} of row {row}; expected finite "
                                 f"numbers{limit}; nothing was learned from this rollout")

    @torch.no_grad()
    def normalize_advantages(self) -> tuple[Tensor, Tensor]:
        """Mean 0 and spread 1 over steps that had a choice, others keep none; (mean, spread) before."""
        if not self._ready:
            raise EsperError("there are no advantages yet; call compute_advantages_and_returns first")
        mean, centred, variance = moments(self["advantage"], self["valid"] & self["relevant"].any(-1))
        self["advantage"].copy_(centred / (variance.sqrt() + 1e-8))
        return mean, variance.sqrt()

    def get_batched_sequences(self, minibatches: int = 1,
                              generator: torch.Generator | None = None) -> Iterator[Sequences]:
        """All sequences once, in random batches of equal size. One batch of whole rows is a view, no copy."""
        if not self._ready:
            raise EsperError("there are no advantages yet; call compute_advantages_and_returns first")
        if self.spec.chunk and self.filled % self.spec.chunk:
            raise EsperError(f"{self.filled} steps cannot be cut into chunks of {self.spec.chunk}; "
                             "fill whole chunks")
        chunks = max(1, self.filled // self.spec.length)
        count = chunks * self.spec.rows
        if count % minibatches:
            raise EsperError(f"{count} sequences cannot be cut into {minibatches} equal batches; "
                             "choose a divisor")
        unused = ("reward", "done", "truncated", "bootstrap")
        named = {name: self[name].unflatten(0, (chunks, -1)).transpose(0, 1).flatten(1, 2)  # [L, C * N, ...]
                 for name in self._all if name not in unused}
        seen = Observation(*(named[f"seen.{name}"] for name in Observation._fields))
        spec, masks = self.spec.spec, {name: named[f"mask.{name}"] for name in mask_sizes(self.spec.spec)}
        reset, hidden = named["reset"] if self._resets_inside else None, self._hidden[:chunks].flatten(0, 1)
        plain = {name: named[name] for name in Sequences._fields[2:-2]}
        whole = Sequences(seen, ActionMasks.from_named(spec, masks), **plain, reset=reset, hidden=hidden)
        if minibatches == 1:
            yield whole
            return
        for part in torch.randperm(count, generator=generator).to(self.device).split(count // minibatches):
            yield whole.pick(torch.index_select, part)


def mean_of(values: Tensor, counted: Tensor, count: Tensor) -> Tensor:
    """The sum of what is `counted`, over the given count."""
    return torch.where(counted, values, 0.0).sum() / count


def moments(values: Tensor, counted: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(mean, values less it, variance) of those that are `counted`; the others become zero."""
    count = counted.sum().clamp(min=1)
    mean = mean_of(values, counted, count)
    centred = torch.where(counted, values - mean, 0.0)
    return mean, centred, centred.square().sum() / count


def parts_of(batch: Sequences, pieces: int) -> Iterator[Sequences]:
    """The batch in so many pieces along its sequences, for gradients that are summed up."""
    count = batch.valid.shape[1]
    if count % pieces:
        raise EsperError(f"{count} sequences cannot be cut into {pieces} equal pieces; choose a divisor")
    for start in range(0, count, count // pieces):
        yield batch.pick(torch.narrow, start, count // pieces)
