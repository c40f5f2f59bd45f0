"""What reports are written with: the page around them, notes, legends, folds and tables of panels."""

from collections.abc import Mapping
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from esper.karn.charts import tag
from esper.karn.panels import Table, said
from esper.leyline.storage import atomic_write


def write_page(out: Path, title: str, head: str, sections: Mapping[str, str]) -> None:
    """One file that needs no other. `head` and the sections are markup, by their title."""
    parts = [tag("section", tag("h2", escape(name)), inner, id=f"s{number}")
             for number, (name, inner) in enumerate(sections.items())]
    links = [tag("a", escape(name), href=f"#s{number}") for number, name in enumerate(sections)]
    page = Template((files(__package__) / "page.html").read_text("utf-8"))
    atomic_write(out, page.substitute(title=escape(title), head=head, links="".join(links),
                                      body="\n".join(parts)))


def legend(colours: Mapping[str, str]) -> str:
    """name -> class"""
    items = (tag("li", tag("i", class_=class_), escape(name)) for name, class_ in colours.items())
    return tag("ul", *items, class_="legend")


def note(text: str) -> str:
    return tag("p", escape(text), class_="note")


def fold(name: str, about: str, *inner: str, opened: bool = False) -> str:
    label = tag("summary", tag("b", escape(name)), escape(about))
    return tag("details", label, *inner, open="open" if opened else "")


def list_of(about: Mapping[str, object]) -> str:
    items = (tag("div", tag("dt", escape(key)), tag("dd", escape(str(fact)))) for key, fact in about.items())
    return tag("dl", *items)


def figure(value: Any, unit: str = "") -> str:
    """Long counts are easier to read on paper with commas."""
    return f"{value:,}" if type(value) is int and not unit else said(value, unit)


def table_of(table: Table, most: int = 200) -> str:
    """The answer of a panel as a table; what does not fit is counted."""
    units = [table.units.get(name, "") for name in table.columns]
    head = [tag("th", escape(name.replace("_", " ") + (f", {unit}" if unit else "")))
            for name, unit in zip(table.columns, units, strict=True)]
    signed = ["" if name == "error" else unit for name, unit in zip(table.columns, units, strict=True)]
    cells = [[figure(value, unit) for value, unit in zip(row, signed, strict=True)] for row in table.rows]
    body = [tag("tr", *(tag("td", escape(cell)) for cell in row)) for row in cells[:most]]
    left = note(f"{len(table.rows) - most} more rows are not shown.") if len(table.rows) > most else ""
    return tag("div", tag("table", tag("thead", tag("tr", *head)), tag("tbody", *body)), class_="wide") + left
