"""The lifecycle: every edge, the clock of ramps, the gates, and a state machine that tries to break it."""

from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from esper.kasmina import Host, Lifecycle, Population
from esper.kasmina.blending import CURVES, curve_value
from esper.kasmina.lifecycle import FIELDS, expand_actions
from esper.leyline import (
    ALPHA_SPEEDS,
    ALPHA_TARGETS,
    TEMPOS,
    TRANSITIONS,
    ActionSpec,
    AlphaCurve,
    Contribution,
    EsperError,
    GateConfig,
    Head,
    InvalidStateMachineError,
    LifecycleOp,
    SeedStage,
    Style,
)
from tests.workshop import random_actions

Op, Stage = LifecycleOp, SeedStage
SPEC = ActionSpec.full(2, ("noop", "a", "b"))


def action(op: LifecycleOp = Op.WAIT, slot: int = 0, **heads: int) -> torch.Tensor:
    row = [SPEC.defaults[head] for head in Head]
    row[Head.OP], row[Head.SLOT] = op, slot
    for name, value in heads.items():
        row[Head[name.upper()]] = value
    return torch.tensor([row])


def single(**gates: Any) -> Lifecycle:
    return Lifecycle(1, SPEC, GateConfig(**gates))


def epoch(life: Lifecycle, act: torch.Tensor | None = None, known: bool = True) -> float:
    """One epoch; returns the alpha of slot 0 that training and evaluation saw."""
    life.begin_epoch(action() if act is None else act)
    alpha = float(life.alpha[0, 0])
    life.healthy = life.planted
    shape = life.alpha.shape
    life.end_epoch(Contribution(torch.zeros(shape), torch.zeros(shape), torch.full(shape, known)))
    return alpha


def held(target: int = 2, tempo: int = 0) -> Lifecycle:
    life = single()
    epoch(life, action(Op.GERMINATE, blueprint=1, tempo=tempo, alpha_target=target))
    epoch(life, action(Op.ADVANCE))
    while life.stage[0, 0] == Stage.BLENDING:
        epoch(life)
    return life


@pytest.mark.parametrize("tempo", range(len(TEMPOS)))
@pytest.mark.parametrize("target", range(len(ALPHA_TARGETS)))
def test_first_ramp_is_linear_and_arrives_on_time(tempo: int, target: int) -> None:
    life = single()
    assert epoch(life, action(Op.GERMINATE, blueprint=1, tempo=tempo, alpha_target=target)) == 0
    length, goal = TEMPOS[tempo], ALPHA_TARGETS[target]
    alphas = [epoch(life, action(Op.ADVANCE))] + [epoch(life) for _ in range(length - 1)]
    assert alphas == pytest.approx([goal * k / length for k in range(1, length + 1)])
    assert life.stage[0, 0] == Stage.HOLDING
    assert epoch(life) == pytest.approx(goal)


@pytest.mark.parametrize("curve", AlphaCurve)
@pytest.mark.parametrize("speed", range(1, len(ALPHA_SPEEDS)))
def test_retarget_and_fade_follow_their_curve(speed: int, curve: AlphaCurve) -> None:
    life, length = held(target=0), ALPHA_SPEEDS[speed]
    up = [epoch(life, action(Op.SET_ALPHA_TARGET, alpha_target=2, alpha_speed=speed, alpha_curve=curve))]
    up += [epoch(life) for _ in range(length - 1)]
    assert up == pytest.approx([0.5 + 0.5 * curve_value(curve, k / length) for k in range(1, length + 1)], abs=1e-6)
    assert life.stage[0, 0] == Stage.HOLDING
    down = [epoch(life, action(Op.PRUNE, alpha_speed=speed, alpha_curve=curve))] + [epoch(life) for _ in range(length - 1)]
    assert down == pytest.approx([1 - curve_value(curve, k / length) for k in range(1, length + 1)], abs=1e-6)
    assert down[-1] == 0
    assert life.stage[0, 0] == Stage.PRUNED


def test_curves_run_from_zero_to_one_and_never_back() -> None:
    assert CURVES.shape == (len(AlphaCurve), 9, 9)
    for curve in AlphaCurve:
        values = [curve_value(curve, t / 100) for t in range(101)]
        assert values[0] == pytest.approx(0, abs=1e-12)
        assert values[-1] == pytest.approx(1)
        assert values == sorted(values)
        assert curve_value(curve, 0.3) + curve_value(curve, 0.7) == pytest.approx(1)
    sigmoids = [curve_value(c, 1 / 3) for c in (AlphaCurve.SIGMOID_GENTLE, AlphaCurve.SIGMOID, AlphaCurve.SIGMOID_SHARP)]
    assert sigmoids == pytest.approx([0.245, 0.117, 0.018], abs=1e-3)  # logistic with k = 6, 12, 24, renormalised


def test_speed_zero_is_at_once() -> None:
    life = held(target=0)
    assert epoch(life, action(Op.SET_ALPHA_TARGET, alpha_target=2, alpha_speed=0)) == 1.0
    assert life.stage[0, 0] == Stage.HOLDING
    life.begin_epoch(action(Op.PRUNE, alpha_speed=0))
    assert life.stage[0, 0] == Stage.PRUNED


def test_a_retarget_cancels_a_fade() -> None:
    life = held()
    epoch(life, action(Op.PRUNE, alpha_speed=2))
    assert bool(life.fading[0, 0])
    with pytest.raises(InvalidStateMachineError, match="not already fading"):
        life.begin_epoch(action(Op.PRUNE))
    middle = float(life.alpha[0, 0])
    first = epoch(life, action(Op.SET_ALPHA_TARGET, alpha_target=2, alpha_speed=1))
    assert first == pytest.approx(middle + (1 - middle) / 3)
    epoch(life)
    epoch(life)
    assert life.stage[0, 0] == Stage.HOLDING
    assert not bool(life.fading.any())


def test_cool_down_blocks_only_its_own_slot() -> None:
    life = single(embargo=2)
    epoch(life, action(Op.GERMINATE, blueprint=1))
    epoch(life, action(Op.PRUNE))
    seen = []
    while life.stage[0, 0] != Stage.DORMANT:
        seen.append(Stage(int(life.stage[0, 0])))
        assert not bool(life.verdicts()[0, 0, Op.GERMINATE])
        assert bool(life.verdicts()[0, 1, Op.GERMINATE])
        epoch(life)
    assert seen == [Stage.EMBARGOED, Stage.EMBARGOED, Stage.RESETTING]
    epoch(life, action(Op.GERMINATE, blueprint=2))
    assert int(life.germinations[0, 0]) == 2


def test_three_decisions_make_a_fossil() -> None:
    life = held()
    epoch(life)
    before = life.alpha.clone()
    epoch(life, action(Op.FOSSILIZE))
    assert life.stage[0, 0] == Stage.FOSSILIZED
    assert torch.equal(life.alpha, before)
    assert not bool(life.verdicts()[0, 0, 1:].any())  # closed for good


def test_missing_evidence_denies() -> None:
    life = held()
    epoch(life, known=False)
    with pytest.raises(InvalidStateMachineError, match="contribution measured"):
        life.begin_epoch(action(Op.FOSSILIZE))
    epoch(life, known=True)
    assert bool(life.verdicts()[0, 0, Op.FOSSILIZE])
    epoch(life, known=False)  # evidence does not outlive its epoch
    assert not bool(life.verdicts()[0, 0, Op.FOSSILIZE])
    epoch(life, known=True)
    life.begin_epoch(action())
    life.end_epoch()  # nothing said is nothing known
    assert not bool(life.verdicts()[0, 0, Op.FOSSILIZE])
    fresh = single()
    fresh.begin_epoch(action(Op.GERMINATE, blueprint=1))
    fresh.end_epoch()
    assert not bool(fresh.verdicts()[0, 0, Op.ADVANCE])  # gradients were never measured


def test_contribution_gate_reads_the_number() -> None:
    life = held()
    life.gates = GateConfig(min_contribution=0.1)
    shape = life.alpha.shape
    for value, allowed in ((0.05, False), (0.2, True)):
        life.begin_epoch(action())
        life.end_epoch(Contribution(torch.full(shape, value), torch.zeros(shape), torch.ones(shape, dtype=torch.bool)))
        assert bool(life.verdicts()[0, 0, Op.FOSSILIZE]) is allowed


def test_dwell_times_are_config() -> None:
    life = single(min_training=3)
    epoch(life, action(Op.GERMINATE, blueprint=1))
    for _ in range(2):
        assert not bool(life.verdicts()[0, 0, Op.ADVANCE])
        epoch(life)
    assert bool(life.verdicts()[0, 0, Op.ADVANCE])


@pytest.mark.parametrize(("act", "words"), [
    (action(Op.ADVANCE), "row 0, slot 0: ADVANCE is not allowed in DORMANT"),
    (action(Op.PRUNE, 1), "row 0, slot 1: PRUNE is not allowed in DORMANT"),
    (action(Op.FOSSILIZE), "it needs HOLDING for 1 epochs"),
    (action(Op.SET_ALPHA_TARGET), "BLENDING or HOLDING"),
    (action(Op.GERMINATE, blueprint=3), r"blueprint 3 is outside 0\.\.2"),
    (action(Op.GERMINATE, slot=2), r"slot 2 is outside 0\.\.1"),
])
def test_illegal_requests_say_one_clear_sentence(act: torch.Tensor, words: str) -> None:
    with pytest.raises(InvalidStateMachineError, match=words) as caught:
        single().begin_epoch(act)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("heads", [{"alpha_target": 2}, {"alpha_target": 0, "style": int(Style.GATE)}])
def test_pointless_retargets_are_refused(heads: dict[str, int]) -> None:
    with pytest.raises(InvalidStateMachineError, match="an alpha other than"):
        held().begin_epoch(action(Op.SET_ALPHA_TARGET, **heads))


def test_one_bad_row_raises_before_any_row_is_written() -> None:
    population = Population(Host("mlp"), 3)
    before = population.snapshot(torch.arange(3))
    actions = torch.tensor([[int(Op.GERMINATE), 0, 1, 0, 0, 0, 0, 0]] * 3)
    actions[2, Head.OP] = Op.FOSSILIZE
    with pytest.raises(InvalidStateMachineError, match="row 2"):
        population.begin_epoch(actions)
    for name, tensor in population.snapshot(torch.arange(3)).items():
        assert torch.equal(tensor, before[name])


def test_compact_spec_advances_by_itself() -> None:
    spec = ActionSpec.compact(3, Population(Host("mlp"), 1).spec.blueprints)
    population = Population(Host("mlp"), 2, spec=spec)
    assert spec.sizes == (4, 3, 6, 3)
    x, y = torch.randn(4, 2, 40), torch.zeros(4, 2, dtype=torch.int64)
    population.begin_epoch(torch.tensor([[1, 0, 2, 1], [0, 0, 0, 0]]))
    population.train_step(x, y)
    population.end_epoch()
    assert population.life.style[0, 0] == Style.MULTIPLY
    population.begin_epoch(torch.zeros(2, 4, dtype=torch.int64))
    assert population.life.stage[:, 0].tolist() == [Stage.BLENDING, Stage.DORMANT]
    population.train_step(x, y)
    population.end_epoch()
    population.begin_epoch(torch.tensor([[2, 0, 0, 0], [0, 0, 0, 0]]))  # the third op of compact is PRUNE, at once
    assert population.life.stage[0, 0] == Stage.PRUNED
    population.end_epoch()
    population.reset(torch.arange(2), torch.arange(2))
    population.life.drain_transitions()
    for act in ([1, 0, 2, 1], [2, 0, 0, 0]):  # a prune goes before the automatic advance
        population.begin_epoch(torch.tensor([act, [0, 0, 0, 0]]))
        population.train_step(x, y)
        population.end_epoch()
    assert (Stage.TRAINING, Stage.PRUNED) in {(m.source, m.target) for m in population.life.drain_transitions()}
    with pytest.raises(EsperError, match=r"expected \[N, 4\]"):
        expand_actions(spec, torch.zeros(2, 8, dtype=torch.int64))


def test_every_edge_is_taken_by_random_lives() -> None:
    population = Population(Host("mlp"), 64)
    generator = torch.Generator().manual_seed(0)
    for _ in range(60):
        population.begin_epoch(random_actions(population, generator))
        population.life.healthy = population.life.planted
        shape = population.life.alpha.shape
        population.end_epoch(Contribution(torch.zeros(shape), torch.zeros(shape), torch.ones(shape, dtype=torch.bool)))
    taken = {(move.source, move.target) for move in population.life.drain_transitions()}
    assert taken == {(source, target) for source, targets in TRANSITIONS.items() for target in targets}
    assert population.life.drain_transitions() == []


class LifecycleMachine(RuleBasedStateMachine):
    """Random requests, legal or not, against three rows; the state must stay legal and refusals must change nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.life = Lifecycle(3, SPEC, GateConfig(embargo=0))

    @rule()
    def out_of_turn(self) -> None:
        turn = self.life.end_epoch if not self.life.open else lambda: self.life.begin_epoch(action().repeat(3, 1))
        with pytest.raises(EsperError, match="begin_epoch"):
            turn()

    @precondition(lambda self: not self.life.open)
    @rule(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        sizes = [SPEC.head_sizes[head] for head in Head]
        actions = torch.tensor([[data.draw(st.integers(0, size - 1)) for size in sizes] for _ in range(3)])
        before = {name: tensor.clone() for name, tensor in self.life.fields()}
        try:
            self.life.begin_epoch(actions)
        except InvalidStateMachineError:
            assert all(torch.equal(tensor, before[name]) for name, tensor in self.life.fields())

    @precondition(lambda self: not self.life.open)
    @rule(seed=st.integers(0, 10**6))
    def live(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        holder = type("Holder", (), {"life": self.life, "spec": SPEC})()
        self.life.begin_epoch(random_actions(holder, generator))

    @precondition(lambda self: self.life.open)
    @rule(known=st.booleans())
    def end(self, known: bool) -> None:
        self.life.healthy = self.life.planted
        shape = self.life.alpha.shape
        self.life.end_epoch(Contribution(torch.zeros(shape), torch.zeros(shape), torch.full(shape, known)))

    @invariant()
    def moves_are_edges(self) -> None:
        for move in self.life.drain_transitions():
            assert move.target in TRANSITIONS[move.source]

    @invariant()
    def state_is_consistent(self) -> None:
        life = self.life
        assert all(tensor.dtype == FIELDS[name][0] for name, tensor in life.fields())
        assert not bool(life.at(Stage.GERMINATED).any())
        assert bool(((life.alpha >= 0) & (life.alpha <= 1)).all())
        assert bool(((life.blueprint >= 0) == life.planted).all())
        assert bool((life.alpha == 0)[~life.planted | life.incubating].all())
        assert bool((life.alpha > 0)[life.at(Stage.HOLDING, Stage.FOSSILIZED)].all())
        assert not bool((life.fading & ~life.at(Stage.BLENDING)).any())


TestLifecycleMachine = LifecycleMachine.TestCase
TestLifecycleMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
