"""The controller's network: shapes, memory, gradients, and freedom from counts."""

import copy
import math

import pytest
import torch

from esper.leyline import ActionSpec, EsperError, Head, LifecycleOp, Observation
from esper.tamiyo import ActionLogits, FactoredRecurrentActorCritic, NetworkConfig
from tests.minds import SEES, SPEC, TINY, random_masks


def network(spec: ActionSpec = SPEC, seed: int = 0, config: NetworkConfig = TINY) -> FactoredRecurrentActorCritic:
    torch.manual_seed(seed)
    return FactoredRecurrentActorCritic(spec, config, SEES)


def seen(steps: int, rows: int, spec: ActionSpec = SPEC, seed: int = 0, dtype: torch.dtype = torch.float32) -> Observation:
    generator = torch.Generator().manual_seed(seed)
    row, slot, candidate = SEES.widths
    shapes = ((row,), (spec.slots, slot), (spec.slots, len(spec.blueprints), candidate))
    return Observation(*(torch.randn(steps, rows, *shape, generator=generator).to(dtype) for shape in shapes))


def sequence_masks(spec: ActionSpec, steps: int, rows: int, seed: int = 0) -> object:
    flat = random_masks(spec, steps * rows, torch.Generator().manual_seed(seed))
    def shaped(mask: torch.Tensor) -> torch.Tensor:
        return mask.unflatten(0, (steps, rows))

    return type(flat)(shaped(flat.op), shaped(flat.slot), {pair: shaped(mask) for pair, mask in flat.values.items()})


def test_the_default_network_has_the_size_it_should() -> None:
    for spec in (ActionSpec.full(3, tuple("abcdefghi")), ActionSpec.decisive(3, tuple("abcdefghi"))):
        count = sum(p.numel() for p in FactoredRecurrentActorCritic(spec).parameters())
        assert 100_000 < count < 300_000


def test_whole_sequences_equal_single_steps() -> None:
    net, look = network(), seen(20, 5)
    whole, end = net(look)
    hidden = net.get_initial_hidden(5)
    for step in range(20):
        one, hidden = net(Observation(*(part[step : step + 1] for part in look)), hidden)
        torch.testing.assert_close(one.value[0], whole.value[step], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(one.logits.op[0], whole.logits.op[step], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(hidden, end, atol=1e-5, rtol=1e-5)
    stretched, behind = net(look, reset=torch.zeros(20, 5, dtype=torch.bool))
    torch.testing.assert_close(stretched.value, whole.value, atol=1e-5, rtol=1e-5)
    assert behind is None


@pytest.mark.parametrize("seed", range(3))
def test_stretches_between_resets_equal_single_steps(seed: int) -> None:
    net, look = network(), seen(15, 6, seed=seed)
    reset = torch.rand(15, 6, generator=torch.Generator().manual_seed(seed)) < 0.3
    start = torch.randn(6, 2, 16)
    whole, _ = net(look, start, reset)
    hidden = start
    for step in range(15):
        hidden = torch.where(reset[step, :, None, None], 0.0, hidden)
        one, hidden = net(Observation(*(part[step : step + 1] for part in look)), hidden)
        torch.testing.assert_close(one.value[0], whole.value[step], atol=1e-5, rtol=1e-5)
    poisoned = torch.where(reset[0, :, None, None], torch.nan, start)
    assert torch.equal(net(look, poisoned, reset)[0].value, whole.value), "what a reset empties cannot come back"


def test_a_reset_empties_the_memory_of_its_row_alone() -> None:
    net, look = network(), seen(9, 3)
    reset = torch.zeros(9, 3, dtype=torch.bool)
    reset[4, 1] = True
    with_reset, _ = net(look, reset=reset)
    without, _ = net(look)
    fresh, _ = net(Observation(*(part[4:, 1:2] for part in look)))
    torch.testing.assert_close(with_reset.value[4:, 1:2], fresh.value, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(with_reset.value[:, [0, 2]], without.value[:, [0, 2]], atol=1e-5, rtol=1e-5)
    assert not torch.allclose(with_reset.value[5:, 1], without.value[5:, 1], atol=1e-4)


def test_without_memory_every_step_stands_alone() -> None:
    net, look = network(config=NetworkConfig(16, 8, 6, 12, memory=False)), seen(6, 2)
    whole, _ = net(look)
    alone, _ = net(Observation(*(part[3:4] for part in look)))
    torch.testing.assert_close(whole.value[3], alone.value[0])


@pytest.mark.parametrize("slots", [2, 3, 8, 12])
def test_the_same_weights_act_on_any_host(slots: int) -> None:
    """Other numbers of slots, and a registry with one more blueprint: only the shapes change."""
    net = network()
    for names in (SPEC.blueprints, (*SPEC.blueprints, "a user's own")):
        spec = ActionSpec.full(slots, names)
        bound = net.bound_to(spec)
        assert next(bound.parameters()) is next(net.parameters())
        look, masks = seen(1, 4, spec), random_masks(spec, 4, torch.Generator().manual_seed(slots))
        acted = bound.get_action(Observation(*(p[0] for p in look)), masks, bound.get_initial_hidden(4), torch.rand(4, 8))
        assert int(acted.actions[:, Head.SLOT].max()) < slots
        decided, _ = bound(look)
        assert decided.logits.values[LifecycleOp.GERMINATE, Head.BLUEPRINT].shape == (1, 4, slots, len(names))
    with pytest.raises(EsperError, match=r"this controller chooses .*WAIT.*it cannot act in a space of"):
        net.bound_to(ActionSpec.compact(3, SPEC.blueprints))


def test_slots_and_blueprints_have_no_numbers() -> None:
    """Permuting the slots permutes the pointer; a blueprint's score does not depend on the others' places."""
    net, look = network(), seen(4, 3)
    order = torch.tensor([2, 0, 1])
    moved, _ = net(Observation(look.row, look.slot[:, :, order], look.candidate[:, :, order]))
    decided, _ = net(look)
    torch.testing.assert_close(moved.logits.slot, decided.logits.slot[..., order], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(moved.value, decided.value, atol=1e-5, rtol=1e-5)
    kinds = torch.tensor([1, 2, 0])
    swapped, _ = net(Observation(look.row, look.slot, look.candidate[:, :, :, kinds]))
    pair = LifecycleOp.GERMINATE, Head.BLUEPRINT
    torch.testing.assert_close(swapped.logits.values[pair], decided.logits.values[pair][..., kinds], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_memory_takes_the_dtype_of_the_weights(dtype: torch.dtype) -> None:
    net = network().to(dtype)
    assert net.get_initial_hidden(2).dtype == dtype
    decided, hidden = net(seen(3, 2, dtype=dtype))
    assert decided.value.dtype == hidden.dtype == dtype
    assert bool(decided.value.isfinite().all())


def test_initialisation_is_the_documented_one() -> None:
    net = FactoredRecurrentActorCritic(SPEC)
    hidden = net.config.hidden
    inward, inner, *biases = net.lstm.parameters()
    assert torch.equal(biases[0] + biases[1], torch.cat([torch.zeros(hidden), torch.ones(hidden), torch.zeros(2 * hidden)]))
    for gate in (*inward.split(hidden), *inner.split(hidden)):
        torch.testing.assert_close(gate @ gate.t(), torch.eye(hidden), atol=1e-4, rtol=0)
    gains = {"op_head.2": 0.01, "slot_pointer": 0.01, "heads.style": 0.01, "value_head.2": 1.0, "feature_net.0": math.sqrt(2)}
    for name, gain in gains.items():
        weight = net.get_submodule(name).weight.detach()
        largest = torch.linalg.matrix_norm(weight, 2)
        assert float(largest) == pytest.approx(gain, rel=1e-3), name


def test_what_leaves_the_memory_stays_in_range() -> None:
    """As the op head gets it."""
    net, reached = network(), []
    net.op_head.register_forward_pre_hook(lambda module, inputs: reached.append(inputs[0]))
    with torch.no_grad():
        net(seen(1000, 2))
    rms = reached[0].square().mean(-1).sqrt()
    assert rms.shape == (1000, 2)
    assert float(rms.min()) > 0.9
    assert float(rms.max()) < 1.1


@pytest.mark.parametrize("saturated", [False, True])
def test_every_weight_has_a_finite_gradient(saturated: bool) -> None:
    net = network()
    if saturated:
        net.op_head[-1].bias.detach()[0] = 200.0  # WAIT with all its weight
    masks, look = sequence_masks(SPEC, 7, 6), seen(7, 6)
    hidden = net.get_initial_hidden(6)
    actions = []
    for step in range(7):
        one = type(masks)(masks.op[step], masks.slot[step], {p: m[step] for p, m in masks.values.items()})  # type: ignore[attr-defined]
        acted = net.get_action(Observation(*(p[step] for p in look)), one, hidden, torch.rand(6, 8), explore=0.5)
        hidden = acted.hidden
        actions.append(acted.actions)
    scored = net.evaluate_actions(look, masks, torch.stack(actions), None, explore=0.5)  # type: ignore[arg-type]
    (scored.scored.joint.sum() + scored.distribution.entropy().sum() + scored.value.sum()).backward()
    for name, parameter in net.named_parameters():
        assert parameter.grad is not None, name
        assert bool(parameter.grad.isfinite().all()), name
        assert saturated or bool((parameter.grad != 0).any()), name


def test_what_acting_returns_carries_no_gradient() -> None:
    net = network()
    masks, look = random_masks(SPEC, 4, torch.Generator().manual_seed(0)), seen(1, 4)
    acted = net.get_action(Observation(*(p[0] for p in look)), masks, net.get_initial_hidden(4), torch.rand(4, 8))
    assert not any(part.requires_grad for part in acted)
    with pytest.raises(RuntimeError, match="does not require grad"):
        acted.log_prob.sum().backward()
    acted.log_prob.clone().add_(1)  # and they are ordinary tensors


def test_a_broken_mind_does_not_act() -> None:
    net, masks, look = network(), random_masks(SPEC, 4, torch.Generator().manual_seed(0)), seen(1, 4)
    look.row[0, 2, 0] = torch.nan
    with pytest.raises(EsperError, match="not finite; its weights or observations are broken"):
        net.get_action(Observation(*(p[0] for p in look)), masks, net.get_initial_hidden(4), torch.rand(4, 8))


def test_the_value_does_not_depend_on_the_action() -> None:
    net, look = network(), seen(5, 3)
    before = net(look)[0].value
    changed = copy.deepcopy(net)
    for layer in (changed.op_head, changed.slot_pointer, changed.heads, changed.trunk_slot, changed.trunk_state):
        for parameter in layer.parameters():
            parameter.detach().normal_()
    assert torch.equal(changed(look)[0].value, before)


def test_changing_the_scale_of_the_value_changes_nothing_it_says() -> None:
    net, look = network(), seen(5, 3)
    before = net(look)[0].value
    net.rescale_value(torch.tensor(37.0))
    torch.testing.assert_close(net(look)[0].value, before, atol=1e-5, rtol=1e-5)
    assert float(net.value_scale) == 37


@pytest.mark.parametrize(("change", "message"), [
    (lambda s: s._replace(row=s.row[0]), r"observation 'row' has shape \[3, 4\]; expected \[T, B, ...\] = "),
    (lambda s: s._replace(slot=s.slot[:, :, :1]), r"observation 'slot' has shape \[5, 3, 1, 4\]; expected .* \[5, 3, 3, 4\]"),
    (lambda s: s._replace(candidate=s.candidate.double()), r"observation 'candidate' is torch.float64 on cpu"),
])
def test_wrong_observations_are_refused_by_name(change: object, message: str) -> None:
    with pytest.raises(EsperError, match=message):
        network()(change(seen(5, 3)))  # type: ignore[operator]


def test_wrong_memory_masks_and_resets_are_refused() -> None:
    net, look = network(), seen(4, 4)
    with pytest.raises(EsperError, match=r"hidden is torch.float32 \[4, 2, 15\]; expected torch.float32 \[4, 2, 16\]"):
        net(look, torch.zeros(4, 2, 15))
    with pytest.raises(EsperError, match=r"hidden is torch.float64"):
        net(look, torch.zeros(4, 2, 16, dtype=torch.float64))
    with pytest.raises(EsperError, match=r"reset is torch.bool \[4\]; expected torch.bool \[4, 4\]"):
        net(look, reset=torch.zeros(4, dtype=torch.bool))
    flat = random_masks(SPEC, 4, torch.Generator().manual_seed(0))  # [B, ...] where [T, B, ...] is due, with T == B
    with pytest.raises(EsperError, match=r"mask 'op' has shape \[4, 6\]; expected \[4, 4, 6\]"):
        net.evaluate_actions(look, flat, torch.zeros(4, 4, 8, dtype=torch.int64), None)
    assert isinstance(net(look)[0].logits, ActionLogits)


@pytest.mark.parametrize("options", [
    {"hidden": 0}, {"hidden": 200_000}, {"slot": -1}, {"candidate": 4097}, {"trunk": 2.5}, {"privileged": -1},
])
def test_sizes_that_cannot_be_meant_are_refused_before_memory_is_asked_for(options: dict) -> None:
    (name,) = options
    said = rf"^{name} is {options[name]}; expected a whole number from [01] to 4096$"
    with pytest.raises(EsperError, match=said):
        NetworkConfig(**options)
