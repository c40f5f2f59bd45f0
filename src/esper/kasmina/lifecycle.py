"""The lifecycle of every seed of a population, as tensors [N, S] moved by one transition table.

Clock: `begin_epoch` checks and applies one action per row and steps every ramp, so that alpha in the k-th
epoch of a ramp is curve(k / length) for training and evaluation alike; `end_epoch` makes the moves of time.
The state is tiny and lives on the CPU: decisions wait for no accelerator, every device sees the same bits.
"""

import typing
from collections import deque
from collections.abc import Iterator
from typing import Annotated

import torch
from torch import Tensor

from esper.kasmina.blending import CURVES
from esper.leyline import ActionSpec, AlphaCurve, Contribution, EsperError, Head, LifecycleOp, Style
from esper.leyline.actions import ALPHA_SPEEDS, ALPHA_TARGETS, TEMPOS
from esper.leyline.errors import InvalidStateMachineError
from esper.leyline.records import Transition
from esper.leyline.stages import TRANSITIONS, GateConfig, SeedStage

_LEGAL = torch.tensor([[target in TRANSITIONS[source] for target in SeedStage] for source in SeedStage])


class _Among(dict[frozenset[SeedStage], Tensor]):
    """Sets of stages as tables that a stage looks itself up in."""

    def __missing__(self, stages: frozenset[SeedStage]) -> Tensor:
        self[stages] = torch.tensor([stage in stages for stage in SeedStage])
        return self[stages]


_AMONG = _Among()


def expand_actions(spec: ActionSpec, actions: Tensor) -> Tensor:
    """[N, len(spec.heads)] of a controller to the full [N, heads], absent heads at their defaults."""
    if not isinstance(actions, Tensor) or actions.is_floating_point():
        raise EsperError(f"actions are a {type(actions).__name__}; expected a tensor of whole numbers, "
                         "as torch.tensor([spec.action(...), ...])")
    actions = actions.cpu()
    if actions.shape[1:] != (len(spec.heads),):
        raise EsperError(f"actions have shape {list(actions.shape)}; expected [N, {len(spec.heads)}] for "
                         f"heads {', '.join(h.name.lower() for h in spec.heads)}")
    op = actions[:, spec.heads.index(Head.OP)]
    if len(wrong := ((op < 0) | (op >= len(spec.ops))).nonzero()):
        row = int(wrong[0])
        raise InvalidStateMachineError(f"row {row}: op {int(op[row])} is outside 0..{len(spec.ops) - 1}")
    full = torch.tensor([spec.defaults[head] for head in Head]).repeat(len(actions), 1)
    for column, head in enumerate(spec.heads):
        full[:, head] = torch.tensor(spec.ops)[actions[:, column]] if head is Head.OP else actions[:, column]
    return full


class Lifecycle:
    """Stages, alphas, ramps and gates of N rows with S slots: fields [N, S], each with its dtype and its
    value in an empty slot; `germinations` survives a prune."""

    stage: Annotated[Tensor, torch.int64, SeedStage.DORMANT]
    dwell: Annotated[Tensor, torch.int64, 0]  # epochs completed in the stage
    blueprint: Annotated[Tensor, torch.int64, -1]
    style: Annotated[Tensor, torch.int64, Style.ADD]
    tempo: Annotated[Tensor, torch.int64, 0]  # epochs of the first ramp
    target: Annotated[Tensor, torch.float32, 0]  # where the ramp is going, and the alpha a preview uses
    alpha: Annotated[Tensor, torch.float32, 0]
    ramp_from: Annotated[Tensor, torch.float32, 0]
    ramp_length: Annotated[Tensor, torch.int64, 0]
    ramp_at: Annotated[Tensor, torch.int64, 0]
    curve: Annotated[Tensor, torch.int64, AlphaCurve.LINEAR]
    fading: Annotated[Tensor, torch.bool, False]  # on the way to PRUNED
    germinations: Annotated[Tensor, torch.int64, 0]
    healthy: Annotated[Tensor, torch.bool, False]  # gradients of the last epoch were measured and finite
    broken: Annotated[Tensor, torch.bool, False]  # a gradient of this epoch was not
    contribution: Annotated[Tensor, torch.float32, 0]
    contribution_known: Annotated[Tensor, torch.bool, False]

    def __init__(self, rows: int, spec: ActionSpec, gates: GateConfig) -> None:
        self.rows, self.spec, self.gates, self.epoch = rows, spec, gates, 0
        self.open = False  # between begin_epoch and end_epoch
        self._moves: deque[Tensor] = deque(maxlen=10_000)  # [k, 5] each: epoch, row, slot, source, target
        for name, (dtype, value) in FIELDS.items():
            setattr(self, name, torch.full((rows, spec.slots), value, dtype=dtype))

    def fields(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, getattr(self, name)) for name in FIELDS)

    def clear(self, rows: Tensor) -> None:
        """Empty every slot of these rows, as at the start of an episode."""
        for name, tensor in self.fields():
            tensor[rows] = FIELDS[name][1]

    def clear_slots(self, slots: Tensor) -> None:
        """Empty these slots [k] of every row at once, without a pause."""
        for name, tensor in self.fields():
            if name != "germinations":
                tensor[:, slots] = FIELDS[name][1]

    def install(self, rows: Tensor, blueprint: Tensor, style: Tensor, alpha: Tensor,
                stage: SeedStage = SeedStage.HOLDING) -> None:
        """Fill empty slots of these rows with seeds that already hold their alpha; each tensor [R, S],
        blueprint -1 is none. A starting state, not a move: no transition is recorded."""
        shape, kinds, planted = [len(rows), self.spec.slots], len(self.spec.blueprints), blueprint >= 0
        if {t.shape for t in (blueprint, style, alpha)} != {torch.Size(shape)}:
            raise EsperError(f"a topology for {len(rows)} rows needs blueprint, style and alpha "
                             f"of shape {shape}")
        if bool(((blueprint < -1) | (blueprint >= kinds) | (style < 0) | (style >= len(Style))).any()):
            raise EsperError(f"blueprints are -1..{kinds - 1} and styles 0..{len(Style) - 1}")
        if bool(((alpha <= 0) | (alpha > 1))[planted].any()):
            raise EsperError("an installed seed holds an alpha in (0, 1]")
        if bool((self.stage[rows] != SeedStage.DORMANT).any()):
            raise InvalidStateMachineError("a topology can only be installed into rows with DORMANT slots; "
                                           "reset them first")
        values = {"stage": torch.where(planted, int(stage), int(SeedStage.DORMANT)), "blueprint": blueprint,
                  "style": torch.where(planted, style, 0), "alpha": torch.where(planted, alpha, 0.0),
                  "target": torch.where(planted, alpha, 0.0), "dwell": torch.zeros_like(blueprint),
                  "germinations": self.germinations[rows] + planted}
        for name, value in values.items():
            getattr(self, name)[rows] = value.to(FIELDS[name][0])

    def at(self, *stages: SeedStage) -> Tensor:
        """bool [N, S]: slots in any of these stages."""
        return _AMONG[frozenset(stages)][self.stage]

    @property
    def incubating(self) -> Tensor:
        return self.at(SeedStage.TRAINING)

    @property
    def planted(self) -> Tensor:
        """bool [N, S]: slots that hold weights."""
        return self.at(SeedStage.TRAINING, SeedStage.BLENDING, SeedStage.HOLDING, SeedStage.FOSSILIZED)

    def drain_transitions(self) -> list[Transition]:
        """Every move since the last call, in order (the oldest are dropped if nobody asks for very long)."""
        moves = [move for batch in self._moves for move in batch.tolist()]
        self._moves.clear()
        return [Transition(epoch, row, slot, SeedStage(source), SeedStage(target))
                for epoch, row, slot, source, target in moves]

    def verdicts(self) -> Tensor:
        """bool [N, S, ops]: what each slot's gate allows now. Missing evidence denies; WAIT always may be."""
        stages = (SeedStage.TRAINING, SeedStage.BLENDING, SeedStage.HOLDING)
        (training, blending, holding), proven = map(self.at, stages), self.contribution_known
        if (least := self.gates.min_contribution) is not None:
            proven = proven & (self.contribution >= least)
        allowed = {
            LifecycleOp.WAIT: torch.ones_like(training),
            LifecycleOp.GERMINATE: self.at(SeedStage.DORMANT),
            LifecycleOp.SET_ALPHA_TARGET: blending | holding,
            LifecycleOp.PRUNE: training | (blending & ~self.fading) | holding,
            LifecycleOp.FOSSILIZE: holding & (self.dwell >= self.gates.min_holding) & proven,
            LifecycleOp.ADVANCE: training & (self.dwell >= self.gates.min_training) & self.healthy,
        }
        return torch.stack([allowed[op] for op in LifecycleOp], dim=2)

    def free_targets(self) -> Tensor:
        """bool [N, S, targets]: alphas that SET_ALPHA_TARGET may name. The held one would change nothing."""
        same = torch.tensor(ALPHA_TARGETS) == self.alpha[..., None]
        return ~(same & self.at(SeedStage.HOLDING)[..., None])

    def check(self, actions: Tensor) -> None:
        """Raise for the first row whose action is malformed or denied; nothing has been written then."""
        if actions.shape != (self.rows, len(Head)):
            raise EsperError(f"actions have shape {list(actions.shape)}; expected [{self.rows}, {len(Head)}]")
        sizes = torch.tensor([self.spec.head_sizes[head] for head in Head])
        if len(wrong := ((actions < 0) | (actions >= sizes)).nonzero()):
            row, head = wrong[0].tolist()
            raise InvalidStateMachineError(f"row {row}: {Head(head).name.lower()} {int(actions[row, head])} "
                                           f"is outside 0..{int(sizes[head]) - 1}")
        op, slot, every = actions[:, Head.OP], actions[:, Head.SLOT], torch.arange(self.rows)
        allowed = self.verdicts()[every, slot, op]
        retarget = op == LifecycleOp.SET_ALPHA_TARGET
        free = self.free_targets()[every, slot, actions[:, Head.ALPHA_TARGET]]
        restyled = actions[:, Head.STYLE] != self.style[every, slot]
        bad = ~allowed | (retarget & (~free | restyled))
        if bool(bad.any()):
            row = int(bad.nonzero()[0])
            self._refuse(row, LifecycleOp(int(op[row])), int(slot[row]), bool((allowed & retarget)[row]))

    def _refuse(self, row: int, op: LifecycleOp, slot: int, about_target: bool) -> None:
        where, alpha, dwell = f"row {row}, slot {slot}", self.alpha[row, slot], int(self.dwell[row, slot])
        if about_target:
            raise InvalidStateMachineError(f"{where}: SET_ALPHA_TARGET must keep the seed's style and name "
                                           f"an alpha other than the one it holds ({float(alpha):.1f})")
        stage = SeedStage(int(self.stage[row, slot])).name
        raise InvalidStateMachineError(f"{where}: {op.name} is not allowed in {stage} after {dwell} epochs "
                                       f"there; {_NEEDS[op].format(gates=self.gates)}")

    def begin_epoch(self, actions: Tensor) -> None:
        """Apply one full action [N, heads] per row, then step every ramp."""
        if self.open:
            raise EsperError("this epoch has begun already; call end_epoch before the next begin_epoch")
        self.check(actions)
        self.open = True
        ready = self.verdicts()[:, :, LifecycleOp.ADVANCE] & self.spec.auto_advance
        at_slot = actions[:, Head.SLOT, None] == torch.arange(self.spec.slots)
        acted = {op: at_slot & (actions[:, Head.OP, None] == op) for op in LifecycleOp}
        self._germinate(acted[LifecycleOp.GERMINATE], actions)
        advanced = acted[LifecycleOp.ADVANCE] | (ready & ~acted[LifecycleOp.PRUNE])
        self._move(advanced, SeedStage.BLENDING)
        self._start_ramp(advanced, self.target, self.tempo, torch.full_like(self.curve, AlphaCurve.LINEAR))
        self._retarget(acted[LifecycleOp.SET_ALPHA_TARGET], actions)
        self._prune(acted[LifecycleOp.PRUNE], actions)
        self._move(acted[LifecycleOp.FOSSILIZE], SeedStage.FOSSILIZED)
        self._step_ramps()
        self.healthy, self.broken = torch.zeros_like(self.healthy), torch.zeros_like(self.broken)

    def record_gradients(self, rows: Tensor, slots: Tensor, finite: Tensor) -> None:
        """Health of trained seeds, [K] each; a seed that breaks once stays broken for the epoch."""
        self.broken[rows, slots] |= ~finite
        self.healthy = self.planted & ~self.broken  # a seed without parameters has nothing that could break

    def _germinate(self, mask: Tensor, actions: Tensor) -> None:
        self._move(mask, SeedStage.GERMINATED)
        values = {"blueprint": actions[:, Head.BLUEPRINT], "style": actions[:, Head.STYLE],
                  "tempo": torch.tensor(TEMPOS)[actions[:, Head.TEMPO]],
                  "target": torch.tensor(ALPHA_TARGETS)[actions[:, Head.ALPHA_TARGET]]}
        for name, value in values.items():
            self._write(name, mask, value)
        self.germinations += mask
        self._move(mask, SeedStage.TRAINING)

    def _retarget(self, mask: Tensor, actions: Tensor) -> None:
        self._move(mask & self.at(SeedStage.HOLDING), SeedStage.BLENDING)
        self.fading &= ~mask
        target = torch.tensor(ALPHA_TARGETS)[actions[:, Head.ALPHA_TARGET], None].expand_as(self.alpha)
        self._start_ramp(mask, target, *self._tempo_of(actions))

    def _prune(self, mask: Tensor, actions: Tensor) -> None:
        length, curve = self._tempo_of(actions)
        at_once = mask & ((actions[:, Head.ALPHA_SPEED, None] == ALPHA_SPEEDS.index(0)) | (self.alpha == 0))
        slowly = mask & ~at_once
        self._move(slowly & self.at(SeedStage.HOLDING), SeedStage.BLENDING)
        self.fading |= slowly
        self._start_ramp(slowly, torch.zeros_like(self.alpha), length, curve)
        self._free(at_once)

    def _tempo_of(self, actions: Tensor) -> tuple[Tensor, Tensor]:
        length = torch.tensor(ALPHA_SPEEDS)[actions[:, Head.ALPHA_SPEED]].clamp(min=1)  # 0: within one epoch
        return length[:, None].expand_as(self.stage), actions[:, Head.ALPHA_CURVE, None].expand_as(self.stage)

    def _start_ramp(self, mask: Tensor, target: Tensor, length: Tensor, curve: Tensor) -> None:
        values = {"ramp_from": self.alpha, "target": target, "ramp_length": length, "curve": curve,
                  "ramp_at": torch.zeros_like(self.ramp_at)}
        for name, value in values.items():
            self._write(name, mask, value)

    def _step_ramps(self) -> None:
        ramping = self.at(SeedStage.BLENDING)
        self.ramp_at = torch.where(ramping, self.ramp_at + 1, self.ramp_at)
        progress = CURVES[self.curve, self.ramp_length, self.ramp_at.clamp(max=CURVES.shape[2] - 1)]
        moved = self.ramp_from + (self.target - self.ramp_from) * progress
        arrived = self.ramp_at >= self.ramp_length
        self.alpha = torch.where(ramping, torch.where(arrived, self.target, moved), self.alpha)

    def end_epoch(self, contribution: Contribution | None = None) -> None:
        """Record evidence, then the moves of time: ramps that arrived, and cool-downs. One move per slot."""
        if not self.open:
            raise EsperError("no epoch has begun; call begin_epoch before end_epoch")
        known, value = torch.zeros_like(self.fading), self.contribution
        if contribution is not None:
            known, value = contribution.known.cpu(), contribution.value.cpu().to(torch.float32)
        if not known.shape == value.shape == (shape := self.alpha.shape):
            raise EsperError(f"contributions have shape {list(value.shape)}; expected {list(shape)}")
        self.open = False
        self.contribution_known = known & self.planted
        self.contribution = torch.where(self.contribution_known, value, 0.0)
        self.dwell += 1
        arrived = self.at(SeedStage.BLENDING) & (self.ramp_at >= self.ramp_length)
        moves = ((arrived & ~self.fading, SeedStage.HOLDING),
                 (self.at(SeedStage.PRUNED), SeedStage.EMBARGOED),
                 (self.at(SeedStage.EMBARGOED) & (self.dwell >= self.gates.embargo), SeedStage.RESETTING),
                 (self.at(SeedStage.RESETTING), SeedStage.DORMANT))
        self._free(arrived & self.fading)
        for mask, target in moves:
            self._move(mask, target)
        self.epoch += 1

    def _free(self, mask: Tensor) -> None:
        self._move(mask, SeedStage.PRUNED)
        for name in FIELDS.keys() - {"stage", "dwell", "germinations"}:
            self._write(name, mask, torch.tensor(FIELDS[name][1]))

    def _write(self, name: str, mask: Tensor, values: Tensor) -> None:
        old = getattr(self, name)
        wide = values[:, None] if values.dim() == 1 else values
        setattr(self, name, torch.where(mask, wide.to(old.dtype), old))

    def _move(self, mask: Tensor, target: SeedStage) -> None:
        """The one place where a stage changes."""
        where = mask.nonzero()
        if not len(where):
            return
        sources = self.stage[mask]
        if not bool(_LEGAL[sources, target].all()):
            source = SeedStage(int(sources[~_LEGAL[sources, target]][0]))
            raise InvalidStateMachineError(f"{source.name} -> {target.name} is not an edge of the lifecycle")
        epoch, to = torch.full_like(sources, self.epoch), torch.full_like(sources, int(target))
        self._moves.append(torch.stack([epoch, where[:, 0], where[:, 1], sources, to], 1))
        self.stage = torch.where(mask, int(target), self.stage)
        self.dwell = torch.where(mask, 0, self.dwell)


FIELDS: dict[str, tuple[torch.dtype, int]] = {
    name: hint.__metadata__ for name, hint in typing.get_type_hints(Lifecycle, include_extras=True).items()}
_NEEDS = {
    LifecycleOp.WAIT: "",
    LifecycleOp.GERMINATE: "it needs a DORMANT slot",
    LifecycleOp.SET_ALPHA_TARGET: "it needs a seed in BLENDING or HOLDING",
    LifecycleOp.PRUNE: "it needs a seed in TRAINING, BLENDING (not already fading) or HOLDING",
    LifecycleOp.FOSSILIZE: "it needs HOLDING for {gates.min_holding} epochs and a contribution measured in "
                           "the last one (least: {gates.min_contribution})",
    LifecycleOp.ADVANCE: "it needs TRAINING for {gates.min_training} epochs with finite gradients measured "
                         "in the last one",
}
