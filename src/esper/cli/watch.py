"""`esper watch`: a run in the terminal, live or afterwards."""

import sys
from pathlib import Path

from rich.console import Console

from esper.cli.options import Watch
from esper.karn.drawn import Place, shown
from esper.karn.panels import PAGES, open_run
from esper.karn.stores import DESCRIPTION, STORE, store_of, written
from esper.leyline import EsperError


def run(options: Watch, console: Console) -> None:
    store = _found(options.run)
    if not sys.stdout.isatty():
        with open_run(store) as seen:
            console.print(shown([seen.panel(name) for name in PAGES["overview"]], Place(console.width)))
        return
    try:
        from esper.karn.watching import Watch as Viewer
    except ModuleNotFoundError as error:
        raise EsperError(f"esper watch needs the package {error.name}; "
                         "install it with: pip install 'esper-morph[watch]'") from error
    folder = store.parent.parent
    Viewer(store, lambda: sorted(folder.glob(f"*/{STORE}"))).run(mouse=False)


def _found(path: Path) -> Path:
    """The store that is named, or the one below a folder that was written last."""
    if not path.exists():
        raise EsperError(f"there is no {path}; name the folder of a run, or begin one with esper train")
    if path.is_file() or any((path / name).exists() for name in (STORE, DESCRIPTION)):
        return store_of(path)
    if below := [each.parent / STORE for name in (STORE, DESCRIPTION) for each in path.rglob(name)]:
        return max(below, key=written)
    raise EsperError(f"there is no run below {path}; begin one with esper train")
