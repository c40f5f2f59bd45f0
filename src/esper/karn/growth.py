"""The life of a population as one self-contained SVG: a row per host, a column per epoch, a band per slot."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from torch import Tensor

from esper.karn.charts import tag
from esper.leyline import SeedStage

_COLOURS = ("#8b95a1", "#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#b07aa1", "#76b7b2", "#edc948", "#ff9da7",
            "#9c755f")
_INK, _DIM, _EMPTY = "#24292f", "#57606a", "#f3f5f7"
_CELL, _BAND, _GAP, _MARGIN, _TOP, _LETTER = 30, 7, 4, 16, 74, 6.8
_EXPLAINED = ("one line per host, {slots} slots in network order from top to bottom; "
              "colour is the blueprint, opacity is alpha")


@dataclass(frozen=True)
class Frame:
    """What one epoch looked like, each [N, S]."""

    stage: Tensor
    blueprint: Tensor
    alpha: Tensor


def growth_svg(frames: Sequence[Frame], blueprints: Sequence[str], title: str, names: Sequence[str]) -> str:
    """Incubating seeds are outlined, fossils underlined. A host's name is not repeated under the same one."""
    rows, slots = frames[0].stage.shape
    pitch, left = slots * _BAND + _GAP, _MARGIN + round(_LETTER * max(map(len, names)))
    right, height = left + len(frames) * _CELL, _TOP + rows * pitch + 40
    width = max(right + 150, _MARGIN + round(_LETTER * len(_EXPLAINED)))
    parts = [_box(0, 0, width, height, fill="#ffffff"),
             _words(title, _MARGIN, 26, font_size=16, font_weight=600),
             _words(_EXPLAINED.format(slots=slots), _MARGIN, 46, fill=_DIM),
             _words("epoch", left - 8, _TOP - 8, text_anchor="end", fill=_DIM)]
    parts += [_words(e, left + e * _CELL, _TOP - 8, fill=_DIM) for e in range(0, len(frames), 5)]
    for row, name in enumerate(names):
        y = _TOP + row * pitch
        if row == 0 or name != names[row - 1]:
            parts.append(_words(name, left - 8, y + pitch // 2 + 3, text_anchor="end", fill=_DIM))
        parts.append(_box(left, y, right - left, slots * _BAND, fill=_EMPTY))
    for epoch, frame in enumerate(frames):
        parts += _bars(frame, left + epoch * _CELL, pitch)
    shown = {b: name for b, name in enumerate(blueprints) if any((f.blueprint == b).any() for f in frames)}
    parts += _legend(shown, right + 12)
    return tag("svg", "\n", "\n".join(parts), "\n", xmlns="http://www.w3.org/2000/svg",
               viewBox=f"0 0 {width} {height}", width=width, height=height,
               font_family="system-ui, sans-serif", font_size=12, fill=_INK) + "\n"


def _words(text: object, x: float, y: float, **look: object) -> str:
    return tag("text", escape(str(text)), x=x, y=y, **look)


def _box(x: float, y: float, width: float, height: float, **look: object) -> str:
    return tag("rect", x=x, y=y, width=width, height=height, **look)


def _bars(frame: Frame, x: int, pitch: int) -> list[str]:
    bars = []
    for row, slot in (frame.blueprint >= 0).nonzero().tolist():
        y, stage = _TOP + row * pitch + slot * _BAND, frame.stage[row, slot]
        colour = _COLOURS[int(frame.blueprint[row, slot]) % len(_COLOURS)]
        if stage == SeedStage.TRAINING:
            bars.append(_box(x + 1, y + 1.5, _CELL - 2, _BAND - 3, fill="none", stroke=colour))
            continue
        opacity = 0.15 + 0.85 * float(frame.alpha[row, slot])
        bars.append(_box(x, y + 0.5, _CELL, _BAND - 1, fill=colour, opacity=f"{opacity:.2f}"))
        if stage == SeedStage.FOSSILIZED:
            bars.append(_box(x, y + _BAND - 2, _CELL, 1.5, fill=_INK))
    return bars


def _legend(shown: Mapping[int, str], x: int) -> list[str]:
    lines, y = [], _TOP
    for blueprint, name in shown.items():
        lines += [_box(x, y, 14, 12, fill=_COLOURS[blueprint % len(_COLOURS)]), _words(name, x + 22, y + 10)]
        y += 20
    return [*lines, _box(x + 0.5, y + 15, 14, 5, fill="none", stroke=_DIM),
            _words("incubating", x + 22, y + 22), _box(x, y + 40, 14, 2, fill=_INK),
            _words("fossilized", x + 22, y + 46)]
