"""A universe: the families that one controller must cope with, and which of them it never sees in training.

Families of ordinary hosts are made of tasks; whole data sets are held out: no task is on two sides.
"""

import itertools
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from esper.kasmina import Host
from esper.leyline import EsperError
from esper.leyline.codec import from_dict, to_dict
from esper.leyline.keys import Purpose, mix, uniform
from esper.tolaria.families import find_family
from esper.tolaria.scenarios import Family, Kind
from esper.tolaria.tasks import find_task

PARTS = ("training", "validation", "test")
"""A controller learns on the first, is watched on the second; only a proof plays the third."""
SIZES: dict[str, dict[str, tuple[int, ...]]] = {
    "mlp": {"tiny": (6, 6, 6), "small": (12, 12, 12), "medium": (24, 24, 24)},
    "conv1d": {"tiny": (4, 4, 4), "small": (6, 8, 8), "medium": (10, 16, 16)},
    "gpt": {"tiny": (16, 16), "small": (24, 24), "medium": (48, 48)}}
"""Widths of ordinary hosts by their kind and size."""
POINTS, FLOP_POINTS = (0.003, 0.012, 0.05), (0.0025, 0.01, 0.04)
"""Prices of as many parameters as the host has, and of as many FLOPs as its training takes."""


@dataclass(frozen=True)
class Universe:
    """Plain data: write your own in Python, or in TOML with names where families are meant."""

    name: str
    training: tuple[Family, ...]
    validation: tuple[Family, ...]
    test: tuple[Family, ...] = ()
    weights: tuple[float, ...] = ()
    """How often each training family is met, relative to the others; empty: all alike."""
    sources: dict[str, str] = field(default_factory=dict)
    """task -> where its data comes from. Tasks that are not listed are sources of their own."""

    def __post_init__(self) -> None:
        for problem in self._problems():
            raise EsperError(f"universe {self.name!r} {problem}")

    def _problems(self) -> Iterator[str]:
        parts = {part: getattr(self, part) for part in PARTS}
        names = [family.name for part in parts.values() for family in part]
        if not self.training or not self.validation:
            yield "needs at least one training and one validation family"
        if twice := sorted({name for name in names if names.count(name) > 1}):
            yield f"has two families called {twice[0]!r}"
        for one, other in itertools.combinations(parts, 2):
            if shared := set(self.source_of(parts[one])) & set(self.source_of(parts[other])):
                yield f"has data of {min(shared)!r} both in {one} and in {other}; hold out whole data sets"
        judged = {family.host.kind for part in PARTS[1:] for family in parts[part]}
        if unknown := judged - {family.host.kind for family in self.training}:
            yield f"has {min(unknown)} hosts to be judged on and none to learn from"
        if self.weights and (len(self.weights) != len(self.training) or min(self.weights) < 0
                             or not sum(self.weights) > 0):
            yield (f"has {len(self.weights)} weights for {len(self.training)} training families, "
                   "or none above 0")

    def source_of(self, families: Sequence[Family]) -> list[str]:
        """Where the data of each comes from: what a proof generalises over."""
        return [self.sources.get(family.task, family.task) for family in families]

    @property
    def kinds(self) -> dict[str, float]:
        """kind of host -> the share of training that meets it."""
        odds, found = self.weights or (1.0,) * len(self.training), dict[str, float]()
        for family, weight in zip(self.training, odds, strict=True):
            found[family.host.kind] = found.get(family.host.kind, 0.0) + weight / sum(odds)
        return found

    def pick(self, number: int, count: int) -> list[Family]:
        """The training families of so many shards of a round; they depend on its number alone."""
        odds = torch.tensor(self.weights or (1.0,) * len(self.training), dtype=torch.float64)
        places = uniform(mix(torch.tensor([number]), Purpose.UNIVERSE), count)[0].double()
        edges = (odds / odds.sum()).cumsum(0)
        chosen = torch.searchsorted(edges, places, right=True).clamp(max=len(odds) - 1)
        return [self.training[place] for place in chosen.tolist()]


def ordinary(task: str, kind: str = "", size: str = "small") -> Family:
    """Healthy hosts on a task: all samples, few, or (but for tokens) noisy inputs or wrong labels; short
    trainings; parameters and FLOPs have a price."""
    known = find_task(task)
    kind = kind or known.host
    if kind not in SIZES or size not in SIZES[kind]:
        raise EsperError(f"no ordinary {kind} hosts of size {size!r}; choose from "
                         f"{', '.join(f'{k}/{s}' for k, sizes in SIZES.items() for s in sizes)}")
    widths, small = SIZES[kind][size], min(known.inputs[1:], default=8).bit_length() - 1
    halvings = small if len(known.inputs) > 1 and small < len(widths) else 0
    host = Host(kind, known.inputs, widths, known.classes, halvings=halvings)
    most = 2_048 if host.tokens else 512  # of fewer texts hosts learn no more than how often a token comes
    samples, validation = min(most, known.sizes[0]), min(256, known.sizes[1])
    few = samples // 4 if host.tokens else max(2 * known.classes, samples // 5)
    kinds = [Kind("plain"), Kind("few samples", samples=few)]
    kinds += [] if host.tokens else [Kind("noisy inputs", noise=0.7), Kind("wrong labels", label_noise=0.3)]
    return Family(f"{task}-{kind}-{size}", task, host, tuple(kinds),
                  prices=tuple(points / host.cost.params for points in POINTS), flop_prices=FLOP_POINTS,
                  horizons=(12, 18), lrs=(5e-3, 1e-2), samples=samples, validation=validation,
                  batch=max(1, min(most // 16, samples // 4)))


def find_universe(path: str | Path) -> Universe:
    """From a TOML file. A family in it is a table, or a name: one that `find_family` knows, or
    TASK/HOST/SIZE of ordinary hosts."""
    try:
        keys = tomllib.loads(Path(path).read_text())
    except (OSError, ValueError) as error:  # bytes that are no text, text that is no TOML
        raise EsperError(f"cannot read the universe {path}: {error}") from error
    for part in (part for part in PARTS if isinstance(keys.get(part), list)):
        keys[part] = [to_dict(_named(each)) if isinstance(each, str) else each for each in keys[part]]
    return from_dict(Universe, keys, str(path), complete=False)


def _named(name: str) -> Family:
    task, *rest = name.split("/")
    return ordinary(task, *rest) if len(rest) == 2 else find_family(name)
