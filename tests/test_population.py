"""Rows as data: keys, resets, snapshots, files, impairments, learning rates."""

import gc
import os
import weakref
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from esper.kasmina import HOSTS, Host, OptimConfig, Population
from esper.kasmina.packing import Prefix
from esper.leyline import ActionSpec, EsperError, GateConfig, Head, LifecycleOp, StateFormatError
from esper.leyline.keys import mix, uniform
from esper.leyline.storage import read_state, write_state
from tests.reference import batch, known_contributions, samples, small_hosts, wait
from tests.workshop import healthy, random_actions, waves

ALL = torch.arange(6)


def live(population: Population, epochs: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        population.begin_epoch(random_actions(population, generator))
        for _ in range(2):
            population.train_step(*batch(population, 4, generator))
        population.end_epoch(known_contributions(population))


def small(kind: str = "conv1d", rows: int = 6, **options: object) -> Population:
    return Population(Host(kind, **small_hosts()[kind]), rows, **options)


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        assert torch.equal(tensor, b[name]), name


def test_rows_at_rest_change_no_bit_and_the_others_train_as_if_alone() -> None:
    whole, few = small(dtype=torch.float64), small(rows=4, dtype=torch.float64)
    others = torch.tensor([0, 2, 3, 5])
    live(whole, 3, seed=1)
    few.restore(torch.arange(4), whole.snapshot(others))
    resting = torch.ones(6, dtype=torch.bool)
    resting[others] = False
    before = whole.snapshot(ALL[resting])
    wait = torch.tensor([whole.spec.action(LifecycleOp.WAIT)])
    x, y = batch(few, 4, torch.Generator().manual_seed(2))
    whole.begin_epoch(wait.repeat(6, 1), resting)
    few.begin_epoch(wait.repeat(4, 1))
    torch.testing.assert_close(whole.train_step(x, y), few.train_step(x, y), rtol=0, atol=1e-12)
    torch.testing.assert_close(whole.forward(x), few.forward(x), rtol=0, atol=1e-12)
    for name, tensor in whole.snapshot(ALL[resting]).items():
        assert not name.startswith("bank.") or torch.equal(tensor, before[name]), name
    for name, tensor in few.snapshot(torch.arange(4)).items():
        if name.startswith("bank."):
            torch.testing.assert_close(whole.snapshot(others)[name], tensor, rtol=0, atol=1e-12, msg=name)
    whole.end_epoch()
    assert whole.forward(batch(whole, 4, torch.Generator().manual_seed(2))[0]).shape[1] == 6


def test_an_epoch_that_is_refused_leaves_nobody_at_rest() -> None:
    population = small()
    wait = torch.tensor([population.spec.action(LifecycleOp.WAIT)]).repeat(6, 1)
    kept = wait.clone()
    kept[0, Head.OP] = LifecycleOp.FOSSILIZE
    resting = torch.arange(6) == 3
    with pytest.raises(EsperError):
        population.begin_epoch(kept, resting)
    for wrong in (resting[:5], resting.long(), torch.ones(6, dtype=torch.bool)):
        with pytest.raises(EsperError, match="resting needs 6 truth values"):
            population.begin_epoch(wait, wrong)
    assert population.count == 6
    population.begin_epoch(wait, resting)
    assert population.count == 5


def test_keys_are_uniform_and_order_matters() -> None:
    keys = mix(torch.arange(200), 5)
    draw = uniform(keys, 500).double()
    assert abs(float(draw.mean()) - 0.5) < 0.01
    assert abs(float(draw.var()) - 1 / 12) < 0.002
    assert len(torch.unique(draw)) > 99_000
    assert not torch.equal(mix(torch.arange(5), 1, 2), mix(torch.arange(5), 2, 1))
    correlation = torch.corrcoef(draw[:50])
    assert float((correlation - torch.eye(50)).abs().max()) < 0.25


def test_weights_depend_on_keys_not_positions(device: str) -> None:
    a, b = small(device=device), small(device=device, seed=9)
    b.reset(ALL, a.keys.flip(0))
    assert torch.equal(a.banks[0].weights, b.banks[0].weights.flip(0))
    assert torch.equal(a.banks[0].weights.cpu(), small().banks[0].weights)  # and not on the device
    assert len(torch.unique(a.banks[0].weights[:, 0])) == 6


@pytest.mark.parametrize("kind", HOSTS)
def test_initial_scale_is_pytorchs(kind: str) -> None:
    population = Population(Host(kind), 50 if kind == "resnet" else 200)  # 270,000 numbers each
    mine, _ = population.host.layout.split(population.banks[0].weights)
    theirs = [dict(population.host.module().named_parameters()) for _ in range(50)]
    for name, stack in mine.items():
        reference = torch.stack([p[name] for p in theirs]).detach()
        torch.testing.assert_close(stack.std(), reference.std(), rtol=0.1, atol=1e-3)
        torch.testing.assert_close(stack.mean(), reference.mean(), rtol=0.1, atol=0.03)


def test_newborn_weights_are_their_prototypes(device: str) -> None:
    population = small(device=device)
    blueprint = 1 + torch.arange(18).view(6, 3) % 8
    population.install(ALL, blueprint, torch.zeros(6, 3), torch.ones(6, 3))
    for row, slot in [(0, 0), (1, 2), (5, 1)]:
        prototype = population.prototypes[slot][int(blueprint[row, slot])]
        expected = prototype.fresh(mix(population.keys[[row]], 1 + slot, 1))[0]
        got = population.banks[1 + slot].weights[row].cpu()
        assert torch.equal(got[: len(expected)], expected)
        assert bool((got[len(expected) :] == 0).all())


def test_the_next_seed_in_a_slot_is_another_one() -> None:
    population = small("mlp")
    germinate = torch.tensor([population.spec.action(LifecycleOp.GERMINATE, blueprint="glu")] * 6)
    wait = torch.tensor([population.spec.action(LifecycleOp.WAIT)] * 6)
    population.begin_epoch(germinate)
    first = population.banks[1].weights.clone()
    population.end_epoch()
    for actions in [torch.tensor([population.spec.action(LifecycleOp.PRUNE)] * 6), wait, wait, germinate]:
        population.begin_epoch(actions)
        population.end_epoch()
    assert population.life.germinations[:, 0].tolist() == [2] * 6
    assert bool((population.banks[1].weights != first).any(1).all())


def test_reset_touches_its_rows_alone() -> None:
    population = small()
    live(population, 6, 1)
    others, reset = torch.tensor([0, 2, 3, 5]), torch.tensor([1, 4])
    before = population.snapshot(others)
    population.reset(reset, torch.tensor([77, 78]))
    assert_same(population.snapshot(others), before)
    fresh = small(rows=2)
    fresh.reset(torch.arange(2), torch.tensor([77, 78]))
    assert_same(population.snapshot(reset), fresh.snapshot(torch.arange(2)))


@pytest.mark.parametrize("kind", HOSTS)
def test_restore_goes_back_bit_exactly(kind: str, device: str) -> None:
    population = small(kind, device=device)
    live(population, 5, 1)
    rows = torch.tensor([1, 3])
    saved = population.snapshot(rows)
    live(population, 3, 2)
    others = torch.tensor([0, 2, 4, 5])
    before = population.snapshot(others)
    population.restore(rows, saved)
    assert_same(population.snapshot(rows), saved)
    assert_same(population.snapshot(others), before)


@pytest.mark.parametrize("kind", HOSTS)
def test_a_saved_population_goes_on_bit_exactly(kind: str, device: str, tmp_path: Path) -> None:
    spec = ActionSpec.full(3, [n for n in small(kind).spec.blueprints if n != "norm"])
    population = small(kind, device=device, spec=spec, gates=GateConfig(embargo=2), incubation="straight_through",
                       optim=OptimConfig("sgd", lr=0.03, weight_decay=0.1), compute_dtype=torch.float64)
    impaired = healthy(6, 3)
    impaired.frozen[2, 1] = True
    population.reset(ALL, ALL + 40, impaired)
    population.set_lr(0.01 * torch.rand(6, 4))
    population.decay[:] = 0.1 * torch.rand(6, 4)
    live(population, 7, 1)
    population.save(tmp_path / "p.safetensors")
    again = Population.load(tmp_path / "p.safetensors", device)
    assert again.life.gates == GateConfig(embargo=2)
    assert again.optim == population.optim
    assert again.spec == population.spec
    assert (again.life.epoch, again.life.open, again.compute_dtype) == (7, False, torch.float64)
    assert {"lr", "decay", "trainable", "keys", "life.broken", "bank.3.steps"} <= population.snapshot(ALL).keys()
    for one in (population, again):
        live(one, 3, 2)
    assert_same(again.snapshot(ALL), population.snapshot(ALL))
    assert [p.name for p in tmp_path.iterdir()] == ["p.safetensors"]


def test_a_spec_survives_the_file(tmp_path: Path) -> None:
    names = small("mlp").spec.blueprints
    compact = ActionSpec.compact(3, names)
    spec = ActionSpec(3, names, compact.heads, compact.ops, auto_advance=True, defaults={Head.ALPHA_TARGET: 0})
    small("mlp", spec=spec).save(tmp_path / "p.safetensors")
    again = Population.load(tmp_path / "p.safetensors").spec
    assert again == spec
    assert again.defaults[Head.ALPHA_TARGET] == 0


def test_a_save_that_fails_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "p.safetensors"
    small().save(path)
    before = path.read_bytes()

    real, calls = os.write, []

    def broken(file: int, data: bytes) -> int:
        calls.append(file)
        if len(calls) > 1:
            raise OSError(28, "disk full")
        return real(file, data[: len(data) // 2])

    monkeypatch.setattr("esper.leyline.storage.os.write", broken)
    with pytest.raises(EsperError, match="disk full"):
        small(seed=3).save(path)
    assert path.read_bytes() == before
    assert len(calls) == 2, "half of it was written"
    assert list(tmp_path.iterdir()) == [path], "half a file is taken away"


def test_reset_lifts_old_impairments() -> None:
    population = small()
    impaired = healthy(6, 3)
    impaired.frozen[:] = True
    population.reset(ALL, ALL, impaired)
    population.reset(ALL[:3], ALL[:3])
    start = population.snapshot(ALL)["bank.0.weights"]
    live(population, 1, 1)
    weights, _ = population.host.layout.split(population.snapshot(ALL)["bank.0.weights"] - start)
    moved = weights["stages.1.0.weight"].flatten(1).abs().sum(1) > 0
    assert moved.tolist() == [True] * 3 + [False] * 3


def test_foreign_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.safetensors"
    with pytest.raises(StateFormatError, match="cannot read"):
        Population.load(path)
    path.write_bytes(b"not a file of tensors")
    with pytest.raises(StateFormatError, match="cannot read"):
        Population.load(path)
    save_file({"a": torch.zeros(1)}, path)
    with pytest.raises(StateFormatError, match="no population"):
        Population.load(path)
    small().save(path)
    header, tensors = read_state(path, "population")
    body = {name: value for name, value in header.items() if name not in ("kind", "schema")}
    with pytest.raises(StateFormatError, match="is a population of schema 2; expected a mind of schema 2"):
        read_state(path, "mind")
    write_state(path, "population", body | {"schema": 99}, tensors)
    with pytest.raises(StateFormatError, match="schema 99; expected a population of schema 2"):
        Population.load(path)
    write_state(path, "population", body, {k: v for k, v in tensors.items() if k != "decay"})
    with pytest.raises(StateFormatError, match="does not fit"):
        Population.load(path)
    write_state(path, "population", body, {k: v for k, v in tensors.items() if k != "keys"})
    with pytest.raises(StateFormatError, match="does not describe a population"):
        Population.load(path)
    save_file({k: v + 1 for k, v in tensors.items()}, path, _metadata(path))
    with pytest.raises(StateFormatError, match="does not match its checksum"):
        Population.load(path)
    save_file(tensors, path, {"esper.population": "{}"})
    with pytest.raises(StateFormatError, match=r"written by Esper 0.1 \(schema 1\)"):
        Population.load(path)


def _metadata(path: Path) -> dict[str, str]:
    with safe_open(path, "pt") as file:
        return dict(file.metadata())


@pytest.mark.parametrize("optim", ["adamw", "sgd"])
def test_impairments_hold_through_training(optim: str) -> None:
    population = small("cnn", optim=OptimConfig(optim, lr=0.05, weight_decay=0.1))
    impaired = healthy(6, 3)
    impaired.one_tap[1, 0] = True
    impaired.width[2, 1] = 0.5
    impaired.frozen[3, 2] = True
    population.reset(ALL, ALL, impaired)
    start, _ = population.host.layout.split(population.banks[0].weights.clone())
    live(population, 4, 1)
    end, _ = population.host.layout.split(population.banks[0].weights)
    kernel = end["stages.0.0.weight"][1]
    assert float(kernel[..., 1, 1].abs().min()) > 0
    kernel[..., 1, 1] = 0
    assert bool((kernel == 0).all())
    x, _ = batch(population, 3, torch.Generator().manual_seed(0))
    middle = population.extract(2).stages[:2]
    h = middle[1](middle[0](x[:, 2]))
    assert bool((h[:, 4:] == 0).all())
    assert bool((h[:, :4] != 0).any())
    for name, tensor in end.items():
        moved = not torch.equal(tensor[3], start[name][3])
        assert moved is not name.startswith("stages.2."), name
        assert not torch.equal(tensor[0], start[name][0])


def test_impossible_impairments_are_refused() -> None:
    impaired = healthy(6, 3)
    impaired.one_tap[0, 0] = True
    with pytest.raises(EsperError, match="no taps"):
        small("mlp").reset(ALL, ALL, impaired)
    impaired = healthy(6, 3)
    impaired.width[0, 0] = 0.0
    with pytest.raises(EsperError, match="share in"):
        small("mlp").reset(ALL, ALL, impaired)


def test_learning_rates_are_per_row_and_place() -> None:
    population = small()
    population.install(ALL, torch.full((6, 3), 3), torch.zeros(6, 3), torch.ones(6, 3))
    before = [bank.weights.clone() for bank in population.banks]
    rates = torch.full((6, 4), 0.01)
    rates[2] = 0
    rates[4, 2] = 0
    x, y = batch(population, 4, torch.Generator().manual_seed(0))
    wait(population).set_lr(rates * 0)
    population.train_step(x, y)
    population.set_lr(rates)  # takes effect in the middle of an epoch
    population.train_step(x, y)
    population.snapshot(ALL)
    changed = torch.stack([(bank.weights != old).any(1) for bank, old in zip(population.banks, before, strict=True)], 1)
    assert torch.equal(changed, rates > 0)


def test_decay_is_per_row() -> None:
    population, plain = small(), small()
    decay = torch.zeros(6, 4)
    decay[1] = 0.5
    population.decay[:] = decay
    for one in (population, plain):
        wait(one).train_step(*batch(one, 4, torch.Generator().manual_seed(0)))
    differs = (population.snapshot(ALL)["bank.0.weights"] != plain.snapshot(ALL)["bank.0.weights"]).any(1)
    assert differs.tolist() == [False, True, False, False, False, False]


def test_one_channel_hosts_differ_by_key_too() -> None:
    weights = Population(Host("mlp", (1,), (1,)), 5).banks[0].weights
    assert len(torch.unique(weights[:, 0])) == 5


def test_the_global_generator_is_left_alone() -> None:
    before = torch.random.get_rng_state()
    population = small("cnn")
    live(population, 4, 1)
    population.extract(0)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_errors_write_nothing() -> None:
    population = small("mlp")
    live(population, 5, 1)
    before = population.snapshot(ALL)
    impaired = healthy(6, 3)
    impaired.one_tap[0, 0] = True
    with pytest.raises(EsperError, match="no taps"):
        population.reset(ALL, ALL, impaired)
    with pytest.raises(StateFormatError, match="nothing was restored"):
        population.restore(ALL, {name: t + 1 for name, t in before.items() if name != "life.alpha"})
    assert_same(population.snapshot(ALL), before)


def test_a_step_that_fails_is_no_evidence_of_health() -> None:
    population = small("mlp")
    population.begin_epoch(torch.tensor([population.spec.action(LifecycleOp.GERMINATE, blueprint="glu")] * 6))
    x, y = batch(population, 4, torch.Generator().manual_seed(0))
    with pytest.raises(EsperError, match="labels go from 100 to"):
        population.train_step(x, y + 100)
    population.end_epoch()
    assert not bool(population.life.healthy.any())


def test_health_is_evidence_of_one_epoch_only() -> None:
    population = small("mlp")
    population.begin_epoch(torch.tensor([population.spec.action(LifecycleOp.GERMINATE, blueprint="glu")] * 6))
    population.train_step(*batch(population, 4, torch.Generator().manual_seed(0)))
    population.end_epoch()
    assert bool(population.life.healthy[:, 0].all())
    population.begin_epoch(torch.tensor([population.spec.action(LifecycleOp.WAIT)] * 6))
    population.end_epoch()  # nothing was trained
    assert not bool(population.life.healthy.any())


def test_a_seed_that_broke_once_is_not_healthy_this_epoch() -> None:
    population = small("mlp")
    population.begin_epoch(torch.tensor([population.spec.action(LifecycleOp.GERMINATE, blueprint="glu")] * 6))
    x, y = batch(population, 4, torch.Generator().manual_seed(0))
    saved = population.snapshot(torch.tensor([2]))
    population.banks[1].weights[2] = float("nan")
    population.train_step(x, y)
    population.banks[1].weights[2] = saved["bank.1.weights"]
    population._flush()
    population.banks[1].weights[2] = saved["bank.1.weights"]  # repaired within the epoch
    population.train_step(x, y)
    population.end_epoch()
    assert population.life.healthy[:, 0].tolist() == [True, True, False, True, True, True]


def probed(kind: str, shared: bool) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Two hosts, each in six rows with another seed: logits of both, and of all rows after a few shadow steps."""
    rows, key, generator = 12, torch.arange(2).repeat_interleave(6), torch.Generator().manual_seed(0)
    population = Population(Host(kind, **small_hosts()[kind]), rows, dtype=torch.float64, optim=OptimConfig("sgd"))
    population.reset(torch.arange(rows), mix(key, 5))
    spec = population.spec
    actions = [spec.action(LifecycleOp.GERMINATE, slot=row % 3, blueprint=spec.blueprints[1 + row // 3 % 2 * 2])
               for row in range(rows)]
    population.set_lr(torch.tensor([[0.0, 0.3, 0.3, 0.3]]).double().repeat(rows, 1))
    population.begin_epoch(torch.tensor(actions))
    prefix, columns = (Prefix(torch.tensor([0, 6]), key), torch.arange(2)) if shared else (None, key)
    for _ in range(6 if population.host.tokens else 3):  # logits of small embeddings are small
        x, y = samples(population.host, 20, 2, generator=generator), torch.arange(40).view(20, 2) % 10
        y = x.flip(2) if population.host.tokens else y
        population.shadow_step(x[:, columns], y[:, columns], prefix)
    logits = population.probe(torch.arange(rows), population.life.target, prefix)(x[:, columns])
    return logits[:, :2] if shared else logits[:, [0, 6]], logits[:, -rows:], population.tensors()


@pytest.mark.parametrize("kind", HOSTS)
def test_rows_that_share_a_host_may_share_its_prefix(kind: str) -> None:
    """Steps and probes are the same, only cheaper."""
    (live, extra, tensors), (live_too, extra_too, tensors_too) = (probed(kind, shared) for shared in (False, True))
    torch.testing.assert_close(live, live_too, atol=1e-10, rtol=0)
    torch.testing.assert_close(extra, extra_too, atol=1e-10, rtol=0)
    for name, tensor in tensors.items():
        torch.testing.assert_close(tensors_too[name], tensor, atol=1e-10, rtol=0, msg=name)
    assert float((extra[:, :6] - live[:, :1]).abs().amax((0, *range(2, live.dim()))).min()) > 1e-3, "every seed did learn"


def test_seeds_help_a_host_that_cannot_learn_alone() -> None:
    """The point of it all: hosts with one-tap kernels learn order in sequences only through a grown seed."""
    population = Population(Host("conv1d"), 8, optim=OptimConfig(lr=5e-3))
    impaired = healthy(8, 3)
    impaired.one_tap[:] = True
    population.reset(torch.arange(8), torch.arange(4).repeat(2), impaired)  # the same four hosts twice
    heavy = population.spec.blueprints.index("conv_heavy")
    blueprint = torch.full((8, 3), -1)
    blueprint[4:, 0] = heavy
    population.install(torch.arange(8), blueprint, torch.zeros(8, 3), torch.ones(8, 3))
    generator = torch.Generator().manual_seed(0)
    wait(population)
    for _ in range(150):
        x, y = waves(32, 4, generator)
        population.train_step(x.repeat(1, 2, 1, 1), y.repeat(1, 2))
    x, y = waves(500, 4, generator)
    right = (population.forward(x.repeat(1, 2, 1, 1)).argmax(2) == y.repeat(1, 2)).float().mean(0)
    assert float((right[4:] - right[:4]).min()) > 0.1, right


def test_costs_of_empty_slots_are_zero() -> None:
    population = small()
    params, flops = population.costs()
    assert int(params.sum()) == int(flops.sum()) == 0


@pytest.mark.parametrize(("make", "words"), [
    (lambda: Population(Host("mlp"), 0), "at least 1"),
    (lambda: Population(Host("mlp"), 1, incubation="magic"), "shadow, straight_through"),
    (lambda: Host("rnn"), "mlp, conv1d, cnn"),
    (lambda: Host("cnn", (3, 4, 4)), "fewer stages"),
    (lambda: Host("cnn", (3, 32)), "expected 3 numbers"),
    (lambda: OptimConfig("adam"), "adamw, sgd"),
    (lambda: small().graft(0, 0), "holds no seed"),
    (lambda: small().begin_epoch(torch.zeros(2, 8, dtype=torch.int64)), r"expected \[6, 8\]"),
    (lambda: small().begin_epoch(torch.full((6, 8), -1)), r"op -1 is outside 0\.\.5"),
    (lambda: small().end_epoch(), "no epoch has begun"),
    (lambda: small().train_step(torch.zeros(4, 6, 2, 16), torch.zeros(4, 1, dtype=torch.int64)), r"labels .* expected \[4, 6\]"),
    (lambda: small().train_step(torch.zeros(4, 5, 2, 16), torch.zeros(4, 5, dtype=torch.int64)), r"expected \[batch of at least 1, 6, 2, 16\]"),
    (lambda: small().forward(torch.zeros(4, 6, 2, 16), alpha=torch.full((6, 3), -1.0)), "from 0 to 1"),
    (lambda: small().set_lr(torch.zeros(6)), r"expected \[6, 4\]"),
    (lambda: small().install(ALL, torch.full((6, 3), 77), torch.zeros(6, 3), torch.ones(6, 3)), r"-1\.\.8"),
    (lambda: small().install(ALL, torch.zeros(6, 3), torch.zeros(6, 3), torch.zeros(6, 3)), r"in \(0, 1\]"),
    (lambda: small(dtype=torch.bfloat16), "compute_dtype"),
    (lambda: small(spec=ActionSpec.full(2, ("norm",))), "2 slots, but this host has 3"),
])
def test_bad_input_gets_one_sentence(make: object, words: str) -> None:
    with pytest.raises(EsperError, match=words) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_a_population_goes_at_once_with_all_it_holds(device: str) -> None:
    """Not when a collector comes by: on CUDA it might come in the middle of somebody's capture."""
    population = small("mlp", device=device)
    wait(population).train_step(*batch(population, 4, torch.Generator().manual_seed(0)))
    population.forward(batch(population, 4, torch.Generator())[0])
    held = weakref.ref(population)
    gc.disable()
    try:
        del population
        assert held() is None
    finally:
        gc.enable()
