"""`esper tasks` and `esper tasks add-data`: what there is to learn, and where its files are."""

import json

from rich.console import Console
from rich.table import Table

from esper.cli.options import TasksAddData, TasksList
from esper.tolaria.tasks import TASKS, add_data, where


def tasks_table() -> Table:
    table = Table(title="Tasks", title_justify="left", caption_justify="left")
    table.caption = "samples: train / validation / test"
    for name in ("task", "host", "samples", "reference score", "data"):
        table.add_column(name, overflow="fold")
    for task in TASKS.values():
        sizes, place = " /\n".join(f"{size:,}" for size in task.sizes), where(task)
        data = f"missing: {task.source.remedy(task)}" if place is None else "found"
        table.add_row(task.name, task.host, sizes, task.reference, place if place == "built in" else data)
        table.add_section()
    return table


def run(config: TasksList | TasksAddData, console: Console) -> None:
    if isinstance(config, TasksAddData):
        folder = add_data(config.name, config.path)
        console.print(f"{config.name}: all files in {folder} are as expected; Esper reads them from there")
    elif config.json:
        names = ("host", "inputs", "sizes", "reference")
        print(json.dumps({task.name: {**{name: getattr(task, name) for name in names}, "data": where(task)}
                          for task in TASKS.values()}))
    else:
        console.print(tasks_table())
