"""What installed packages bring: modules of the entry point group `esper.plugins`, in which things register.
They are imported once, when blueprints are first listed or a name is asked for that is not built in."""

from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import TypeVar

from esper.leyline.errors import EsperError

V = TypeVar("V")
_brought: dict[str, str] = {}  # plugin -> what is wrong with it, if anything is
_progress: list[str] = []


def loading() -> bool:
    return _progress == ["begun"]


def load_plugins() -> list[str]:
    """Their names, once all are imported; or one sentence on the first that fails, every time."""
    if not _progress:
        _progress.append("begun")
        for found in sorted(entry_points(group="esper.plugins")):
            called = f"{found.name} of the package {found.dist.name if found.dist else found.module}"
            try:
                found.load()
                _brought[called] = ""
            except (Exception, SystemExit) as error:  # whatever its code does
                _brought[called] = f"{type(error).__name__}: {error}".partition("\n")[0]
        _progress.append("done")
    for called, wrong in () if loading() else _brought.items():
        if wrong:
            raise EsperError(f"the plugin {called} cannot be used: {wrong}; mend or uninstall it")
    return list(_brought)


class Registry(dict[str, V]):
    """Things of one kind by name, to which installed packages may add theirs."""

    def __init__(self, kind: str, of: object, rows: Mapping[str, V]) -> None:
        super().__init__(rows)
        self.kind, self.of = kind, of

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or (bool(load_plugins()) and super().__contains__(name))

    def __missing__(self, name: str) -> V:
        if name in self:
            return self[name]
        raise EsperError(f"no {self.kind} {name!r}; choose from {', '.join(self)}")

    def add(self, name: str, thing: V) -> V:
        """Make one of your own known by its name, which must not be taken; docs/extend.md has an example."""
        if not isinstance(thing, self.of):  # type: ignore[arg-type]
            wanted = getattr(self.of, "__name__", self.of)
            raise EsperError(f"the {self.kind} {name!r} must be a {wanted}, not {thing!r}")
        if super().__contains__(name):
            raise EsperError(f"the {self.kind} {name!r} exists already; give yours another name")
        self[name] = thing
        return thing
