"""Panels in a terminal: one function for each kind of renderer, from a `Table` to rich text."""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from rich.console import Group, RenderableType
from rich.table import Table as Grid
from rich.text import Text

from esper.karn.live import bar, sparkline
from esper.karn.panels import UNITS, Rows, Table, said
from esper.leyline import SeedStage

WIDE = 120  # columns of a terminal that has place for two panels beside each other
TILE = 18
DIM = "grey62"
LINES = ("cyan", "magenta", "yellow", "green", "blue", "red", "white")
_SHADES = (DIM, "cyan", "bright_blue", "yellow", "magenta", "green", "red", DIM, DIM)
STAGES = {stage.name: (letter, shade)
          for stage, letter, shade in zip(SeedStage, "·gTBHFxer", _SHADES, strict=True)}
"""stage -> its letter and colour."""
COLOURS = {"running": "green", "finished": "cyan", "stopped": "yellow", "better": "green", "worse": "red",
           "kept": "green", "pruned": "red", "GERMINATE": "bright_blue", "FOSSILIZE": "green", "PRUNE": "red",
           **{stage: colour for stage, (_, colour) in STAGES.items()}}
INTERVALS = {"gain": ("low", "high"), "difference": ("diff_low", "diff_high")}
_BEHIND = {"%": "%", UNITS["rate"]: f" {UNITS['rate']}"}  # units that stand behind every number
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))  # of a braille letter, by column
Point = tuple[float, float | None, float | None, float | None]  # x, y, ends of its interval


class Place(NamedTuple):
    """Where a viewer stands, and how much room there is."""

    width: int
    round: int | None = None
    epoch: int | None = None
    row: int | None = None
    run: int | None = None
    slots: Sequence[str] = ()
    lines: int = 4  # of a chart


def figures(table: Table, row: Sequence[Any]) -> dict[str, str]:
    """column -> what a row says there; an interval stands behind its mean."""
    known = dict(zip(table.columns, row, strict=True))
    told = {name: said(value, unit := UNITS.get(name, "")) + _BEHIND.get(unit, "") * (value is not None)
            for name, value in known.items()}
    if "rolled_back" in told:
        told["rolled_back"] = "yes" if known["rolled_back"] else ""
    for mean, (low, high) in INTERVALS.items():
        if low in told:
            ends = f" ({told.pop(low)} to {told.pop(high)})"
            told[mean] += "" if known[low] is None else ends
    return told


def draw(table: Table, at: Place) -> Text:
    """The question, and its answer as wide as there is place."""
    head = Text(table.question, "bold")
    for unit in ("points", "nats"):  # other units stand behind their numbers
        if unit in table.units.values() and head.cell_len % at.width + len(unit) + 3 < at.width:
            head.append(f" [{unit}]", f"not bold {DIM}")
    if not table.rows:
        return Text.assemble(head, (f"\n{table.none}", DIM))
    return Text("\n").join([head, *RENDERERS[table.renderer](table, at)])


def shown(tables: Sequence[Table], at: Place) -> RenderableType:
    """A page: panels below each other, or those of two kinds beside each other where there is place."""
    sides = [[table for table in tables if (table.renderer in ("table", "bars")) == side]
             for side in (False, True)]
    if at.width < WIDE or not all(sides):
        return Group(*(Text.assemble(draw(table, at), "\n") for table in tables))
    half, page = at._replace(width=at.width // 2 - 2), Grid.grid(padding=(0, 2, 0, 0), expand=True)
    page.add_row(*(shown(side, half) for side in sides))
    return page


def _word(text: str, style: str = "") -> Text:
    return Text(text, COLOURS.get(text, style))


def _pairs(told: Mapping[str, str], width: int, colours: Mapping[str, str] | None = None) -> Text:
    """name value  name value, in lines; what was not measured is left out."""
    lines = [Text()]
    for name, value in told.items():
        if value in ("", "-"):
            continue
        pair = Text.assemble((name, (colours or {}).get(name, DIM)), " ", _word(value), "  ")
        if lines[-1] and lines[-1].cell_len + pair.cell_len > width + 2:
            lines.append(Text())
        lines[-1].append_text(pair)
    return Text("\n").join(lines)


def _text(table: Table, at: Place) -> list[Text]:
    known, told = dict(zip(table.columns, table.rows[0], strict=True)), figures(table, table.rows[0])
    done = known["round"] / known["planned"] if known.get("planned") else None
    drawn = [] if done is None else [Text.assemble((bar(done), "cyan"), f" {done:.0%}")]
    return [*drawn, _pairs(told, at.width)]


def _columns(header: Sequence[str], rows: Iterable[Sequence[Text]], width: int) -> list[Text]:
    """Text in columns; what does not fit stands below its row, with its name."""
    found = [[Text(name, DIM) for name in header], *rows]
    widths = [max(cell.cell_len for cell in column) for column in zip(*found, strict=True)]
    fits = sum(sum(widths[:count]) + 2 * count <= width + 2 for count in range(1, len(widths) + 1))
    lines = []
    for number, row in enumerate(found):
        line = Text()
        for cell, wide in zip(row[:fits], widths, strict=False):
            line.append_text(cell).append(" " * (wide - cell.cell_len + 2))
        line.rstrip()
        lines.append(line)
        if number and fits < len(header):
            below = {name: cell.plain for name, cell in zip(header[fits:], row[fits:], strict=True)}
            lines += [Text("      ") + line for line in _pairs(below, width - 6).split() if line]
    return lines


def _table(table: Table, at: Place) -> list[Text]:
    rows = []
    for number, row in enumerate(table.rows):
        told = figures(table, row)
        if told.get("slot", "-") != "-" and at.slots:
            told["slot"] = said(at.slots[int(told["slot"])])
        here = {"epoch": row[0] == at.epoch, "run": number == at.run}.get(table.columns[0])
        style = "bold" if here else "red" if told.get("closed") == "-" else ""
        first, *rest = (_word(value, style) for value in told.values())
        mark = "" if here is None else "▸ " if here else "  "
        rows.append([Text.assemble((mark, "cyan"), first), *rest])
    return _columns(list(told), rows, at.width)


def _bars(table: Table, at: Place) -> list[Text]:
    most, wide = max(row[1] for row in table.rows) or 1, max(10, min(30, at.width - 50))
    rows = [[Text(said(row[0])), Text(bar(row[1] / most, wide), "cyan"),
             *map(Text, list(figures(table, row).values())[1:])] for row in table.rows]
    return _columns([table.columns[0], "", *table.columns[1:]], rows, at.width)


def tiles_across(width: int) -> int:
    """How many tiles stand in a line."""
    return max(1, (width + 1) // (TILE + 1))


def _tiles(table: Table, at: Place) -> list[Text]:
    across, lines = tiles_across(at.width), []
    tiles = [_tile(dict(zip(table.columns, row, strict=True)), figures(table, row), at) for row in table.rows]
    for start in range(0, len(tiles), across):
        lines += [Text(" ").join(part) for part in zip(*tiles[start:start + across], strict=True)] + [Text()]
    legend = {letter: stage.lower() for stage, (letter, _) in STAGES.items()} | {"↺": "rolled back"}
    return [*lines, _pairs(legend, at.width, dict(STAGES.values()) | {"↺": "red"})]


def _tile(host: Mapping[str, Any], told: Mapping[str, str], at: Place) -> list[Text]:
    """Two lines: row, score and gain; the stage of every slot, rollbacks and the last decision."""
    colour = DIM if not host["gain"] else "green" if host["gain"] > 0 else "red"
    slots = Text.assemble(*(STAGES[stage] for stage in host["stages"]))
    slots.truncate(TILE - 11, overflow="ellipsis")
    back = f"↺{host['rollbacks']} " if host["rollbacks"] else ""
    halves = ((Text(told["row"], "bold"), Text(f"{told['score']} {told['gain']}", colour)),
              (slots, Text.assemble((back, "red"), _word(told["op"][:9]))))
    lines = []
    for left, right in halves:
        edge = ("▸" if host["row"] == at.row else "▌", colour)
        lines.append(Text.assemble(edge, left, " " * (TILE - 1 - left.cell_len - right.cell_len), right))
        lines[-1].truncate(TILE, pad=True)
        lines[-1].stylize("bold on grey23" if host["row"] == at.row else "")
    return lines


def _network(table: Table, at: Place) -> list[Text]:
    """Slots in the order of the network, with their stages up to the chosen epoch and what they hold then."""
    cells = {row[:2]: row for row in table.rows}
    last = at.epoch or max(row[0] for row in table.rows)
    names = at.slots or [str(slot) for slot in range(1 + max(row[1] for row in table.rows))]
    lines = []
    for slot, name in enumerate(names):
        none = (last, slot, SeedStage.DORMANT.name, *[None] * 5)
        now = cells.get((last, slot), none)
        told, (_, colour) = figures(table, now), STAGES[now[2]]
        past = (STAGES[cells.get((epoch, slot), none)[2]] for epoch in range(1, last + 1))
        knot = "◆" if now[4] else "◇" if now[3] is None else "◈"
        doubt = {each: f" ± {said(now[7])}" for each in ("contribution", "preview")
                 if told[each] != "-" and now[7] is not None}
        lines.append([Text.assemble("├─", (f"{knot} ", colour), (said(name), "bold")), Text.assemble(*past),
                      *(_word(told[each] + doubt.get(each, "")) for each in table.columns[2:7])])
    head = ["● in", f"to epoch {last}", *table.columns[2:7]]
    return [*_columns(head, lines, at.width), Text("● out", DIM)]


def _line(table: Table, at: Place) -> list[Text]:
    x = "round" if "round" in table.columns else "epoch"
    place, upto = table.columns.index(x), at.round if x == "round" else at.epoch
    if upto is not None and table.columns[0] == "policy":  # examined after so many rounds
        upto += 1
    groups: dict[str, Rows] = {}
    for row in table.rows:
        groups.setdefault(said(row[0]) if place else "", []).append(row)
    now = {name: next((row for row in reversed(rows) if upto is None or row[place] <= upto), rows[0])
           for name, rows in groups.items()}

    def points(rows: Rows, *names: str) -> list[Point]:
        y, low, high = ([row[table.columns.index(name)] for row in rows] if name else [None] * len(rows)
                        for name in names)
        return list(zip((row[place] for row in rows), y, low, high, strict=True))

    if "twin" in table.columns:
        lines = {name: points(table.rows, name, "", "") for name in ("score", "twin")}
        colours = dict(zip(lines, LINES, strict=False))
        return [*_chart(lines, x, upto, at), _pairs(figures(table, now[""]), at.width, colours)]
    if "low" not in table.columns:
        return _courses(table, groups, now, place, at)
    drawn = _chart({name: points(rows, "gain", "low", "high") for name, rows in groups.items()}, x, upto, at)
    for colour, (name, row) in zip(itertools.cycle(LINES), now.items(), strict=False):
        told = dict(list(figures(table, row).items())[place:])
        drawn.append(Text.assemble((f"● {name}".ljust(2), colour), " " * place, _pairs(told, at.width - 12)))
    return drawn


def _courses(table: Table, groups: Mapping[str, Rows], now: Mapping[str, tuple[Any, ...]], place: int,
             at: Place) -> list[Text]:
    """A sparkline for each name, of the first number; where lines have no name, for each number."""
    wide, told = max(10, min(40, at.width - 50)), {name: figures(table, row) for name, row in now.items()}

    def course(rows: Rows, column: int, marked: int) -> Text:
        said = sparkline([row[column] for row in rows], wide)  # between the least and the most
        drawn = Text(said.partition(" ")[2].rpartition(" ")[0], "cyan")
        here = marked // (-(-len(rows) // wide))
        drawn.stylize("reverse", here, here + 1)
        return drawn

    if place == 1:
        lines = [[Text(name), *(Text(told[name][each]) for each in table.columns[2:]),
                  course(rows, 2, rows.index(now[name]))] for name, rows in groups.items()]
        return _columns([table.columns[0], *table.columns[2:], "by round"], lines, at.width)
    rows = groups[""]
    lines = [[Text(name), Text(told[""][name]), course(rows, number, rows.index(now[""]))]
             for number, name in enumerate(table.columns) if number]
    return _columns([f"{table.columns[0]} {now[''][0]}", "", ""], lines, at.width)


def _chart(lines: Mapping[str, Sequence[Point]], x_title: str, mark: int | None, at: Place) -> list[Text]:
    """Lines and the ends of their intervals in braille, with the chosen moment marked."""
    gutter, tall = 8, at.lines
    wide = min(100, at.width - gutter - 1)
    points = [point for line in lines.values() for point in line]
    ys = [value for point in points for value in point[1:] if value is not None] or [0.0]
    left, right, low, high = min(p[0] for p in points), max(p[0] for p in points), min(ys), max(ys)
    bits: dict[tuple[int, int], tuple[int, str]] = {}
    if left == right:
        return []

    def across(x: float) -> int:
        return round((2 * wide - 1) * (x - left) / (right - left))

    def dot(x: int, y: float, colour: str) -> None:
        down = round((4 * tall - 1) * (high - y) / ((high - low) or 1))
        old, _ = bits.get((down // 4, x // 2), (0, ""))
        bits[down // 4, x // 2] = old | _DOTS[x % 2][down % 4], colour

    for every, part in ((3, 2), (3, 3), (1, 1)):  # intervals first: a line lies over them
        for colour, line in zip(itertools.cycle(LINES), lines.values(), strict=False):
            known = [(across(point[0]), y) for point in line if (y := point[part]) is not None]
            for (x0, y0), (x1, y1) in zip(known, known[1:] + known[-1:], strict=True):
                for x in range(x0, max(x1, x0 + 1), every):
                    dot(x, y0 + (y1 - y0) * (x - x0) / ((x1 - x0) or 1), colour)
    chosen = None if mark is None else across(min(max(mark, left), right)) // 2
    drawn = []
    for row in range(tall):
        label = f"{high:.1f}" if row == 0 else f"{low:.1f}" if row == tall - 1 and low < high else ""
        drawn.append(Text(f"{label:>{gutter - 1}}│", DIM))
        cells = [(f"{colour} on grey35" if column == chosen else colour, chr(0x2800 + code) if code else " ")
                 for column in range(wide) for code, colour in (bits.get((row, column), (0, "")),)]
        for style, same in itertools.groupby(cells, key=lambda cell: cell[0]):
            drawn[-1].append("".join(letter for _, letter in same), style)
    ends = f"{x_title} {left}", f"{right}"
    return [*drawn, Text(f"{'':>{gutter}}{ends[0]:<{wide - len(ends[1])}}{ends[1]}", DIM)]


RENDERERS: Mapping[str, Callable[[Table, Place], list[Text]]] = {
    "text": _text, "line": _line, "bars": _bars, "table": _table, "tiles": _tiles, "network": _network}
