"""Every column of the run store in words: `python -m esper.nissa.glossary > docs/store.md`."""

import math
from importlib.resources import files

from esper.nissa.registry import INCIDENT, SCHEMA, TABLES


def glossary() -> str:
    """All tables as Markdown, under the words of `glossary.md`: `docs/store.md`."""
    head = (files(__package__) / "glossary.md").read_text("utf-8")
    lines = [head.rstrip().format(schema=SCHEMA)]
    for table, columns in TABLES.items():
        lines += ["", f"## {table}", "", "| column | what it is | unit | range |", "|---|---|---|---|"]
        for name, metric in columns.items():
            ends = [f"{end:g}" if math.isfinite(end) else "" for end in (metric.low, metric.high)]
            span = f"{ends[0]} .. {ends[1]}" if any(ends) else ""
            key = " (key)" if metric.key else ""
            lines.append(f"| `{name}`{key} | {metric.help} | {metric.unit} | {span} |")
    lines += ["", "## incident", "",
              "A view of `anomaly`: one row for rounds on end in which something was alarming.", "",
              "| column | what it is |", "|---|---|",
              *(f"| `{name}` | {why} |" for name, why in INCIDENT.items())]
    return "\n".join(lines)


if __name__ == "__main__":
    print(glossary())
