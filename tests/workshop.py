"""A small workshop for tests: a family on made-up data that a small host can learn, quickly."""

import torch
from torch import Tensor

from esper.kasmina import Host, blueprints_for
from esper.leyline import ActionSpec
from esper.tolaria import TASKS, Family, Kind, MorphogeneticEnv, TaskData

KINDS = (Kind("plain"), Kind("noisy", noise=0.3, label_noise=0.2), Kind("few", samples=40, width=(0.5,)),
         Kind("moved", shift=2), Kind("shuffled", shuffle=True, frozen=(True,)))


def toy_data(samples: int = 240, validation: int = 120, inputs: tuple[int, ...] = (1, 40), classes: int = 10) -> TaskData:
    generator = torch.Generator().manual_seed(0)
    centres = 1.5 * torch.randn(classes, *inputs, generator=generator)

    def draw(count: int) -> tuple[Tensor, Tensor]:
        y = torch.randint(classes, (count,), generator=generator)
        return centres[y] + torch.randn(count, *inputs, generator=generator), y

    return TaskData(TASKS["mnist1d"], *draw(samples), *draw(validation))


def toy_family(host: Host | None = None, **options: object) -> Family:
    settings: dict[str, object] = {"kinds": KINDS, "prices": (0.0, 1e-4), "horizons": (6, 8), "batch": 40}
    settings |= {"name": "toy", "task": "mnist1d", "host": host or Host("mlp", widths=(16, 16))} | options
    return Family(**settings)  # type: ignore[arg-type]


def toy_env(rows: int = 12, family: Family | None = None, **options: object) -> MorphogeneticEnv:
    """With every head, unless `spec` says otherwise."""
    family = family or toy_family()
    options = {"spec": ActionSpec.full(len(family.host.slots), blueprints_for(family.host.kind))} | options
    return MorphogeneticEnv(family, rows, data=toy_data(inputs=family.host.inputs), **options)  # type: ignore[arg-type]
