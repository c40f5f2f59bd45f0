"""The learning rule: what must hold in every update, and what must never."""

import ast
import collections
import dataclasses
import functools
import itertools
import math
import warnings
from pathlib import Path

import pytest
import torch
from experiments.toys import WorldCollector

from esper.leyline import ActionSpec, EsperError, Head, LifecycleOp, Observation, StateFormatError
from esper.leyline.storage import read_state, write_state
from esper.simic import (
    AnomalyDetector,
    Outcome,
    PPOAgent,
    PPOConfig,
    PPOUpdateMetrics,
    Thresholds,
    ppo as ppo_module,
)
from esper.simic.buffer import parts_of
from esper.simic.metrics import METRICS, check_metrics
from esper.tamiyo import Controller, Learned, NetworkConfig, Normaliser
from esper.tamiyo.controller import PolicyInput
from tests.minds import SEES, SPEC, TINY, Chance, agent, filled, op_index

SOURCES = Path(ppo_module.__file__).parents[1]


def prepared(mind: PPOAgent, **options: object) -> object:
    """The only batch of a random rollout, with normalised advantages."""
    buffer, last = filled(mind, **options)  # type: ignore[arg-type]
    buffer.compute_advantages_and_returns(mind.config.gamma, mind.config.gae_lambda, last)
    buffer.normalize_advantages()
    (batch,) = buffer.get_batched_sequences()
    return batch


def gradients(mind: PPOAgent) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in mind.network.named_parameters() if p.grad is not None}


def weights(mind: PPOAgent) -> list[torch.Tensor]:
    return [p.detach().clone() for p in mind.network.parameters()]


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("ends", [0.0, 0.3])
def test_the_first_pass_replays_the_rollout(seed: int, ends: float, device: str) -> None:
    """Ratios are 1, and stored log-probabilities and values come back, for random patterns of endings; also on CUDA."""
    mind = agent(seed=seed, device=device, network=NetworkConfig(64, 32, 16, 32), explore=(0.05, 0.0))
    buffer, last = filled(mind, seed=seed, rows=32, steps=20, ends=ends, cuts=ends)
    assert buffer._resets_inside == (ends > 0)
    metrics = mind.update(buffer, last)
    assert metrics.ratio_max == pytest.approx(1, abs=1e-5)
    assert metrics.ratio_min == pytest.approx(1, abs=1e-5)
    assert metrics.replay_error < 1e-5
    assert metrics.kl == pytest.approx(0, abs=1e-6)
    found = gradients(mind)
    assert set(found) == {name for name, _ in mind.network.named_parameters()}
    assert all(bool(g.isfinite().all()) for g in found.values())


@pytest.mark.parametrize("ratio", ["joint", "per_head"])
def test_the_first_gradient_is_the_policy_gradient(ratio: str) -> None:
    """At the weights that acted, both surrogates have the gradient of advantage x log-probability over choices."""
    mind = agent(ratio=ratio, value_weight=0.0, entropy=(0.0, 0.0), explore=(0.0, 0.0), max_grad_norm=1e9)
    batch = prepared(mind)
    mind._gradient([batch], mind._knobs())
    found = gradients(mind)
    mind.network.zero_grad()
    scored = mind.network.evaluate_actions(batch.seen, batch.masks, batch.actions, batch.hidden, batch.reset).scored
    (-(scored.joint * batch.advantage * batch.chosen).sum() / batch.chosen.sum()).backward()
    for name, parameter in mind.network.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(found[name], parameter.grad, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("ratio", ["joint", "per_head"])
def test_heads_that_did_not_matter_get_no_gradient(ratio: str) -> None:
    mind = agent(ratio=ratio, entropy=(0.0, 0.0), value_weight=0.0)
    batch = prepared(mind, rows=16, steps=20)
    for op, expected in ((LifecycleOp.WAIT, set()), (LifecycleOp.GERMINATE, {"blueprint", "style", "tempo", "alpha_target"}),
                         (LifecycleOp.PRUNE, {"alpha_speed", "alpha_curve"})):
        mine = batch.actions[..., 0] == op_index(op)
        assert bool(mine.any())
        mind._gradient([batch._replace(valid=batch.valid & mine)], mind._knobs())
        alive = {name.split(".")[1] for name, g in gradients(mind).items() if name.startswith("heads.") and bool((g != 0).any())}
        assert alive == expected, op


def test_rollouts_without_a_choice_teach_the_actor_nothing() -> None:
    mind = agent(entropy=(0.5, 0.5), critic_decay=0.0)
    batch = prepared(mind, forced=True)
    assert not bool(batch.chosen.any())
    mind._gradient([batch], mind._knobs())
    actor = ("op_head", "slot_pointer", "heads", "trunk_op")
    assert all(bool((g == 0).all()) for name, g in gradients(mind).items() if name.split(".")[0] in actor)
    assert bool((gradients(mind)["value_head.2.weight"] != 0).any())


def test_entropy_reaches_heads_whose_op_was_never_taken() -> None:
    """The bonus acts on what the head would do if it were asked."""
    mind = agent(entropy=(1.0, 1.0), value_weight=0.0)
    batch = prepared(mind, rows=16, steps=20)
    taken = batch.actions[..., 0] == op_index(LifecycleOp.GERMINATE)
    available = batch.masks.op[..., op_index(LifecycleOp.GERMINATE)]
    kept = batch.valid & ~taken & available
    mind._gradient([batch._replace(valid=kept, advantage=torch.zeros_like(batch.advantage))], mind._knobs())
    assert bool((gradients(mind)["heads.blueprint.weight"] != 0).any())


def bonus_gradient(bias: float, **options: object) -> dict[str, torch.Tensor]:
    """Of the entropy bonus alone, with this bias of GERMINATE."""
    options |= {"entropy": (1.0, 1.0), "value_weight": 0.0, "explore": (0.0, 0.0), "max_grad_norm": 1e9}
    mind = agent(**options)
    batch = prepared(mind, rows=16, steps=20)
    mind.network.op_head[-1].bias.detach()[op_index(LifecycleOp.GERMINATE)] = bias
    mind._gradient([batch._replace(advantage=torch.zeros_like(batch.advantage))], mind._knobs())
    return gradients(mind)


@pytest.mark.parametrize("head", ["blueprint", "tempo", "style", "alpha_target"])
def test_a_head_is_explored_however_unlikely_its_op_is(head: str) -> None:
    """Without any mixture: the gradient of the head's own entropy does not vanish with p(GERMINATE)."""
    biases = (0.0, -5.0, -8.0, -12.0, -200.0)
    norms = [float(bonus_gradient(bias)[f"heads.{head}.weight"].norm()) for bias in biases]
    assert norms[0] > 1e-4
    assert max(norms) < 3 * min(norms)


def test_the_bonus_has_a_weight_for_each_head() -> None:
    weights = tuple(2.0 if head is Head.BLUEPRINT else 0.0 for head in Head)
    plain, weighted = bonus_gradient(0.0), bonus_gradient(0.0, entropy_weights=weights)
    torch.testing.assert_close(weighted["heads.blueprint.weight"], 2 * plain["heads.blueprint.weight"])
    others = ("op_head", "slot_pointer", "heads.style", "heads.tempo", "heads.alpha_speed")
    assert all(bool((g == 0).all()) for name, g in weighted.items() if name.startswith(others))


def test_the_order_of_environments_does_not_matter() -> None:
    def updated(order: torch.Tensor | None) -> list[torch.Tensor]:
        mind = agent()
        buffer, last = filled(mind, rows=8, steps=10)
        if order is not None:
            for name, tensor in buffer._all.items():
                buffer._all[name] = tensor[:, order].contiguous()
            buffer._hidden, last = buffer._hidden[:, order].contiguous(), last[order]
        mind.update(buffer, last)
        return weights(mind)

    for a, b in zip(updated(None), updated(torch.randperm(8)), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=0)


def test_pieces_of_a_minibatch_sum_to_the_whole() -> None:
    found = []
    for accumulate in (1, 4):
        mind = agent(accumulate=accumulate, max_grad_norm=1e9)
        mind._gradient([prepared(mind, rows=8, steps=10)], mind._knobs())
        found.append(gradients(mind))
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, atol=1e-6, rtol=1e-4)


def test_several_epochs_move_the_policy_and_the_kl_stops_it() -> None:
    still = agent(epochs=6, target_kl=1e9, learning_rate=(3e-3, 3e-3))
    metrics = still.update(*filled(still, rows=16))
    assert metrics.steps == 6
    assert metrics.kl > 0
    assert metrics.ratio_max > 1.001
    strict = agent(epochs=6, target_kl=1e-5, learning_rate=(3e-3, 3e-3))
    before = weights(strict)
    stopped = strict.update(*filled(strict, rows=16))
    assert stopped.stopped_early
    assert 1 <= stopped.steps < 6
    assert not equal(before, weights(strict))


def measured_kl(mind: PPOAgent, kls: list[float], monkeypatch: pytest.MonkeyPatch) -> list[list]:
    """Let the steps of an update find these KLs; the weights that each of them found."""
    gradient, found = mind._gradient, []

    def told(batch: object, knobs: object) -> dict:
        found.append(weights(mind))
        return gradient(batch, knobs) | {"kl": kls[len(found) - 1]}  # type: ignore[arg-type]

    monkeypatch.setattr(mind, "_gradient", told)
    return found


@pytest.mark.parametrize(("epochs", "minibatches"), [(4, 1), (1, 4), (2, 2)])
def test_the_kl_stops_an_update_beyond_its_multiple_and_before_the_step(
        epochs: int, minibatches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also within a single epoch."""
    mind = agent(epochs=epochs, minibatches=minibatches, target_kl=0.02, kl_stop=1.5)
    rollout = filled(mind)
    found = measured_kl(mind, [0.0, 0.029, 0.031, 0.0], monkeypatch)
    metrics = mind.update(*rollout)
    assert (metrics.steps, metrics.stopped_early, len(found)) == (2, True, 3)
    assert not equal(found[1], found[2]), "1.45 times the target goes on"
    assert equal(found[2], weights(mind)), "1.55 times the target takes no step"


def test_a_single_step_of_an_update_cannot_be_stopped() -> None:
    """One epoch of one minibatch: its KL is measured where the rollout was made."""
    mind = agent(epochs=1, minibatches=1, target_kl=1e-9, kl_stop=1e-3, learning_rate=(1e-2, 1e-2))
    rollout, before = filled(mind), weights(mind)
    metrics = mind.update(*rollout)
    assert (metrics.steps, metrics.stopped_early) == (1, False)
    assert metrics.kl == pytest.approx(0, abs=1e-12)
    assert not equal(before, weights(mind))


def test_tampered_rollouts_are_refused() -> None:
    mind = agent()
    before = weights(mind)
    for row, poison in itertools.product((0, 5), (0.01, torch.nan)):
        mind.config = dataclasses.replace(mind.config, minibatches=4)
        buffer, last = filled(mind)
        buffer["log_prob"][3, row] += poison
        with pytest.raises(EsperError, match="acting and learning must see the same observations, masks, memory and exploration"):
            mind.update(buffer, last)
    assert equal(before, weights(mind)), "refused before anything changed"
    mind = agent(explore=(0.3, 0.0))
    mind.network.op_head[-1].bias.detach()[0] = 3.0
    buffer, last = filled(mind)
    mind.updates = 150  # exploration has been annealed since the rollout was made
    with pytest.raises(EsperError, match="differ by"):
        mind.update(buffer, last)


def test_a_non_finite_gradient_skips_its_step_alone() -> None:
    mind = agent(epochs=2)
    buffer, last = filled(mind)
    before = weights(mind)
    handle = mind.network.heads["style"].weight.register_hook(lambda g: g * torch.nan)
    metrics = mind.update(buffer, last)
    assert (metrics.steps, metrics.skipped) == (0, 2)
    head_only = [name for name, _ in mind.network.named_parameters() if name.startswith("value_head.2")]
    for (name, now), old in zip(mind.network.named_parameters(), before, strict=True):
        assert bool(now.isfinite().all())
        assert name in head_only or torch.equal(now, old), "only the scale of the value changed"
    assert any(a.kind == "non_finite" for a in metrics.anomalies)
    handle.remove()
    assert mind.update(*filled(mind)).steps == 2


def test_only_the_critic_decays_and_every_weight_is_trained_once() -> None:
    mind = agent(critic_decay=0.1)
    groups = mind.optimizer.param_groups
    critic = {id(p) for name, p in mind.network.named_parameters() if name.startswith("value_head.")}
    assert {id(p) for p in groups[1]["params"]} == critic
    assert (groups[0]["weight_decay"], groups[1]["weight_decay"]) == (0.0, 0.1)
    every = [id(p) for group in groups for p in group["params"]]
    assert sorted(every) == sorted(id(p) for p in mind.network.parameters())
    assert groups[0]["fused"]


def test_schedules_are_fractions_of_the_declared_run() -> None:
    mind = agent(updates=10, learning_rate=(1e-2, 1e-3), explore=(0.4, 0.0))
    mind.updates = 5
    assert mind.scheduled(mind.config.learning_rate) == pytest.approx(5.5e-3)
    assert mind.explore == pytest.approx(0.2)
    mind.updates = 50
    assert mind.explore == 0
    assert mind.update(*filled(mind)).learning_rate == pytest.approx(1e-3)


def test_value_clipping_has_its_own_range() -> None:
    """A value outside its range of the old one has no gradient where that would take it further."""
    mind = agent(value_clip=0.1, entropy=(0.0, 0.0), value_weight=1.0)
    batch = prepared(mind)
    far = batch._replace(value=batch.value + 10, target=batch.value + 20, advantage=torch.zeros_like(batch.advantage))
    mind._gradient([far], mind._knobs())
    assert bool((gradients(mind)["value_head.2.weight"] != 0).any()), "the worse of the two losses counts"
    past = batch._replace(value=batch.value - 10, target=batch.value - 20, advantage=torch.zeros_like(batch.advantage))
    numbers = mind._gradient([past], mind._knobs())
    assert numbers["value_loss"] == pytest.approx(0.5 * 400 / float(mind.network.value_scale) ** 2, rel=1e-3)


def test_saved_agents_go_on_bit_for_bit(tmp_path: Path) -> None:
    def next_two(mind: PPOAgent) -> list[torch.Tensor]:
        for seed in (11, 12):
            mind.update(*filled(mind, seed=seed, rows=8))
        return [*weights(mind), *mind.controller.normaliser.stats, mind.network.value_scale, mind.generator.get_state()]

    mind = agent(epochs=2, minibatches=2, updates=9, learning_rate=(1e-2, 1e-4))
    for seed in range(3):
        mind.update(*filled(mind, seed=seed, rows=8))
    mind.save(tmp_path / "agent.safetensors")
    again = PPOAgent.load(tmp_path / "agent.safetensors")
    assert again.config == mind.config
    assert again.detector.thresholds == mind.detector.thresholds
    assert again.updates == 3
    assert again.detector.counts == mind.detector.counts
    assert equal(next_two(mind), next_two(again))


def test_checkpoints_hold_every_argument_and_no_pickle(tmp_path: Path) -> None:
    path = tmp_path / "agent.safetensors"
    mind = agent(updates=7, clip=0.11)
    mind.save(path)
    header, _ = read_state(path, "agent")
    assert set(header["config"]) == {f.name for f in dataclasses.fields(PPOConfig)}
    assert set(header["network"]) == {f.name for f in dataclasses.fields(NetworkConfig)}
    assert set(header["thresholds"]) == {f.name for f in dataclasses.fields(Thresholds)}
    assert header["spec"]["slots"] == 3
    assert path.read_bytes()[8:9] == b"{", "safetensors: a JSON header, then numbers"
    for source in SOURCES.rglob("*.py"):
        names = {node.id for node in ast.walk(ast.parse(source.read_text())) if isinstance(node, ast.Name)}
        text = source.read_text()
        assert "pickle" not in names, source
        assert "torch.load" not in text, source
        assert "torch.save" not in text, source
        assert "_orig_mod" not in text, source


def test_checkpoints_of_another_space_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "agent.safetensors"
    agent().save(path)
    with pytest.raises(EsperError, match=r"this controller sees other row fields than there are: .*progress.* differ"):
        Learned.load(path, SPEC)
    PPOAgent(Controller.fresh(SPEC, TINY)).save(path)
    with pytest.raises(EsperError, match="it cannot act in a space of"):
        Learned.load(path, ActionSpec.compact(3, SPEC.blueprints))
    Learned.load(path, ActionSpec.full(5, ("x", "y")))
    header, tensors = read_state(path, "agent")
    header["network"]["hidden"] = 32
    write_state(path, "agent", {k: v for k, v in header.items() if k not in ("kind", "schema")}, tensors)
    with pytest.raises(StateFormatError, match=r"these weights are of another controller: .*feature_net.* differ"):
        PPOAgent.load(path)


@pytest.mark.parametrize(("change", "message"), [
    (lambda h, t: h["config"].update(fame=1), "no use for fame"),
    (lambda h, t: t.pop("generator"), "does not describe a whole agent: 'generator'"),
    (lambda h, t: t.pop("optimizer.0.exp_avg"), "these moments are of another controller: optimizer.0.exp_avg differ"),
    (lambda h, t: t.update({"normaliser.row": torch.zeros(3, 2)}), "these scales are of another controller: row differ"),
    (lambda h, t: h.pop("limit"), "does not describe a controller: 'limit'"),
])
def test_damaged_checkpoints_are_refused(change: object, message: str, tmp_path: Path) -> None:
    path = tmp_path / "agent.safetensors"
    mind = agent()
    mind.controller.normaliser.limit = 2.0
    mind.update(*filled(mind))
    mind.save(path)
    assert PPOAgent.load(path).controller.normaliser.limit == 2.0
    header, tensors = read_state(path, "agent")
    change(header, tensors)  # type: ignore[operator]
    write_state(path, "agent", {k: v for k, v in header.items() if k not in ("kind", "schema")}, tensors)
    with pytest.raises(StateFormatError, match=message):
        PPOAgent.load(path)


Counters = dict[str, collections.Counter]


@pytest.fixture
def quick_compiler(monkeypatch: pytest.MonkeyPatch) -> Counters:
    """Dynamo's counters from zero, and a compiler that traces as ever but generates no code."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    return torch._dynamo.utils.counters


def test_what_is_compiled_is_traced_once_and_whole(quick_compiler: Counters) -> None:
    doubled = ppo_module._compiled(lambda x: 2 * x)
    assert quick_compiler["stats"]["unique_graphs"] == 0
    for _ in range(3):
        assert torch.equal(doubled(torch.ones(2)), torch.full((2,), 2.0))
    assert quick_compiler["stats"]["unique_graphs"] == 1


def test_a_graph_break_is_an_error(quick_compiler: Counters) -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x + 1

    with pytest.raises(torch._dynamo.exc.Unsupported):
        ppo_module._compiled(broken)(torch.ones(2))


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
@pytest.mark.parametrize("given", [{"compile": True}, {}])
def test_an_agent_compiles_if_and_only_if_it_is_asked_to(quick_compiler: Counters, given: dict) -> None:
    mind = agent(**given)
    mind.update(*filled(mind))
    assert (quick_compiler["stats"]["unique_graphs"] >= 2) == bool(given)
    asked = PPOAgent(mind.controller, compile=not given)
    assert (asked._losses == asked._loss) == bool(given)


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
@pytest.mark.parametrize("ratio", ["joint", "per_head"])
def test_weights_keep_their_names_when_compiled(quick_compiler: Counters, ratio: str) -> None:
    """Functions are compiled, not modules: one graph each, no breaks, and none anew while schedules move."""
    counters = quick_compiler
    plain = agent(epochs=2, updates=4, ratio=ratio)
    mind = agent(epochs=2, updates=4, ratio=ratio, compile=True)
    keys = set(plain.network.state_dict())
    for seed in range(4):
        for each in (plain, mind):
            each.update(*filled(each, seed=seed, ends=0.2))
        if seed == 0:
            graphs = counters["stats"]["unique_graphs"]
            assert graphs >= 2, "the encoder and the loss"
    assert counters["stats"]["unique_graphs"] == graphs
    assert not counters["graph_break"]
    assert set(mind.network.state_dict()) == keys
    for a, b in zip(weights(plain), weights(mind), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="counts waits for a device")
@pytest.mark.parametrize("ends", [0.0, 0.2])
def test_a_step_on_cuda_waits_once(ends: float) -> None:
    """And once more where memories are emptied inside a sequence."""
    mind = agent(device="cuda")
    batch = prepared(mind, ends=ends, cuts=ends)
    knobs = mind._knobs()
    mind._gradient([batch], knobs)
    torch.cuda.synchronize()
    try:
        with warnings.catch_warnings(action="ignore"):  # it says that it is a prototype
            torch.cuda.set_sync_debug_mode("warn")
        with pytest.warns(UserWarning, match="synchroniz") as seen:
            _ = mind._gradient([batch], knobs), mind.optimizer.step()
        assert len(seen) == 1 + (ends > 0)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_metrics_are_complete_and_each_has_its_reducer() -> None:
    mind = agent(epochs=2, minibatches=2)
    metrics = mind.update(*filled(mind, rows=8))
    for field in dataclasses.fields(PPOUpdateMetrics):
        value = getattr(metrics, field.name)
        numbers = value.values() if isinstance(value, dict) else [value] if isinstance(value, (int, float)) else []
        assert all(math.isfinite(number) for number in numbers), field.name
    assert set(metrics.head_entropy) == set(metrics.head_grad_norm) == {head.name.lower() for head in Head}
    assert metrics.head_learnable["op"] > metrics.head_learnable["blueprint"] > 0
    assert metrics.advantage_std > 0
    with pytest.raises(TypeError, match="differ in kl"):
        check_metrics(PPOUpdateMetrics, {name: row for name, row in METRICS.items() if name != "kl"})


def healthy(heads: tuple[str, ...] = ("op", "slot")) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    numbers = {"ratio_max": 1.1, "ratio_min": 0.9, "value_error": 0.3, "kl": 0.01, "explained_variance": 0.4}
    by_head = {name: dict.fromkeys(heads, value) for name, value in
               (("head_entropy", 0.5), ("head_grad_norm", 0.1), ("head_learnable", 0.4))}
    return numbers, by_head


@pytest.mark.parametrize(("place", "value", "kind", "after"), [
    ("ratio_max", 9.0, "ratio_explosion", 1), ("ratio_min", 0.01, "ratio_collapse", 1), ("kl", math.nan, "non_finite", 1),
    ("value_error", 30.0, "value_error", 3), ("explained_variance", -0.1, "stale_values", 3),
    ("head_entropy", 0.001, "entropy_collapse", 3),
    ("head_grad_norm", 0.0, "starved", 3), ("head_learnable", 0.0, "starved", 3),
])
def test_anomalies_are_found_when_injected_and_go_when_it_is_over(place: str, value: float, kind: str, after: int) -> None:
    detector = AnomalyDetector(Thresholds())

    def shown(bad: float | None) -> set[str]:
        numbers, heads = healthy()
        if bad is not None and place in numbers:
            numbers[place] = bad
        elif bad is not None:
            heads[place]["slot"] = bad
        return {anomaly.kind for anomaly in detector(numbers, heads)}

    assert shown(None) == set()
    for number in range(after):
        assert shown(value) == ({kind} if number + 1 == after else set())
    assert shown(None) == set()


def test_creeping_anomalies_have_hysteresis_and_one_set_of_thresholds() -> None:
    limits = Thresholds(head_entropy=0.2, fire_after=2, clear_factor=2.0)
    mind = PPOAgent(Controller.fresh(SPEC, TINY, SEES), thresholds=limits)
    assert mind.detector.thresholds is limits
    detector, (numbers, heads) = mind.detector, healthy()
    fired = []
    for share in (0.1, 0.3, 0.1, 0.1, 0.3, 0.41):
        heads["head_entropy"]["op"] = share
        fired.append(bool(detector(numbers, heads)))
    assert fired == [False, False, False, True, True, False]


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize(("ratio", "by"), [("ratio_max", -3.0), ("ratio_min", 3.0)])
def test_an_extreme_ratio_is_traced_to_its_step_op_and_head(ratio: str, by: float, accumulate: int) -> None:
    mind = agent(accumulate=accumulate)
    batch = prepared(mind, rows=16, steps=20)
    blueprint = SPEC.heads.index(Head.BLUEPRINT)
    step, row = batch.relevant[..., blueprint].nonzero()[-1].tolist()
    since = step - max([s for s in range(step + 1) if bool(batch.reset[s, row])], default=0)
    assert 0 < since < step, "an episode that began within the rollout"
    batch.log_prob[step, row] += by
    batch.head_log_probs[step, row, blueprint] += by
    entry = mind._gradient([batch], mind._knobs())
    assert entry[ratio] == pytest.approx(math.exp(-by), rel=1e-3)
    assert mind._places([entry])[ratio] == f"step {since}, GERMINATE, blueprint"


def test_a_ratio_that_stays_extreme_elsewhere_is_the_same_anomaly() -> None:
    detector, (numbers, heads) = AnomalyDetector(Thresholds()), healthy()
    numbers["ratio_max"] = 9.0
    for place in ("step 7, GERMINATE, blueprint", "step 2, PRUNE, slot"):
        (anomaly,) = detector(numbers, heads, {"ratio_max": place})
        assert anomaly.where == f"ratio_max at {place}"
    again = AnomalyDetector(Thresholds())
    again.restore(detector.state())
    assert again.open == detector.open
    numbers["ratio_max"] = 1.0
    assert not again(numbers, heads)


def test_an_injected_collapse_is_reported_by_the_agent() -> None:
    mind = agent(explore=(0.0, 0.0))
    mind.network.op_head[-1].bias.detach()[0] = 50.0  # WAIT and nothing else
    metrics = [mind.update(*filled(mind, seed=seed)) for seed in range(4)]
    assert not metrics[0].anomalies
    kinds = {(a.kind, a.where) for a in metrics[-1].anomalies}
    assert ("entropy_collapse", "op") in kinds


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize("options", [
    {"epochs": 0}, {"minibatches": 0}, {"accumulate": 2.5}, {"updates": True}, {"clip": NAN}, {"clip": 0.0},
    {"clip": "wide"}, {"target_kl": NAN}, {"kl_stop": INF}, {"entropy": (0.1, INF)}, {"entropy": (-0.1, 0.0)},
    {"entropy": (0.1,)}, {"entropy_weights": (1.0,)}, {"entropy_weights": (1.0,) * 7 + (NAN,)},
    {"learning_rate": (1e30, 0.1)}, {"learning_rate": (1e-3, -1e-3)}, {"learning_rate": 0.1},
    {"explore": (1.0, 0.0)}, {"gamma": 1.1}, {"gae_lambda": -0.1}, {"value_clip": NAN},
    {"value_weight": -1.0}, {"scale_memory": 1.0}, {"max_grad_norm": NAN}, {"critic_decay": -1.0},
    {"adam_eps": 0.0}, {"replay_tolerance": NAN},
])
def test_impossible_configs_are_refused_by_field(options: dict) -> None:
    (name,) = options
    with pytest.raises(EsperError, match=rf"^{name} is .*; expected \d (whole )?numbers? from \S+ to \S+$"):
        PPOConfig(**options)
    with pytest.raises(EsperError, match="no ratio 'none'"):
        PPOConfig(ratio="none")


def test_every_number_of_a_config_has_its_range() -> None:
    numbers = {f.name for f in dataclasses.fields(PPOConfig) if not isinstance(f.default, (str, bool))}
    assert set(ppo_module.RANGES) == numbers


def state_of(mind: PPOAgent) -> list[torch.Tensor]:
    """Everything that a refused update must leave alone."""
    moments = [t for part in mind.optimizer.state.values() for t in part.values()]
    stats = mind.controller.normaliser.stats
    return [t.clone() for t in (*mind.network.state_dict().values(), *moments, *stats)]


@pytest.mark.parametrize(("name", "value"), [
    ("reward", NAN), ("reward", INF), ("reward", 1e20), ("reward", -2e6), ("value", NAN), ("seen.row", INF),
    ("seen.slot", NAN), ("seen.candidate", NAN), ("last", NAN),
])
def test_numbers_that_are_none_are_refused_before_anything_changes(name: str, value: float) -> None:
    mind = agent()
    mind.update(*filled(mind))
    buffer, last = filled(mind, seed=1, ends=0.0, cuts=0.0)
    if name == "last":
        last[2] = value
    else:
        buffer[name][3, 2] = value
    before, done = state_of(mind), mind.updates
    said = "'target' is nan at step 0" if name == "last" else rf"'{name}' is \S+ at step 3"
    with pytest.raises(EsperError, match=rf"^{said} of row 2; expected finite numbers.*; nothing"):
        mind.update(buffer, last)
    assert equal(before, state_of(mind))
    assert mind.updates == done
    largest = filled(mind, seed=1)
    largest[0]["reward"][3, 2] = ppo_module.LARGEST
    assert mind.update(*largest).steps == 1, "what is merely large is learned from"


def test_a_checkpoint_is_not_replaced_by_one_that_nothing_can_go_on_from(tmp_path: Path) -> None:
    path = tmp_path / "agent.safetensors"
    mind = agent()
    mind.update(*filled(mind))
    mind.save(path)
    good = path.read_bytes()
    spoils = {"heads.style.weight": mind.network.heads["style"].weight,
              "value_scale": mind.network.value_scale,
              "optimizer.0.exp_avg": mind.optimizer.state_dict()["state"][0]["exp_avg"],
              "normaliser.row": mind.controller.normaliser.stats[0]}
    for name, tensor in spoils.items():
        kept = tensor.detach().clone()
        for value in (NAN, INF, 2e29):
            if value == 2e29 and name in ("value_scale", "normaliser.row"):
                continue  # units of reward and sums over many steps may be large
            tensor.detach().flatten()[0] = value
            with pytest.raises(EsperError, match=rf"^'{name}' has grown to (nan|inf|2e\+29),.* not written"):
                mind.save(path)
            tensor.detach().copy_(kept)
    assert path.read_bytes() == good
    mind.save(path)


def test_devices_may_be_named_either_way() -> None:
    for device in ("cpu", torch.device("cpu")):
        mind = PPOAgent(Controller.fresh(SPEC, TINY, SEES, device))
        assert isinstance(mind.device, torch.device)
        assert isinstance(mind.buffer(2, 2).device, torch.device)


def test_no_gradient_leaks_from_collecting() -> None:
    mind = agent()
    buffer, _ = filled(mind, rows=2, steps=300)
    assert not any(tensor.requires_grad for tensor in buffer._all.values())
    assert not buffer._hidden.requires_grad


def test_imports_stand_at_the_top_and_files_stay_small() -> None:
    rooms = [path for room in ("leyline", "kasmina", "tolaria", "tamiyo", "simic") for path in (SOURCES / room).glob("*.py")]
    assert len(rooms) > 40
    for path in rooms:
        text = path.read_text()
        assert len(text.splitlines()) <= 500, path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                arguments = node.args.args + node.args.kwonlyargs
                assert len(arguments) <= 16, (path, node.name)
                nested = [n for n in ast.walk(node) if isinstance(n, (ast.Import, ast.ImportFrom))]
                lazy = {alias.name.split(".")[0] for n in nested for alias in n.names} | \
                       {(n.module or "").split(".")[0] for n in nested if isinstance(n, ast.ImportFrom)}
                assert "esper" not in lazy, (path, node.name)


def moved(batch: object, by: float) -> object:
    """As if the policy had been `by` likelier to act so when it acted: ratios become exp(-by)."""
    return batch._replace(log_prob=batch.log_prob + by)  # type: ignore[attr-defined]


@pytest.mark.parametrize(("shift", "sign", "alive"), [(-1, 1, False), (-1, -1, True), (1, 1, True), (1, -1, False)])
def test_the_clip_stops_what_went_far_enough(shift: float, sign: float, alive: bool) -> None:
    """No gradient where the ratio is outside the range on the side that the advantage asks for; all of it on the other."""
    mind = agent(entropy=(0.0, 0.0), value_weight=0.0)
    batch = prepared(mind)
    advantage = torch.full_like(batch.advantage, sign)
    numbers = mind._gradient([moved(batch._replace(advantage=advantage), shift)], mind._knobs())
    assert any(bool((g != 0).any()) for g in gradients(mind).values()) == alive
    assert numbers["clip_fraction"] == pytest.approx(1.0)


@pytest.mark.parametrize(("shift", "sign", "alive"),
                         [(-1, 1, False), (-1, -1, True), (1, 1, True), (1, -1, False)])
def test_each_head_is_clipped_by_its_own_ratio(shift: float, sign: float, alive: bool) -> None:
    mind = agent(ratio="per_head", entropy=(0.0, 0.0), value_weight=0.0, max_grad_norm=1e9)
    batch = prepared(mind, rows=16, steps=20)
    batch.head_log_probs[..., SPEC.heads.index(Head.BLUEPRINT)] += shift
    mind._gradient([batch._replace(advantage=torch.full_like(batch.advantage, sign))], mind._knobs())
    found = gradients(mind)
    assert bool((found["heads.blueprint.weight"] != 0).any()) == alive
    assert bool((found["heads.tempo.weight"] != 0).any()), "another head's ratio is its own"


@pytest.mark.parametrize("ratio", ["joint", "per_head"])
def test_steps_without_a_choice_do_not_thin_the_policy_loss(ratio: str) -> None:
    """The loss, the KL and the clip fraction are means over choices; nothing else is in the denominator."""
    mind = agent(ratio=ratio, clip=0.05)
    batch = prepared(mind)
    free = torch.arange(batch.valid.shape[0])[:, None, None] % 3 == 0
    batch = batch._replace(relevant=batch.relevant & free, advantage=torch.ones_like(batch.advantage))
    chosen = batch.chosen
    assert 0.1 < float(chosen.float().mean()) < 0.4
    numbers = mind._gradient([batch], mind._knobs())
    terms = batch.relevant.sum(-1) if ratio == "per_head" else torch.ones_like(batch.log_prob)
    assert numbers["policy_loss"] == pytest.approx(-float(terms[chosen].float().mean()), rel=1e-4)
    far = mind._gradient([moved(batch, -0.1)], mind._knobs())
    assert far["clip_fraction"] == pytest.approx(1.0)
    assert far["kl"] == pytest.approx(math.exp(0.1) - 1 - 0.1, rel=1e-2)


@pytest.mark.parametrize("ratio", ["joint", "per_head"])
def test_rows_that_are_not_valid_weigh_nothing(ratio: str) -> None:
    """Half of the rows marked as padding, with real numbers in them: as if the batch were the other half."""
    mind = agent(ratio=ratio, max_grad_norm=1e9)
    batch = prepared(mind, rows=8, steps=10)
    noise = 0.1 * torch.randn(batch.log_prob.shape, generator=torch.Generator().manual_seed(0))
    batch = batch._replace(log_prob=batch.log_prob + noise, target=batch.target + 1)
    half, _ = parts_of(batch, 2)
    expected = mind._gradient([half], mind._knobs())
    alone = gradients(mind)
    valid = batch.valid.clone()
    valid[:, 4:] = False
    found = mind._gradient([batch._replace(valid=valid)], mind._knobs())
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)
    for name, gradient in gradients(mind).items():
        torch.testing.assert_close(gradient, alone[name], atol=1e-6, rtol=1e-4)


def test_statistics_of_an_update_leave_out_rows_that_wait() -> None:
    mind = agent()
    buffer, last = filled(mind, rows=8, steps=10)
    buffer.compute_advantages_and_returns(1.0, 0.95, last)
    buffer["valid"][3:, 5:] = False
    valid, target, value = buffer["valid"], buffer["target"], buffer["value"]
    target[~valid] = 100.0
    spread, (explained, *learnable) = mind._summarise(buffer)
    torch.testing.assert_close(spread, target[valid].std(correction=0))
    unexplained = (target - value)[valid].var(correction=0) / target[valid].var(correction=0)
    torch.testing.assert_close(explained, 1 - unexplained)
    torch.testing.assert_close(torch.stack(learnable), buffer["relevant"][valid].float().mean(0))
    _, entropies = mind._replay(buffer)
    (batch,) = buffer.get_batched_sequences()
    again = mind.network.evaluate_actions(*batch[:3], batch.hidden, batch.reset, mind.explore)
    share, asked = (part[valid] for part in again.distribution.head_entropies())
    torch.testing.assert_close(entropies, (share * asked).sum(0) / asked.sum(0))


@pytest.mark.parametrize(("done", "weight"), [(0, 0.4), (5, 0.25), (10, 0.1), (50, 0.1)])
def test_the_weight_of_the_bonus_is_annealed(done: int, weight: float) -> None:
    mind = agent(updates=10, entropy=(0.4, 0.1), value_weight=0.0, explore=(0.0, 0.0), max_grad_norm=1e9)
    batch = prepared(mind)
    batch = batch._replace(advantage=torch.zeros_like(batch.advantage))
    mind.updates = done
    mind._gradient([batch], mind._knobs())
    found = gradients(mind)["heads.blueprint.weight"]
    mind.config = dataclasses.replace(mind.config, entropy=(1.0, 1.0))
    mind._gradient([batch], mind._knobs())
    torch.testing.assert_close(found, weight * gradients(mind)["heads.blueprint.weight"])


def test_the_value_is_clipped_towards_its_old_self() -> None:
    """The larger of two errors counts: near the target, but far from the old value, the clipped one does."""
    mind = agent(value_clip=0.1, entropy=(0.0, 0.0), value_weight=1.0)
    batch = prepared(mind)
    mind.network.rescale_value(torch.tensor(1.0))
    again = mind.network.evaluate_actions(batch.seen, batch.masks, batch.actions, batch.hidden, batch.reset, mind.explore)
    jumped = batch._replace(value=again.value.detach() - 1.0, target=again.value.detach() + 0.1)
    numbers = mind._gradient([jumped], mind._knobs())
    assert numbers["value_loss"] == pytest.approx(0.5 * 1.0**2, rel=1e-3), "0.5 x (old + 0.1 - target)^2, not 0.5 x 0.1^2"
    assert not bool((gradients(mind)["value_head.2.weight"] != 0).any()), "and it has no gradient"


def test_the_gradient_is_clipped_and_the_learning_rate_is_used() -> None:
    mind = agent(max_grad_norm=1e-3, learning_rate=(3e-4, 3e-4))
    numbers = mind._gradient([prepared(mind)], mind._knobs())
    total = torch.stack([g.norm() for g in gradients(mind).values()]).norm()
    assert numbers["grad_norm"] > 1e-3
    assert float(total) == pytest.approx(1e-3, rel=1e-2)
    mind.update(*filled(mind))
    assert {group["lr"] for group in mind.optimizer.param_groups} == {3e-4}
    still = agent(learning_rate=(0.0, 0.0), critic_decay=0.0)
    before = weights(still)
    still.update(*filled(still))
    unscaled = [name.startswith("value_head.2") for name, _ in still.network.named_parameters()]
    assert all(scaled or torch.equal(a, b) for scaled, a, b in zip(unscaled, before, weights(still), strict=True))


def test_the_bonus_raises_entropy() -> None:
    mind = agent(entropy=(1.0, 1.0), value_weight=0.0, explore=(0.0, 0.0), epochs=8, learning_rate=(1e-2, 1e-2))
    mind.network.op_head[-1].bias.detach()[0] = 2.0
    seen = []
    for seed in range(3):
        buffer, last = filled(mind, seed=seed)
        buffer["reward"].zero_()
        seen.append(mind.update(buffer, last).entropy)
    assert seen[-1] > seen[0] + 0.05


def test_an_update_normalises_its_advantages() -> None:
    """A tenfold reward is the same lesson for the actor."""
    found = []
    for scale in (1.0, 10.0):
        mind = agent(value_weight=0.0, max_grad_norm=1e9, entropy=(0.0, 0.0), gae_lambda=1.0, gamma=1.0)
        buffer, last = filled(mind, ends=1.0, cuts=0.0)
        buffer["reward"].mul_(scale)
        buffer["value"].zero_()
        mind.config = dataclasses.replace(mind.config, replay_tolerance=10.0)
        mind.update(buffer, last)
        found.append(weights(mind))
    unscaled = [not name.startswith("value_head") for name, _ in mind.network.named_parameters()]
    for same, a, b in zip(unscaled, *found, strict=True):
        if same:
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def test_the_reported_kl_is_that_of_whole_actions() -> None:
    """Against the mean over many draws of the exact log-ratio: nothing is divided by the number of heads."""
    mind = agent(entropy=(0.0, 0.0), explore=(0.0, 0.0), learning_rate=(3e-2, 3e-2), epochs=1)
    mind.network.op_head[-1].weight.detach().mul_(30)
    batch = prepared(mind, rows=64, steps=40)
    other = agent(seed=1, explore=(0.0, 0.0))
    again = other.network.evaluate_actions(batch.seen, batch.masks, batch.actions, batch.hidden, batch.reset)
    ratio = (again.scored.joint - batch.log_prob)[batch.chosen].detach()
    expected = (ratio.exp() - 1 - ratio).mean()
    told = PPOAgent(other.controller, dataclasses.replace(mind.config))._gradient([batch], mind._knobs())
    assert told["kl"] == pytest.approx(float(expected), rel=1e-4)
    assert told["kl"] > 0.01


def test_collecting_bootstraps_from_what_a_cut_row_would_have_seen() -> None:
    mind = agent(network=TINY)
    world = Chance(6, ends=0.0, cuts=0.5)
    seen: list = []
    step = world.step

    def watched(actions: torch.Tensor) -> object:
        outcome = step(actions)
        seen.append(outcome)
        return outcome

    world.step = watched  # type: ignore[method-assign, assignment]
    buffer = mind.buffer(1, 6)
    collector = WorldCollector(mind, world, 6)
    last = collector.fill(buffer)
    expected = mind.controller.value(seen[0].final, collector.hidden)
    torch.testing.assert_close(buffer["bootstrap"][0], expected)
    assert bool(seen[0].truncated.any())
    ahead = world.look()
    assert last.shape == ahead.reset.shape
    assert bool((last != 0).all()), "rows that go on are worth something"
    world.step = lambda actions: step(actions)._replace(final=None, truncated=torch.ones(6, dtype=torch.bool))  # type: ignore
    buffer.reset()
    with pytest.raises(EsperError, match="a row was cut, and nothing says what it would have seen next"):
        collector.fill(buffer)


class Waiting(Chance):
    """A world in which rows end for good: from then on they wait, and show what nobody may count."""

    over = torch.tensor([False, True, False, True])

    def look(self) -> PolicyInput:
        shown = super().look()
        if bool(self.fresh.all()):
            return shown
        for part in shown.seen:
            part[self.over] = 100.0
        return shown._replace(valid=~self.over)

    def step(self, actions: torch.Tensor) -> Outcome:
        outcome = super().step(actions)
        return outcome._replace(done=self.over.clone(), truncated=torch.zeros(4, dtype=torch.bool))


def test_rows_that_are_over_are_neither_counted_nor_learned_from() -> None:
    mind = agent()
    world = Waiting(4, ends=0.0, cuts=0.0)
    looked: list[PolicyInput] = []
    look = world.look
    world.look = lambda: (looked.append(look()), looked[-1])[1]  # type: ignore[method-assign, func-returns-value]
    buffer = mind.buffer(5, 4)
    WorldCollector(mind, world, 4).fill(buffer)
    assert buffer["valid"].tolist() == [[True] * 4] + 4 * [[True, False, True, False]]
    expected = Normaliser(SEES)
    for number, shown in enumerate(looked[:5]):
        expected.update(Observation(*(part if number == 0 else part[~world.over] for part in shown.seen)))
    for found, stat in zip(mind.controller.normaliser.stats, expected.stats, strict=True):
        assert torch.equal(found, stat)
    assert float(mind.controller.normaliser.stats[0][0].max()) == 4 + 4 * 2


def test_acting_and_learning_use_no_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is set outside, and it is as it was afterwards."""
    places = (torch.backends.cudnn.rnn, torch.backends.cuda.matmul)
    inside: list = []
    run = torch.nn.LSTM.forward
    monkeypatch.setattr(torch.nn.LSTM, "forward",
                        lambda *args: (inside.append([place.fp32_precision for place in places]), run(*args))[1])
    before = [place.fp32_precision for place in places]
    try:
        for place in places:
            place.fp32_precision = "tf32"
        mind = agent()
        mind.update(*filled(mind))
        assert [place.fp32_precision for place in places] == ["tf32", "tf32"]
    finally:
        for place, precision in zip(places, before, strict=True):
            place.fp32_precision = precision
    assert len(inside) > 12
    assert all(seen == ["ieee", "ieee"] for seen in inside)
