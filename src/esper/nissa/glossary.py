"""Every column of the run store in words: `python -m esper.nissa.glossary > docs/store.md`."""

import math

from esper.nissa.registry import TABLES


def glossary() -> str:
    """All tables as Markdown: `docs/store.md`."""
    lines = ["# The run store", "",
             "One SQLite file per run; `read` or any SQLite client opens it, also while the run writes. NULL was not measured.",
             "Made by `python -m esper.nissa.glossary > docs/store.md`."]
    for table, columns in TABLES.items():
        lines += ["", f"## {table}", "", "| column | what it is | unit | range | over rows |", "|---|---|---|---|---|"]
        for name, metric in columns.items():
            ends = [f"{end:g}" if math.isfinite(end) else "" for end in (metric.low, metric.high)]
            span = f"{ends[0]} .. {ends[1]}" if any(ends) else ""
            lines.append(f"| `{name}`{' (key)' if metric.key else ''} | {metric.help} | {metric.unit} | {span} | "
                         f"{metric.reducer if metric.reducer != 'none' else ''} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(glossary())
