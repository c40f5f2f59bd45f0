"""A small workshop for tests: a family on made-up data that a small host can learn, quickly."""

from dataclasses import dataclass

import torch
from torch import Tensor

from esper.kasmina import Host, Impairments, Population, blueprints_for
from esper.leyline import ActionSpec, View
from esper.tamiyo import Random
from esper.tolaria import TASKS, Family, Kind, MorphogeneticEnv, Scenarios, TaskData
from esper.tolaria.env import seeds_of

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


@dataclass(frozen=True)
class Scenario:
    """One episode's facts, written by hand."""

    key: int
    kind: Kind
    price: float = 0.0
    flop_price: float = 0.0
    horizon: int = 20
    lr: float = 1e-2


def columns_of(scenarios: list[Scenario]) -> Scenarios:
    kinds = tuple(dict.fromkeys(s.kind for s in scenarios))

    def column(name: str, dtype: torch.dtype | None = None) -> Tensor:
        return torch.tensor([getattr(s, name) for s in scenarios], dtype=dtype)

    return Scenarios(key=column("key"), kind=torch.tensor([kinds.index(s.kind) for s in scenarios]), price=column("price"),
                     flop_price=column("flop_price"), horizon=column("horizon"), lr=column("lr", torch.float64),
                     luck=torch.arange(len(scenarios)), kinds=kinds)


def healthy(rows: int, stages: int) -> Impairments:
    """Nothing is wrong with any host; to be written into."""
    off = torch.zeros(rows, stages, dtype=torch.bool)
    return Impairments(off, torch.ones(rows, stages), off.clone())


def random_actions(population: Population, generator: torch.Generator) -> Tensor:
    """One legal action per row, [N, heads], from the random policy."""
    life = population.life
    nothing = torch.zeros(life.rows, dtype=torch.int64)
    keys = torch.randint(2**62, (life.rows,), generator=generator)
    return Random()(View(population.spec, keys, nothing, nothing, nothing, nothing, nothing > 0, life.verdicts(),
                         life.free_targets(), seeds_of(life)))


def waves(batch: int, rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """A toy task for 40-sample sequences: which of ten chirps is hidden in the noise? x [B, N, 1, 40], y [B, N]."""
    label = torch.randint(10, (batch, rows), generator=generator)
    time = torch.linspace(0, 1, 40)
    phase = torch.rand(batch, rows, 1, generator=generator)
    chirp = torch.sin(2 * torch.pi * (phase + (1 + label[..., None] * 0.6) * time * (1 + time)))
    return (chirp + 0.5 * torch.randn(chirp.shape, generator=generator)).unsqueeze(2), label


def unmixed(value: Tensor, part: int) -> Tensor:
    """The key of which `mix(key, part)` is this value: the hash is a bijection, step by step backwards."""
    mask = (1 << 64) - 1

    def back(number: int, shift: int) -> int:
        found = number
        for _ in range(64 // shift + 1):
            found = number ^ (found >> shift)
        return found

    out = []
    for number in value.tolist():
        number &= mask
        number = back(number, 31) * pow(0x94D049BB133111EB, -1, 1 << 64) & mask
        number = back(number, 27) * pow(0xBF58476D1CE4E5B9, -1, 1 << 64) & mask
        key = (back(number, 30) - (part + 1) * 0x9E3779B97F4A7C15) & mask
        out.append(key - (1 << 64) if key >> 63 else key)
    return torch.tensor(out)
