"""`esper replay`: run a recorded round again and compare it bit by bit."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import tyro
from rich.console import Console

from esper.leyline import EsperError
from esper.tolaria import Trace, replay


@dataclass(frozen=True)
class Replay:
    """Run a recorded round again; every measurement must be the same bit for bit.

    Example: esper replay round.safetensors --row 3
    """

    trace: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="TRACE")]
    """File that a recorded round was written to."""
    row: int | None = None
    """Compare this row alone (the whole round is run either way)."""


def run(config: Replay, console: Console) -> None:
    trace = Trace.load(config.trace)
    epochs, rows = trace.actions.shape[:2]
    if config.row is not None and not 0 <= config.row < rows:
        raise EsperError(f"--row {config.row} is outside 0..{rows - 1}")
    if trace.header["device"] != "cpu" and not torch.cuda.is_available():
        raise EsperError(f"this round was recorded on {trace.header['device']}, which is not here")
    here = {"threads": torch.get_num_threads(), "torch": torch.__version__,
            "deterministic": torch.are_deterministic_algorithms_enabled()}
    other = [f"{name} {trace.header[name]} then, {value} now" for name, value in here.items() if trace.header[name] != value]
    if other:
        console.print(f"Bits are only promised for the same build, threads and mode: {'; '.join(other)}")
    with console.status(f"{epochs} epochs of {rows} rows"):
        places = replay(trace)
    different = [place for place in places if config.row is None or place.endswith((f", row {config.row}", "every row"))]
    if different:
        raise EsperError(f"{len(different)} of the measurements differ, first {different[0]}")
    what = f"row {config.row}" if config.row is not None else f"all {rows} rows"
    console.print(f"{what}, {epochs} epochs: {len(trace.measured)} measurements, bit for bit the same")
