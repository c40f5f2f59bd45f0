"""`esper doctor`: what is installed and found here, and whether the main parts work."""

import os
import platform
import shutil
import tempfile
from contextlib import closing
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from esper.cli.options import Doctor
from esper.kasmina import Host, Population
from esper.leyline import EsperError
from esper.leyline.keys import seeded
from esper.leyline.plugins import load_plugins
from esper.leyline.provenance import VERSION
from esper.nissa import Store, read, verify
from esper.tamiyo.minds import read_mind, shipped
from esper.tolaria.tasks import all_tasks, data_directory, where


def run(options: Doctor, console: Console) -> int:
    well, shown = True, Table.grid(padding=(0, 2))
    for name, check in CHECKS.items():
        try:
            said = check()
        except Exception as error:  # a patient may have anything
            said, well = f"FAILS: {error if isinstance(error, EsperError) else repr(error)}", False
        shown.add_row(name, said)
    console.print(shown)
    console.print("all is well" if well else "something fails")
    return int(not well)


def _data() -> str:
    folder, places = data_directory().absolute(), {name: where(task) for name, task in all_tasks().items()}
    disk = shutil.disk_usage(next(each for each in (folder, *folder.parents) if each.exists()))
    found = ", ".join(f"{name} ({place})" for name, place in places.items() if place)
    missing = ", ".join(name for name, place in places.items() if not place) or "none"
    return f"{folder}, {disk.free / 2**30:,.1f} GiB free\nhere: {found}\nmissing: {missing}"


def _grow() -> str:
    """A host and its twin agree until the seed of one is blended in."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    population = Population(Host("mlp", (4,), (8, 8), classes=2), rows=2, device=device)
    population.reset(torch.arange(2), torch.tensor([7, 7]))
    with seeded(0):
        x = torch.randn(64, 1, 4).repeat(1, 2, 1).to(device)
    action = population.spec.action
    begin = action("GERMINATE", blueprint="mlp_small", tempo=3)
    for op, alike in ((begin, True), (action("ADVANCE"), False)):
        population.begin_epoch(torch.tensor([op, action("WAIT")]))
        for _ in range(4):
            population.train_step(x, (x[..., 0] > 0).long())
        gap = float(population.forward(x).diff(dim=1).abs().max())
        population.end_epoch()
        if alike != (gap < 1e-4):
            raise EsperError(f"a seed that {'incubates' if alike else 'is blended in'} moved its host {gap}")
    path = "the engine" if population.by_engine else "the general path"
    return f"a seed incubates on the {device} without a trace, then changes its host\nrun by {path}"


def _store() -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.db"
        with closing(Store(path)) as store:
            store.write("round", {"round": [0], "utility": [0.5]})
            store.commit()
        verify(path)
        ((value,),) = read(path, "SELECT utility FROM round")
        return f"{value} was written, verified and read"


CHECKS = {
    "versions": lambda: (f"esper {VERSION}, Python {platform.python_version()}, torch {torch.__version__}, "
                         f"numpy {np.__version__}"),
    "devices": lambda: (f"{os.cpu_count()} cores, threads in use: {torch.get_num_threads()}, "
                        f"CUDA devices: {torch.cuda.device_count()}"),
    "plugins": lambda: ", ".join(load_plugins()) or "none",
    "data": _data,
    "growing": _grow,
    "store": _store,
    "minds": lambda: ", ".join(f"{name} with {len(read_mind(name))} controllers" for name in shipped())}
"""What it says of each; whatever one of them raises is a failure."""
