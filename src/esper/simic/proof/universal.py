"""The court for a universe: controllers and controls on data sets that none of them was tuned on.

Legend: n scenarios of several families, each of a source of data; sources are what a proof generalises over.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from esper.leyline.codec import from_dict, to_dict
from esper.leyline.storage import decoding, read_state, write_state
from esper.simic.proof.claims import CONFIDENCE, RESAMPLES
from esper.simic.proof.plans import Plan
from esper.simic.proof.surveyed import PlanTable
from esper.tolaria import Family

_COLUMNS = PlanTable._fields[1:]


def save_table(path: Path, table: PlanTable) -> None:
    tensors = {name: torch.from_numpy(getattr(table, name)) for name in _COLUMNS}
    write_state(path, "plans", {"plans": [to_dict(plan) for plan in table.plans]}, tensors)


def load_table(path: Path) -> PlanTable:
    header, tensors = read_state(path, "plans")
    with decoding(path, "table of plans"):
        plans = tuple(from_dict(Plan, each, f"{path}: plans") for each in header["plans"])
        return PlanTable(plans, *(tensors[name].numpy() for name in _COLUMNS))


def source_numbers(families: Sequence[Family]) -> list[int]:
    """Families on one task's data share a number, other views of it too: TASK-s and TASK-v are one."""
    names = [family.task.removesuffix("-s").removesuffix("-v") for family in families]
    return [names.index(name) for name in names]


def interval(values: np.ndarray, group: np.ndarray, seed: int = 0,
             resamples: int = RESAMPLES) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean of values [n]: sources are drawn, then scenarios of each."""
    rng, members = np.random.default_rng(seed), [values[group == each] for each in np.unique(group)]
    sizes = np.array([len(each) for each in members])
    sums = np.stack([each[rng.integers(size, size=(resamples, size))].sum(1)
                     for each, size in zip(members, sizes, strict=True)], 1)
    drawn = rng.integers(len(members), size=(resamples, len(members)))
    means = np.take_along_axis(sums, drawn, 1).sum(1) / sizes[drawn].sum(1)
    low, high = np.quantile(means, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)
