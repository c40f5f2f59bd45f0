"""Draws the life of a population as one self-contained SVG: a row per host, a column per epoch, a band per slot."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from esper.leyline import SeedStage

_COLOURS = ("#8b95a1", "#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#b07aa1", "#76b7b2", "#edc948", "#ff9da7", "#9c755f")
_CELL, _BAND, _GAP, _LEFT, _TOP = 30, 7, 4, 56, 74


@dataclass(frozen=True)
class Frame:
    """What one epoch looked like, each [N, S]."""

    stage: Tensor
    blueprint: Tensor
    alpha: Tensor


def growth_svg(frames: Sequence[Frame], blueprints: Sequence[str], title: str) -> str:
    """Bars are coloured by blueprint and as opaque as alpha; incubating seeds are outlined, fossils underlined in black."""
    rows, slots = frames[0].stage.shape
    pitch = slots * _BAND + _GAP
    width, height = _LEFT + len(frames) * _CELL + 150, _TOP + rows * pitch + 40
    shown = [b for b in range(len(blueprints)) if any(bool((f.blueprint == b).any()) for f in frames)]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="system-ui, sans-serif" font-size="12" fill="#24292f">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="{_LEFT}" y="26" font-size="16" font-weight="600">{title}</text>',
        f'<text x="{_LEFT}" y="46" fill="#57606a">one line per host, {slots} slots in network order from top to bottom; '
        f'colour is the blueprint, opacity is alpha</text>',
    ]
    parts += [f'<text x="{_LEFT + e * _CELL}" y="{_TOP - 8}" fill="#57606a">{e}</text>' for e in range(0, len(frames), 5)]
    parts.append(f'<text x="{_LEFT - 8}" y="{_TOP - 8}" text-anchor="end" fill="#57606a">epoch</text>')
    for row in range(rows):
        y = _TOP + row * pitch
        parts.append(f'<text x="{_LEFT - 8}" y="{y + pitch // 2 + 3}" text-anchor="end" fill="#57606a">{row}</text>')
        parts.append(f'<rect x="{_LEFT}" y="{y}" width="{len(frames) * _CELL}" height="{slots * _BAND}" fill="#f3f5f7"/>')
    for epoch, frame in enumerate(frames):
        parts += _bars(frame, _LEFT + epoch * _CELL, pitch)
    return "\n".join([*parts, *_legend(shown, blueprints, width - 138), "</svg>\n"])


def _bars(frame: Frame, x: int, pitch: int) -> list[str]:
    bars = []
    for row, slot in (frame.blueprint >= 0).nonzero().tolist():
        y, colour = _TOP + row * pitch + slot * _BAND, _COLOURS[int(frame.blueprint[row, slot]) % len(_COLOURS)]
        if frame.stage[row, slot] == SeedStage.TRAINING:
            bars.append(f'<rect x="{x + 1}" y="{y + 1.5}" width="{_CELL - 2}" height="{_BAND - 3}" fill="none" '
                        f'stroke="{colour}"/>')
            continue
        opacity = 0.15 + 0.85 * float(frame.alpha[row, slot])
        bars.append(f'<rect x="{x}" y="{y + 0.5}" width="{_CELL}" height="{_BAND - 1}" fill="{colour}" opacity="{opacity:.2f}"/>')
        if frame.stage[row, slot] == SeedStage.FOSSILIZED:
            bars.append(f'<rect x="{x}" y="{y + _BAND - 2}" width="{_CELL}" height="1.5" fill="#24292f"/>')
    return bars


def _legend(shown: Sequence[int], blueprints: Sequence[str], x: int) -> list[str]:
    lines = []
    for line, blueprint in enumerate(shown):
        y = _TOP + 20 * line
        lines.append(f'<rect x="{x}" y="{y}" width="14" height="12" fill="{_COLOURS[blueprint % len(_COLOURS)]}"/>')
        lines.append(f'<text x="{x + 22}" y="{y + 10}">{blueprints[blueprint]}</text>')
    y = _TOP + 20 * len(shown) + 12
    lines.append(f'<rect x="{x + 0.5}" y="{y + 3}" width="14" height="5" fill="none" stroke="#57606a"/>')
    lines.append(f'<text x="{x + 22}" y="{y + 10}">incubating</text>')
    lines.append(f'<rect x="{x}" y="{y + 28}" width="14" height="2" fill="#24292f"/>')
    lines.append(f'<text x="{x + 22}" y="{y + 34}">fossilized</text>')
    return lines
