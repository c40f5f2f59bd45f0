"""Gradients reach everything that is live, and nothing that must stay untouched. Faults stay in their row."""

import functools

import pytest
import torch

from esper.kasmina import HOSTS, INCUBATION, Host, OptimConfig, Population
from esper.leyline import Head, LifecycleOp, SeedStage, Style
from tests.reference import batch, cross_entropy, known_contributions, small_hosts, wait


@pytest.mark.parametrize("style", Style)
@pytest.mark.parametrize("kind", HOSTS)
def test_upstream_gradients_equal_plain_autograd(kind: str, style: Style) -> None:
    """Seeds in every slot at alpha 1: each stage of each host gets a gradient, and it is autograd's."""
    population = Population(Host(kind, **small_hosts()[kind]), 8, dtype=torch.float64)
    every = torch.arange(8)
    blueprint = 1 + torch.arange(24).view(8, 3) % (len(population.spec.blueprints) - 1)
    population.install(every, blueprint, torch.full((8, 3), int(style)), torch.ones(8, 3))
    for bank in population.banks[1:]:
        bank.weights += 0.1 * torch.randn(bank.weights.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x, y = batch(population, 6, torch.Generator().manual_seed(1))
    wait(population).train_step(x, y)
    stepper = population._run.stepper
    grad = stepper.pack.gradient(population.objective.losses(stepper.main(x), y).sum())
    weights, _ = population.host.layout.split(stepper.pack.views(grad)[0])
    for row in range(8):
        net = population.extract(row)
        cross_entropy(net(x[:, row]), y[:, row]).backward()
        for name, parameter in [*net.stages.named_parameters(prefix="stages"), *net.head.named_parameters(prefix="head")]:
            name = population.host.layout.shared.get(name, name)
            torch.testing.assert_close(weights[name][row], parameter.grad, rtol=0, atol=1e-10)
        for stage in net.stages:
            assert all(float(p.grad.norm()) > 0 for p in stage.parameters())


@pytest.mark.parametrize("incubation", INCUBATION)
@pytest.mark.parametrize("kind", HOSTS)
def test_incubating_seeds_leave_their_host_bit_identical(kind: str, incubation: str, device: str) -> None:
    def train(seeded: bool) -> Population:
        population = Population(Host(kind, **small_hosts()[kind]), 6, incubation=incubation, device=device,
                                optim=OptimConfig(lr=0.02, host_clip=0.1, seed_clip=0.1))
        generator = torch.Generator().manual_seed(0)
        for slot in range(3):
            actions = torch.zeros(6, len(Head), dtype=torch.int64)
            actions[:, Head.SLOT], actions[:, Head.ALPHA_TARGET] = slot, 2
            if seeded:
                actions[:, Head.OP] = LifecycleOp.GERMINATE
                actions[:, Head.BLUEPRINT] = 1 + torch.arange(6) % (len(population.spec.blueprints) - 1)
                actions[:, Head.STYLE] = torch.arange(6) % 3
            population.begin_epoch(actions)
            for _ in range(7):
                population.train_step(*batch(population, 5, generator))
            population.end_epoch()
        return population

    with_seeds, without = train(True), train(False)
    assert bool(with_seeds.life.incubating.all())
    assert torch.equal(with_seeds.banks[0].weights, without.banks[0].weights)
    assert torch.equal(with_seeds.banks[0].second, without.banks[0].second)
    assert int(with_seeds.banks[1].steps.min()) == 21
    for row in range(6):
        assert float(with_seeds.banks[1].second[row].abs().max()) > 0


PLACES = {"host": None, "live": 0, "incubating": 1, "freed": 2}
"""Where row 2 breaks: its host, or the seed of one slot, which is then in that state."""


def run_with_fault(kind: str, device: str, incubation: str, place: str, value: float | None) -> Population:
    """Ten rows with every kind of seed. Row 2 breaks; the seed in its last slot is pruned, and its first fades."""
    population = Population(Host(kind, **small_hosts()[kind]), 10, device=device, incubation=incubation, seed=1)
    spec, generator = population.spec, torch.Generator().manual_seed(4)
    blueprint = 1 + torch.arange(30).view(10, 3) % (len(spec.blueprints) - 1)
    blueprint[:, 1] = -1
    population.install(torch.arange(10), blueprint, torch.arange(30).view(10, 3) % 3, torch.ones(10, 3))
    wait = spec.action(LifecycleOp.WAIT)
    germinate = [spec.action(LifecycleOp.GERMINATE, slot=1, blueprint=spec.blueprints[1 + row % 3]) for row in range(10)]
    prune = [spec.action(LifecycleOp.PRUNE, slot=2) if row == 2 else wait for row in range(10)]
    fade = [spec.action(LifecycleOp.PRUNE, slot=0, alpha_speed=3) if row == 2 else wait for row in range(10)]
    for epoch, actions in enumerate([germinate, prune, [wait] * 10, fade, [wait] * 10]):
        population.begin_epoch(torch.tensor(actions))
        if epoch == 1 and value is not None:
            slot = PLACES[place]
            population.banks[0 if slot is None else 1 + slot].weights[2] = value
        for _ in range(3):
            population.train_step(*batch(population, 4, generator))
        population.end_epoch(known_contributions(population))
    return population


@functools.cache
def without_fault(kind: str, device: str, incubation: str) -> Population:
    """To be read and not to be trained: several tests compare with it."""
    return run_with_fault(kind, device, incubation, "host", None)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("incubation", INCUBATION)
@pytest.mark.parametrize("kind", HOSTS)
def test_faults_stay_in_their_row(kind: str, incubation: str, place: str, value: float, device: str) -> None:
    torch.use_deterministic_algorithms(device == "cuda")
    try:
        sick, well = run_with_fault(kind, device, incubation, place, value), without_fault(kind, device, incubation)
        x, _ = batch(sick, 3, torch.Generator().manual_seed(9))
        seen, wanted = sick.forward(x), well.forward(x)
    finally:
        torch.use_deterministic_algorithms(False)
    assert not all(bool(bank.weights[2].isfinite().all()) for bank in sick.banks)
    others = torch.tensor([0, 1, 3, 4, 5, 6, 7, 8, 9])
    mine, theirs = sick.snapshot(others), well.snapshot(others)
    for name, tensor in mine.items():
        assert torch.equal(tensor, theirs[name]), name
    kept = others.to(device)
    assert torch.equal(seen[:, kept], wanted[:, kept])


@pytest.mark.parametrize("incubation", INCUBATION)
@pytest.mark.parametrize("kind", HOSTS)
def test_broken_incubating_seed_cannot_reach_its_own_host(kind: str, incubation: str, device: str) -> None:
    def train(broken: bool) -> Population:
        population = Population(Host(kind, **small_hosts()[kind]), 3, device=device, incubation=incubation)
        generator = torch.Generator().manual_seed(0)
        actions = torch.tensor([[int(LifecycleOp.GERMINATE), 1, 2 + row, row, 0, 2, 0, 0] for row in range(3)])
        population.begin_epoch(actions)
        if broken:
            population.banks[2].weights[:] = float("nan")
        for _ in range(5):
            losses = population.train_step(*batch(population, 4, generator))
            assert bool(losses.isfinite().all())
        population.end_epoch()
        return population

    broken, whole = train(True), train(False)
    assert torch.equal(broken.banks[0].weights, whole.banks[0].weights)
    assert not bool(broken.life.healthy[:, 1].any())
    assert bool(whole.life.healthy[:, 1].all())
    assert not bool(broken.life.verdicts()[:, 1, LifecycleOp.ADVANCE].any())


def test_a_fade_ends_with_clean_rows() -> None:
    population = Population(Host("mlp", **small_hosts()["mlp"]), 2)
    population.install(torch.arange(2), torch.full((2, 3), 3), torch.zeros(2, 3), torch.ones(2, 3))
    fade = torch.tensor([population.spec.action(LifecycleOp.PRUNE, slot=1, alpha_speed=3)] * 2)
    waiting = torch.tensor([population.spec.action(LifecycleOp.WAIT)] * 2)
    for actions in (fade, waiting, waiting):
        population.begin_epoch(actions)
        population.train_step(*batch(population, 4, torch.Generator().manual_seed(0)))
        assert bool((population.banks[2].weights != 0).any())
        population.end_epoch()
    assert bool((population.life.stage[:, 1] == SeedStage.PRUNED).all())
    for tensor in population.banks[2].tensors().values():
        assert bool((tensor == 0).all())


@pytest.mark.parametrize("kind", HOSTS)
def test_freed_rows_are_clean(kind: str) -> None:
    """A NaN seed that is pruned leaves zeros behind, and the next seed in its slot is as good as new."""
    population = Population(Host(kind, **small_hosts()[kind]), 2)
    germinate = torch.tensor([[int(LifecycleOp.GERMINATE), 0, 2, 0, 0, 2, 0, 0]] * 2)
    population.begin_epoch(germinate)
    population.banks[1].weights[0] = float("nan")
    population.train_step(*batch(population, 4, torch.Generator().manual_seed(0)))
    population.end_epoch()
    wait = torch.zeros(2, len(Head), dtype=torch.int64)
    prune = wait.clone()
    prune[0, Head.OP] = LifecycleOp.PRUNE
    population.begin_epoch(prune)
    for tensor in population.banks[1].tensors().values():
        assert bool((tensor[0] == 0).all())
    population.end_epoch()
    while population.life.stage[0, 0] != SeedStage.DORMANT:
        population.begin_epoch(wait)
        population.end_epoch()
    germinate[1] = wait[1]
    population.begin_epoch(germinate)
    losses = population.train_step(*batch(population, 4, torch.Generator().manual_seed(1)))
    population.end_epoch()
    assert bool(losses.isfinite().all())
    assert bool(population.life.healthy[0, 0])
