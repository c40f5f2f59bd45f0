"""Families that ship with Esper: in each the best decision depends on what a policy cannot see."""

from esper.kasmina import Host
from esper.leyline import EsperError
from esper.tolaria.scenarios import Family, Kind

ALL = (True, True, True)
_WRONG = Kind("few samples, wrong labels", samples=300, label_noise=0.4)

FAMILIES: dict[str, Family] = {family.name: family for family in (
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
)}


def register_family(family: Family) -> Family:
    """Make a family known by its name, to `--family` as well: a plugin's way in."""
    if not isinstance(family, Family):
        raise EsperError(f"a family must be a Family, not a {type(family).__name__}")
    if family.name in FAMILIES:
        raise EsperError(f"there is already a family {family.name!r}; give yours another name")
    FAMILIES[family.name] = family
    return family


def find_family(name: str) -> Family:
    """A family that ships with Esper, or was registered."""
    if name not in FAMILIES:
        raise EsperError(f"no family {name!r}; choose from {', '.join(FAMILIES)}")
    return FAMILIES[name]
