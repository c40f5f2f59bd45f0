"""The sampler and scorer against enumeration: every action of a space, one by one."""

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings, strategies as st

from esper.leyline import ALPHA_SPEEDS, ActionSpec, EsperError, Head, InvalidStateMachineError, LifecycleOp
from esper.tamiyo import ActionDistribution, ActionLogits, MaskedCategorical
from tests.minds import SPEC, every_action, op_index, random_logits, random_masks

SPECS = {"full": SPEC, "compact": ActionSpec.compact(2, ("noop", "a")), "decisive": ActionSpec.decisive(2, ("a", "b")),
         "one slot": ActionSpec.full(1, ("a",)),
         "no speed": ActionSpec(2, ("a",), heads=(Head.OP, Head.SLOT, Head.ALPHA_CURVE), ops=tuple(LifecycleOp))}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_masked_choices_are_impossible_in_every_precision(dtype: torch.dtype) -> None:
    logits = torch.tensor([[60000.0, 3.0, -60000.0], [0.0, 50.0, 0.0]]).to(dtype)
    mask = torch.tensor([[False, True, True], [True, False, True]])
    distribution = MaskedCategorical(logits, mask)
    assert distribution.log_probs.dtype == torch.promote_types(dtype, torch.float32)
    assert bool(distribution.log_probs.isfinite().all())
    assert bool((distribution.probs[~mask] == 0).all())
    torch.testing.assert_close(distribution.probs.sum(-1), torch.ones(2, dtype=distribution.probs.dtype))
    assert float(distribution.entropy()[1]) == pytest.approx(math.log(2), rel=1e-3)


def test_one_choice_has_log_probability_zero_exactly() -> None:
    distribution = MaskedCategorical(torch.randn(5, 4), torch.arange(4).expand(5, 4) == 2, explore=0.37)
    assert distribution.log_prob(torch.full((5,), 2)).eq(0).all()
    assert distribution.entropy().eq(0).all()


def test_wrong_masks_are_refused() -> None:
    with pytest.raises(EsperError, match=r"a mask of shape \[2, 3\] for logits of shape \[2, 4\]"):
        MaskedCategorical(torch.zeros(2, 4), torch.ones(2, 3, dtype=torch.bool))
    empty = torch.tensor([[True, True], [False, False]])
    with pytest.raises(InvalidStateMachineError, match=r"allows nothing at \[1\]"):
        MaskedCategorical(torch.zeros(2, 2), empty)
    MaskedCategorical(torch.zeros(2, 2), empty, validate=False)  # validation is each instance's own
    with pytest.raises(InvalidStateMachineError):
        MaskedCategorical(torch.zeros(2, 2), empty)


@given(st.integers(0, 10_000), st.floats(0, 0.5))
@settings(max_examples=30, deadline=None)
def test_samples_follow_the_probabilities_and_the_mask(seed: int, explore: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(6, generator=generator) < 0.6
    mask[int(torch.randint(6, (), generator=generator))] = True
    distribution = MaskedCategorical(3 * torch.randn(6, generator=generator), mask, explore)
    u = (torch.arange(4000) + 0.5) / 4000
    drawn = MaskedCategorical(distribution.log_probs.expand(4000, 6), mask.expand(4000, 6)).sample(u).bincount(minlength=6) / 4000
    torch.testing.assert_close(drawn, distribution.probs, atol=2e-3, rtol=0)
    assert bool(mask[MaskedCategorical(distribution.log_probs, mask).sample(torch.tensor(0.99999994))])
    assert bool(mask[MaskedCategorical(distribution.log_probs, mask).sample(torch.tensor(0.0))])


def test_exploration_is_a_mixture_and_its_gradients_live() -> None:
    logits = torch.tensor([8.0, 0.0, 0.0, -8.0], requires_grad=True)
    mask = torch.tensor([True, True, True, True])
    distribution = MaskedCategorical(logits, mask, explore=0.2)
    torch.testing.assert_close(distribution.probs, 0.8 * logits.softmax(-1) + 0.05)
    for choice in range(4):
        (gradient,) = torch.autograd.grad(distribution.log_prob(torch.tensor(choice)), logits, retain_graph=True)
        assert bool((gradient != 0).all()), "a clamped floor would have killed it"
    (gradient,) = torch.autograd.grad(distribution.entropy(), logits)
    assert float(gradient.abs().max()) > 1e-4


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("explore", [0.0, 0.1])
def test_the_joint_distribution_equals_enumeration(name: str, explore: float) -> None:
    spec = SPECS[name]
    generator = torch.Generator().manual_seed(1)
    masks = random_masks(spec, 6, generator)
    distribution = ActionDistribution(spec, random_logits(spec, masks, generator), masks, explore)
    actions = torch.tensor(list(every_action(spec)))
    rows = [_row(spec, masks, distribution, row, len(actions)) for row in range(6)]
    joint = torch.stack([ActionDistribution(spec, *row, 0.0, validate=False).score(actions).joint for row in rows])
    possible = _possible(spec, masks, actions)
    probability = torch.where(possible, joint.exp(), 0.0)
    torch.testing.assert_close(probability.sum(1), torch.ones(6))
    surprise = torch.where(possible, -joint, 0.0)
    torch.testing.assert_close((probability * surprise).sum(1), distribution.entropy(), atol=1e-5, rtol=1e-5)
    drawn = distribution.sample(torch.rand(6, len(spec.heads), generator=generator))
    assert all(tuple(action) in set(every_action(spec)) for action in drawn.tolist())
    found = [actions.tolist().index(action) for action in drawn.tolist()]
    assert bool(possible[torch.arange(6), found].all())
    torch.testing.assert_close(distribution.score(drawn).joint, joint[torch.arange(6), found])
    assert float(distribution.score(distribution.mode()).joint.min()) > -20


def _row(spec: ActionSpec, masks: object, distribution: ActionDistribution, row: int, count: int) -> tuple:
    """One row of a distribution, repeated: its log-probabilities are logits of the same distribution."""
    def repeated(tensor: torch.Tensor) -> torch.Tensor:
        return tensor[row].expand(count, *tensor.shape[1:])

    logits = ActionLogits(repeated(distribution.op.log_probs), repeated(distribution.slot.log_probs),
                          {pair: repeated(table.log_probs) for pair, table in distribution.values.items()})
    again = type(masks)(repeated(masks.op), repeated(masks.slot), {p: repeated(t) for p, t in masks.values.items()})  # type: ignore
    return logits, again


def _possible(spec: ActionSpec, masks: object, actions: torch.Tensor) -> torch.Tensor:
    """bool [rows, actions], written without the code under test."""
    out = []
    for row in range(len(masks.op)):  # type: ignore[attr-defined]
        mine = []
        for action in actions.tolist():
            chosen = dict(zip(spec.heads, action, strict=True))
            op, slot = chosen[Head.OP], chosen.get(Head.SLOT, spec.defaults[Head.SLOT])
            fine = bool(masks.op[row, op]) and bool(masks.slot[row, op, slot])  # type: ignore[attr-defined]
            for (its_op, head), mask in masks.values.items():  # type: ignore[attr-defined]
                if spec.ops[op] is its_op:
                    at_once = head is Head.ALPHA_CURVE and chosen.get(Head.ALPHA_SPEED) == ALPHA_SPEEDS.index(0)
                    forced = chosen[head] == spec.defaults[head]
                    fine = fine and (forced if at_once else bool(mask[row, slot, chosen[head]]))
            mine.append(fine)
        out.append(mine)
    return torch.tensor(out)


def test_uniform_entropy_is_the_analytic_one_and_heads_without_a_choice_add_nothing() -> None:
    spec = ActionSpec.decisive(3, ("a", "b", "c", "d"))
    masks = random_masks(spec, 1, torch.Generator().manual_seed(0), chance=1.1)
    masks = masks._replace(slot=torch.ones_like(masks.slot), op=torch.ones_like(masks.op))
    masks.slot[:, 0, 1:] = False
    entropy = ActionDistribution(spec, ActionLogits.flat(spec, masks), masks).entropy()
    expected = math.log(4) + 3 / 4 * math.log(3) + 1 / 4 * math.log(4)  # op, a slot for three of four ops, a blueprint for one
    assert float(entropy) == pytest.approx(expected, rel=1e-6)
    wide = ActionSpec(3, spec.blueprints, heads=(*spec.heads, Head.STYLE, Head.TEMPO), ops=spec.ops, auto_advance=True)
    only = {pair: torch.arange(wide.head_sizes[pair[1]]).expand(1, 3, -1) == 0 for pair in wide.pairs}
    doubled = masks._replace(values=only | masks.values)
    again = ActionDistribution(wide, ActionLogits.flat(wide, doubled), doubled).entropy()
    assert float(again) == pytest.approx(expected, rel=1e-6)


def test_irrelevant_and_forced_heads_count_nothing() -> None:
    generator = torch.Generator().manual_seed(3)
    masks = random_masks(SPEC, 64, generator)
    distribution = ActionDistribution(SPEC, random_logits(SPEC, masks, generator), masks)
    actions = distribution.sample(torch.rand(64, len(Head), generator=generator))
    scored = distribution.score(actions)
    assert bool((scored.heads[~scored.relevant] == 0).all())
    torch.testing.assert_close(scored.heads.sum(-1), scored.joint)
    waits = actions[:, 0] == op_index(LifecycleOp.WAIT)
    assert bool(waits.any())
    assert not bool(scored.relevant[waits, 1:].any())
    at_once = actions[:, Head.ALPHA_SPEED] == 0
    assert not bool(scored.relevant[at_once, Head.ALPHA_CURVE].any()), "at once has no curve"
    assert bool((actions[at_once, Head.ALPHA_CURVE] == SPEC.defaults[Head.ALPHA_CURVE]).all())
    ungerminated = actions[:, 0] != op_index(LifecycleOp.GERMINATE)
    assert bool((actions[ungerminated, Head.BLUEPRINT] == SPEC.defaults[Head.BLUEPRINT]).all())


def test_the_estimate_of_the_joint_kl_is_the_joint_kl() -> None:
    """k3 on the joint ratio, averaged over all actions, is the KL of whole actions: no head dilutes it."""
    generator = torch.Generator().manual_seed(2)
    spec = SPECS["compact"]
    masks = random_masks(spec, 1, generator)
    old, new = (ActionDistribution(spec, random_logits(spec, masks, generator), masks) for _ in range(2))
    actions = torch.tensor(list(every_action(spec)))
    possible = _possible(spec, masks, actions)[0]
    then, now = (ActionDistribution(spec, *_row(spec, masks, d, 0, len(actions)), 0.0, validate=False).score(actions).joint
                 for d in (old, new))
    weight = torch.where(possible, then.exp(), 0.0)
    exact = (weight * (then - now)).sum()
    moved = now - then
    torch.testing.assert_close((weight * (moved.exp() - 1 - moved)).sum(), exact, atol=1e-5, rtol=1e-5)
    assert float(exact) > 0.05


def test_head_entropies_are_conditional_and_between_zero_and_one() -> None:
    spec = SPECS["compact"]
    masks = random_masks(spec, 4, torch.Generator().manual_seed(0))
    masks.op[:], masks.slot[:] = True, True
    masks.slot[:, 0, 1:] = False
    masks.values[LifecycleOp.GERMINATE, Head.STYLE][:] = True
    flat = ActionLogits.flat(spec, masks)
    flat.op[:, op_index(LifecycleOp.GERMINATE, spec)] = -30.0  # hardly ever asked, and still measured
    share, asked = ActionDistribution(spec, flat, masks).head_entropies()
    style = spec.heads.index(Head.STYLE)
    torch.testing.assert_close(share[:, style], torch.ones(4))
    assert float(asked[:, style].max()) < 1e-9
    assert float(share[:, 0].max()) < 1


@pytest.mark.parametrize("name", SPECS)
def test_conditional_entropies_are_averages_over_what_asks(name: str) -> None:
    """Against plain loops over ops, slots and speeds: only what is possible and leaves a choice counts."""
    spec, generator = SPECS[name], torch.Generator().manual_seed(4)
    masks = random_masks(spec, 5, generator)
    distribution = ActionDistribution(spec, random_logits(spec, masks, generator), masks)
    found, (_, likely) = distribution.conditional_entropies(), distribution.head_entropies()
    for row in range(5):
        for number, head in enumerate(spec.heads):
            cases = list(_asking(spec, distribution, row, head))
            total = sum(weight for weight, _ in cases)
            expected = sum(weight * entropy for weight, entropy in cases) / total if total else 0.0
            assert float(found[row, number]) == pytest.approx(expected, abs=1e-5), head
            assert float(likely[row, number]) == pytest.approx(total, abs=1e-5), head


def _asking(spec: ActionSpec, joint: ActionDistribution, row: int, head: Head) -> Iterator[tuple]:
    """(how likely the head is asked here, its entropy then), place by place."""
    def case(table: MaskedCategorical, place: tuple[int, ...], weight: float) -> Iterator[tuple]:
        probs = table.probs[(row, *place)]
        if int(table.mask[(row, *place)].sum()) > 1:
            yield weight, float(-(probs * probs.clamp(min=1e-30).log()).sum())

    if head is Head.OP:
        yield from case(joint.op, (), 1.0)
    for number, op in enumerate(spec.ops):
        chance = float(joint.op.probs[row, number])
        if head is Head.SLOT:
            yield from case(joint.slot, (number,), chance)
        for slot in range(spec.slots if (op, head) in joint.values else 0):
            weight, table = chance * float(joint.slot.probs[row, number, slot]), joint.values[op, head]
            if table.mask.dim() == 3:
                yield from case(table, (slot,), weight)
            else:
                for speed, p in enumerate(joint.values[op, Head.ALPHA_SPEED].probs[row, slot].tolist()):
                    yield from case(table, (slot, speed), weight * p)


def test_wrong_actions_are_refused() -> None:
    masks = random_masks(SPEC, 3, torch.Generator().manual_seed(0))
    distribution = ActionDistribution(SPEC, ActionLogits.flat(SPEC, masks), masks)
    with pytest.raises(EsperError, match=r"actions have shape \[3, 4\]; expected \[3, 8\]"):
        distribution.score(torch.zeros(3, 4, dtype=torch.int64))
