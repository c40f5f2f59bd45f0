"""`esper tasks` and `esper tasks add-data`: what there is to learn, and where its files are."""

import json

from rich.console import Console
from rich.table import Table

from esper.cli.options import TasksAddData, TasksList
from esper.tolaria.tasks import TASKS, Task, add_data, where


def data_status(task: Task) -> str:
    place = where(task)
    if place is None:
        return f"missing: {task.source.remedy(task)}"
    return place if place == "built in" else "found"


def tasks_table() -> Table:
    table = Table(title="Tasks", title_justify="left", caption="samples: train / validation / test", caption_justify="left")
    for name in ("task", "host", "samples", "reference score", "data"):
        table.add_column(name, overflow="fold")
    for task in TASKS.values():
        table.add_row(task.name, task.host, " /\n".join(f"{size:,}" for size in task.sizes), task.reference, data_status(task))
        table.add_section()
    return table


def run(config: TasksList | TasksAddData, console: Console) -> None:
    if isinstance(config, TasksAddData):
        folder = add_data(config.name, config.path)
        console.print(f"{config.name}: all files in {folder} are as expected; Esper reads them from there", markup=False)
    elif config.json:
        print(json.dumps({task.name: {"host": task.host, "inputs": task.inputs, "sizes": task.sizes,
                                      "reference": task.reference, "data": where(task)} for task in TASKS.values()}))
    else:
        console.print(tasks_table())
