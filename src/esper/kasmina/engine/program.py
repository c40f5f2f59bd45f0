"""Modules as data: a plain module becomes a list of ops that one kernel reads, for every row its own.

An op turns the numbers of a sample, [*extent, C] flattened, into those of the next op: with channels last,
neighbours are read together. Between ops lie values before their activation: whoever reads them applies it.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from esper.kasmina.blueprints import Prototype
from esper.kasmina.hosts import Host
from esper.kasmina.layers import Modulate, Scaled
from esper.kasmina.lift import Layout
from esper.leyline import SlotShape, Style


class Code(IntEnum):
    NORM = 0  # over all numbers of a sample
    MAP = 1  # a linear map: dense, over positions, or with taps
    DEPTHWISE = 2  # taps of each channel by itself; with one tap, a scale
    MEAN = 3  # over positions
    GLU = 4
    POOL = 5  # the larger of two neighbours, along every extent
    MODULATE = 6  # the program's input times one number per channel
    ACTIVATE = 7
    GATE = 8  # times one number per sample, found from the means of the program's input


ACTIVATIONS: dict[type[nn.Module], int] = {nn.ReLU: 1, nn.SiLU: 2, nn.Tanh: 3}  # 0 is none


class Op(NamedTuple):
    """One op, as the kernels read it: whole numbers in this order."""

    code: int
    act: int  # activation of what it reads
    weight: int = -1  # place in the module's flat row, -1 is none
    bias: int = -1
    inputs: int = 0  # of a map, per tap
    outputs: int = 0
    taps: int = 1
    taps_wide: int = 1
    height: int = 1
    width: int = 1
    columns: int = 1  # how often a map is applied in a sample
    input_stride: int = 1  # from one input of a map to the next, and from one column to the next
    column_stride: int = 1
    output_stride: int = 1
    output_column_stride: int = 1
    channels: int = 1
    positions: int = 1
    size: int = 1  # numbers of a sample behind it
    last: int = 0
    # Sizes of tiles, powers of two:
    numbers_tile: int = 1  # a sample behind it
    samples_tile: int = 1
    outputs_tile: int = 16
    positions_tile: int = 1
    packed: int = 0  # backward: inputs and taps in one row; 0 is one tap after the other
    columns_tile: int = 64
    channels_tile: int = 1
    inputs_tile: int = 16
    spans_tile: int = 1  # channels of samples, with all their positions
    packed_forward: int = 0
    columns_tile_forward: int = 64

    def tiled(self) -> "Op":
        """With the tiles that its sizes ask for."""
        whole, inner, outer = _power(self.size), _power(self.inputs, 16), _power(self.outputs, 16)
        inputs, outputs, packed = min(inner, 64), min(outer, 64), _power(self.inputs * self.taps, 16)
        packed = packed if packed <= 128 and packed < self.taps * inner else 0
        forward = packed if packed <= 64 else 0
        return self._replace(
            numbers_tile=whole, samples_tile=max(1, 2048 // whole), positions_tile=_power(self.positions),
            channels_tile=_power(self.channels), inputs_tile=inputs, outputs_tile=outputs,
            spans_tile=max(8, min(1024, 2048 // _power(self.positions))),
            packed=packed, columns_tile=max(64, min(128, 4096 // max(packed, inputs, outputs))),
            packed_forward=forward,
            columns_tile_forward=max(64, min(128 if forward or self.columns < 64 else 256,
                                             8192 // max(forward, inputs, outputs))))


FIELDS = len(Op._fields)
LARGEST = 1 << 18
"""Numbers of a tile that a kernel has room for."""


def _power(number: int, least: int = 1) -> int:
    """The next power of two."""
    return max(least, 1 << max(number - 1, 0).bit_length())


class _Unknown(Exception):
    """A layer or a use of it that has no op."""


@dataclass
class _Writer:
    layout: Layout
    channels: int
    extent: tuple[int, ...]
    ops: list[Op] = field(default_factory=list)
    planar: bool = False
    """Does the first op read [C, *extent], as users bring samples? Of few channels that is faster, too."""
    act: int = 0
    """Activation of what the last op wrote, still to be applied."""

    @property
    def positions(self) -> int:
        return _product(self.extent)

    def place(self, name: str) -> int:
        """Of a parameter in the flat row; -1 if there is none of this name."""
        if name not in self.layout.names:
            return -1
        return sum(self.layout.sizes[: self.layout.names.index(name)])

    def ask(self, prefix: str) -> None:
        """A weight that has another name in the layout has no place here."""
        if self.place(prefix + "weight") < 0:
            raise _Unknown

    def add(self, code: Code, prefix: str, **values: int) -> None:
        if self.planar and code is not Code.MAP:
            raise _Unknown
        values = {"channels": self.channels, "positions": self.positions} | values
        height, width = (1, 1, *self.extent)[-2:]
        size = self.channels * self.positions
        parameters = {"weight": self.place(prefix + "weight"), "bias": self.place(prefix + "bias")}
        self.ops.append(Op(code, self.act, **{**parameters, "height": height, "width": width, "size": size,
                                              **values}))
        self.act, self.planar = 0, False


def _product(extent: tuple[int, ...]) -> int:
    return extent[0] * _product(extent[1:]) if extent else 1


def _conv(layer: Any, prefix: str, to: _Writer) -> None:
    odd = all(taps % 2 and pad == taps // 2 for taps, pad in zip(layer.kernel_size, layer.padding,
                                                                 strict=True))
    if set(layer.stride) | set(layer.dilation) != {1} or layer.padding_mode != "zeros" or not odd:
        raise _Unknown
    taps = {"taps": _product(layer.kernel_size), "taps_wide": layer.kernel_size[-1]}
    if layer.groups == layer.in_channels == layer.out_channels > 1:
        return to.add(Code.DEPTHWISE, prefix, **taps)
    if layer.groups > 1:
        raise _Unknown
    to.channels = layer.out_channels
    to.ask(prefix)
    steps = (to.positions, 1) if to.planar else (1, layer.in_channels)
    to.add(Code.MAP, prefix, inputs=layer.in_channels, outputs=layer.out_channels, columns=to.positions,
           input_stride=steps[0], column_stride=steps[1], output_column_stride=layer.out_channels, **taps)


def _linear(layer: Any, prefix: str, to: _Writer) -> None:
    if len(to.extent) > 1 or (to.extent and to.planar):
        raise _Unknown
    to.ask(prefix)
    columns, inputs, outputs = (to.channels if to.extent else 1), layer.in_features, layer.out_features
    if to.extent:
        to.extent = (outputs,)
    else:
        to.channels = outputs
    step = columns if to.extent else 1
    to.add(Code.MAP, prefix, inputs=inputs, outputs=outputs, columns=columns, input_stride=step,
           output_stride=step)


def _norm(layer: Any, prefix: str, to: _Writer) -> None:
    whole = layer.num_groups == 1 if isinstance(layer, nn.GroupNorm) else not to.extent
    if not whole or layer.eps != 1e-5 or (to.place(prefix + "weight") < 0) != (to.place(prefix + "bias") < 0):
        raise _Unknown
    to.add(Code.NORM, prefix)


def _activation(layer: Any, prefix: str, to: _Writer) -> None:
    if to.act:
        to.add(Code.ACTIVATE, prefix)
    to.act = ACTIVATIONS[type(layer)]


def _pool(layer: Any, prefix: str, to: _Writer) -> None:
    sizes = {layer.kernel_size, layer.stride}
    if sizes != {2} or layer.padding or layer.dilation != 1 or layer.ceil_mode or layer.return_indices:
        raise _Unknown
    before = to.positions
    height, width = (1, *to.extent)[-2:]
    to.extent = tuple(size // 2 for size in to.extent)
    to.add(Code.POOL, prefix, height=height, width=width, positions=before)


def _mean(layer: Any, prefix: str, to: _Writer) -> None:
    sizes = layer.output_size if isinstance(layer.output_size, tuple) else (layer.output_size,)
    if set(sizes) != {1}:
        raise _Unknown
    to.add(Code.MEAN, prefix, size=to.channels)
    to.extent = (1,) * len(to.extent)


def _glu(layer: Any, prefix: str, to: _Writer) -> None:
    if layer.dim not in (1, -1) or (to.extent and layer.dim == -1):
        raise _Unknown
    if to.act:
        to.add(Code.ACTIVATE, prefix)
    to.channels //= 2
    to.add(Code.GLU, prefix)


def _flatten(layer: Any, prefix: str, to: _Writer) -> None:
    if layer.start_dim != 1 or layer.end_dim != -1 or (to.channels > 1 and to.positions > 1):
        raise _Unknown
    to.channels, to.extent = to.channels * to.positions, ()


def _modulate(layer: Any, prefix: str, to: _Writer) -> None:
    if to.ops or to.act:
        raise _Unknown  # the kernels know the program's own input alone
    channels, extent = to.channels, to.extent
    _write(layer.net, prefix + "net.", to)
    if to.channels != channels or to.positions != 1 or not to.ops:  # the first op may not be this one
        raise _Unknown
    to.extent = extent
    to.add(Code.MODULATE, prefix)


def _scaled(layer: Any, prefix: str, to: _Writer) -> None:
    _write(layer.body, prefix + "body.", to)
    to.add(Code.DEPTHWISE, prefix, weight=to.place(prefix + "scale"))


def _sequential(layer: Any, prefix: str, to: _Writer) -> None:
    for name, child in layer._modules.items():
        _write(child, f"{prefix}{name}.", to)


_WRITERS: dict[type[nn.Module], Callable[[Any, str, _Writer], None]] = {
    **dict.fromkeys((nn.Conv1d, nn.Conv2d), _conv),
    nn.Linear: _linear,
    **dict.fromkeys((nn.GroupNorm, nn.LayerNorm), _norm),
    **dict.fromkeys(ACTIVATIONS, _activation),
    **dict.fromkeys((nn.MaxPool1d, nn.MaxPool2d), _pool),
    **dict.fromkeys((nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d), _mean),
    nn.GLU: _glu,
    nn.Flatten: _flatten,
    nn.Identity: lambda layer, prefix, to: None,
    nn.Sequential: _sequential,
    Modulate: _modulate,
    Scaled: _scaled,
}


def _write(module: nn.Module, prefix: str, to: _Writer) -> None:
    rule = _WRITERS.get(type(module))
    if rule is None or module._forward_hooks or module._forward_pre_hooks:
        raise _Unknown
    rule(module, prefix, to)


def program_of(module: nn.Module, shape: SlotShape, layout: Layout, prefix: str = "",
               planar: bool = False) -> list[Op] | None:
    """The ops of a module on samples of this shape; None if any of its layers has no op.

    `layout` is of the whole that the module is a part of, `prefix` its name there.
    """
    to = _Writer(layout, shape.channels, shape.extent, planar=planar)
    try:
        _write(module, prefix, to)
    except _Unknown:
        return None
    if to.act:
        to.add(Code.ACTIVATE, prefix)
    return finished(to.ops) if to.ops else None


def has_room(ops: list[Op]) -> bool:
    """Are samples small enough for the kernels?"""
    by_channel, by_span = (Code.NORM, Code.DEPTHWISE, Code.GATE), (Code.MEAN, Code.MODULATE)
    return all(op.numbers_tile * op.channels_tile <= LARGEST for op in ops if op.code in by_channel) and all(
        op.positions_tile * op.spans_tile <= LARGEST for op in ops if op.code in by_span)


def finished(ops: list[Op]) -> list[Op]:
    return [op._replace(last=int(op is ops[-1])).tiled() for op in ops]


def styled(ops: list[Op], style: Style, shape: SlotShape, size: int) -> list[Op]:
    """A seed's program with what its style does behind it; gates lie behind its own `size` parameters."""
    numbers = shape.channels * _product(shape.extent)
    if style is Style.MULTIPLY:
        ops = [*ops, Op(Code.MODULATE, ACTIVATIONS[nn.Tanh], channels=numbers, size=numbers)]
    if style is Style.GATE:
        ops = [*ops, Op(Code.GATE, 0, size, size + shape.channels, channels=shape.channels,
                        positions=_product(shape.extent), size=numbers)]
    return finished(ops)


class Programs(NamedTuple):
    """What a host and its seeds are made of, as ops."""

    stages: list[list[Op]]
    head: list[Op]
    seeds: list[list[list[Op]]]  # [S][kinds]
    sizes: list[list[int]]  # [S][kinds] parameters
    kinds: Tensor  # [S, blueprints, styles]: -1 has no parameters, -2 is not known here


@functools.cache
def programs_of(host: Host, prototypes: tuple[tuple[Prototype, ...], ...], styles: tuple[Style, ...]
                ) -> Programs | None:
    """A kind for each blueprint in each of these styles. None if a layer of host or seed has no op, or a
    sample is too large for the kernels."""
    if host.foreign is not None or host.tokens:
        return None
    shapes = [SlotShape(host.inputs[0], host.inputs[1:]), *host.slots.shapes]
    parts = [*host.template.stages, host.template.head]  # type: ignore[misc]
    names = [*(f"stages.{i}." for i in range(host.stages)), "head."]
    fixed = [program_of(part, shape, host.layout, name, name == names[0])
             for part, shape, name in zip(parts, shapes, names, strict=True)]
    kinds = torch.full((len(prototypes), len(prototypes[0]), len(Style)), -2)
    seeds: list[list[list[Op]]] = [[] for _ in prototypes]
    sizes: list[list[int]] = [[] for _ in prototypes]
    for slot, row in enumerate(prototypes):
        for number, prototype in enumerate(row):
            ops = program_of(prototype.template, prototype.shape, prototype.layout)
            if not prototype.layout.size:
                kinds[slot, number] = -1
                continue
            if ops is None:
                return None
            for style in styles:
                whole = styled(ops, style, prototype.shape, prototype.layout.size)
                if not has_room(whole) or (len(whole) == 1 and whole[0].code in (Code.MAP, Code.DEPTHWISE)):
                    return None  # of these an only op would read gradients where it adds to them
                kinds[slot, number, style] = len(seeds[slot])
                seeds[slot].append(whole)
                sizes[slot].append(prototype.layout.size + prototype.gate_size * (style is Style.GATE))
    if not all(ops and has_room(ops) for ops in fixed):
        return None
    return Programs(fixed[:-1], fixed[-1], seeds, sizes, kinds)  # type: ignore[arg-type]
