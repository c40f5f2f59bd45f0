"""What `benchmarks/speed.py` measured by number of rows, as one SVG: time of a host-epoch and memory, on logarithmic axes."""

import math
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from esper.karn.charts import tag

_COLOURS = ("#4e79a7", "#f28e2b", "#59a14f")
_WIDTH, _HEIGHT, _LEFT, _TOP, _APART = 330, 260, 62, 84, 90
_INK, _DIM, _GRID = "#24292f", "#57606a", "#e1e4e8"
Points = Sequence[tuple[float, float, float]]  # rows, value, busy share (nan: unknown)


def scaling_svg(result: dict[str, Any]) -> str:
    """A panel for each quantity, a line for each family; a dot is filled where the device is busy for 80 % of the time."""
    families = {name: each for name, each in result.items() if isinstance(each, dict)}
    width = _LEFT + 2 * _WIDTH + _APART + 24
    height = _TOP + _HEIGHT + 48
    marks = [tag("rect", x=0, y=0, width=width, height=height, fill="#ffffff"),
             _words(f"Rows of an environment on one {result['hardware']}", 16, 26, font_size=16, font_weight=600),
             _words(f"random policy; filled: the device is busy for 80 % of the time or more; {result['date']}, {result['commit']}",
                    16, 46, fill=_DIM)]
    for place, name in enumerate(families):
        marks.append(_words(name, _LEFT + 90 * place, 68, fill=_COLOURS[place % len(_COLOURS)], font_weight=600))
    panels: dict[str, Callable[[dict[str, Any]], float]] = {
        "milliseconds of a host-epoch": lambda one: 1e3 * one["seconds_per_host_epoch"],
        "GiB of the device's memory": lambda one: one["reserved"] / 2**30}
    for place, (title, value) in enumerate(panels.items()):
        lines = {name: [(float(rows), value(one), one.get("busy", math.nan)) for rows, one in each.items() if "rate" in one]
                 for name, each in families.items()}
        marks += _panel(title, lines, _LEFT + place * (_WIDTH + _APART))
    return tag("svg", "\n", "\n".join(marks), "\n", xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {width} {height}",
               width=width, height=height, font_family="system-ui, sans-serif", font_size=12, fill=_INK) + "\n"


def _panel(title: str, lines: dict[str, Points], left: float) -> list[str]:
    points = [point for line in lines.values() for point in line]
    xs, ys = sorted({x for x, _, _ in points}), _ticks([y for _, y, _ in points])

    def at(x: float, y: float) -> tuple[float, float]:
        right, up = _share(x, xs[0], xs[-1]), _share(max(y, ys[0]), ys[0], ys[-1])
        return round(left + _WIDTH * right, 1), round(_TOP + _HEIGHT * (1 - up), 1)

    marks = []
    for y in ys:
        _, down = at(xs[0], y)
        marks += [tag("line", x1=left, y1=down, x2=left + _WIDTH, y2=down, stroke=_GRID),
                  _words(f"{y:g}", left - 8, down + 4, text_anchor="end", fill=_DIM)]
    for x in xs:
        across, _ = at(x, ys[0])
        marks += [tag("line", x1=across, y1=_TOP, x2=across, y2=_TOP + _HEIGHT, stroke=_GRID),
                  _words(f"{x:,.0f}", across, _TOP + _HEIGHT + 18, text_anchor="middle", fill=_DIM)]
    marks.append(_words(f"{title}, by rows", left + _WIDTH / 2, _TOP + _HEIGHT + 38, text_anchor="middle"))
    for colour, (name, line) in zip(_COLOURS, lines.items(), strict=False):
        marks.append(tag("polyline", points=" ".join("{},{}".format(*at(x, y)) for x, y, _ in line), fill="none", stroke=colour,
                         stroke_width=2))
        for x, y, busy in line:
            told = "" if math.isnan(busy) else f", busy {busy:.0%}"
            across, down = at(x, y)
            marks.append(tag("circle", tag("title", f"{name}, {x:,.0f} rows: {y:.3g}{told}"), cx=across, cy=down, r=4, stroke=colour,
                             stroke_width=2, fill=colour if busy >= 0.8 else "#ffffff"))
    return marks


def _share(value: float, low: float, high: float) -> float:
    return math.log(value / low) / math.log(high / low) if high > low else 0.5


def _ticks(values: Sequence[float]) -> list[float]:
    """1, 2 and 5 times powers of ten around the values, or every power of ten if that is many."""
    known = [value for value in values if value > 0] or [1.0]
    first, last = math.floor(math.log10(min(known))), math.ceil(math.log10(max(known)))
    every = [step * 10.0**power for power in range(first, last + 1) for step in (1, 2, 5)]
    low, high = max(t for t in every if t <= min(known)), min([t for t in every if t >= max(known)], default=every[-1])
    within = [t for t in every if low <= t <= high]
    return within if len(within) <= 8 else [10.0**power for power in range(first, last + 1)]


def _words(text: str, x: float, y: float, **look: object) -> str:
    return tag("text", escape(text), x=x, y=y, **look)
