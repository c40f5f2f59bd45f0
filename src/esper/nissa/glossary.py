"""Every column of the run store in words: `python -m esper.nissa.glossary > docs/store.md`."""

import math

from esper.nissa.registry import INCIDENT, SCHEMA, TABLES

HEAD = """\
# The run store

One SQLite file per run in WAL mode: one process writes it, and any number read it meanwhile with
`esper sql`, [panels](panels.md) or any SQLite client. A round is written in one transaction, so a run that is
killed leaves whole rounds. NULL was not measured.

```sh
esper sql runs/first "SELECT op, count(*) FROM step GROUP BY op"
esper sql runs/first "SELECT * FROM seed WHERE round = 3" --rows 100000 --csv > seeds.csv
```

`esper sql` takes one SELECT. It can change nothing, opens no other file, and stops after `--rows`, after
`--seconds` and at an answer of 100 MB.

These are the tables of schema {schema} (`PRAGMA user_version`). A store of schema 2 is brought to it when its
run is resumed, with NULL for what was not measured then; viewers bring a copy in memory. Runs whose facts
have the same `group` differ in seed alone; facts with a `round` above 0 were noted when the run was resumed.

`esper train --log jsonl:FILE --log tensorboard:FOLDER` tells other tools, as soon as the store has them, the
figures of every round (`train/return`, which is `round.utility`, `train/entropy`, `train/kl` and the rest)
and the means of every examination (`eval/gain`, which is `exam.utility`, `eval/heuristic/gain` and the rest).
The step is the number of rounds that are done; figures that are not finite are left out, and a round that is
played again after a crash is told again. A tracker of your own is any object with
`log(step: int, values: Mapping[str, float])`: `Training(config, folder, Tracked(Store(path), [mine]))`, with
`Tracked` and `Store` of `esper.nissa`.

Made by `python -m esper.nissa.glossary > docs/store.md`."""


def glossary() -> str:
    """All tables as Markdown: `docs/store.md`."""
    lines = [HEAD.format(schema=SCHEMA)]
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
