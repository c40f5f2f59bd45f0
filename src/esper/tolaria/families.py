"""Families that ship with Esper, each with hidden causes; and families on any task, with ordinary hosts."""

import math
import tomllib
from pathlib import Path

from esper.kasmina import HOSTS, Host
from esper.leyline import EsperError
from esper.leyline.codec import from_dict
from esper.leyline.plugins import Registry
from esper.tolaria.scenarios import Family, Kind
from esper.tolaria.tasks import all_tasks, find_task

ALL = (True, True, True)
_WRONG = Kind("few samples, wrong labels", samples=300, label_noise=0.4)

FAMILIES = Registry[Family]("family", Family, {family.name: family for family in (
    Family(
        "mnist1d", "mnist1d", Host("conv1d", widths=(8, 12, 12)),
        (_WRONG, Kind("shuffled", shuffle=True), Kind("shuffled, blind", shuffle=True, one_tap=ALL),
         Kind("blind", one_tap=ALL), Kind("frozen", frozen=ALL)),
        prices=(0.0, 2e-5, 5e-5, 1e-4), horizons=(12, 20)),
    Family(
        "mlp", "digits", Host("mlp", inputs=(64,), widths=(16, 16, 16)),
        (_WRONG, Kind("frozen", frozen=ALL), Kind("narrow last", width=(1.0, 1.0, 0.15))),
        prices=(4e-5, 1e-4, 2e-4), horizons=(8, 12), batch=50),
    Family(
        "fashion", "fashion", Host("cnn", inputs=(1, 14, 14), widths=(6, 8, 8)),
        (_WRONG, Kind("frozen", frozen=ALL), Kind("narrow last", width=(1.0, 1.0, 0.25)),
         Kind("narrow", width=(0.25, 0.25, 0.25))),
        prices=(2e-5, 5e-5, 1e-4), horizons=(10, 14), samples=2000, validation=1000, pool=2),
)})


def register_family(family: Family) -> Family:
    """Make a family known by its name, to `--family` as well: a plugin's way in."""
    if not isinstance(family, Family):
        raise EsperError(f"a family must be a Family, not a {type(family).__name__}")
    return FAMILIES.add(family.name, family)


WIDTHS: dict[str, tuple[int, ...]] = {
    "mlp": (24, 24, 24), "conv1d": (8, 12, 12), "cnn": (8, 16, 16), "resnet": (8, 16, 32), "gpt": (32, 32)}
"""Of hosts on any task: small ones, so that a family can be explored on a laptop."""
MOST = {"gpt": (512, 128, 16)}  # training and validation samples that an epoch uses at the most, and a batch
POINTS, FLOP_PRICES = (0.005, 0.02, 0.08), (0.005, 0.02)
"""Prices: of as many parameters as the host has, and of as many FLOPs as its training takes."""


def family_on(task: str, kind: str = "") -> Family:
    """Hosts of a kind, by default the task's own: all samples, few, or (but for tokens) wrong labels."""
    known, name = find_task(task), f"{task}-{kind}" if kind else task
    kind = kind or known.host
    takes = len(known.inputs), HOSTS[known.host].tokens
    if kind not in WIDTHS or (len(HOSTS[kind].inputs), HOSTS[kind].tokens) != takes:
        raise EsperError(f"a {kind} host does not take the samples of {task}, {list(known.inputs)}; "
                         f"try {known.host}")
    train, validation, batch = MOST.get(kind, (2000, 1000, 100))
    widths, small = WIDTHS[kind], int(math.log2(min(known.inputs[1:], default=8)))  # halvings that leave one
    widths = widths[: small + 1] if kind == "resnet" else widths
    halvings = small if len(known.inputs) > 1 and kind != "resnet" and small < len(widths) else 0
    host = Host(kind, known.inputs, widths, known.classes, halvings=halvings, depth=1)
    samples = min(train, known.sizes[0])
    kinds = [Kind("plain"), Kind("few samples", samples=max(10, samples // 6))]
    kinds += [] if host.tokens else [Kind("wrong labels", label_noise=0.3)]
    return Family(name, task, host, tuple(kinds),
                  prices=tuple(points / host.cost.params for points in POINTS), flop_prices=FLOP_PRICES,
                  horizons=(8, 12), lrs=(3e-3,) if host.tokens else (1e-2,), samples=samples,
                  validation=min(validation, known.sizes[1]), batch=max(1, min(batch, samples // 4)))


def find_family(name: str) -> Family:
    """A family that is known by its name; one in a file NAME.toml; or ordinary hosts on TASK or TASK/HOST."""
    task, _, kind = name.partition("/")
    if name in FAMILIES:
        return FAMILIES[name]
    if name.endswith(".toml"):
        try:
            return from_dict(Family, tomllib.loads(Path(name).read_text()), name, complete=False)
        except (OSError, ValueError) as error:  # bytes that are no text, text that is no TOML
            raise EsperError(f"cannot read the family {name}: {error}") from error
    if task in (tasks := list(all_tasks())):
        return family_on(task, kind)
    raise EsperError(f"no family {name!r}; choose from {', '.join(FAMILIES)}, a file FAMILY.toml, "
                     f"or ordinary hosts on a task: {', '.join(tasks)}")
