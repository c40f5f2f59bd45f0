"""The rollout: advantages against brute force, and nothing stale, padded or misshapen in reach."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings, strategies as st

from esper.leyline import RELEVANCE, EsperError, Head, LifecycleOp, Observation
from esper.simic import TamiyoRolloutBuffer, compute_causal_masks, compute_per_head_advantages
from esper.simic.buffer import RolloutSpec, Step, parts_of
from esper.tamiyo.network import Acted
from tests.minds import SEES, SPEC, agent, filled, random_masks


def step(rows: int, generator: torch.Generator, **changes: torch.Tensor) -> Step:
    """A step of random numbers; `changes` name fields of Step or Acted."""
    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(rows, *shape, generator=generator)

    row, slot, candidate = SEES.widths
    masks = random_masks(SPEC, rows, generator)
    no = torch.zeros(rows, dtype=torch.bool)
    acted = Acted(torch.zeros(rows, 8, dtype=torch.int64), noise(), noise(8), noise(8) > 0, noise(), noise(2, 16))
    seen = (noise(row), noise(3, slot), noise(3, 3, candidate))
    made = Step(Observation(*seen), masks, acted, noise(), no, no, noise(), no, noise(2, 16), ~no)
    acted_changes = {name: value for name, value in changes.items() if name in Acted._fields and name != "hidden"}
    rest = {name: value for name, value in changes.items() if name not in acted_changes}
    return made._replace(acted=acted._replace(**acted_changes), **rest)


def empty(steps: int, rows: int, chunk: int = 0) -> TamiyoRolloutBuffer:
    return TamiyoRolloutBuffer(RolloutSpec(steps, rows, SPEC, SEES, 16, chunk))


def brute_force(reward: list, value: list, done: list, cut: list, boot: list, last: float, gamma: float,
                lam: float) -> list[float]:
    """GAE by its definition, in O(T^2): the weighted sum of all later errors of the same episode."""
    steps = len(reward)
    out = []
    for t in range(steps):
        total, weight = 0.0, 1.0
        for k in range(t, steps):
            after = boot[k] if cut[k] else 0.0 if done[k] else value[k + 1] if k + 1 < steps else last
            total += weight * (reward[k] + gamma * after - value[k])
            weight *= gamma * lam
            if done[k] or cut[k]:
                break
        out.append(total)
    return out


@given(st.integers(1, 9), st.integers(0, 10_000), st.floats(0, 1), st.floats(0, 1), st.floats(0, 0.6), st.floats(0, 0.6))
@settings(max_examples=60, deadline=None)
def test_advantages_equal_brute_force(steps: int, seed: int, gamma: float, lam: float, ends: float, cuts: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    buffer = empty(steps, 3)
    for _ in range(steps):
        draw = torch.rand(2, 3, generator=generator)
        done = draw[0] < ends
        buffer.add(step(3, generator, done=done, truncated=~done & (draw[1] < cuts)))
    last = torch.randn(3, generator=generator)
    buffer.compute_advantages_and_returns(gamma, lam, last)
    columns = ("reward", "value", "done", "truncated", "bootstrap")
    for row in range(3):
        expected = brute_force(*(buffer[name][:, row].tolist() for name in columns), float(last[row]), gamma, lam)
        torch.testing.assert_close(buffer["advantage"][:, row], torch.tensor(expected), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(buffer["target"], buffer["advantage"] + buffer["value"])


def test_a_single_unfinished_row_is_bootstrapped_and_an_ended_one_is_not() -> None:
    generator, yes, no = torch.Generator().manual_seed(0), torch.tensor([True, False]), torch.tensor([False, False])
    buffer = empty(1, 2)
    buffer.add(step(2, generator, done=yes, truncated=no, reward=torch.ones(2), value=torch.zeros(2)))
    buffer.compute_advantages_and_returns(1.0, 1.0, torch.tensor([100.0, 100.0]))
    assert buffer["target"].tolist() == [[1.0, 101.0]]


def test_gamma_and_lambda_have_no_defaults() -> None:
    with pytest.raises(TypeError, match="gae_lambda"):
        empty(1, 1).compute_advantages_and_returns(gamma=1.0)  # type: ignore[call-arg]


def test_advantages_are_normalised_over_steps_with_a_choice() -> None:
    generator = torch.Generator().manual_seed(0)
    buffer = empty(40, 5)
    for number in range(40):
        relevant = torch.rand(5, 8, generator=generator) < (0.05 if number % 2 else 0.5)
        buffer.add(step(5, generator, relevant=relevant, reward=50.0 * torch.randn(5, generator=generator)))
    buffer.compute_advantages_and_returns(0.9, 0.9, torch.zeros(5))
    chosen, raw = buffer["relevant"].any(-1), buffer["advantage"].clone()
    mean, spread = buffer.normalize_advantages()
    assert 0 < int(chosen.sum()) < chosen.numel()
    torch.testing.assert_close(mean, raw[chosen].mean())
    torch.testing.assert_close(spread, raw[chosen].std(correction=0))
    assert float(buffer["advantage"][chosen].mean()) == pytest.approx(0, abs=1e-5)
    assert float(buffer["advantage"][chosen].std(correction=0)) == pytest.approx(1, abs=1e-4)
    assert bool((buffer["advantage"][~chosen] == 0).all())


def test_rows_that_wait_are_not_in_the_statistics_of_advantages() -> None:
    """Whatever their heads say: mean and spread are those of valid choices, and rows that wait keep none."""
    generator, buffer = torch.Generator().manual_seed(0), empty(8, 4)
    over, choice = torch.tensor([False, True, False, True]), torch.ones(4, 8, dtype=torch.bool)
    for number in range(8):
        reward = 5 + torch.randn(4, generator=generator)
        buffer.add(step(4, generator, relevant=choice, reward=reward, valid=~(over & (number > 2)),
                        done=over & (number == 2)))
    buffer.compute_advantages_and_returns(0.9, 0.9, torch.zeros(4))
    raw, valid = buffer["advantage"].clone(), buffer["valid"]
    assert int((~valid).sum()) == 10
    mean, spread = buffer.normalize_advantages()
    torch.testing.assert_close(mean, raw[valid].mean())
    torch.testing.assert_close(spread, raw[valid].std(correction=0))
    assert bool((buffer["advantage"][~valid] == 0).all())


@pytest.mark.parametrize(("change", "message"), [
    ({"reward": torch.zeros(2, 1)}, r"step's 'reward' is torch.float32 \[2, 1\] on cpu; this rollout holds torch.float32 \[2\]"),
    ({"done": torch.zeros(2)}, r"step's 'done' is torch.float32 \[2\] on cpu; this rollout holds torch.bool \[2\]"),
    ({"actions": torch.zeros(2, 3, dtype=torch.int64)}, r"step's 'actions' is torch.int64 \[2, 3\]"),
    ({"hidden": torch.zeros(2, 2, 8)}, r"step's 'hidden' is torch.float32 \[2, 2, 8\] on cpu; .* holds .* \[2, 2, 16\]"),
    ({"value": torch.zeros(2, device="meta")}, r"step's 'value' is torch.float32 \[2\] on meta"),
    ({"log_prob": torch.zeros(2, requires_grad=True)}, r"step's 'log_prob' carries a gradient"),
])
def test_steps_of_another_shape_are_refused_and_nothing_is_written(change: dict, message: str) -> None:
    buffer = empty(2, 2)
    with pytest.raises(EsperError, match=message):
        buffer.add(step(2, torch.Generator().manual_seed(0), **change))
    assert buffer.filled == 0
    assert all(bool((tensor == 0).all()) for tensor in buffer._all.values())


@pytest.mark.parametrize("wrong", ["narrow", "float", "rank"])
def test_masks_of_another_shape_are_refused(wrong: str) -> None:
    made = step(2, torch.Generator().manual_seed(0))
    change = {"narrow": lambda m: m[:, :1], "float": lambda m: m.float(), "rank": lambda m: m[0]}[wrong]
    with pytest.raises(EsperError, match=r"step's 'mask.op' is "):
        empty(2, 2).add(made._replace(masks=made.masks._replace(op=change(made.masks.op))))


def test_a_step_without_a_mask_is_refused() -> None:
    made, buffer = step(2, torch.Generator().manual_seed(0)), empty(2, 2)
    with pytest.raises(EsperError, match=r"the step has no 'mask\..*'; nothing was added"):
        buffer.add(made._replace(masks=made.masks._replace(values=dict(list(made.masks.values.items())[1:]))))
    assert buffer.filled == 0


def test_a_full_or_empty_rollout_says_so() -> None:
    generator, buffer = torch.Generator().manual_seed(0), empty(1, 2)
    with pytest.raises(EsperError, match="this rollout is empty"):
        buffer.compute_advantages_and_returns(1.0, 1.0, torch.zeros(2))
    with pytest.raises(EsperError, match="there are no advantages yet"):
        next(buffer.get_batched_sequences())
    buffer.add(step(2, generator))
    with pytest.raises(EsperError, match="already holds its 1 steps"):
        buffer.add(step(2, generator))
    buffer.compute_advantages_and_returns(1.0, 1.0, torch.zeros(2))
    with pytest.raises(EsperError, match="2 sequences cannot be cut into 3 equal batches"):
        next(buffer.get_batched_sequences(3))


def test_one_batch_is_a_view_and_minibatches_hold_every_sequence_once() -> None:
    buffer, last = filled(agent(), rows=8, steps=6)
    buffer.compute_advantages_and_returns(1.0, 0.9, last)
    (whole,) = buffer.get_batched_sequences()
    assert whole.advantage.data_ptr() == buffer["advantage"].data_ptr()
    assert whole.seen.slot.data_ptr() == buffer["seen.slot"].data_ptr()
    parts = list(buffer.get_batched_sequences(4, torch.Generator().manual_seed(0)))
    assert [tuple(part.value.shape) for part in parts] == [(6, 2)] * 4
    together = torch.cat([part.value for part in parts], 1)
    assert sorted(together.t().tolist()) == sorted(buffer["value"].t().tolist())
    pieces = list(parts_of(parts[0], 2))
    assert torch.equal(torch.cat([piece.actions for piece in pieces], 1), parts[0].actions)
    assert torch.equal(torch.cat([piece.hidden for piece in pieces]), parts[0].hidden)


def test_minibatches_are_drawn_anew_every_time() -> None:
    buffer, last = filled(agent(), rows=16, steps=4)
    buffer.compute_advantages_and_returns(1.0, 0.9, last)

    def drawn(generator: torch.Generator) -> torch.Tensor:
        return torch.cat([part.value[0] for part in buffer.get_batched_sequences(4, generator)])

    generator = torch.Generator().manual_seed(0)
    orders = [drawn(generator) for _ in range(3)]
    for order, other in ((orders[0], orders[1]), (orders[1], orders[2]), (orders[0], buffer["value"][0])):
        assert not torch.equal(order, other)
        assert torch.equal(order.sort().values, other.sort().values)
    assert torch.equal(drawn(torch.Generator().manual_seed(0)), orders[0]), "by the generator alone"


def test_steps_are_counted_from_the_beginning_of_their_episode() -> None:
    buffer, _ = filled(agent(), rows=6, steps=20, ends=0.2, cuts=0.1)
    for row in range(6):
        count, expected = 0, []
        for reset in buffer["reset"][:, row].tolist():
            count = 0 if reset else count
            expected.append(count)
            count += 1
        assert buffer["clock"][:, row].tolist() == expected
    assert int(buffer["clock"].max()) < 19


def test_chunks_begin_with_the_memory_they_began_with() -> None:
    mind = agent()
    buffer, last = filled(mind, rows=4, steps=12, chunk=4)
    buffer.compute_advantages_and_returns(1.0, 0.9, last)
    for part in buffer.get_batched_sequences(3, torch.Generator().manual_seed(1)):
        assert part.value.shape == (4, 4)
        again = mind.network.evaluate_actions(part.seen, part.masks, part.actions, part.hidden, part.reset, mind.explore)
        torch.testing.assert_close(again.scored.joint, part.log_prob, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(again.value, part.value, atol=1e-5, rtol=1e-5)
    with pytest.raises(EsperError, match="cannot be cut into chunks of 5"):
        empty(12, 4, chunk=5)


def test_what_was_not_added_cannot_be_reached() -> None:
    """A rollout that is used again, and filled less far, equals a fresh one; so does one whose storage was poisoned."""
    def fill(buffer: TamiyoRolloutBuffer) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(5)
        for _ in range(3):
            buffer.add(step(2, generator, done=torch.tensor([False, True])))
        buffer.compute_advantages_and_returns(0.9, 0.9, torch.ones(2))
        buffer.normalize_advantages()
        (batch,) = buffer.get_batched_sequences()
        return [t for t in batch if isinstance(t, torch.Tensor)]

    used, poisoned = empty(6, 2), empty(6, 2)
    for _ in range(6):
        used.add(step(2, torch.Generator().manual_seed(9), reset=torch.tensor([True, True])))
    used.reset()
    for tensor in poisoned._all.values():
        if tensor.is_floating_point():
            tensor.fill_(torch.nan)
    fresh = fill(empty(6, 2))
    for other in (fill(used), fill(poisoned)):
        assert all(torch.equal(a, b) for a, b in zip(fresh, other, strict=True))


def test_rows_that_wait_may_hold_anything() -> None:
    """NaN in rows that are over changes neither advantages nor any gradient."""
    def gradients(poison: bool) -> list[torch.Tensor]:
        mind = agent()
        buffer, generator = mind.buffer(5, 4), torch.Generator().manual_seed(2)
        over = torch.tensor([False, True, False, False])
        for number in range(5):
            made = step(4, generator, done=torch.full((4,), number == 4) | (over & (number == 1)),
                        valid=~(over & (number > 1)))
            acted = mind.network.get_action(made.seen, made.masks, mind.network.get_initial_hidden(4), torch.rand(4, 8))
            made = made._replace(acted=acted, hidden=torch.zeros(4, 2, 16), reset=torch.ones(4, dtype=torch.bool))
            if poison and number > 1:
                made = made._replace(reward=torch.where(over, torch.nan, made.reward),
                                     seen=type(made.seen)(*(_poisoned(part, over) for part in made.seen)),
                                     acted=acted._replace(value=torch.where(over, torch.nan, acted.value),
                                                          log_prob=torch.where(over, torch.nan, acted.log_prob)))
            buffer.add(made)
        buffer.compute_advantages_and_returns(0.9, 0.9, torch.zeros(4))
        buffer.normalize_advantages()
        (batch,) = buffer.get_batched_sequences()
        mind._gradient([batch], mind._knobs())
        return [parameter.grad for parameter in mind.network.parameters() if parameter.grad is not None]

    torch.manual_seed(0)
    clean = gradients(False)
    torch.manual_seed(0)
    assert all(torch.equal(a, b) for a, b in zip(clean, gradients(True), strict=True))


def _poisoned(part: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return torch.where(rows.view(-1, *[1] * (part.dim() - 1)), torch.nan, part)


def test_a_row_cannot_stop_without_an_ending() -> None:
    generator, buffer = torch.Generator().manual_seed(0), empty(2, 2)
    buffer.add(step(2, generator))
    buffer.add(step(2, generator, valid=torch.tensor([True, False])))
    with pytest.raises(EsperError, match="a row stopped without done or truncated"):
        buffer.compute_advantages_and_returns(1.0, 1.0, torch.zeros(2))


def test_a_rollout_of_another_network_is_refused() -> None:
    mind = agent()
    spec = RolloutSpec.of(mind.network, 4, 2)
    for change in ({"hidden": 8}, {"spec": dataclasses.replace(SPEC, blueprints=("a", "b", "c"))},
                   {"spec": dataclasses.replace(SPEC, slots=2)}):
        other = TamiyoRolloutBuffer(dataclasses.replace(spec, **change))  # type: ignore[arg-type]
        with pytest.raises(EsperError, match=f"not made for this agent: {next(iter(change))} differ"):
            mind.update(other, torch.zeros(2))


@pytest.mark.parametrize("op", list(LifecycleOp))
def test_causal_masks_are_rows_of_the_table(op: LifecycleOp, device: str) -> None:
    ops = torch.full((2, 3), op, device=device)
    masks = compute_causal_masks(ops)
    for head in Head:
        assert bool((masks[head] == bool(RELEVANCE[op, head])).all()), head
        assert masks[head].device.type == device
    assert masks._fields == tuple(head.name.lower() for head in Head)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_advantages_of_heads_that_did_not_matter_are_zero(dtype: torch.dtype) -> None:
    ops = torch.arange(6).repeat(2, 1)
    base = torch.randn(2, 6, dtype=dtype)
    heads = compute_per_head_advantages(base, ops)
    assert heads.op.data_ptr() == base.data_ptr(), "every op matters: the tensor itself"
    for head in Head:
        assert heads[head].dtype == dtype
        expected = torch.where(torch.tensor(RELEVANCE)[ops, int(head)], base, 0)
        assert torch.equal(heads[head], expected)
    with pytest.raises(EsperError, match=r"ops have shape \[6\]; expected \[T, N\]"):
        compute_causal_masks(ops[0])
    with pytest.raises(EsperError, match="both must be"):
        compute_per_head_advantages(base[:1], ops)
