"""Every column of the run store in words: `python -m esper.nissa.glossary > docs/store.md`."""

import math

from esper.nissa.registry import SCHEMA, TABLES


def glossary() -> str:
    """All tables as Markdown: `docs/store.md`."""
    lines = ["# The run store", "",
             "One SQLite file per run; `read` or any SQLite client opens it, also while the run writes.",
             f"NULL was not measured. These are the tables of schema {SCHEMA} (`PRAGMA user_version`).",
             "Made by `python -m esper.nissa.glossary > docs/store.md`."]
    for table, columns in TABLES.items():
        lines += ["", f"## {table}", "", "| column | what it is | unit | range |", "|---|---|---|---|"]
        for name, metric in columns.items():
            ends = [f"{end:g}" if math.isfinite(end) else "" for end in (metric.low, metric.high)]
            span = f"{ends[0]} .. {ends[1]}" if any(ends) else ""
            key = " (key)" if metric.key else ""
            lines.append(f"| `{name}`{key} | {metric.help} | {metric.unit} | {span} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(glossary())
