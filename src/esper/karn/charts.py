"""Charts as inline SVG. x is in percent of the width and y in pixels, so that text keeps its size on a phone.

Names are escaped here. Colours are classes of the page, which set `color`: c0, c1, .. say who.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape

NARROW, LETTER, LINE = 270, 5.9, 13  # pixels: a plot on a small phone, a letter, a line of text
Z95 = 1.96  # standard errors on each side of a mean, in a 95 % interval
Point = tuple[float, float]
Box = tuple[float, float, float, float]  # left, top, right, bottom
Span = tuple[str, str, float, float, float]  # class, title, low, value, high
Estimate = tuple[float, float, float | None]  # x, y, half of its interval if it has one


def tag(name: str, *inner: str, **attributes: object) -> str:
    """An element around markup. Attributes (class_ is class, _ is -) are escaped, and left out if empty."""
    given = (f' {key.rstrip("_").replace("_", "-")}="{escape(str(value))}"'
             for key, value in attributes.items() if value != "")
    return f"<{name}{''.join(given)}>{''.join(inner)}</{name}>"


def words(text: object, x: float, y: float, anchor: str = "", class_: str = "", dx: float = 0) -> str:
    return tag("text", escape(str(text)), x=f"{x:.2f}%", y=f"{y:.1f}", dx=dx or "", text_anchor=anchor,
               class_=class_)


def rule(x1: float, y1: float, x2: float, y2: float, class_: str) -> str:
    return tag("line", x1=f"{x1:.2f}%", y1=f"{y1:.1f}", x2=f"{x2:.2f}%", y2=f"{y2:.1f}", class_=class_)


def block(x: float, y: float, width: float, height: float, class_: str, title: str = "", **look: str) -> str:
    return tag("rect", tag("title", escape(title)) if title else "", x=f"{x:.2f}%", y=f"{y:.1f}",
               width=f"{width:.2f}%", height=f"{height:.1f}", class_=class_, **look)


def drawing(height: float, marks: Iterable[str], left: float = 0) -> str:
    """`left`: pixels for what stands before 0 %."""
    return tag("div", tag("svg", *marks, width="100%", height=f"{height:.0f}"), class_="plot",
               style=f"padding-left:{left:.0f}px")


def ticks(values: Iterable[float]) -> list[float]:
    """Two to seven round numbers around the values."""
    known = list(values) or [0.0, 1.0]
    low, high = min(known), max(known)
    span = high - low or abs(high) or 1.0
    size = 10.0 ** math.floor(math.log10(span / 5))
    step = next(size * share for share in (1, 2, 2.5, 5, 10) if span <= 5 * size * share * (1 + 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [step * number for number in range(first, max(last, first + 1) + 1)]


def colours(names: Sequence[str]) -> dict[str, str]:
    """name -> class; from the seventh on they are dashed as well."""
    return {name: f"c{place % 6 + 1}{' dashed' * (place >= 6)}" for place, name in enumerate(names)}


class Plot:
    """A chart in the units of its axes; `marks` are drawn in their order."""

    def __init__(self, xs: Iterable[float], ys: Iterable[float], height: float = 230) -> None:
        self.x, self.y, self.height = ticks(xs), ticks(ys), height
        self.marks: list[str] = []

    def at(self, x: float, y: float) -> Point:
        """(percent, pixels)"""
        (left, *_, right), (low, *_, high) = self.x, self.y
        return 100 * (x - left) / (right - left), self.height * (high - y) / (high - low)

    def shape(self, points: Iterable[Point], class_: str, kind: str = "polyline") -> None:
        """A line, or a polygon; drawn in a box that is stretched, since its points cannot be percentages."""
        corners = " ".join("{:.2f},{:.1f}".format(*self.at(*point)) for point in points)
        drawn = tag(kind, points=corners, class_=class_, vector_effect="non-scaling-stroke")
        self.marks.append(tag("svg", drawn, width="100%", height=self.height,
                              viewBox=f"0 0 100 {self.height}", preserveAspectRatio="none"))

    def dot(self, x: float, y: float, class_: str, title: str) -> None:
        across, down = self.at(x, y)
        self.marks.append(tag("circle", tag("title", escape(title)), cx=f"{across:.2f}%", cy=f"{down:.1f}",
                              r=4, class_=class_))

    def svg(self, x_title: str, y_title: str = "") -> str:
        """With its axes; without a title there is no y axis."""
        below, grid = self.height + 15, []
        for x in self.x:
            across = self.at(x, 0)[0]
            grid += [rule(across, 0, across, self.height, "grid" if x else "zero"),
                     words(f"{x:,.6g}", across, below, "middle", "dim")]
        for y in self.y if y_title else ():
            down = self.at(0, y)[1]
            grid += [rule(0, down, 100, down, "grid"), words(f"{y:,.6g}", 0, down + 4, "end", "dim", -6)]
        grid += [words(x_title, 50, below + 16, "middle"), words(y_title, 0, -10, dx=-36)]
        return drawing(self.height, grid + self.marks, 40 if y_title else 12)


def front(dots: Mapping[str, Point]) -> list[str]:
    """The Pareto front of (cost, score), by cost: no other is better in one and as good in the other."""
    best: list[str] = []
    for name in sorted(dots, key=lambda name: (dots[name][0], -dots[name][1])):
        if not best or dots[name][1] > dots[best[-1]][1]:
            best.append(name)
    return best


def scatter(dots: Mapping[str, Point], x_title: str, y_title: str, subject: str) -> str:
    """(cost, score) by name, with the Pareto front as steps; the subject stands out."""
    plot, best = Plot((x for x, _ in dots.values()), (y for _, y in dots.values()), 340), front(dots)
    steps = [corner for a, b in itertools.pairwise(best)
             for corner in (dots[a], (dots[b][0], dots[a][1]), dots[b])]
    plot.shape(steps, "front")
    places = {name: plot.at(*dot) for name, dot in dots.items()}
    for name, (left, down) in _labels(places, [plot.at(*corner) for corner in steps], plot.height).items():
        (x, y), class_ = places[name], "subject" if name == subject else ""
        plot.marks.append(rule(x, y, x, y + down, "lead"))
        plot.marks.append(words(name, x, y + down + 4, "end" if left else "", class_, -7 if left else 7))
    for name, (x, y) in dots.items():
        colour = ("c2" if name == subject else "c1") + ("" if name in best else " hollow")
        plot.dot(x, y, colour, f"{name}: {x:,.4g}, {y:.4g}")
    return plot.svg(x_title, y_title)


def _labels(places: Mapping[str, Point], line: Sequence[Point], height: float) -> dict[str, tuple[bool, int]]:
    """Left of its dot? How far down? What does not meet on a narrow chart does not meet on a wider one."""
    spots = {name: (x * NARROW / 100, y) for name, (x, y) in places.items()}
    dots = {name: (x - 5, y - 5, x + 5, y + 5) for name, (x, y) in spots.items()}
    thin = [(x1 * NARROW / 100 + 2, y2, x2 * NARROW / 100 - 2, y1)
            for (x1, y1), (x2, y2) in itertools.pairwise(line)]
    labels, chosen = list[Box](), dict[str, tuple[bool, int]]()
    for name, (x, y) in sorted(spots.items(), key=lambda item: item[1][1]):
        solid = labels + [box for other, box in dots.items() if other != name]
        width, best = LETTER * len(name), math.inf
        for down, left in itertools.product(range(-90, 91, 3), (False, True)):
            start, centre = x - 7 - width if left else x + 7, y + down
            label = (start, centre - LINE / 2, start + width, centre + LINE / 2)
            lead = (x - 1, min(y, centre), x + 1, max(y, centre))
            outside = start < -30 or start + width > NARROW or not 0 <= centre <= height
            crossed = _hits(label, thin) + _hits(lead, solid)
            cost = 999 * outside + 200 * _hits(label, solid) + 25 * crossed + abs(down)
            if cost < best:
                best, chosen[name], picked = cost, (left, down), (label, lead)
        labels.append(picked[0])
        thin.append(picked[1])
    return chosen


def _hits(a: Box, others: Iterable[Box]) -> int:
    return sum(a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3] for b in others)


def forest(groups: Mapping[str, Sequence[Span]], x_title: str) -> str:
    """Values with intervals, under the names of their groups."""
    ends = [end for spans in groups.values() for _, _, *span in spans for end in span]
    plot, down = Plot([0.0, *ends], (), sum(LINE + 12 + 10 * len(spans) for spans in groups.values())), 0.0
    for label, spans in groups.items():
        plot.marks.append(words(label, 0, down + LINE))
        for class_, title, low, value, high in spans:
            y = 1 - (down + LINE + 9) / plot.height
            plot.marks.append(rule(*plot.at(low, y), *plot.at(high, y), class_))
            plot.dot(value, y, class_, title)
            down += 10
        down += LINE + 12
    return plot.svg(x_title)


def curves(lines: Mapping[str, tuple[str, Sequence[Estimate]]], x_title: str, y_title: str) -> str:
    """(class, estimates) by name."""
    points = [point for _, line in lines.values() for point in line]
    plot = Plot((0.0, *(x for x, _, _ in points)),
                (y + side * (half or 0) for _, y, half in points for side in (-1, 1)))
    for name, (class_, line) in lines.items():
        for known, part in itertools.groupby(line, key=lambda point: point[2] is not None):
            ends = [((x, y + (half or 0)), (x, y - (half or 0))) for x, y, half in part]
            upper, lower = zip(*ends, strict=True)
            if known and len(ends) == 1:  # a single interval is a stroke, neighbours share a band
                plot.marks.append(rule(*plot.at(*upper[0]), *plot.at(*lower[0]), class_))
            elif known:
                plot.shape([*upper, *reversed(lower)], class_, "polygon")
        plot.shape([(x, y) for x, y, _ in line], class_)
        for x, y, half in line if len(line) <= 40 else ():
            plot.dot(x, y, class_, f"{name}, {x:g}: {y:.2f}" + ("" if half is None else f" ± {half:.2f}"))
    return plot.svg(x_title, y_title)


def heat(counts: Mapping[tuple[str, int], int], rows: Sequence[str], columns: Sequence[int], full: float,
         left: float) -> str:
    """Counts by row and column, as numbers and as colours, of which `full` has the strongest."""
    width = 100 / max(len(columns), 1)
    marks = [block(0, 0, 100, 18 * len(rows), "empty"), words("slot", 0, -6, "end", "dim", -6)]
    marks += [words(column, width * (x + 0.5), -6, "middle", "dim") for x, column in enumerate(columns)]
    marks += [words(row, 0, 18 * y + 13, "end", dx=-6) for y, row in enumerate(rows)]
    for (y, row), (x, column) in itertools.product(enumerate(rows), enumerate(columns)):
        if count := counts.get((row, column), 0):
            title, share = f"{row} in slot {column}: {count}", count / full
            marks += [block(width * x, 18 * y, width, 18, "cell", title, style=f"--share:{share:.3f}"),
                      words(count, width * (x + 0.5), 18 * y + 13, "middle", "strong" if share > 0.5 else "")]
    return drawing(18 * len(rows), marks, left)


def histogram(bars: Sequence[tuple[float, float]], full: float, left: float) -> str:
    """(part, whole) by epoch from 0; `full` is as high as the chart."""
    height, width = 60, 100 / max(len(bars), 1)
    marks = [rule(0, height, 100, height, "axis"), words(f"{full:.2g}", 0, 8, "end", "dim", -6),
             words("epoch", 0, height + 13, "end", "dim", -6)]
    for number, values in enumerate(bars):
        for value, class_ in zip(values, ("c1", "c1 pale"), strict=True):
            if value:
                tall, title = height * value / full, f"{number}: {value:.2g}"
                marks.append(block(width * number, height - tall, width * 0.84, tall, class_, title))
        if number % 5 == 0:
            marks.append(words(number, width * (number + 0.42), height + 13, "middle", "dim"))
    return drawing(height, marks, left)


def stacks(rows: Sequence[tuple[str, str, Mapping[str, float]]]) -> str:
    """Horizontal bars: (label, figures, length of its parts by class)."""
    longest, marks = max((sum(parts.values()) for _, _, parts in rows), default=0.0) or 1.0, []
    for row, (label, figures, parts) in enumerate(rows):
        marks += [words(label, 0, 32 * row + 11), words(figures, 100, 32 * row + 11, "end", "dim")]
        x = 0.0
        for class_, size in parts.items():
            marks.append(block(x, 32 * row + 15, 100 * size / longest, 9, class_, f"{class_}: {size:.2f}"))
            x += 100 * size / longest
    return drawing(32 * len(rows), marks)
