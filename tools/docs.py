"""The documentation site: `api` writes docs/api.md from docstrings, `site` gathers all pages and builds them.

Pages lie in the site as they lie in the repository, so that their links hold in both."""

import inspect
import shutil
import subprocess
import sys
from enum import Enum
from pathlib import Path
from typing import Any

import esper

ROOT = Path(__file__).parent.parent
PAGES = ("README.md", "CHANGELOG.md", "docs/*.md", "docs/*.svg", "experiments/*.md", "experiments/proof/*/proof.html")


def api_page() -> str:
    """Every public name with its parameters and docstring, and the documented methods of classes."""
    parts = ["# API reference\n\nEverything that `import esper` gives. `python tools/docs.py api` writes this page from the docstrings.\n"]
    for name in esper.__all__:
        thing = getattr(esper, name)
        parts.append(f"## {name}\n\n{_described(name, thing)}")
        for method in sorted(vars(thing)) if inspect.isclass(thing) and not issubclass(thing, Enum) else ():
            found = getattr(thing, method)
            if not method.startswith("_") and callable(found) and inspect.isroutine(found) and found.__doc__:
                parts.append(f"### {name}.{method}\n\n{_described(f'{name}.{method}', found)}")
    return "\n".join(parts)


def _described(name: str, thing: Any) -> str:
    """How it is called, and its docstring. Enums and errors are not called."""
    said = inspect.cleandoc(thing.__doc__)
    if inspect.isclass(thing) and issubclass(thing, (Enum, Exception)):
        return f"{said}\n"
    shown = [f"{_STARS.get(each.kind, '')}{each.name}{'=...' if each.default is not each.empty else ''}"
             for each in inspect.signature(thing).parameters.values() if each.name != "self"]
    return f"```text\n{name}({', '.join(shown)})\n```\n\n{said}\n"


_STARS = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}


def stage(folder: Path) -> None:
    """All pages in one folder; what an earlier build left is removed."""
    shutil.rmtree(folder, ignore_errors=True)
    for pattern in PAGES:
        for path in ROOT.glob(pattern):
            target = folder / path.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)
    (folder / "README.md").rename(folder / "index.md")


def main(words: list[str]) -> int:
    if words == ["api"]:
        (ROOT / "docs" / "api.md").write_text(api_page())
        return 0
    stage(ROOT / "build" / "pages")
    return subprocess.run([sys.executable, "-m", "zensical", "build", "--clean", "--strict"], cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
