"""Scenarios: what an episode is about. A family draws them by key; a policy sees prices, horizon and clock
alone. Legend: N scenarios."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

from esper.kasmina import Host, Impairments, OptimConfig
from esper.leyline import EsperError
from esper.leyline.keys import Purpose, mix, uniform
from esper.tolaria.tasks import find_task


@dataclass(frozen=True)
class Kind:
    """A hidden type: what the data is like, what is wrong with the host. Per-stage tuples may be short."""

    name: str
    noise: float = 0.0
    """Standard deviation of noise added to every input, fixed per sample."""
    shift: int = 0
    """Every sample is moved by up to so many places, fixed per sample."""
    shuffle: bool = False
    """Positions are permuted, the same way for all samples."""
    label_noise: float = 0.0
    """Share of training labels that are drawn at random; validation labels stay true."""
    samples: int = 0
    """Training samples, cycled so that an epoch stays as long; 0 is all."""
    one_tap: tuple[bool, ...] = ()
    width: tuple[float, ...] = ()
    frozen: tuple[bool, ...] = ()


@dataclass
class Scenarios:
    """Many scenarios as columns."""

    key: Tensor  # [N] int64: decides weights, data order and noise
    kind: Tensor  # [N] int64: position in `kinds`
    price: Tensor  # [N] score that one parameter of a live seed costs
    flop_price: Tensor  # [N] score that extra FLOPs cost, in trainings of the bare host for the episode
    horizon: Tensor  # [N] int64
    lr: Tensor  # [N] float64
    luck: Tensor  # [N] int64: for the draws of policies; says nothing about the rest
    kinds: tuple[Kind, ...]

    def __len__(self) -> int:
        return len(self.key)

    def columns(self) -> dict[str, Tensor]:
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "kinds"}

    def take(self, rows: Tensor) -> "Scenarios":
        return Scenarios(**{name: column[rows] for name, column in self.columns().items()}, kinds=self.kinds)

    @staticmethod
    def joined(parts: Sequence["Scenarios"]) -> "Scenarios":
        """All of one family, one part behind the other."""
        columns = {name: torch.cat([getattr(part, name) for part in parts]) for name in parts[0].columns()}
        return Scenarios(**columns, kinds=parts[0].kinds)

    def put(self, rows: Tensor, others: "Scenarios") -> None:
        """Write others into these rows; their kinds must be among these."""
        if not set(others.kinds) <= set(self.kinds):
            raise EsperError("these scenarios are of another family: it has no such kind")
        for name, column in self.columns().items():
            column[rows] = getattr(others, name)
        self.kind[rows] = torch.tensor([self.kinds.index(kind) for kind in others.kinds])[others.kind]

    def of_kind(self, name: str) -> Tensor:
        """[N]: one field of every scenario's kind."""
        return torch.tensor([getattr(kind, name) for kind in self.kinds])[self.kind]

    def impairments(self, stages: int) -> Impairments:
        def table(name: str, healthy: float) -> Tensor:
            rows = [(*getattr(kind, name), *[healthy] * stages)[:stages] for kind in self.kinds]
            return torch.tensor(rows, dtype=torch.float32)[self.kind]

        return Impairments(table("one_tap", 0) > 0, table("width", 1), table("frozen", 0) > 0)


SPLITS = {"train": 0, "validation": 1, "test": 2}
"""Of scenarios: a controller learns on the first, is watched on the second and judged on the third."""


@dataclass(frozen=True)
class Family:
    """A distribution of scenarios on one task and host. Write your own: every field is plain data."""

    name: str
    task: str
    host: Host
    kinds: tuple[Kind, ...]
    prices: tuple[float, ...] = (0.0,)
    flop_prices: tuple[float, ...] = (0.0,)
    horizons: tuple[int, ...] = (20,)
    lrs: tuple[float, ...] = (1e-2,)
    samples: int = 0
    """Training samples used of the task; 0 is all."""
    validation: int = 0
    """Validation samples used; 0 is all."""
    batch: int = 100
    pool: int = 1
    """Images are averaged over squares of so many pixels first."""
    augment: int = 0
    """Every sample is moved by up to so many places, anew each epoch."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    floor: float = 0.1
    """Learning rates fall along a cosine to this share at the horizon."""

    def __post_init__(self) -> None:
        for name in ("kinds", "prices", "flop_prices", "horizons", "lrs"):
            if not isinstance(given := getattr(self, name), (tuple, list)):
                raise EsperError(f"{name} of family {self.name!r} is a {type(given).__name__}; "
                                 "expected a tuple")
        for problem in self._problems():
            raise EsperError(f"family {self.name!r} {problem}")

    def _problems(self) -> Iterator[str]:
        if not isinstance(self.host, Host) or not isinstance(self.optim, OptimConfig):
            yield "needs a Host and an OptimConfig"
        find_task(self.task)
        if not (self.kinds and self.prices and self.flop_prices and self.horizons and self.lrs):
            yield "needs at least one kind, price, FLOP price, horizon and learning rate"
        least = min(self.samples, self.validation, self.augment)
        if min(*self.horizons, self.batch, self.pool) < 1 or least < 0:
            yield (f"has an impossible size: horizons {self.horizons}, batch {self.batch}, pool {self.pool}, "
                   f"samples {self.samples}, validation {self.validation}")
        if min(*self.prices, *self.flop_prices, 0.0) < 0 or min(self.lrs) <= 0:
            yield "has a negative price, or a learning rate that is not above 0"
        if any(not 0 <= k.label_noise < 1 or min(k.noise, k.shift, k.samples) < 0 for k in self.kinds):
            yield "has a kind with impossible noise, shift or samples"
        distorted = any(k.noise or k.shift or k.shuffle or k.label_noise for k in self.kinds)
        if self.host.tokens and (distorted or self.augment or self.pool > 1):
            yield ("has hosts of tokens: nothing distorts them; "
                   "leave out noise, shift, shuffle, label_noise, augment and pool")

    @property
    def objective(self) -> str:
        return find_task(self.task).objective

    def draw(self, keys: Tensor) -> Scenarios:
        """Scenarios that depend on their keys [N] alone, but for their luck, which depends on their place
        among the N alone: a policy that sees it learns nothing of the key."""
        table = {"kind": (range(len(self.kinds)), torch.int64), "price": (self.prices, torch.float32),
                 "flop_price": (self.flop_prices, torch.float32), "horizon": (self.horizons, torch.int64),
                 "lr": (self.lrs, torch.float64)}
        places = uniform(mix(keys, Purpose.SCENARIO), len(table)).unbind(1)
        drawn = {name: torch.tensor(values, dtype=dtype)[(place * len(values)).long()]
                 for (name, (values, dtype)), place in zip(table.items(), places, strict=True)}
        luck = mix(torch.full_like(keys, Purpose.LUCK), torch.arange(len(keys)))
        return Scenarios(key=keys.clone(), **drawn, luck=luck, kinds=self.kinds)

    def scenarios(self, count: int, split: str = "train", start: int = 0) -> Scenarios:
        """Scenarios number `start` .. `start + count - 1` of a split; splits share no key."""
        if split not in SPLITS:
            raise EsperError(f"no scenario split {split!r}; choose from {', '.join(SPLITS)}")
        return self.draw(mix(torch.full((count,), SPLITS[split]), torch.arange(start, start + count)))

    def rate(self, clock: Tensor, horizon: Tensor) -> Tensor:
        """Share of the learning rate in epoch `clock` (0 is the first). The clock alone decides, for hosts
        and seeds and in every arm alike: a seed born late starts at what is left."""
        turn = (1 + torch.cos(math.pi * clock.double() / horizon.clamp(min=1))) / 2
        return self.floor + (1 - self.floor) * turn
