"""`esper tasks` and what follows it: what there is to learn, and where its data is."""

import json

from rich.console import Console
from rich.table import Table

from esper.cli.options import TasksAdd, TasksAddData, TasksList, TasksRemove
from esper.tolaria.tasks import Task, add_data, all_tasks, remove_task, where

SHOWN = ("host", "inputs", "classes", "sizes", "objective", "reference", "digest")


def tasks_table() -> Table:
    table = Table(title="Tasks", title_justify="left", caption_justify="left")
    table.caption = "samples: train / validation / test"
    for name in ("task", "host", "samples", "reference score", "data"):
        table.add_column(name, overflow="fold")
    for task in all_tasks().values():
        sizes, place = " /\n".join(f"{size:,}" for size in task.sizes), where(task)
        data = f"missing: {task.source.remedy(task)}" if place is None else "found"
        table.add_row(task.name, task.host, sizes, task.reference, place if place == "built in" else data)
        table.add_section()
    return table


def _add(config: TasksAdd) -> str:
    task = Task.from_file(config.name, config.path, config.objective.replace("-", "_"), target=config.target,
                          context=config.context, replace=config.replace)
    outputs = f", {task.classes} classes" if task.names else ""
    return (f"{task.name}: {task.objective}{outputs}, inputs {list(task.inputs)} for a {task.host} host; "
            "{:,} samples train, {:,} validate, {:,} test".format(*task.sizes))


def run(config: TasksList | TasksAdd | TasksRemove | TasksAddData, console: Console) -> None:
    if isinstance(config, TasksAdd):
        console.print(_add(config))
    elif isinstance(config, TasksRemove):
        remove_task(config.name)
        console.print(f"{config.name}: removed")
    elif isinstance(config, TasksAddData):
        folder = add_data(config.name, config.path)
        console.print(f"{config.name}: all files in {folder} are as expected; Esper reads them from there")
    elif config.json:
        print(json.dumps({name: {**{key: getattr(task, key) for key in SHOWN}, "data": where(task)}
                          for name, task in all_tasks().items()}))
    else:
        console.print(tasks_table())
