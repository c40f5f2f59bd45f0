"""Blueprints: the modules a seed can be. Each is a plain `nn.Module` that starts as the zero function.

The last linear map of every built-in blueprint is zero at birth and sits behind the last norm: a zero map in
front of a norm would be amplified by 1/sqrt(eps) on its first step. A norm right in front of a linear map has
no weights of its own: the map would absorb them.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from esper.kasmina import lift
from esper.kasmina.hosts import Host, transformer_bodies
from esper.kasmina.layers import CausalAttention, InTurn, Modulate, Nothing, Scaled, Taps
from esper.kasmina.lift import Layout, Weights
from esper.leyline import Cost, EsperError, SlotShape
from esper.leyline.keys import seeded
from esper.leyline.plugins import load_plugins

VECTORS, SERIES, IMAGES, TOKENS = KINDS = ("mlp", "conv1d", "cnn", "gpt")
"""What a slot can hold: [B, C], [B, C, L], [B, C, H, W], [B, T, C]; called by hosts that have such slots."""
ALIKE = {"resnet": IMAGES}  # hosts with the slots of another kind


def kind_of(shape: SlotShape) -> str:
    return TOKENS if shape.tokens else KINDS[len(shape.extent)]


class SeedKind(IntEnum):
    NOTHING = 0
    NORM = 1
    ATTENTION = 2
    CONVOLUTION = 3
    MIXER = 4
    DENSE = 5
    CUSTOM = 6


@dataclass(frozen=True)
class Blueprint:
    """One row of the registry: how to build a module for a slot's shape, and what a controller knows."""

    name: str
    build: Callable[[SlotShape], nn.Module]
    hosts: tuple[str, ...]
    kind: SeedKind
    reach: int = 1
    """Taps along each extent that one output sees; 0 is all of it."""
    draws_own_weights: bool = False
    """Fresh rows come from the constructor (user modules) instead of the counter-based uniform draw."""

    @functools.cache  # noqa: B019 - blueprints live as long as the registry
    def prototype(self, shape: SlotShape) -> "Prototype":
        return Prototype(self, shape)


class Prototype:
    """A blueprint at one slot shape: template, layout, cost, descriptor, and the program for G copies."""

    def __init__(self, blueprint: Blueprint, shape: SlotShape) -> None:
        self.blueprint, self.shape = blueprint, shape
        self.template = self._built(0)
        _refuse_unliftable(blueprint.name, self.template, shape)
        self.layout = Layout(self.template)
        self.range = None if blueprint.draws_own_weights else lift.initial_range(self.template)
        self.opening = lift.opening(self.template, bool(shape.extent)) if len(shape.extent) < 2 else None

    def __call__(self, weights: Weights, x: Tensor, opened: bool = False) -> Tensor:
        """Outputs of G seeds for x in lifted layout; `opened` x went through their opening already."""
        return (lift.lifted_rest if opened else lift.lifted)(self.template, weights, x)

    def fresh(self, keys: Tensor) -> Tensor:
        """float32 [R, P]: newborn weights, a function of the keys [R] alone."""
        if self.range is not None:
            return lift.draw_rows(self.range, keys)
        return torch.stack([self.layout.flatten(self._built(key)) for key in keys.tolist()]).to(keys.device)

    def plain(self, row: Tensor) -> nn.Module:
        """A plain module with the weights of one flat row [P]."""
        module = self._built(0).to(row.dtype)
        self.layout.load(module, row)
        return module

    def _built(self, key: int) -> nn.Module:
        with seeded(key):
            return self.blueprint.build(self.shape)

    @property
    def gate_size(self) -> int:
        """Parameters of a gate behind this seed's own: a weight per channel and a bias."""
        return self.shape.channels + 1

    @functools.cached_property
    def cost(self) -> Cost:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            self.template(torch.zeros(1, *self.shape.sample))
        return Cost(self.layout.size, counter.get_total_flops())

    @functools.cached_property
    def descriptor(self) -> tuple[float, ...]:
        """For a controller: kind as flags, log cost per channel, share of the extent that one output sees."""
        flags = [float(self.blueprint.kind == kind) for kind in SeedKind]
        extent = max(*self.shape.extent, self.shape.tokens, 1)
        reach = (self.blueprint.reach or extent) / extent
        logs = [math.log1p(v / self.shape.channels) for v in (self.cost.params, self.cost.flops)]
        return (*flags, *logs, min(reach, 1.0))


def range_table(prototypes: list[Prototype], device: torch.device) -> tuple[Tensor, Tensor]:
    """(centre, radius) of newborn weights, [blueprints, P of the largest] each."""
    width = max(p.layout.size for p in prototypes)
    ranges = [p.range or (torch.empty(0), torch.empty(0)) for p in prototypes]
    centre, radius = (torch.stack([F.pad(part, (0, width - len(part))) for part in each]).to(device)
                      for each in zip(*ranges, strict=True))
    return centre, radius


_IN_PLACE = "works in place, which would overwrite its host; use inplace=False, or x + 1 for x += 1"


def _refuse_unliftable(name: str, module: nn.Module, shape: SlotShape) -> None:
    layers, parameters = list(module.modules()), list(module.parameters())
    for wrong, why in (
        (list(module.buffers()), "keeps buffers (running statistics?); use layers without any"),
        (any(isinstance(layer, nn.modules.dropout._DropoutNd) for layer in layers),
         "uses dropout, whose noise is not keyed; leave it out"),
        (len(list(module.named_parameters(remove_duplicate=False))) != len(parameters),
         "uses one parameter under two names; give each layer its own"),
        (any(not parameter.requires_grad for parameter in parameters),
         "has frozen parameters; make them constants of its forward instead"),
        (any(getattr(layer, "inplace", False) for layer in layers), _IN_PLACE),
    ):
        if wrong:
            raise EsperError(f"blueprint {name!r} {why}")
    x = torch.zeros(2, *shape.sample)
    with torch.no_grad():
        out = (module.body if isinstance(module, Scaled) else module)(x)
    if x._version:
        raise EsperError(f"blueprint {name!r} {_IN_PLACE}")
    if not isinstance(out, Tensor):
        raise EsperError(f"blueprint {name!r} returns a {type(out).__name__}; "
                         "a seed returns one tensor of its input's shape")
    if out.shape != x.shape:
        raise EsperError(f"blueprint {name!r} turns {list(x.shape)} into {list(out.shape)}; "
                         "a seed must keep its input's shape")


def _zero(layer: nn.Module) -> nn.Module:
    for parameter in layer.parameters():
        nn.init.zeros_(parameter)
    return layer


def _conv(shape: SlotShape, inputs: int, outputs: int, taps: int = 1, groups: int = 1) -> nn.Module:
    conv = nn.Conv1d if len(shape.extent) == 1 else nn.Conv2d
    return conv(inputs, outputs, taps, padding=taps // 2, groups=groups)


def _norm(channels: int) -> nn.Module:
    return nn.GroupNorm(1, channels, affine=False)


def _attention(shape: SlotShape) -> nn.Module:
    c, squeezed = shape.channels, max(2, shape.channels // 4)
    pool = nn.AdaptiveAvgPool1d(1) if len(shape.extent) == 1 else nn.AdaptiveAvgPool2d(1)
    narrow, wide = _conv(shape, c, squeezed), _zero(_conv(shape, squeezed, c))
    return Modulate(nn.Sequential(pool, narrow, nn.SiLU(), wide, nn.Tanh()))


def _depthwise(shape: SlotShape) -> nn.Module:
    c = shape.channels
    return nn.Sequential(_norm(c), _conv(shape, c, c, 3, groups=c), nn.ReLU(), _zero(_conv(shape, c, c)))


def _bottleneck(shape: SlotShape) -> nn.Module:
    c, inner = shape.channels, max(4, shape.channels // 4)
    return nn.Sequential(_norm(c), _conv(shape, c, inner), nn.ReLU(), _conv(shape, inner, inner, 3),
                         nn.ReLU(), _zero(_conv(shape, inner, c)))


def _conv_once(shape: SlotShape, taps: int) -> nn.Module:
    c = shape.channels
    return nn.Sequential(nn.GroupNorm(1, c), nn.ReLU(), _zero(_conv(shape, c, c, taps)))


def _conv_twice(shape: SlotShape) -> nn.Module:
    first, last = (nn.GroupNorm(1, shape.channels), nn.ReLU()), _conv_once(shape, 3).children()
    return nn.Sequential(*first, _conv(shape, shape.channels, shape.channels, 3), *last)


def _mixer(shape: SlotShape) -> nn.Module:
    length, inner = shape.extent[0], max(4, shape.extent[0] // 2)
    mix, unmix = nn.Linear(length, inner), _zero(nn.Linear(inner, length))
    return nn.Sequential(_norm(shape.channels), mix, nn.ReLU(), unmix)


def _dense(shape: SlotShape, inner: int, *between: nn.Module, bias: bool = True, fold: int = 1) -> nn.Module:
    """In through `fold` times as many numbers as go out, with something in between."""
    c = shape.channels
    norm = nn.LayerNorm(c, elementwise_affine=False)
    return nn.Sequential(norm, nn.Linear(c, fold * inner, bias), *between, _zero(nn.Linear(inner, c)))


def _shift(shape: SlotShape) -> nn.Module:
    """A gated convolution over the present token and the two before it."""
    c, inner = shape.channels, max(2, shape.channels // 2)
    norm, last = nn.LayerNorm(c, elementwise_affine=False), _zero(nn.Linear(inner, c))
    return nn.Sequential(norm, Taps(3, shape.tokens), nn.Linear(3 * c, 2 * inner), nn.GLU(-1), last)


def _attend(shape: SlotShape, heads: int) -> nn.Module:
    attention = CausalAttention(shape.channels, heads, max(1, shape.channels // 4), shape.tokens)
    _zero(attention.out)
    return nn.Sequential(nn.LayerNorm(shape.channels, elementwise_affine=False), attention)


def _block(shape: SlotShape) -> nn.Module:
    """A whole transformer block, both of whose maps back are zero at birth."""
    attend, think = transformer_bodies(shape.channels, math.gcd(4, shape.channels), shape.tokens)
    _zero(attend[-1].out)  # type: ignore[arg-type]
    _zero(think[-1])
    return InTurn(attend, think)


BLUEPRINTS: dict[tuple[str, str], Blueprint] = {}
"""(kind of slot, name) -> blueprint. The order of insertion is the order of the blueprint head."""


def names_for(kinds: set[str]) -> tuple[str, ...]:
    """Blueprints that fit slots of all these kinds."""
    load_plugins()
    names = dict.fromkeys(name for kind, name in BLUEPRINTS if kind in kinds)
    return tuple(name for name in names if all((kind, name) in BLUEPRINTS for kind in kinds))


def blueprints_for(host: Host | str) -> tuple[str, ...]:
    """Those that fit every slot of a host, or of hosts of this kind."""
    return names_for({ALIKE.get(host, host)} if isinstance(host, str) else
                     set(map(kind_of, host.slots.shapes)))


def find_blueprint(kind: str, name: str) -> Blueprint:
    kind, known = ALIKE.get(kind, kind), ", ".join(blueprints_for(kind))
    if (kind, name) not in BLUEPRINTS:
        raise EsperError(f"no blueprint {name!r} for {kind} hosts; there are {known}")
    return BLUEPRINTS[kind, name]


def _register(blueprint: Blueprint) -> Blueprint:
    for host in blueprint.hosts:
        if host not in KINDS:
            raise EsperError(f"no host kind {host!r} for blueprint {blueprint.name!r}; "
                             f"choose from {', '.join(KINDS)}")
        if (host, blueprint.name) in BLUEPRINTS:
            raise EsperError(f"{host} hosts already have a blueprint {blueprint.name!r}; choose another name")
    BLUEPRINTS.update({(host, blueprint.name): blueprint for host in blueprint.hosts})
    return blueprint


def register_blueprint(name: str, build: Callable[[int], nn.Module], hosts: tuple[str, ...] | str,
                       reach: int = 1) -> Blueprint:
    """Add your own seed: `build(channels)` returns a plain module that keeps its input's shape.

    It is wrapped in a per-channel scale that is zero at birth, so any module starts without disturbing its
    host, and it is initialised by its own constructor.
    """
    def scaled(shape: SlotShape) -> nn.Module:
        return Scaled(build(shape.channels), shape.channels, shape.tokens)

    hosts = tuple(ALIKE.get(host, host) for host in ((hosts,) if isinstance(hosts, str) else hosts))
    return _register(Blueprint(name, scaled, hosts, SeedKind.CUSTOM, reach, draws_own_weights=True))


_CONVOLVED = (SERIES, IMAGES)
_DENSE = (VECTORS, TOKENS)
for _row in (
    Blueprint("noop", lambda shape: Nothing(), KINDS, SeedKind.NOTHING),
    Blueprint("norm", lambda s: _zero(nn.GroupNorm(1, s.channels)), _CONVOLVED, SeedKind.NORM, reach=0),
    Blueprint("attention", _attention, _CONVOLVED, SeedKind.ATTENTION, reach=0),
    Blueprint("depthwise", _depthwise, _CONVOLVED, SeedKind.CONVOLUTION, reach=3),
    Blueprint("bottleneck", _bottleneck, _CONVOLVED, SeedKind.CONVOLUTION, reach=3),
    Blueprint("conv_small", lambda s: _conv_once(s, 1), _CONVOLVED, SeedKind.CONVOLUTION),
    Blueprint("conv_light", lambda s: _conv_once(s, 3), _CONVOLVED, SeedKind.CONVOLUTION, reach=3),
    Blueprint("conv_heavy", _conv_twice, _CONVOLVED, SeedKind.CONVOLUTION, reach=5),
    Blueprint("mixer", _mixer, (SERIES,), SeedKind.MIXER, reach=0),
    Blueprint("norm", lambda s: _zero(nn.LayerNorm(s.channels)), _DENSE, SeedKind.NORM, reach=0),
    Blueprint("low_rank", lambda s: _dense(s, max(2, s.channels // 8), bias=False), _DENSE, SeedKind.DENSE),
    Blueprint("glu", lambda s: _dense(s, max(2, s.channels // 2), nn.GLU(-1), fold=2), _DENSE,
              SeedKind.DENSE),
    Blueprint("mlp_small", lambda s: _dense(s, max(2, s.channels // 2), nn.ReLU()), _DENSE, SeedKind.DENSE),
    Blueprint("mlp_heavy", lambda s: _dense(s, 2 * s.channels, nn.ReLU()), _DENSE, SeedKind.DENSE),
    Blueprint("attention", lambda s: _attend(s, 1), (TOKENS,), SeedKind.ATTENTION, reach=0),
    Blueprint("attention_4", lambda s: _attend(s, 4), (TOKENS,), SeedKind.ATTENTION, reach=0),
    Blueprint("gated_conv", _shift, (TOKENS,), SeedKind.CONVOLUTION, reach=3),
    Blueprint("block", _block, (TOKENS,), SeedKind.ATTENTION, reach=0),
):
    _register(_row)
