"""Hosts: networks with slots. The built-in kinds are stages with a slot after each, lifted to run as many;
modules that users bring are in `foreign`."""

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from esper.kasmina.foreign import Foreign, make_foreign, spelled_out
from esper.kasmina.layers import CausalAttention, Embed, Residual
from esper.kasmina.lift import Layout, Weights, draw_rows, from_copies, initial_range, lifted, row_dim
from esper.leyline import Cost, EsperError, SlotConfig, SlotShape
from esper.leyline.keys import seeded
from esper.leyline.plugins import Registry, loading

MOST_COMPILED = 24
"""Compiled variants of host stages in one process; beyond them stages run eagerly."""


@dataclass(frozen=True)
class Impairments:
    """Handicaps per row and stage, each [R, stages]: data, masks on weights, never another program."""

    one_tap: Tensor  # bool: convolution kernels keep their centre tap only
    width: Tensor  # share of the stage's channels that live; the rest is dead for good
    frozen: Tensor  # bool: the stage keeps its initial weights


class Staged(nn.Module):
    """A bare host: stages, one behind the other, and a head."""

    def __init__(self, stages: Sequence[nn.Module], head: nn.Module) -> None:
        super().__init__()
        self.stages, self.head = nn.ModuleList(stages), head

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            x = stage(x)
        out: Tensor = self.head(x)
        return out


def _mlp(host: "Host") -> nn.Module:
    sizes = (host.inputs[0], *host.widths)
    stages = [nn.Sequential(nn.Linear(a, b), nn.LayerNorm(b), nn.ReLU())
              for a, b in itertools.pairwise(sizes)]
    return Staged(stages, nn.Sequential(nn.Identity(), nn.Flatten(), nn.Linear(sizes[-1], host.classes)))


def _conv(conv: Any, pool: type[nn.Module], mean: type[nn.Module], host: "Host") -> nn.Module:
    stages = []
    for number, (a, b) in enumerate(itertools.pairwise((host.inputs[0], *host.widths)), start=1):
        layer = conv(a, b, host.taps, padding=host.taps // 2, bias=False)
        pools = [pool(2)] if number <= (host.halvings or host.stages) else []
        stages.append(nn.Sequential(layer, nn.GroupNorm(1, b), nn.ReLU(), *pools))
    return Staged(stages, nn.Sequential(mean(1), nn.Flatten(), nn.Linear(host.widths[-1], host.classes)))


def _normed(inputs: int, outputs: int, taps: int, stride: int = 1) -> list[nn.Module]:
    conv = nn.Conv2d(inputs, outputs, taps, stride, padding=taps // 2, bias=False)
    return [conv, nn.GroupNorm(math.gcd(outputs, 8), outputs)]


def _resnet(host: "Host") -> nn.Module:
    """Stages of `depth` residual blocks; all but the first halve the extent."""
    stages, before = [], host.widths[0]
    for number, width in enumerate(host.widths):
        blocks = [] if number else [*_normed(host.inputs[0], width, host.taps), nn.ReLU()]
        for block in range(host.depth):
            stride = 2 if number and not block else 1
            body = nn.Sequential(*_normed(before, width, host.taps, stride), nn.ReLU(),
                                 *_normed(width, width, host.taps))
            changes = stride > 1 or before != width
            shortcut = nn.Sequential(*_normed(before, width, 1, stride)) if changes else None
            blocks += [Residual(body, shortcut), nn.ReLU()]
            before = width
        stages.append(nn.Sequential(*blocks))
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, host.classes))
    return Staged(stages, head)


def transformer_bodies(channels: int, heads: int, length: int) -> tuple[nn.Sequential, nn.Sequential]:
    """Of a pre-norm block: attention to earlier tokens, then a map of each token."""
    attention = CausalAttention(channels, heads, channels // heads, length)
    inner, out = nn.Linear(channels, 4 * channels), nn.Linear(4 * channels, channels)
    return (nn.Sequential(nn.LayerNorm(channels), attention),
            nn.Sequential(nn.LayerNorm(channels), inner, nn.GELU(), out))


def _gpt(host: "Host") -> nn.Module:
    """Token and position embeddings, pre-norm blocks with a slot behind each, a head over the vocabulary."""
    length, width = host.inputs[0], host.widths[0]
    blocks = [nn.Sequential(*map(Residual, transformer_bodies(width, host.heads, length)))
              for _ in host.widths]
    embed, out = Embed(host.classes, length, width), nn.Linear(width, host.classes, bias=False)
    if host.tied:
        out.weight = embed.token.weight
    return Staged([nn.Sequential(embed, blocks[0]), *blocks[1:]], nn.Sequential(nn.LayerNorm(width), out))


class HostKind(NamedTuple):
    """One row of the table of host kinds."""

    module: Callable[["Host"], nn.Module]
    inputs: tuple[int, ...] = ()
    widths: tuple[int, ...] = ()
    handicaps: tuple[str, ...] = ("frozen",)
    """Impairments that mean something for its stages."""
    tokens: bool = False
    """Are samples token numbers, and slots [T, C]?"""
    draws_own_weights: bool = False
    """Initial weights come from the constructor instead of the counter-based uniform draw."""
    foreign: Foreign | None = None
    """Where its slots are, for a module that is not made of stages."""


_TAPS = ("frozen", "width", "one_tap")
HOSTS = Registry[HostKind]("host", HostKind, {
    "mlp": HostKind(_mlp, (40,), (32, 32, 32), ("frozen", "width")),
    "conv1d": HostKind(functools.partial(_conv, nn.Conv1d, nn.MaxPool1d, nn.AdaptiveAvgPool1d), (1, 40),
                       (8, 16, 16), _TAPS),
    "cnn": HostKind(functools.partial(_conv, nn.Conv2d, nn.MaxPool2d, nn.AdaptiveAvgPool2d), (3, 32, 32),
                    (8, 16, 32), _TAPS),
    "resnet": HostKind(_resnet, (3, 32, 32), (16, 32, 64)),
    "gpt": HostKind(_gpt, (64,), (64, 64, 64), tokens=True, draws_own_weights=True),
})
BUILT_IN = tuple(HOSTS)


@dataclass(frozen=True)
class Host:
    """An architecture. `inputs` is one sample's shape: (features,) for `mlp`, (tokens,) for `gpt`, else
    (channels, *extent). `Host.of` makes one from a module of your own."""

    kind: str
    inputs: tuple[int, ...] = ()
    widths: tuple[int, ...] = ()
    classes: int = 10
    """Outputs: classes, tokens of the vocabulary, or 1 for a number."""
    taps: int = 3
    halvings: int = 0
    """Stages of conv1d and cnn that halve the extent, from the first on; 0 is all of them."""
    depth: int = 3
    """Residual blocks in a stage of resnet."""
    heads: int = 4
    """Of attention in gpt."""
    tied: bool = False
    """Does the head of gpt share the token embedding?"""

    def __post_init__(self) -> None:
        if self.kind not in HOSTS:
            raise EsperError(f"no host kind {self.kind!r}; choose from {', '.join(HOSTS)}, or make your own "
                             "with Host.of (in a --plugin, for commands)")
        row = self._row
        for name in ("inputs", "widths"):
            given = getattr(self, name)
            if not isinstance(given, (tuple, list)):
                raise EsperError(f"{name} is {given!r}; expected a tuple of whole numbers")
            object.__setattr__(self, name, tuple(given) or getattr(row, name))
        if (len(self.inputs) != len(row.inputs) or min(self.inputs + self.widths, default=0) < 1
                or min(self.classes, self.depth, self.heads) < 1 or self.taps % 2 == 0
                or not 0 <= self.halvings <= self.stages * (len(self.inputs) > 1)):
            raise EsperError(f"impossible {self.kind} host: inputs {self.inputs} (expected {len(row.inputs)} "
                             f"numbers), widths {self.widths}, {self.classes} classes, {self.taps} taps "
                             f"(odd), {self.halvings} halvings, depth {self.depth}, {self.heads} heads")
        halved = self.halvings or self.stages - (self.kind == "resnet")
        if row.foreign is None and any(extent < 2**halved for extent in self.inputs[1:]):
            raise EsperError(f"{halved} stages halve the extent {self.inputs[1:]} below one; "
                             "use fewer stages or halvings")
        if self.kind == "gpt" and (len(set(self.widths)) > 1 or self.widths[0] % self.heads):
            raise EsperError(f"the blocks of a gpt have one width, a multiple of its {self.heads} heads; "
                             f"got {self.widths}")

    def __getstate__(self) -> dict[str, Any]:
        """Its fields: another process finds the rest by its kind."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    @classmethod
    def of(cls, module: nn.Module | Callable[[], nn.Module], slots: Sequence[str], example: Tensor,
           layouts: Mapping[str, str] | None = None, name: str = "") -> "Host":
        """A host from your own module, with slots behind the submodules of these names.

        Every row starts with the weights of a `module`; a function that returns a new module gives every row
        weights of its own. `example` is a batch that it takes; whole numbers are tokens. What a slot holds is
        found by running the module once: [B, C], [B, C, L], [B, C, H, W] or [B, T, C]; `layouts` says
        "BCL" or "BTC" where that is guessed wrong. `name` is what files call it.
        """
        if name in BUILT_IN or (loading() and name and name in HOSTS):
            raise EsperError(f"{name!r} is the name of a built-in or installed host; choose another")
        with seeded(0):
            made = make_foreign(module, (slots,) if isinstance(slots, str) else tuple(slots), example,
                                dict(layouts or {}))
        HOSTS[name or made.name] = HostKind(
            lambda host: made.plain(), tuple(example.shape[1:]), (1,) * len(made.slots), handicaps=(),
            tokens=not example.is_floating_point(), draws_own_weights=True, foreign=made)
        return cls(name or made.name, classes=made.classes)

    @functools.cached_property
    def _row(self) -> HostKind:
        """As it was when the host was made: another module may take its name later."""
        return HOSTS[self.kind]

    @property
    def stages(self) -> int:
        """Parts of the network, each with a slot behind it."""
        return len(self.widths)

    @property
    def tokens(self) -> bool:
        """Does it read token numbers?"""
        return self._row.tokens

    @property
    def foreign(self) -> Foreign | None:
        return self._row.foreign

    def example(self) -> Tensor:
        """A batch of one."""
        return torch.zeros(1, *self.inputs, dtype=torch.int64 if self.tokens else torch.float32)

    @functools.cached_property
    def slots(self) -> SlotConfig:
        """Found by running the host once."""
        if self.foreign is not None:
            return self.foreign.slots
        shapes: list[SlotShape] = []
        h = self.example()
        with torch.no_grad():
            for stage in self.template.stages:  # type: ignore[union-attr]
                h = stage(h)
                shapes.append(SlotShape(h.shape[2], tokens=h.shape[1]) if self.tokens
                              else SlotShape(h.shape[1], tuple(h.shape[2:])))
        return SlotConfig(tuple(f"after_stage_{i}" for i in range(self.stages)), tuple(shapes))

    def module(self) -> nn.Module:
        """The bare host as a plain module."""
        return self._row.module(self)

    @functools.cached_property
    def template(self) -> nn.Module:
        with seeded(0):
            return self.module()

    @functools.cached_property
    def layout(self) -> Layout:
        return Layout(self.template)

    @functools.cached_property
    def cost(self) -> Cost:
        with FlopCounterMode(display=False) as counter, torch.no_grad(), spelled_out():
            self.template.eval()(self.example())
        return Cost(self.layout.params, counter.get_total_flops())

    def fresh(self, keys: Tensor) -> Tensor:
        """float32 [R, P]: initial weights, a function of the keys [R] alone."""
        if not self._row.draws_own_weights:
            return draw_rows(self._initial_range, keys)
        rows = []
        for key in keys.tolist():
            with seeded(key):
                rows.append(self.layout.flatten(self.module()))
        return torch.stack(rows).to(keys.device)

    @functools.cached_property
    def _initial_range(self) -> tuple[Tensor, Tensor]:
        return initial_range(self.template)

    def run(self, x: Tensor, weights: Callable[[str, int], Weights], at_slot: Callable[[int, Tensor], Tensor],
            compiled: bool = False, keys: Tensor | None = None) -> tuple[Tensor, Weights]:
        """Logits [R, B, classes] (tokens: [R, B * T, classes]) of samples [B, R, *inputs], and new running
        statistics, if there are any.

        `weights(prefix, rows)` are those of a part of the host; `at_slot(index, h)` is what a slot makes of h
        in lifted layout, and may add rows. `keys` [R] are for noise while training; None evaluates.
        """
        if self.foreign is not None:
            return self.foreign.run(x, weights("", x.shape[1]), at_slot, keys)
        h, run = from_copies(x.transpose(0, 1)), _compiled() if compiled else lifted
        for index, stage in enumerate(self.template.stages):  # type: ignore[arg-type]
            prefix = f"stages.{index}."
            h = at_slot(index, run(stage, weights(prefix, h.shape[row_dim(h)]), h, prefix))
        return lifted(self.template.head, weights("head.", h.shape[row_dim(h)]), h, "head."), {}  # type: ignore[arg-type]

    def masks(self, impairments: Impairments) -> tuple[Tensor, Tensor]:
        """(alive [R, P], trainable [R, P]) as 0/1 floats: weights that exist, and weights that may change."""
        rows, width = len(impairments.frozen), impairments.width
        used = {"one_tap": impairments.one_tap, "width": width != 1, "frozen": impairments.frozen}
        wrong = [name for name, on in used.items() if name not in self._row.handicaps and bool(on.any())]
        if wrong:
            what, able = wrong[0].replace("one_tap", "taps"), " and ".join(self._row.handicaps) or "nothing"
            raise EsperError(f"{self.kind} hosts have no {what} to impair; of impairments they take {able}")
        if bool(((width <= 0) | (width > 1)).any()):
            raise EsperError("the width of an impaired stage is a share in (0, 1]; "
                             "a stage needs one live channel")
        alive, trainable = [], []
        for name, shape in zip(self.layout.names, self.layout.shapes, strict=True):
            mask, free = torch.ones(2, rows, *shape)
            if name.startswith("stages.") and self._row.handicaps:
                stage, ones = int(name.split(".")[1]), [1] * len(shape)
                kept = torch.arange(shape[0]) < torch.ceil(width[:, stage, None].double() * shape[0] - 1e-6)
                mask *= kept.reshape(rows, -1, *ones[1:])
                if len(shape) > 2:
                    centre = torch.zeros(shape[2:])
                    centre.view(-1)[centre.numel() // 2] = 1.0
                    mask *= torch.where(impairments.one_tap[:, stage].reshape(-1, *ones), centre, 1.0)
                free *= (~impairments.frozen[:, stage]).reshape(-1, *ones)
            alive.append(mask.flatten(1))
            trainable.append((mask * free).flatten(1))
        return torch.cat(alive, 1), torch.cat(trainable, 1) * self.layout.free()


@functools.cache
def _compiled() -> Callable[..., Tensor]:
    """`lifted`, compiled once per stage and shape. Shapes are static, and the limit bounds the variants."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MOST_COMPILED)
    return torch.compile(lifted, dynamic=False)
