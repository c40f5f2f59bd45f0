"""The contracts: tables that must be whole, and specs that must make sense."""

import pytest

from esper.leyline import (
    RELEVANCE,
    TRANSITIONS,
    ActionSpec,
    EsperError,
    Head,
    LifecycleOp,
    SeedStage,
    SlotConfig,
    SlotShape,
    Style,
    check_transitions,
    relevance_table,
)

Op = LifecycleOp
ROWS = {op: frozenset(h for h in Head if RELEVANCE[op, h] and h is not Head.OP) for op in Op}


@pytest.mark.parametrize(("op", "heads"), [
    (Op.WAIT, ()),
    (Op.GERMINATE, (Head.SLOT, Head.BLUEPRINT, Head.STYLE, Head.TEMPO, Head.ALPHA_TARGET)),
    (Op.SET_ALPHA_TARGET, (Head.SLOT, Head.STYLE, Head.ALPHA_TARGET, Head.ALPHA_SPEED, Head.ALPHA_CURVE)),
    (Op.PRUNE, (Head.SLOT, Head.ALPHA_SPEED, Head.ALPHA_CURVE)),
    (Op.FOSSILIZE, (Head.SLOT,)),
    (Op.ADVANCE, (Head.SLOT,)),
])
def test_relevance_row(op: LifecycleOp, heads: tuple[Head, ...]) -> None:
    assert ROWS[op] == set(heads)
    assert RELEVANCE[op, Head.OP]


def test_an_op_without_its_row_fails() -> None:
    with pytest.raises(TypeError, match="do not match the ops"):
        relevance_table({op: heads for op, heads in ROWS.items() if op is not Op.PRUNE})


def test_a_head_that_nothing_uses_fails() -> None:
    with pytest.raises(TypeError, match="TEMPO"):
        relevance_table({op: heads - {Head.TEMPO} for op, heads in ROWS.items()})


def test_a_stage_without_its_row_fails() -> None:
    with pytest.raises(TypeError, match="HOLDING"):
        check_transitions({s: t for s, t in TRANSITIONS.items() if s is not SeedStage.HOLDING})


def test_relevance_cannot_be_written() -> None:
    with pytest.raises(ValueError, match="read-only"):
        RELEVANCE[Op.WAIT, Head.SLOT] = True


def test_presets() -> None:
    full, compact = ActionSpec.full(3, ("noop", "norm")), ActionSpec.compact(3, ("noop", "norm"))
    assert full.sizes == (6, 3, 2, 3, 3, 3, 4, 5)
    assert compact.heads == (Head.OP, Head.SLOT, Head.BLUEPRINT, Head.STYLE)
    assert compact.sizes == (4, 3, 2, 3)
    assert compact.auto_advance
    assert not full.auto_advance


def test_actions_are_said_in_words() -> None:
    full, compact = ActionSpec.full(3, ("noop", "norm")), ActionSpec.compact(3, ("noop", "norm"))
    words = full.action(Op.GERMINATE, slot=2, blueprint="norm", style=Style.GATE, tempo=8, alpha_target=0.7)
    assert words == (1, 2, 1, 2, 2, 1, 0, 0)
    assert full.action(Op.PRUNE, slot=1, alpha_speed=5)[Head.ALPHA_SPEED] == 2
    assert compact.action(Op.FOSSILIZE, slot=1) == (3, 1, 0, 0)
    with pytest.raises(EsperError, match=r"tempo cannot be 4; choose from 3, 5, 8"):
        full.action(Op.GERMINATE, tempo=4)
    with pytest.raises(EsperError, match="no head 'tempo'"):
        compact.action(Op.GERMINATE, tempo=3)
    with pytest.raises(EsperError, match="no ADVANCE"):
        compact.action(Op.ADVANCE)


def test_a_spec_in_which_nothing_could_blend_is_refused() -> None:
    with pytest.raises(EsperError, match="auto_advance"):
        ActionSpec(3, ("norm",), ops=(Op.WAIT, Op.GERMINATE))


def test_slots_keep_network_order() -> None:
    slots = SlotConfig(("r0c10", "r0c2"), (SlotShape(4), SlotShape(8)))
    assert slots.names == ("r0c10", "r0c2")
    assert len(slots) == 2
    with pytest.raises(EsperError, match="distinct"):
        SlotConfig(("a", "a"), (SlotShape(1), SlotShape(1)))
