"""The factored action: operations, heads, which head matters for which operation, what head indices mean."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from esper.leyline.errors import EsperError


class LifecycleOp(IntEnum):
    """What a controller may do to a slot, once per epoch."""

    WAIT, GERMINATE, SET_ALPHA_TARGET, PRUNE, FOSSILIZE, ADVANCE = range(6)


class Head(IntEnum):
    """The parts of an action."""

    OP, SLOT, BLUEPRINT, STYLE, TEMPO, ALPHA_TARGET, ALPHA_SPEED, ALPHA_CURVE = range(8)


class Style(IntEnum):
    """How a seed's output s joins the host's h; all are h itself while s is zero."""

    ADD = 0  # h + alpha * s
    MULTIPLY = 1  # h * (1 + alpha * tanh s)
    GATE = 2  # h + alpha * g(h) * s with a learned g in (0, 1)


class AlphaCurve(IntEnum):
    LINEAR, COSINE, SIGMOID_GENTLE, SIGMOID, SIGMOID_SHARP = range(5)


TEMPOS = (3, 5, 8)  # epochs of a seed's first ramp, by index of Head.TEMPO
ALPHA_TARGETS = (0.5, 0.7, 1.0)
ALPHA_SPEEDS = (0, 3, 5, 8)  # epochs of a later ramp; 0 is at once


def relevance_table(rows: Mapping[LifecycleOp, frozenset[Head]]) -> npt.NDArray[np.bool_]:
    """bool [ops, heads]; the op head is relevant to every op. Refuses ops and heads that no row names."""
    if set(rows) != set(LifecycleOp):
        raise TypeError(f"relevance rows {sorted(rows)} do not match the ops {sorted(LifecycleOp)}; "
                        "give each op its row")
    if unused := set(Head) - {Head.OP} - frozenset().union(*rows.values()):
        raise TypeError(f"no op uses the heads {sorted(h.name for h in unused)}; add them to a relevance row")
    table = np.array([[h is Head.OP or h in rows[op] for h in Head] for op in LifecycleOp])
    table.flags.writeable = False
    return table


RELEVANCE = relevance_table({
    LifecycleOp.WAIT: frozenset(),
    LifecycleOp.GERMINATE: frozenset({Head.SLOT, Head.BLUEPRINT, Head.STYLE, Head.TEMPO, Head.ALPHA_TARGET}),
    LifecycleOp.SET_ALPHA_TARGET: frozenset(set(Head) - {Head.OP, Head.BLUEPRINT, Head.TEMPO}),
    LifecycleOp.PRUNE: frozenset({Head.SLOT, Head.ALPHA_SPEED, Head.ALPHA_CURVE}),
    LifecycleOp.FOSSILIZE: frozenset({Head.SLOT}),
    LifecycleOp.ADVANCE: frozenset({Head.SLOT})})
"""RELEVANCE[op, head]: does this head's choice have any effect under this op?"""
_DEFAULTS = dict.fromkeys(Head, 0) | {Head.ALPHA_TARGET: ALPHA_TARGETS.index(1.0)}  # else the first


@dataclass(frozen=True)
class ActionSpec:
    """Which heads and ops a controller chooses from; absent heads take `defaults`."""

    slots: int
    blueprints: tuple[str, ...]
    heads: tuple[Head, ...] = tuple(Head)
    ops: tuple[LifecycleOp, ...] = tuple(LifecycleOp)
    auto_advance: bool = False  # TRAINING seeds blend as soon as their gate passes, without an ADVANCE
    defaults: Mapping[Head, int] = field(default_factory=dict)  # of heads not chosen, over Esper's own
    pairs: tuple[tuple[LifecycleOp, Head], ...] = field(init=False, repr=False, compare=False)
    """(op, head) for every value that an op lets a controller choose behind the slot, in drawing order."""
    head_sizes: Mapping[Head, int] = field(init=False, repr=False, compare=False)  # of all heads there are

    def __post_init__(self) -> None:
        behind = set(self.heads) - {Head.OP, Head.SLOT}
        order = sorted(behind, key=lambda head: (head is not Head.ALPHA_SPEED, head))
        vars(self).update(
            defaults={head: int(index) for head, index in {**_DEFAULTS, **self.defaults}.items()},
            pairs=tuple((op, head) for op in self.ops for head in order if RELEVANCE[op, head]),
            head_sizes={head: len(choices) for head, choices in self.choices.items()})
        if Head.OP not in self.heads or LifecycleOp.WAIT not in self.ops:
            raise EsperError("an ActionSpec needs the op head and the WAIT op; add them to heads and ops")
        if (LifecycleOp.ADVANCE in self.ops) == self.auto_advance:
            raise EsperError("a seed blends by the ADVANCE op or by auto_advance: "
                             "without either none could, with both ADVANCE would be another name of WAIT")
        if idle := behind - {head for _, head in self.pairs}:
            raise EsperError(f"no op of this spec uses {', '.join(sorted(h.name.lower() for h in idle))}; "
                             "leave such heads out")

    @classmethod
    def full(cls, slots: int, blueprints: Sequence[str]) -> "ActionSpec":
        return cls(slots, tuple(blueprints))

    @classmethod
    def decisive(cls, slots: int, blueprints: Sequence[str]) -> "ActionSpec":
        """What sweeps of the shipped families found to matter: which op, where, which blueprint. No other
        head gained more than 0.2 points over its default (`experiments/results/sweep-*.json`, "heads")."""
        compact = cls.compact(slots, blueprints)
        return replace(compact, heads=compact.heads[:3])

    @classmethod
    def compact(cls, slots: int, blueprints: Sequence[str]) -> "ActionSpec":
        ops = (LifecycleOp.WAIT, LifecycleOp.GERMINATE, LifecycleOp.PRUNE, LifecycleOp.FOSSILIZE)
        heads = (Head.OP, Head.SLOT, Head.BLUEPRINT, Head.STYLE)
        return cls(slots, tuple(blueprints), heads, ops, auto_advance=True)

    def action(self, op: LifecycleOp | str, **values: object) -> tuple[int, ...]:
        """One action in the order of `heads`: action(GERMINATE, slot=1, blueprint="norm", tempo=5)."""
        if isinstance(op, str):
            if op not in LifecycleOp.__members__:
                raise EsperError(f"no op {op!r}; there are {', '.join(LifecycleOp.__members__)}")
            op = LifecycleOp[op]
        indices, known = dict(self.defaults), {h.name.lower(): h for h in self.heads if h is not Head.OP}
        for name, value in values.items():
            if name not in known:
                raise EsperError(f"no head {name!r} to choose; there are {', '.join(known)}")
            choices = self.choices[known[name]]
            if value not in choices:
                raise EsperError(f"{name} cannot be {value!r}; choose from {', '.join(map(str, choices))}")
            indices[known[name]] = choices.index(value)
        if op not in self.ops:
            raise EsperError(f"this spec has no {op.name}; its ops are {', '.join(o.name for o in self.ops)}")
        indices[Head.OP] = self.ops.index(op)
        return tuple(indices[head] for head in self.heads)

    @property
    def choices(self) -> Mapping[Head, Sequence[object]]:
        """What the indices of every head mean."""
        return {Head.OP: tuple(LifecycleOp), Head.SLOT: range(self.slots), Head.BLUEPRINT: self.blueprints,
                Head.STYLE: tuple(Style), Head.TEMPO: TEMPOS, Head.ALPHA_TARGET: ALPHA_TARGETS,
                Head.ALPHA_SPEED: ALPHA_SPEEDS, Head.ALPHA_CURVE: tuple(AlphaCurve)}

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of choices of each head, in the order of `heads`."""
        return tuple(len(self.ops) if head is Head.OP else self.head_sizes[head] for head in self.heads)
