"""One suite for every blueprint x style x host kind, and for a blueprint a user brings."""

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from esper.kasmina import (
    BLUEPRINTS,
    HOSTS,
    Host,
    Population,
    blueprints_for,
    find_blueprint,
    register_blueprint,
)
from esper.kasmina.blending import Graft
from esper.kasmina.blueprints import KINDS
from esper.kasmina.lift import _conv_as_matmul, from_copies, to_copies
from esper.leyline import EsperError, SlotShape, Style
from tests.reference import samples, small_hosts, wait


class Squash(nn.Module):
    """A module the lifting table does not know: runs through vmap."""

    def __init__(self, channels: int, dim: int = 1) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.linspace(0.5, 1.5, channels))
        self.mix = nn.Linear(channels, channels)
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        last = x.movedim(self.dim, -1)
        return (torch.atan(last * self.slope) + 0.1 * self.mix(last).sin()).movedim(-1, self.dim)


@pytest.fixture(autouse=True)
def user_blueprint() -> Iterator[None]:
    register_blueprint("squash", Squash, KINDS[:3])
    register_blueprint("squash", lambda channels: Squash(channels, -1), "gpt")
    yield
    for kind in KINDS:
        del BLUEPRINTS[kind, "squash"]


EVERY = [(kind, name, style) for kind in KINDS for name in (*blueprints_for(kind), "squash") for style in Style]


def shapes(kind: str) -> tuple[SlotShape, ...]:
    return Host(kind, *(((16,), (16, 16, 16)) if kind == "gpt" else ())).slots.shapes


def newborn(kind: str, name: str, style: Style, shape: SlotShape) -> Graft:
    prototype = find_blueprint(kind, name).prototype(shape)
    gate = nn.utils.skip_init(nn.Linear, shape.channels, 1) if style is Style.GATE else None
    for parameter in () if gate is None else gate.parameters():
        nn.init.zeros_(parameter)
    return Graft(prototype.plain(prototype.fresh(torch.tensor([7]))[0]), style, 1.0, bool(shape.tokens), gate)


@pytest.mark.parametrize(("kind", "name", "style"), EVERY)
def test_birth_and_first_steps(kind: str, name: str, style: Style) -> None:
    for shape in shapes(kind):
        generator = torch.Generator().manual_seed(0)
        graft = newborn(kind, name, style, shape)
        h, goal = (torch.randn(64, *shape.sample, generator=generator) for _ in range(2))
        torch.testing.assert_close(graft(h), h, rtol=0, atol=1e-6)
        parameters = dict(graft.named_parameters())
        if not parameters or name == "noop":
            continue
        optim = torch.optim.SGD(parameters.values(), 0.01)
        norms = dict.fromkeys(parameters, 0.0)
        for step in range(3):
            optim.zero_grad()
            (graft(h) - goal).square().mean().backward()
            norms = {n: max(norms[n], float(p.grad.norm())) for n, p in parameters.items()}
            nn.utils.clip_grad_norm_(parameters.values(), 1.0)
            optim.step()
            if step == 0:
                assert float((graft(h) - h).detach().norm() / h.norm()) < 0.05
        assert min(norms.values()) > 1e-6 * max(norms.values()), norms


def crowd(kind: str) -> Population:
    """A float64 population that holds every blueprint in every style, three to a host."""
    names = (*blueprints_for(kind),)
    combos = [(b, s) for b in range(len(names)) for s in Style]
    rows = -(-len(combos) // 3)
    flat = (combos * 2)[: rows * 3]
    population = Population(Host(kind, **small_hosts()[kind]), rows, dtype=torch.float64)
    blueprint, style = (torch.tensor([c[i] for c in flat]).view(rows, 3) for i in (0, 1))
    population.install(torch.arange(rows), blueprint, style, torch.ones(rows, 3))
    return population


@pytest.mark.parametrize("kind", HOSTS)
def test_population_of_newborns_is_its_bare_hosts(kind: str) -> None:
    population = crowd(kind)
    x = samples(population.host, 8, population.rows)
    bare = population.forward(x, alpha=torch.zeros(population.rows, 3))
    torch.testing.assert_close(population.forward(x), bare, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", HOSTS)
def test_declared_costs_are_the_counted_ones(kind: str) -> None:
    population = crowd(kind)
    params, flops = population.costs()
    for row in range(population.rows):
        net = population.extract(row)
        for slot, shape in enumerate(population.host.slots.shapes):
            with FlopCounterMode(display=False) as counter, torch.no_grad():
                net.grafts[slot](torch.zeros(1, *shape.sample, dtype=torch.float64))
            assert int(params[row, slot]) == sum(p.numel() for p in net.grafts[slot].parameters())
            assert int(flops[row, slot]) == counter.get_total_flops()


@pytest.mark.parametrize(("kind", "width"), [(kind, width) for kind in KINDS for width in (3, 8, 20)])
def test_lifted_seeds_do_the_declared_work(kind: str, width: int) -> None:
    """The program for G copies spends G times the declared FLOPs and gives each copy its own module's output."""
    tokens, extent = shapes(kind)[0].tokens and 7, tuple(8 for _ in shapes(kind)[0].extent)
    shape = SlotShape(width, extent, tokens)
    for name in (*blueprints_for(kind),):
        prototype = find_blueprint(kind, name).prototype(shape)
        flat = prototype.fresh(torch.arange(4))
        flat += 0.1 * torch.randn(flat.shape, generator=torch.Generator().manual_seed(1))
        weights, _ = prototype.layout.split(flat)
        copies = torch.randn(4, 2 * max(tokens, 1), width, *shape.extent)
        x = from_copies(copies)
        in_place = {torch.ops.aten.baddbmm_: lambda out, a, b, **_: 2 * math.prod(a) * b[2]}  # unknown to PyTorch
        with FlopCounterMode(display=False, custom_mapping=in_place) as counter, torch.no_grad():
            out = prototype(weights, x)
        assert counter.get_total_flops() == 2 * 4 * prototype.cost.flops, name
        for copy in range(4):
            module = prototype.blueprint.build(shape)
            prototype.layout.load(module, flat[copy])
            rows = copies[copy].view(2, *shape.sample)  # tokens are folded into the batch
            torch.testing.assert_close(to_copies(out)[copy].reshape(rows.shape), module(rows).detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("extent", "taps"), [((9,), (3,)), ((6, 7), (3, 3)), ((6, 5), (1, 1)), ((6, 5), (3, 1))])
def test_convolution_as_a_matrix_product(extent: tuple[int, ...], taps: tuple[int, ...]) -> None:
    x = torch.randn(2, 4, 3, *extent, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, 5, 3, *taps, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    padding = tuple(size // 2 for size in taps)
    conv = torch.nn.functional.conv1d if len(taps) == 1 else torch.nn.functional.conv2d
    expected = conv(x.flatten(1, 2), weight.flatten(0, 1), bias.flatten(), padding=padding, groups=4).unflatten(1, (4, 5))
    got = _conv_as_matmul(x, weight, bias, padding)
    direction = torch.randn_like(expected)
    torch.testing.assert_close(got, expected)
    for a, b in zip(torch.autograd.grad(got, [x, weight, bias], direction),
                    torch.autograd.grad(expected, [x, weight, bias], direction), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("kind", KINDS)
def test_descriptors_tell_blueprints_apart(kind: str) -> None:
    rows = [find_blueprint(kind, name).prototype(shapes(kind)[0]).descriptor for name in blueprints_for(kind)]
    assert len({len(row) for row in rows}) == 1
    assert len(set(rows)) == len(rows)
    assert all(0 <= value < 12 for row in rows for value in row)


@pytest.mark.parametrize("kind", HOSTS)
def test_export_with_dynamic_batch(kind: str) -> None:
    population = crowd(kind)
    for bank in population.banks[1:]:  # newborns are the zero function: a wrong export would not show
        bank.weights += 0.1 * torch.randn(bank.weights.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def example(size: int) -> Tensor:
        x = samples(population.host, size)
        return x.float() if x.is_floating_point() else x

    for row in range(population.rows):
        net = population.extract(row).float().eval()
        x = example(4)
        exported = torch.export.export(net, (x,), dynamic_shapes=({0: torch.export.Dim("batch", min=1)},)).module()
        for size in (1, 7):
            x = example(size)
            torch.testing.assert_close(exported(x), net(x), rtol=0, atol=1e-6)


def test_user_module_is_born_from_its_own_constructor() -> None:
    population = Population(Host("conv1d"), 3)
    number = population.spec.blueprints.index("squash")
    population.install(torch.arange(3), torch.full((3, 3), number), torch.zeros(3, 3), torch.ones(3, 3))
    seed = population.graft(1, 0).seed
    torch.testing.assert_close(seed.body.slope.detach(), torch.linspace(0.5, 1.5, 8))
    assert not torch.equal(seed.body.mix.weight, population.graft(2, 0).seed.body.mix.weight)


class Attend(nn.Module):
    """Attention along the length, residual-free."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(channels, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.transpose(1, 2)
        out: Tensor = self.attention(rows, rows, rows, need_weights=False)[0]
        return out.transpose(1, 2)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning", "ignore:There is a performance drop:UserWarning")
@pytest.mark.parametrize("build", [
    Attend,
    lambda c: nn.Sequential(nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(c, c), nn.Unflatten(1, (c, 1)), nn.Upsample(8)),
    lambda c: nn.Sequential(nn.Conv1d(c, 2 * c, 3, padding=2, dilation=2, padding_mode="circular"), nn.GLU(dim=1)),
    lambda c: nn.Sequential(nn.GroupNorm(2, c), nn.Conv1d(c, c, 5, padding="same", groups=2), nn.LayerNorm(8)),
    lambda c: nn.Sequential(nn.InstanceNorm1d(c), nn.utils.weight_norm(nn.Conv1d(c, c, 1)), nn.Softmax(dim=1)),
    lambda c: nn.Sequential(nn.Conv1d(c, c, 1, padding=1), nn.Conv1d(c, c, 3), nn.GLU(dim=2), nn.Upsample(8)),
])
def test_user_modules_of_many_kinds_equal_themselves(build: object, device: str) -> None:
    """Trained as four copies with batch 4, so that a mix-up of rows and samples could not raise, only be wrong."""
    register_blueprint("theirs", build, ("conv1d",))
    try:
        population = Population(Host("conv1d", (2, 16), (4,)), 4, dtype=torch.float64, device=device)
        number = population.spec.blueprints.index("theirs")
        population.install(torch.arange(4), torch.full((4, 1), number), torch.zeros(4, 1), torch.ones(4, 1))
        x, y = torch.randn(4, 4, 2, 16, dtype=torch.float64, device=device), torch.randint(10, (4, 4), device=device)
        wait(population)
        for _ in range(4):
            population.train_step(x, y)
        logits = population.forward(x)
        for row in range(4):
            net = population.extract(row)
            assert float(net.grafts[0].delta(net.stages[0](x[:, row])).detach().abs().max()) > 0
            torch.testing.assert_close(net(x[:, row]).detach(), logits[:, row], rtol=0, atol=1e-9)
    finally:
        del BLUEPRINTS["conv1d", "theirs"]


class Overwriting(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        x += 1.0
        return super().forward(x)


@pytest.mark.parametrize(("build", "word"), [
    (lambda c: nn.Sequential(nn.Linear(c, c), nn.SiLU(inplace=True)), "in place"),
    (lambda c: Overwriting(c, c), "in place"),
    (lambda c: nn.Linear(c, c).requires_grad_(False), "frozen"),
    (lambda c: nn.Linear(c, 2 * c), "keep its input's shape"),
    (lambda c: nn.BatchNorm1d(c), "buffers"),
    (lambda c: nn.Sequential(nn.Dropout(0.1), nn.Linear(c, c)), "dropout"),
    (lambda c: nn.Sequential(*[nn.Linear(c, c)] * 2), "two names"),
])
def test_modules_that_cannot_be_lifted_are_refused(build: object, word: str) -> None:
    register_blueprint("refused", build, ("mlp",))
    try:
        with pytest.raises(EsperError, match=word):
            Population(Host("mlp"), 1)
    finally:
        del BLUEPRINTS["mlp", "refused"]


def test_registry_refuses_strangers() -> None:
    with pytest.raises(EsperError, match="already"):
        register_blueprint("norm", Squash, ("mlp",))
    with pytest.raises(EsperError, match="no host kind"):
        register_blueprint("mine", Squash, ("mlp", "transformer"))
    assert "mine" not in blueprints_for("mlp")
    with pytest.raises(EsperError, match="there are noop"):
        find_blueprint("mlp", "conv_heavy")


def test_stages_that_keep_their_extent_are_stages_like_any_other() -> None:
    host = Host("conv1d", widths=(4, 4, 6, 6), halvings=2)
    assert [shape.extent for shape in host.slots.shapes] == [(20,), (10,), (10,), (10,)]
    population = Population(host, 3, dtype=torch.float64)
    blueprint = torch.tensor([[1, 2, 3, 4]] * 3)
    population.install(torch.arange(3), blueprint, torch.zeros_like(blueprint), torch.full(blueprint.shape, 0.5))
    x, y = torch.randn(5, 3, 1, 40, dtype=torch.float64), torch.randint(10, (5, 3))
    wait(population)
    for _ in range(3):
        population.train_step(x, y)
    logits = population.forward(x)
    for row in range(3):
        torch.testing.assert_close(population.extract(row)(x[:, row]), logits[:, row])
    assert host.cost.flops > Host("conv1d", widths=(4, 4, 6, 6)).cost.flops
    for kind, number in (("conv1d", 4), ("conv1d", -1), ("mlp", 1)):
        with pytest.raises(EsperError, match="halvings"):
            Host(kind, halvings=number)
