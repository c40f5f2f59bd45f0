"""Families that ship with Esper. In each of them the best decision depends on something a policy cannot see."""

from itertools import product

from esper.kasmina import Host, OptimConfig
from esper.leyline import EsperError
from esper.tolaria.scenarios import Family, Kind

_TAPS = {"whole": (False, False, False), "blind first": (True, False, False), "blind last": (False, False, True),
         "blind": (True, True, True)}
"""Which stages see only one place at a time."""

FAMILIES: dict[str, Family] = {family.name: family for family in (
    Family(
        "mnist1d", "mnist1d", Host("conv1d", widths=(8, 12, 12)),
        tuple(Kind(f"{order}, {sight}", shuffle=order == "shuffled", one_tap=taps)
              for order, (sight, taps) in product(("ordered", "shuffled"), _TAPS.items())),
        prices=(0.0, 2e-5, 5e-5, 1e-4), horizons=(12, 20), optim=OptimConfig(lr=1e-2)),
    Family(
        "mlp", "mnist1d", Host("mlp", widths=(24, 24)),
        (Kind("ordered"), Kind("few", samples=200), Kind("wrong labels", label_noise=0.4),
         Kind("frozen first", frozen=(True, False)), Kind("frozen", frozen=(True, True))),
        prices=(0.0, 5e-5, 1.5e-4), horizons=(8, 12), samples=1000, optim=OptimConfig(lr=1e-2)),
    Family(
        "fashion", "fashion", Host("cnn", inputs=(1, 14, 14), widths=(6, 8, 8)),
        tuple(Kind(f"{order}, {sight}", shuffle=order == "shuffled", one_tap=taps)
              for order, (sight, taps) in product(("ordered", "shuffled"), _TAPS.items())),
        prices=(0.0, 5e-5, 1.5e-4), horizons=(10, 16), samples=2000, validation=1000, pool=2, optim=OptimConfig(lr=1e-2)),
)}


def find_family(name: str) -> Family:
    if name not in FAMILIES:
        raise EsperError(f"no family {name!r}; choose from {', '.join(FAMILIES)}")
    return FAMILIES[name]
