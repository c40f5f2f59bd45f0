"""Hosts that users bring, and the built-in ones of residual blocks and of tokens, against plain PyTorch."""

import copy
import math
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import esper
from esper.kasmina import HOSTS, INCUBATION, Host, OptimConfig, Population, blueprints_for, find_blueprint
from esper.kasmina.blueprints import TOKENS, kind_of
from esper.kasmina.foreign import Grafted
from esper.kasmina.objectives import find_objective
from esper.kasmina.packing import Prefix
from esper.leyline import EsperError, LifecycleOp, SlotShape, Style
from tests.reference import PlainForeign, batch, cross_entropy, known_contributions, samples, wait
from tests.workshop import healthy, random_actions, toy_data

ROWS = 6


@pytest.fixture(autouse=True)
def _own_hosts() -> Iterator[None]:
    """No test leaves a kind of host behind: others take every kind there is."""
    kept = dict(HOSTS)
    yield
    HOSTS.clear()
    HOSTS.update(kept)


class Branches(nn.Module):
    """Two branches with a skip; with `norm` one has a batch norm, runs twice, and the first layer is frozen."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.norm = norm
        self.first = nn.Linear(6, 8).requires_grad_(not norm)
        self.shared = nn.BatchNorm1d(8) if norm else nn.Identity()
        self.left = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8) if norm else nn.LayerNorm(8), nn.ReLU())
        self.right = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.shared(self.first(x))
        h = h + self.left(h)
        out: Tensor = self.head(self.shared(h + self.right(h)))
        return out


class Reusing(nn.Module):
    """Writes into what its slot was given."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.point, self.inner, self.head = nn.Linear(6, 8), nn.Identity(), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        h = self.point(x)
        x += self.inner(torch.relu(h))
        out: Tensor = self.head(x)
        return out


class Causal(nn.Module):
    """A dilated causal convolution with a skip; the activation behind its slot works in place."""

    def __init__(self, channels: int, dilation: int) -> None:
        super().__init__()
        self.pad, self.conv = 2 * dilation, nn.Conv1d(channels, channels, 3, dilation=dilation)
        self.norm, self.act = nn.BatchNorm1d(channels, momentum=0.3), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.act(self.norm(self.conv(F.pad(x, (self.pad, 0))))) + x
        return out


class Tcn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(2, 6, 1)
        self.blocks = nn.Sequential(Causal(6, 1), Causal(6, 2))
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.blocks(self.first(x))[..., -1])
        return out


class Block(nn.Module):
    def __init__(self, channels: int, length: int = 0) -> None:
        """With a `length`, tokens see earlier ones alone."""
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(channels), nn.LayerNorm(channels)
        self.attention = nn.MultiheadAttention(channels, 2, batch_first=True)
        self.think = nn.Sequential(nn.Linear(channels, 2 * channels), nn.GELU(), nn.Linear(2 * channels, channels))
        self.register_buffer("mask", torch.ones(length, length).triu(1).bool() if length else None)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        x = x + self.attention(h, h, h, need_weights=False, attn_mask=self.mask)[0]
        out: Tensor = x + self.think(self.norm2(x))
        return out


class Vit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch, self.place = nn.Conv2d(1, 8, 4, 4), nn.Parameter(torch.randn(4, 8))
        self.blocks, self.norm = nn.ModuleList([Block(8), Block(8)]), nn.LayerNorm(8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.patch(x).flatten(2).transpose(1, 2) + self.place
        for block in self.blocks:
            h = block(h)
        out: Tensor = self.head(self.norm(h).mean(1))
        return out


class Speaker(nn.Module):
    """A token model whose head reads the weights of the embedding, behind which there is a slot."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(7, 8), nn.Embedding(5, 8)
        self.register_buffer("steps", torch.arange(5))
        self.register_buffer("wave", torch.sin(torch.arange(5.0))[:, None])
        self.block, self.norm = Block(8, 5), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x) + self.place(self.steps) + self.wave
        return F.linear(self.norm(self.block(h)), self.embed.weight)


def dropping() -> nn.Module:
    """One dropout layer under two names, and one of channels."""
    shared = nn.Dropout(0.4)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), shared, nn.Linear(16, 16), nn.ReLU(), shared, nn.Unflatten(1, (4, 4)),
                         nn.Dropout1d(0.2), nn.Flatten(), nn.Linear(16, 3))


NUMBERS, IMAGE, TEXT = torch.randn(3, 6), torch.randn(3, 1, 8, 8), torch.randint(7, (3, 5))
MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...], Tensor]] = {
    "branches": (Branches, ("left", "right"), NUMBERS),
    "normed": (lambda: Branches(True), ("left", "right"), NUMBERS),
    "tcn": (Tcn, ("blocks.0.norm", "blocks.1"), torch.randn(3, 2, 9)),
    "vit": (Vit, ("blocks.0", "blocks.1"), IMAGE),
    "speaker": (Speaker, ("embed", "block"), TEXT),
}
every_module = pytest.mark.parametrize("kind", MODULES)
NOISY = {"dropping": (dropping, ("1", "4"), NUMBERS)}
with_noise = pytest.mark.parametrize("kind", [*MODULES, *NOISY])
"""Those that no plain module follows, for its noise is another, as well."""


def brought(kind: str) -> Host:
    return Host.of(*(MODULES | NOISY)[kind], name=f"my-{kind}")


def germinate(population: Population, slot: int = 0, rows: int | None = None) -> Tensor:
    """Every blueprint in turn."""
    spec = population.spec
    return torch.tensor([spec.action(LifecycleOp.GERMINATE, slot=slot, blueprint=spec.blueprints[1 + row % (len(spec.blueprints) - 1)],
                                     style=Style(row % 3)) for row in range(rows or population.rows)])


def grown(kind: str, epochs: int = 9, rows: int = ROWS) -> Population:
    """A random topology in every row, after a few steps."""
    generator = torch.Generator().manual_seed(5)
    population = Population(brought(kind), rows, dtype=torch.float64, optim=OptimConfig(lr=0.02))
    for _ in range(epochs):
        population.begin_epoch(random_actions(population, generator))
        population.train_step(*batch(population, 4, generator))
        population.end_epoch(known_contributions(population))
    return population


def same(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        assert torch.equal(tensor, theirs[name]), name


# -- modules that users bring --------------------------------------------------------------------------------


@pytest.mark.parametrize("incubation", INCUBATION)
@every_module
def test_training_equals_a_loop_of_modules(kind: str, incubation: str) -> None:
    config = OptimConfig("adamw" if incubation == "shadow" else "sgd", lr=0.02, weight_decay=0.01, host_clip=0.5, seed_clip=0.3)
    population = Population(brought(kind), ROWS, dtype=torch.float64, incubation=incubation, optim=config, seed=2)
    generator = torch.Generator().manual_seed(3)
    plain = [PlainForeign(population, row) for row in range(ROWS)]
    births = blended = 0
    for _ in range(10):
        population.begin_epoch(random_actions(population, generator))
        births, blended = int(population.life.germinations.sum()), max(blended, int((population.life.alpha > 0).sum()))
        for host in plain:
            host.follow()
        for _ in range(2):
            x, y = batch(population, 5, generator)
            losses = population.train_step(x, y)
            expected = [host.step(x[:, row], y[:, row]) for row, host in enumerate(plain)]
            torch.testing.assert_close(losses, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-8)
        population.end_epoch(known_contributions(population))
    assert births > ROWS
    assert blended > 1
    weights, _ = population.host.layout.split(population.banks[0].weights)
    for row, host in enumerate(plain):
        theirs = dict(host.net.named_parameters()) | dict(host.net.named_buffers())
        for name, mine in weights.items():
            torch.testing.assert_close(mine[row], theirs[name].detach(), rtol=0, atol=1e-8)
        for slot in population.life.planted[row].nonzero().flatten().tolist():
            for a, b in zip(population.graft(row, slot).parameters(), host.seeds[slot].parameters(), strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=1e-8)


@with_noise
def test_forward_equals_extracted_modules(kind: str) -> None:
    population = grown(kind)
    life, costs = population.life, population.costs()[0]
    assert int(((life.alpha > 0) & (costs > 0)).sum()) > 1
    x, _ = batch(population, 6, torch.Generator().manual_seed(1))
    before = population.snapshot(torch.arange(ROWS))
    logits = population.forward(x)
    for row in range(ROWS):
        net = population.extract(row).eval()
        assert type(net) is type(population.host.module())
        assert sum(isinstance(part, Grafted) for part in net.modules()) == int(((life.alpha[row] > 0) & (costs[row] > 0)).sum())
        torch.testing.assert_close(net(x[:, row]).detach(), logits[:, row], rtol=0, atol=1e-10)
        for twin in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
            assert torch.equal(twin(x[:, row]), net(x[:, row]))
    same(population.snapshot(torch.arange(ROWS)), before)


@with_noise
def test_probed_rows_equal_a_forward_of_their_own(kind: str) -> None:
    population, generator = grown(kind), torch.Generator().manual_seed(2)
    x, _ = batch(population, 4, generator)
    env = torch.randint(ROWS, (20,), generator=generator)
    alpha = torch.where(torch.rand(20, 2, generator=generator) < 0.5, 0.7, population.life.alpha[env])
    logits = population.probe(env, alpha)(x)
    torch.testing.assert_close(logits[:, :ROWS], population.forward(x), rtol=0, atol=1e-10)
    torch.testing.assert_close(logits[:, ROWS:], population.forward(x[:, env], env, alpha), rtol=0, atol=1e-10)


@with_noise
def test_shadow_steps_with_a_prefix_equal_those_without(kind: str) -> None:
    """Rows that are copies of two; hosts and their statistics stay put."""
    of, prefix_rows = torch.arange(ROWS) % 2, torch.arange(2)

    def run(prefix: Prefix | None) -> Population:
        population, generator = Population(brought(kind), ROWS, dtype=torch.float64), torch.Generator().manual_seed(0)
        population.reset(torch.arange(ROWS), 5 + of)
        population.set_lr(torch.tensor([0.0, 0.01, 0.01]).repeat(ROWS, 1))
        population.begin_epoch(germinate(population, 1))
        for _ in range(3):
            x, y = batch(population, 4, generator)
            x, y = (x[:, :2], y[:, :2]) if prefix else (x[:, of], y[:, of])
            population.shadow_step(x, y, prefix)
        return population

    with_prefix, without = run(Prefix(prefix_rows, of)).tensors(), run(None).tensors()
    for name, tensor in without.items():
        torch.testing.assert_close(with_prefix[name], tensor, rtol=0, atol=1e-10)
    fresh = Population(brought(kind), 1, dtype=torch.float64)
    fresh.reset(torch.tensor([0]), torch.tensor([5]))
    assert torch.equal(without["bank.0.weights"][0], fresh.banks[0].weights[0])
    assert float(without["bank.2.second"].amax(1).min()) > 0


@pytest.mark.parametrize("incubation", INCUBATION)
@with_noise
def test_incubating_seeds_leave_their_host_bit_identical(kind: str, incubation: str) -> None:
    def train(seeded: bool) -> Population:
        population, generator = Population(brought(kind), ROWS, incubation=incubation), torch.Generator().manual_seed(0)
        for slot in range(2):
            nobody = torch.tensor([population.spec.action("WAIT")] * ROWS)
            population.begin_epoch(germinate(population, slot) if seeded else nobody)
            for _ in range(3):
                population.train_step(*batch(population, 5, generator))
            population.end_epoch()
        return population

    with_seeds, without = train(True), train(False)
    assert bool(with_seeds.life.incubating.all())
    same(with_seeds.banks[0].tensors(), without.banks[0].tensors())
    assert float(with_seeds.banks[1].second.amax(1).min()) > 0


@pytest.mark.parametrize("place", ["host", "live", "incubating"])
@with_noise
def test_faults_stay_in_their_row(kind: str, place: str) -> None:
    def run(value: float | None) -> Population:
        population, generator = Population(brought(kind), ROWS, seed=1), torch.Generator().manual_seed(4)
        first = torch.stack([1 + torch.arange(ROWS) % (len(population.spec.blueprints) - 1), torch.full((ROWS,), -1)], 1)
        population.install(torch.arange(ROWS), first, torch.arange(2 * ROWS).view(ROWS, 2) % 3, torch.ones(ROWS, 2))
        for actions in (germinate(population, 1), torch.tensor([population.spec.action("WAIT")] * ROWS)):
            population.begin_epoch(actions)
            if value is not None:
                population.banks[("host", "live", "incubating").index(place)].weights[2] = value
            for _ in range(2):
                population.train_step(*batch(population, 4, generator))
            population.end_epoch(known_contributions(population))
        return population

    sick, well = run(math.nan), run(None)
    x, _ = batch(sick, 3, torch.Generator().manual_seed(9))
    others = torch.tensor([0, 1, 3, 4, 5])
    same(sick.snapshot(others), well.snapshot(others))
    assert torch.equal(sick.forward(x)[:, others], well.forward(x)[:, others])
    if place == "incubating":
        same({"host": sick.banks[0].weights[2]}, {"host": well.banks[0].weights[2]})
    else:
        assert bool(sick.forward(x)[:, 2].isnan().any())


@with_noise
def test_state_goes_round(kind: str, tmp_path: Path) -> None:
    """Snapshots and files hold everything: what follows is the same to the last bit."""
    population, every = grown(kind, 6), torch.arange(ROWS)
    kept, path = population.snapshot(every), tmp_path / "population.safetensors"
    population.save(path)
    loaded = Population.load(path)
    x, y = batch(population, 4, torch.Generator().manual_seed(0))

    def future(of: Population) -> dict[str, Tensor]:
        wait(of).train_step(x, y)
        of.end_epoch()
        return of.snapshot(every)

    told = future(population)
    assert not torch.equal(told["bank.0.weights"], kept["bank.0.weights"])
    same(future(loaded), told)
    population.restore(every, kept)
    population.life.epoch -= 1
    same(future(population), told)
    del HOSTS[population.host.kind]
    with pytest.raises(EsperError, match=r"no host kind 'my-.*Host\.of"):
        Population.load(path)


def test_statistics_travel_with_their_row() -> None:
    population = grown("tcn")
    named, _ = population.host.layout.split(population.banks[0].weights)
    mean = named["blocks.0.norm.running_mean"]
    assert len(mean.unique(dim=0)) == ROWS
    kept = population.snapshot(torch.tensor([3]))
    population.restore(torch.tensor([0]), kept)
    assert torch.equal(population.extract(0).blocks[0].norm.running_mean, mean[3])
    population.reset(torch.tensor([0]), torch.tensor([1]))
    assert not bool(population.extract(0).blocks[0].norm.running_mean.any())


# -- dropout -------------------------------------------------------------------------------------------------


class Dropped(nn.Module):
    """What a dropout layer makes of ones; its input comes through a slot."""

    def __init__(self, layer: nn.Module, *shape: int) -> None:
        super().__init__()
        self.body, self.layer, self.shape = nn.Linear(2, math.prod(shape)), layer, shape

    def forward(self, x: Tensor) -> Tensor:
        h = torch.ones_like(self.body(x)).view(-1, *self.shape)
        return torch.stack([self.layer(h), self.layer(h)], 1).flatten(1)


def noise(layer: nn.Module, shape: tuple[int, ...], keys: Tensor | None, size: int = 2) -> Tensor:
    """[R, B, 2, *shape]: of both calls."""
    host, rows = Host.of(Dropped(layer, *shape), ("body",), torch.randn(3, 2)), 2 if keys is None else len(keys)
    weights, _ = host.layout.split(host.fresh(torch.zeros(rows, dtype=torch.int64)))
    out, _ = host.run(torch.randn(size, rows, 2), lambda prefix, count: weights, lambda index, h: h, keys=keys)
    return out.view(rows, size, 2, *shape)


def test_noise_follows_keys() -> None:
    out = noise(nn.Dropout(0.3), (5000,), torch.tensor([4, 5, 4]))
    assert torch.equal(out[0], out[2])
    for a, b in ((out[0], out[1]), (out[0, 0], out[0, 1]), (out[0, :, 0], out[0, :, 1])):  # rows, samples, calls
        assert 0.35 < float((a != b).float().mean()) < 0.49  # 2 * 0.3 * 0.7 = 0.42
    assert float((out == 0).float().mean()) == pytest.approx(0.3, abs=0.02)
    torch.testing.assert_close(out[out != 0].unique(), torch.tensor([1 / 0.7]))
    assert bool((noise(nn.Dropout(0.3), (50,), None) == 1).all())
    assert bool((noise(nn.Dropout(0.0), (50,), torch.arange(2)) == 1).all())
    assert bool((noise(nn.Dropout(1.0), (50,), torch.arange(2)) == 0).all())


@pytest.mark.parametrize(("layer", "shape"), [(nn.Dropout1d, (300, 4)), (nn.Dropout2d, (300, 2, 3))])
def test_channel_dropout_drops_whole_channels(layer: type[nn.Module], shape: tuple[int, ...]) -> None:
    out = noise(layer(0.4), shape, torch.arange(3)).flatten(4)
    assert torch.equal(out.amin(-1), out.amax(-1))
    assert float((out[..., 0] == 0).float().mean()) == pytest.approx(0.4, abs=0.05)


def test_noise_changes_from_step_to_step_and_repeats_after_a_rollback() -> None:
    population = Population(brought("dropping"), 3, optim=OptimConfig(lr=0.0))
    x, y = batch(population, 8, torch.Generator().manual_seed(0))
    kept = wait(population).snapshot(torch.arange(3))
    first = [population.train_step(x, y) for _ in range(3)]
    assert len({tuple(losses.tolist()) for losses in first}) == 3
    assert torch.equal(population.forward(x), population.forward(x))
    population.restore(torch.arange(3), kept)
    assert all(torch.equal(population.train_step(x, y), losses) for losses in first)


def test_a_row_alone_equals_the_row_in_a_crowd() -> None:
    crowd = Population(brought("dropping"), 8, dtype=torch.float64)
    alone, generator = Population(crowd.host, 1, dtype=torch.float64), torch.Generator().manual_seed(0)
    alone.reset(torch.tensor([0]), crowd.keys[5:6])
    for _ in range(8):
        actions = random_actions(crowd, generator)
        x, y = batch(crowd, 4, generator)
        for population, chosen in ((crowd, torch.arange(8)), (alone, torch.tensor([5]))):
            population.begin_epoch(actions[chosen])
            population.train_step(x[:, chosen], y[:, chosen])
            population.end_epoch(known_contributions(population))
    assert bool(alone.life.planted.any())
    theirs = crowd.snapshot(torch.tensor([5]))
    for name, tensor in alone.snapshot(torch.tensor([0])).items():
        torch.testing.assert_close(tensor, theirs[name], rtol=0, atol=1e-8)


def test_a_module_may_write_into_what_its_slot_was_given_whatever_others_hold() -> None:
    host, losses = Host.of(Reusing(), ["point"], NUMBERS), []
    x, y = torch.randn(5, 2, 6, dtype=torch.float64), torch.randint(4, (5, 2))
    for names in (("norm", "norm"), ("norm", "mlp_small")):
        population = Population(host, 2, dtype=torch.float64)
        seeds = torch.tensor([[population.spec.blueprints.index(name)] for name in names])
        population.install(torch.arange(2), seeds, torch.zeros_like(seeds), torch.full(seeds.shape, 0.5))
        wait(population)
        losses.append([float(population.train_step(x, y)[0]) for _ in range(5)])
    assert losses[0] == pytest.approx(losses[1], abs=1e-10)


# -- where weights come from ---------------------------------------------------------------------------------


def test_rows_start_at_the_weights_of_an_instance() -> None:
    module = Branches()
    module.left[0].weight.data.fill_(0.25)
    host, kept = Host.of(module, ("left",), NUMBERS), copy.deepcopy(module.state_dict())
    module.left[0].weight.data.zero_()  # later: the host keeps what it was given
    population = Population(host, 3)
    for row in range(3):
        same(dict(population.extract(row).state_dict()), kept)
    assert isinstance(module.left, nn.Sequential)
    assert not module.left._forward_hooks


def test_rows_of_a_builder_differ_by_key_and_repeat() -> None:
    state = torch.random.get_rng_state()
    host = Host.of(Branches, ("left",), NUMBERS)
    weights = host.fresh(torch.tensor([1, 2, 1]))
    assert torch.equal(state, torch.random.get_rng_state())
    assert torch.equal(weights[0], weights[2])
    assert not torch.equal(weights[0], weights[1])
    assert float(weights.std()) > 0.05


def test_a_host_keeps_its_module_when_another_takes_its_name() -> None:
    ones, twos = Branches(), Branches()
    for module, value in ((ones, 1.0), (twos, 2.0)):
        module.head.weight.data.fill_(value)
    first, second = (Host.of(module, ("left",), NUMBERS) for module in (ones, twos))
    for host, value in ((first, 1.0), (second, 2.0)):
        assert bool((Population(host, 1).extract(0).head.weight == value).all())
    assert pickle.loads(pickle.dumps(first)) == first


def test_modules_in_double_and_their_costs() -> None:
    host = Host.of(Branches().double(), ("left",), NUMBERS.double())
    assert host.cost.params == sum(p.numel() for p in Branches().parameters())
    assert host.cost.flops == 2 * (6 * 8 + 2 * 8 * 8 + 8 * 4)
    frozen = Host.of(lambda: Branches(True), ("left",), NUMBERS)
    assert frozen.cost.params == sum(p.numel() for p in Branches(True).parameters() if p.requires_grad)
    attention = 4 * (4 * 8 * 8 + 2 * 4 * 8 + 2 * 8 * 16)  # of 4 tokens: maps, products with keys and values, think
    assert brought("vit").cost.flops == 2 * (2 * attention + 4 * 16 * 8 + 8 * 4)


# -- refusals ------------------------------------------------------------------------------------------------


class Wired(nn.Module):
    """A linear map `a`, anything in between, a head."""

    def __init__(self, middle: Callable[["Wired", Tensor], object], *layers: nn.Module, buffer: bool = False) -> None:
        super().__init__()
        self.middle, self.layers = middle, nn.ModuleList(layers)
        self.a, self.head = nn.Linear(6, 8), nn.Linear(8, 3)
        if buffer:
            self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.middle(self, self.a(x)))
        return out


class Recurrent(Wired):
    def __init__(self) -> None:
        super().__init__(lambda me, h: me.layers[0](h[:, None])[0][:, 0], nn.LSTM(8, 8, batch_first=True))


class Pair(Wired):
    def forward(self, x: Tensor) -> Tensor:
        return self.a(x), self.a.bias  # type: ignore[return-value]


class Keyword(Wired):
    def forward(self, x: Tensor, *, mask: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x * mask)


def asserting(me: Wired, h: Tensor) -> Tensor:
    assert h.dim() == 3
    return h


class Returns(nn.Module):
    def __init__(self, what: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.what = what

    def forward(self, x: Tensor) -> object:
        return self.what(x)


def layered(layer: nn.Module) -> nn.Module:
    return Wired(lambda me, h: me.layers[0](h), layer)


def returning(what: Callable[[Tensor], object], back: Callable[[object], object]) -> nn.Module:
    return Wired(lambda me, h: back(me.layers[0](h)), Returns(what))


def counting(me: Wired, h: Tensor) -> Tensor:
    me.count += 1
    return h


def recounting(me: Wired, h: Tensor) -> Tensor:
    me.count = me.count + 1
    return h


ONE = Branches()
REFUSED: dict[str, tuple[object, object, object, str]] = {
    "unknown": (Branches(), ("middle",), NUMBERS, r"no submodule 'middle'.*there are first"),
    "itself": (Branches(), ("",), NUMBERS, "no submodule ''"),
    "none": (Branches(), (), NUMBERS, "at least one slot"),
    "repeated": (Branches(), ("left", "left"), NUMBERS, "each name once"),
    "twice": (Branches(True), ("shared",), NUMBERS, "shared runs more than once"),
    "never": (Wired(lambda me, h: h, nn.Linear(8, 8)), ("layers.0",), NUMBERS, r"layers\.0 does not run"),
    "tuple": (returning(lambda h: (h, h), lambda out: out[0]), ("layers.0",), NUMBERS, r"layers\.0 returns tuple"),
    "rank 5": (returning(lambda h: h.view(-1, 2, 2, 2, 1), lambda h: h.flatten(1)), ("layers.0",), NUMBERS, r"layers\.0 returns \[3, 2"),
    "whole numbers": (returning(lambda h: h.long(), lambda h: h.float()), ("layers.0",), NUMBERS, r"layers\.0 returns"),
    "time first": (returning(lambda h: h.t(), lambda h: h.t()), ("layers.0",), NUMBERS, r"layers\.0 returns \[8, 3\]"),
    "RReLU": (layered(nn.RReLU()), ("a",), NUMBERS, r"layers\.0 \(RReLU\) cannot run as many"),
    "AlphaDropout": (layered(nn.AlphaDropout(0.5)), ("a",), NUMBERS, r"layers\.0 \(AlphaDropout\).*random"),
    "F.dropout": (Wired(lambda me, h: F.dropout(h, 0.5, me.training)), ("a",), NUMBERS, r"the module \(Wired\).*random"),
    "evaluation": (Wired(lambda me, h: h if me.training else h + torch.rand(8)), ("a",), NUMBERS, r"the module \(Wired\).*random"),
    "attention": (layered(nn.TransformerEncoderLayer(8, 2, 8)), ("a",), NUMBERS, r"layers\.0\.self_attn \(Multi.*random"),
    "branch": (Wired(lambda me, h: h if h.sum() > 0 else -h), ("a",), NUMBERS, r"the module \(Wired\).*control flow"),
    "LSTM": (Recurrent(), ("a",), NUMBERS, r"layers\.0 \(LSTM\) cannot run as many"),
    "counter": (Wired(counting, buffer=True), ("a",), NUMBERS, "buffer count changes"),
    "new counter": (Wired(recounting, buffer=True), ("a",), NUMBERS, "buffer count changes"),
    "spectral": (layered(nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))), ("a",), NUMBERS, r"buffer layers\.0\..* changes"),
    "cumulative": (layered(nn.BatchNorm1d(8, momentum=None)), ("a",), NUMBERS, r"layers\.0 is a batch norm with momentum=None"),
    "no module": (3, ("a",), NUMBERS, "not from a int"),
    "no modules": (lambda: 3, ("a",), NUMBERS, "not from a function"),
    "one module": (lambda: ONE, ("left",), NUMBERS, "one and the same module"),
    "no tensor": (Branches(), ("left",), [[0.0] * 6], "example must be a batch"),
    "no batch": (Branches(), ("left",), torch.randn(6), "example must be a batch"),
    "empty": (Branches(), ("left",), torch.randn(0, 6), "example must be a batch"),
    "wrong example": (Branches(), ("left",), torch.randn(3, 7), r"first \(Linear\) cannot run the example"),
    "assertion": (Wired(asserting), ("a",), NUMBERS, r"the module \(Wired\) cannot run the example: "),
    "nothing learns": (Branches().requires_grad_(False), ("left",), NUMBERS, "no parameters that learn"),
    "keyword": (Keyword(lambda me, h: h), ("a",), NUMBERS, "cannot run the example.*mask"),
    "two outputs": (Pair(lambda me, h: h), ("a",), NUMBERS, "returns one tensor.*returns tuple"),
    "outputs by place": (nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3)), ("0",), torch.randn(3, 5, 6), r"returns \[3, 5, 3\]"),
    "text as a whole": (nn.Sequential(nn.Embedding(7, 8), nn.Flatten(), nn.Linear(40, 2)), ("0",), TEXT, r"returns \[3, 2\]"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_a_host_is_refused_by_name(case: str) -> None:
    module, slots, example, words = REFUSED[case]
    before = dict(HOSTS)
    with pytest.raises(EsperError, match=words) as caught:
        Host.of(module, slots, example)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
    assert before == HOSTS


def test_other_refusals() -> None:
    for layouts in ({"left": "BLC"}, {"middle": "BTC"}, {"left": "BTC"}):
        with pytest.raises(EsperError, match=r"BTC|BLC"):
            Host.of(Branches(), ("left",), NUMBERS, layouts)
    with pytest.raises(EsperError, match="built-in"):
        Host.of(Branches(), ("left",), NUMBERS, name="mlp")
    harm = healthy(1, 2)
    harm.frozen[:] = True
    with pytest.raises(EsperError, match="my-branches hosts have no frozen to impair"):
        Population(brought("branches"), 1).reset(torch.tensor([0]), torch.tensor([0]), harm)
    for host, options, words in (
        (brought("branches"), {"compile": True}, "without it"),
        (brought("tcn"), {"compute_dtype": torch.bfloat16}, "running statistics"),
        (brought("speaker"), {"objective": "classification"}, "my-speaker hosts take tokens"),
        (Host("gpt"), {"objective": "regression"}, "gpt hosts take tokens"),
        (brought("vit"), {"objective": "next_token"}, "my-vit hosts take numbers"),
    ):
        with pytest.raises(EsperError, match=words):
            Population(host, 1, **options)


# -- what slots hold -----------------------------------------------------------------------------------------


def test_layouts_are_guessed_and_can_be_told() -> None:
    shapes = {kind: brought(kind).slots.shapes for kind in MODULES}
    assert shapes["branches"] == (SlotShape(8), SlotShape(8))
    assert shapes["tcn"] == (SlotShape(6, (9,)), SlotShape(6, (9,)))
    assert shapes["vit"] == (SlotShape(8, tokens=4), SlotShape(8, tokens=4))
    assert shapes["speaker"] == (SlotShape(8, tokens=5), SlotShape(8, tokens=5))
    net = nn.Sequential(nn.Conv1d(2, 6, 1), nn.Identity(), nn.Flatten(), nn.Linear(54, 3))
    example = torch.randn(3, 2, 9)
    assert Host.of(net, ("1",), example).slots.shapes == (SlotShape(6, (9,)),)
    host = Host.of(net, "1", example, {"1": "BTC"})
    assert host.slots.shapes == (SlotShape(9, tokens=6),)
    assert blueprints_for(host) == blueprints_for("gpt")
    assert Host.of(Vit, ("blocks.1",), IMAGE, {"blocks.1": "BCL"}).slots.shapes == (SlotShape(4, (8,)),)


def test_slots_are_in_the_order_in_which_they_run() -> None:
    assert Host.of(Branches, ("right", "left", "first"), NUMBERS).slots.names == ("first", "left", "right")


def test_mixed_slots_take_the_blueprints_that_fit_both() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(144, 8), nn.Linear(8, 4))

    host = Host.of(build, ("1", "4"), IMAGE)
    assert [kind_of(shape) for shape in host.slots.shapes] == ["cnn", "mlp"]
    assert blueprints_for(host) == ("noop", "norm")
    population = Population(host, 3, dtype=torch.float64)
    population.install(torch.arange(3), torch.ones(3, 2, dtype=torch.int64), torch.arange(3)[:, None].expand(3, 2), torch.full((3, 2), 0.5))
    generator = torch.Generator().manual_seed(0)
    wait(population)
    for _ in range(3):
        population.train_step(*batch(population, 4, generator))
    x, _ = batch(population, 4, generator)
    for row in range(3):
        net = population.extract(row).eval()
        assert sum(isinstance(part, Grafted) for part in net) == 2
        torch.testing.assert_close(net(x[:, row]).detach(), population.forward(x)[:, row], rtol=0, atol=1e-10)


class Tied(nn.Module):
    """One weight under two names, and one layer under two."""

    def __init__(self) -> None:
        super().__init__()
        self.there, self.back, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.back.weight = self.there.weight
        self.again = self.back

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.again(self.there(x).relu()).relu())
        return out


def test_tied_parameters_stay_tied() -> None:
    population = Population(Host.of(Tied, ("there", "back"), NUMBERS), 3, dtype=torch.float64, optim=OptimConfig(lr=0.05))
    assert population.host.cost.params == 36 + 6 + 6 + 21
    plain = [PlainForeign(population, row) for row in range(3)]
    population.install(torch.arange(3), torch.full((3, 2), 3), torch.zeros(3, 2, dtype=torch.int64), torch.ones(3, 2))
    generator = torch.Generator().manual_seed(0)
    wait(population)
    for host in plain:
        host.follow()
    for _ in range(4):
        x, y = batch(population, 5, generator)
        losses = population.train_step(x, y)
        for row, host in enumerate(plain):
            assert float(losses[row]) == pytest.approx(host.step(x[:, row], y[:, row]), abs=1e-8)
    logits = population.forward(x)
    for row in range(3):
        net = population.extract(row)
        assert net.there.weight is net.back.weight
        assert net.again is net.back
        torch.testing.assert_close(net(x[:, row]).detach(), logits[:, row], rtol=0, atol=1e-10)


def test_frozen_parameters_stay_put() -> None:
    population = grown("normed")
    weights, _ = population.host.layout.split(population.banks[0].weights)
    fresh, _ = population.host.layout.split(population.host.fresh(population.keys).double())
    for name, moved in (("first.weight", False), ("first.bias", False), ("right.0.weight", True)):
        assert torch.equal(weights[name], fresh[name]) is not moved
    net = population.extract(0)
    assert [name for name, p in net.named_parameters() if not p.requires_grad] == ["first.weight", "first.bias"]


def test_constant_buffers_keep_their_precision() -> None:
    """A rough population in between must not leave its rounding in them."""
    host = brought("speaker")
    Population(host, 2, compute_dtype=torch.bfloat16).forward(samples(host, 3, 2))
    population = Population(host, 2, dtype=torch.float64)
    x = samples(host, 3, 2)
    logits = population.forward(x)
    for row in range(2):
        torch.testing.assert_close(population.extract(row)(x[:, row]).detach(), logits[:, row], rtol=0, atol=1e-10)


def test_slots_behind_layers_that_hand_on_their_input() -> None:
    """The sample, or what the module still needs, lies in the same memory."""
    class Skips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.inner, self.tap, self.head = nn.Identity(), nn.Linear(6, 6), nn.Dropout(0.0), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = self.inner(self.first(x))
            out: Tensor = self.head(h * self.tap(h)) + self.head(x)
            return out

    population = Population(Host.of(Skips, ("first", "tap"), NUMBERS), 3, dtype=torch.float64)
    glu = torch.full((3, 2), population.spec.blueprints.index("glu"))
    population.install(torch.arange(3), glu, torch.full((3, 2), int(Style.ADD)), torch.ones(3, 2))
    x, y = batch(population, 5, torch.Generator().manual_seed(0))
    wait(population)
    for _ in range(3):
        population.train_step(x, y)
    kept = x.clone()
    logits = population.forward(x)
    assert torch.equal(x, kept)
    for row in range(3):
        torch.testing.assert_close(population.extract(row)(x[:, row]).detach(), logits[:, row], rtol=0, atol=1e-10)


def test_a_grown_module_is_copied_whole() -> None:
    """Though what a seed grew behind has ideas of its own about copies."""
    class Own(nn.Linear):
        def __deepcopy__(self, memo: object) -> "Own":
            twin = Own(6, 6)
            twin.load_state_dict(self.state_dict())
            return twin

    population = Population(Host.of(lambda: nn.Sequential(Own(6, 6), nn.Linear(6, 3)), ("0",), NUMBERS), 1)
    glu = torch.tensor([[population.spec.blueprints.index("glu")]])
    population.install(torch.tensor([0]), glu, torch.zeros_like(glu), torch.ones(1, 1))
    net = population.extract(0)
    assert isinstance(copy.deepcopy(net)[0], Grafted)
    assert net[0].in_features == 6
    with pytest.raises(AttributeError, match="in_peace"):
        _ = net[0].in_peace


def test_encoders_of_pytorch_are_hosts_too() -> None:
    """Their fast path runs no submodule, and they read settings of the layers that seeds grow behind."""
    def build() -> nn.Module:
        layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        return nn.Sequential(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Flatten(), nn.Linear(40, 3))

    population = Population(Host.of(build, ("0.layers.0", "0.layers.1"), torch.randn(3, 5, 8)), 3, dtype=torch.float64)
    blueprint = torch.tensor([[population.spec.blueprints.index(name)] * 2 for name in ("glu", "attention", "block")])
    population.install(torch.arange(3), blueprint, torch.zeros_like(blueprint), torch.ones(3, 2))
    wait(population)
    for _ in range(3):
        x, y = batch(population, 4, torch.Generator().manual_seed(0))
        population.train_step(x, y)
    for row in range(3):
        out = population.extract(row).eval()(x[:, row]).detach()
        torch.testing.assert_close(out, population.forward(x)[:, row], rtol=0, atol=1e-10)


# -- resnet and gpt ------------------------------------------------------------------------------------------


def test_sizes_of_resnet_and_gpt() -> None:
    assert 265_000 < Host("resnet").cost.params < 285_000
    assert [(s.channels, s.extent) for s in Host("resnet").slots.shapes] == [(16, (32, 32)), (32, (16, 16)), (64, (8, 8))]
    untied, tied = Host("gpt", (16,), (8, 8), 30, heads=2), Host("gpt", (16,), (8, 8), 30, heads=2, tied=True)
    block = 4 * 8 * 8 + 4 * 8 + 2 * 2 * 8 + 2 * 4 * 8 * 8 + 5 * 8
    assert tied.cost.params == 30 * 8 + 16 * 8 + 2 * block + 2 * 8
    assert untied.cost.params == tied.cost.params + 30 * 8
    assert tied.slots.shapes == (SlotShape(8, tokens=16),) * 2


@pytest.mark.parametrize("tied", [False, True])
def test_tokens_do_not_see_what_comes_later(tied: bool) -> None:
    """Every token blueprint in every slot."""
    names = blueprints_for("gpt")
    population = Population(Host("gpt", (6,), (8, 8), 7, heads=2, tied=tied), len(names), dtype=torch.float64)
    blueprint = torch.arange(len(names))[:, None].expand(-1, 2)
    population.install(torch.arange(len(names)), blueprint, blueprint % 3, torch.ones(len(names), 2))
    for bank in population.banks[1:]:
        bank.weights += 0.3 * torch.randn(bank.weights.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = samples(population.host, 4, len(names))
    before = population.forward(x)
    for at in range(6):
        changed = x.clone()
        changed[:, :, at] = (x[:, :, at] + 1) % 7
        after = population.forward(changed)
        assert torch.equal(after[:, :, :at], before[:, :, :at])
        assert bool((after[:, :, at] != before[:, :, at]).flatten(2).any(2).all())


@pytest.mark.parametrize("name", [name for name in blueprints_for("gpt") if name != "noop"])
def test_token_seeds_do_not_see_what_comes_later(name: str) -> None:
    prototype = find_blueprint(TOKENS, name).prototype(SlotShape(8, tokens=6))
    seed = prototype.plain(torch.randn(prototype.layout.size, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    h = torch.randn(3, 6, 8, dtype=torch.float64)
    changed = torch.cat([h[:, :3], torch.randn(3, 3, 8, dtype=torch.float64)], 1)
    before, after = seed(h), seed(changed)
    assert torch.equal(before[:, :3], after[:, :3])
    assert bool((before[:, 3:] != after[:, 3:]).any(2).all())
    sees_others = not torch.equal(seed(torch.cat([changed[:, :1], h[:, 1:]], 1) * 1.0), before) or \
        bool((seed(torch.cat([h[:, :1] + 1.7 * torch.arange(8), h[:, 1:]], 1))[:, 2] != before[:, 2]).any())
    assert sees_others == (name in ("attention", "attention_4", "gated_conv", "block"))


@pytest.mark.parametrize("host", [lambda: Host("gpt", (5,), (8,), 7, heads=2), lambda: brought("speaker")])
def test_unknown_tokens_do_not_reach_other_rows(host: Callable[[], Host]) -> None:
    """Behind the embeddings of one row lie those of the next."""
    population = wait(Population(host(), 3))
    x, y = batch(population, 4, torch.Generator().manual_seed(0))
    population.train_step(x, y)
    for token in (7, -1):
        x[2, 0, 1] = token
        for use in (lambda: population.train_step(x, y), lambda: population.forward(x)):
            with pytest.raises(EsperError, match=r"tokens go from .* 0 to 6"):
                use()


def test_sequences_of_one_token() -> None:
    population = Population(Host("gpt", (1,), (8,), 7, heads=2), 2)
    x, y = batch(wait(population), 3, torch.Generator().manual_seed(0))
    population.train_step(x, y)
    assert population.forward(x).shape == (3, 2, 1, 7)
    torch.testing.assert_close(population.forward(x)[:, 1], population.extract(1)(x[:, 1]).detach())


@pytest.mark.parametrize("entropy", [0.0, 1.7])
def test_next_token_is_the_plain_formula(entropy: float) -> None:
    objective, generator = find_objective("next_token", entropy), torch.Generator().manual_seed(0)
    logits, y = torch.randn(4, 3, 5, 7, generator=generator), torch.randint(7, (4, 3, 5), generator=generator)  # [B, R, T, O]
    each = F.cross_entropy(logits.flatten(0, 2), y.flatten(), reduction="none").view(4, 3, 5)
    outputs = logits.transpose(0, 1).flatten(1, 2)  # [R, B * T, O]
    torch.testing.assert_close(objective.losses(outputs, y), each.mean((0, 2)))
    chance = entropy or math.log(7)
    share = 1 - each.mean(2) / chance
    torch.testing.assert_close(objective.samples(logits, y), torch.stack([each.mean(2), share, share]))
    assert objective.chance(7) == (pytest.approx(chance), 0.0, 0.0)
    assert objective.settle(torch.tensor([[3.0], [-0.2], [1.2]])).flatten().tolist() == [3.0, 0.0, 1.0]
    for row in range(3):
        torch.testing.assert_close(objective.losses(outputs, y)[row], cross_entropy(logits[:, row], y[:, row]))


# -- end to end ----------------------------------------------------------------------------------------------

ELSEWHERE = """
import sys, torch
net, (x, y) = torch.export.load(sys.argv[1]).module(), torch.load(sys.argv[2])
assert not any(name.startswith("esper") for name in sys.modules)
print(float((net(x).argmax(1) == y).float().mean()))
"""


class Mine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv1d(1, 8, 5, stride=2), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.1))
        self.blocks = nn.Sequential(Causal(8, 1), Causal(8, 2))
        self.head = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.blocks(self.features(x)).mean(2))
        return out


def test_a_module_of_ones_own_grows_and_leaves(tmp_path: Path) -> None:
    """What an episode delivers scores the same where nobody has heard of Esper."""
    data = toy_data()
    host = esper.Host.of(Mine, ("features", "blocks.0"), data.x[:4])
    family = esper.Family("mine", "mnist1d", host, (esper.Kind("plain"),), horizons=(12,), batch=40)
    env = esper.MorphogeneticEnv(family, rows=8, data=data)
    begin = torch.tensor([[env.spec.blueprints.index("conv_light"), -1]]).repeat(8, 1)
    episodes = esper.play(env, esper.Random(), family.scenarios(8), fossils=begin)
    assert float(episodes.delivered.score.mean()) > 0.4
    assert len(episodes.decisions()) > 8
    row = int((env.population.life.alpha > 0).sum(1).argmin())  # its fossils alone
    net = env.population.extract(row).eval()
    assert isinstance(net.features, Grafted)
    program = torch.export.export(net, (data.x[:4],), dynamic_shapes=({0: torch.export.Dim("batch", min=1)},))
    torch.export.save(program, tmp_path / "net.pt2")
    torch.save((data.validation_x, data.validation_y), tmp_path / "samples.pt")
    done = subprocess.run([sys.executable, "-c", ELSEWHERE, tmp_path / "net.pt2", tmp_path / "samples.pt"], cwd=tmp_path,
                          capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == pytest.approx(float(episodes.delivered.score[row]), abs=1e-6)


def test_a_gpt_learns_a_text() -> None:
    text = torch.tensor([ord(letter) - 97 for letter in "thequickbrownfoxjumpsoverthelazydog" * 40])
    windows = text.unfold(0, 17, 1)
    counts = text.bincount(minlength=26) / len(text)
    entropy = float(-(counts * counts.clamp(min=1e-9).log()).sum())
    population = Population(Host("gpt", (16,), (16, 16), 26, heads=2, tied=True), 2, optim=OptimConfig(lr=0.01), entropy=entropy)
    for step in range(40):
        if step in (0, 10):
            population.begin_epoch(germinate(population) if not step else torch.tensor([population.spec.action("WAIT")] * 2))
        chosen = windows[torch.randint(len(windows), (24, 2), generator=torch.Generator().manual_seed(step))]
        population.train_step(chosen[..., :-1], chosen[..., 1:])
        if step == 9:
            population.end_epoch()
    held = windows[:50, None].expand(-1, 2, -1)
    loss, score, _ = population.objective.samples(population.forward(held[..., :-1]), held[..., 1:]).mean(1)
    assert bool((loss < 0.7 * entropy).all())
    assert bool((score > 0.3).all())
