"""Draws the life of a population as one self-contained SVG: a row per host, a column per epoch, a band per slot."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from torch import Tensor

from esper.leyline import SeedStage

_COLOURS = ("#8b95a1", "#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#b07aa1", "#76b7b2", "#edc948", "#ff9da7", "#9c755f")
_CELL, _BAND, _GAP, _MARGIN, _TOP, _LETTER = 30, 7, 4, 16, 74, 6.8
_EXPLAINED = "one line per host, {slots} slots in network order from top to bottom; colour is the blueprint, opacity is alpha"


@dataclass(frozen=True)
class Frame:
    """What one epoch looked like, each [N, S]."""

    stage: Tensor
    blueprint: Tensor
    alpha: Tensor


def growth_svg(frames: Sequence[Frame], blueprints: Sequence[str], title: str, names: Sequence[str]) -> str:
    """Bars are coloured by blueprint and as opaque as alpha; incubating seeds are outlined, fossils underlined in black.

    Hosts have names; one that is the same as the name above it is not repeated.
    """
    rows, slots = frames[0].stage.shape
    pitch, left = slots * _BAND + _GAP, _MARGIN + round(_LETTER * max(map(len, names)))
    width, height = max(left + len(frames) * _CELL + 150, _MARGIN + round(_LETTER * len(_EXPLAINED))), _TOP + rows * pitch + 40
    shown = [b for b in range(len(blueprints)) if any(bool((f.blueprint == b).any()) for f in frames)]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="system-ui, sans-serif" font-size="12" fill="#24292f">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="{_MARGIN}" y="26" font-size="16" font-weight="600">{escape(title)}</text>',
        f'<text x="{_MARGIN}" y="46" fill="#57606a">{_EXPLAINED.format(slots=slots)}</text>',
    ]
    parts += [f'<text x="{left + e * _CELL}" y="{_TOP - 8}" fill="#57606a">{e}</text>' for e in range(0, len(frames), 5)]
    parts.append(f'<text x="{left - 8}" y="{_TOP - 8}" text-anchor="end" fill="#57606a">epoch</text>')
    for row, name in enumerate(names):
        y = _TOP + row * pitch
        if row == 0 or name != names[row - 1]:
            parts.append(f'<text x="{left - 8}" y="{y + pitch // 2 + 3}" text-anchor="end" fill="#57606a">{escape(name)}</text>')
        parts.append(f'<rect x="{left}" y="{y}" width="{len(frames) * _CELL}" height="{slots * _BAND}" fill="#f3f5f7"/>')
    for epoch, frame in enumerate(frames):
        parts += _bars(frame, left + epoch * _CELL, pitch)
    return "\n".join([*parts, *_legend(shown, blueprints, left + len(frames) * _CELL + 12), "</svg>\n"])


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
