"""Hosts: small networks of stages with a slot after each. One plain module is lifted to run as many."""

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from esper.kasmina.lift import Layout, Weights, draw_rows, initial_range, lifted
from esper.leyline import Cost, EsperError, SlotConfig, SlotShape
from esper.leyline.keys import seeded

MOST_COMPILED = 24
"""Compiled variants of host stages in one process; beyond them stages run eagerly."""


@dataclass(frozen=True)
class Impairments:
    """Handicaps per row and stage, each [R, stages]: data, masks on weights, never another program."""

    one_tap: Tensor  # bool: convolution kernels keep their centre tap only
    width: Tensor  # share of the stage's channels that live; the rest is dead for good
    frozen: Tensor  # bool: the stage keeps its initial weights


def _mlp_stage(inputs: int, outputs: int, taps: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, outputs), nn.LayerNorm(outputs), nn.ReLU())


def _conv_stage(conv: Any, pool: type[nn.Module], inputs: int, outputs: int, taps: int) -> nn.Module:
    layer = conv(inputs, outputs, taps, padding=taps // 2, bias=False)
    return nn.Sequential(layer, nn.GroupNorm(1, outputs), nn.ReLU(), pool(2))


class _HostKind(NamedTuple):
    """One row of the table of host kinds."""

    stage: Callable[[int, int, int], nn.Module]
    pool: Callable[[], nn.Module]  # what brings the last stage's output to a vector
    inputs: tuple[int, ...]
    widths: tuple[int, ...]


HOSTS: dict[str, _HostKind] = {
    "mlp": _HostKind(_mlp_stage, nn.Identity, (40,), (32, 32, 32)),
    "conv1d": _HostKind(functools.partial(_conv_stage, nn.Conv1d, nn.MaxPool1d),
                        lambda: nn.AdaptiveAvgPool1d(1), (1, 40), (8, 16, 16)),
    "cnn": _HostKind(functools.partial(_conv_stage, nn.Conv2d, nn.MaxPool2d),
                     lambda: nn.AdaptiveAvgPool2d(1), (3, 32, 32), (8, 16, 32)),
}


@dataclass(frozen=True)
class Host:
    """An architecture. `inputs` is one sample's shape: (features,) for `mlp`, else (channels, *extent)."""

    kind: str
    inputs: tuple[int, ...] = ()
    widths: tuple[int, ...] = ()
    classes: int = 10
    """Outputs: classes, or 1 for a number."""
    taps: int = 3
    halvings: int = 0
    """Stages that halve the extent, from the first on; 0 is all of them."""

    def __post_init__(self) -> None:
        if self.kind not in HOSTS:
            raise EsperError(f"no host kind {self.kind!r}; choose from {', '.join(HOSTS)}")
        row = HOSTS[self.kind]
        for name in ("inputs", "widths"):
            given = getattr(self, name)
            if not isinstance(given, (tuple, list)):
                raise EsperError(f"{name} is {given!r}; expected a tuple of whole numbers")
            object.__setattr__(self, name, tuple(given) or getattr(row, name))
        if (len(self.inputs) != len(row.inputs) or min(self.inputs + self.widths) < 1 or self.classes < 1
                or self.taps % 2 == 0 or not 0 <= self.halvings <= self.stages * (len(self.inputs) > 1)):
            raise EsperError(f"impossible {self.kind} host: inputs {self.inputs} (expected {len(row.inputs)} "
                             f"numbers), widths {self.widths}, {self.classes} classes, {self.taps} taps "
                             f"(odd), {self.halvings} halvings")
        halved = self._halved(self.stages)
        if any(extent < 2**halved for extent in self.inputs[1:]):
            raise EsperError(f"{halved} stages halve the extent {self.inputs[1:]} below one; "
                             "use fewer stages or halvings")

    def _halved(self, stages: int) -> int:
        """How often the extent is halved behind so many stages."""
        return min(stages, self.halvings or stages)

    @property
    def stages(self) -> int:
        return len(self.widths)

    @functools.cached_property
    def slots(self) -> SlotConfig:
        shapes = [SlotShape(width, tuple(extent // 2 ** self._halved(i + 1) for extent in self.inputs[1:]))
                  for i, width in enumerate(self.widths)]
        return SlotConfig(tuple(f"after_stage_{i}" for i in range(self.stages)), tuple(shapes))

    def module(self) -> nn.Module:
        """The bare host as a plain module: `stages` (an `nn.ModuleList`) and `head`."""
        row = HOSTS[self.kind]
        sizes = (self.inputs[0], *self.widths)
        net = nn.Module()
        net.stages = nn.ModuleList(row.stage(a, b, self.taps) for a, b in itertools.pairwise(sizes))
        for number, stage in enumerate(net.stages):
            if len(self.inputs) > 1 and self._halved(number + 1) == self._halved(number):
                del stage[-1]  # type: ignore[operator]
        net.head = nn.Sequential(row.pool(), nn.Flatten(), nn.Linear(sizes[-1], self.classes))
        return net

    @functools.cached_property
    def template(self) -> nn.Module:
        with seeded(0):
            return self.module()

    @functools.cached_property
    def layout(self) -> Layout:
        return Layout(self.template)

    @functools.cached_property
    def cost(self) -> Cost:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            h = torch.zeros(1, *self.inputs)
            for stage in self.template.stages:  # type: ignore[union-attr]
                h = stage(h)
            self.template.head(h)  # type: ignore[operator]
        return Cost(self.layout.size, counter.get_total_flops())

    def fresh(self, keys: Tensor) -> Tensor:
        """float32 [R, P]: initial weights, a function of the keys [R] alone."""
        return draw_rows(self._initial_range, keys)

    @functools.cached_property
    def _initial_range(self) -> tuple[Tensor, Tensor]:
        return initial_range(self.template)

    def enter(self, x: Tensor) -> Tensor:
        """Samples [B, N, *inputs] in lifted layout."""
        return x.transpose(0, 1) if x.dim() == 3 else x

    def stage(self, index: int, weights: Weights, h: Tensor, compiled: bool = False) -> Tensor:
        run, stage = _compiled() if compiled else lifted, self.template.stages[index]  # type: ignore[index]
        return run(stage, weights, h, f"stages.{index}.")  # type: ignore[arg-type]

    def head(self, weights: Weights, h: Tensor) -> Tensor:
        """Logits [N, B, classes]."""
        return lifted(self.template.head, weights, h, "head.")  # type: ignore[arg-type]

    def masks(self, impairments: Impairments) -> tuple[Tensor, Tensor]:
        """(alive [R, P], trainable [R, P]) as 0/1 floats: weights that exist, and weights that may change."""
        rows, width = len(impairments.frozen), impairments.width
        if self.kind == "mlp" and bool(impairments.one_tap.any()):
            raise EsperError("mlp stages have no taps; use width or frozen impairments on mlp hosts")
        if bool(((width <= 0) | (width > 1)).any()):
            raise EsperError("the width of an impaired stage is a share in (0, 1]; "
                             "a stage needs one live channel")
        alive, trainable = [], []
        for name, shape in zip(self.layout.names, self.layout.shapes, strict=True):
            mask, free = torch.ones(2, rows, *shape)
            if name.startswith("stages."):
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
        return torch.cat(alive, 1), torch.cat(trainable, 1)


@functools.cache
def _compiled() -> Callable[..., Tensor]:
    """`lifted`, compiled once per stage and shape. Shapes are static, and the limit bounds the variants."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MOST_COMPILED)
    return torch.compile(lifted, dynamic=False)
