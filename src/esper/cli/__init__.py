"""The `esper` command: a table of verbs. Options stand in `options`; what runs them is imported late."""

import difflib
import errno
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import tyro
from rich.console import Console

from esper.cli import options
from esper.cli.machine import choose_threads, keep_freed_memory
from esper.leyline import EsperError

COMMANDS = {
    "demo": (options.Demo, "demo", "train a controller for a minute and meet the shipped one"),
    "tasks": (options.TasksList, "tasks", "list the tasks, their published scores and their data"),
    "tasks add": (options.TasksAdd, "tasks", "make a task of your own data"),
    "tasks remove": (options.TasksRemove, "tasks", "take a task of your own away"),
    "tasks add-data": (options.TasksAddData, "tasks", "check a task's files and remember their folder"),
    "train": (options.Train, "train", "let a controller learn on a family of scenarios"),
    "prove": (options.Prove, "prove", "put trained controllers before the court"),
    "sweep": (options.Sweep, "sweep", "play scripted decisions: what is knowledge worth?"),
    "replay": (options.Replay, "replay", "run recorded episodes again and compare them bit by bit"),
}
"""verb -> (options, module of this package whose `run` takes them, what it does)."""


def usage() -> str:
    width = max(map(len, COMMANDS))
    lines = "\n".join(f"  esper {verb:<{width}}  {row[2]}" for verb, row in COMMANDS.items())
    return f"Esper grows neural networks while they train.\n\n{lines}\n\nAdd --help to any of them."


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0 is done, 1 a verdict that fails, 2 one sentence on what is wrong, 130 is Ctrl-C."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    longest = sorted(COMMANDS, key=len, reverse=True)
    verb = next((v for v in longest if words[: len(v.split())] == v.split()), None)
    try:
        code = _run(verb, words)
        sys.stdout.flush()
        return code
    except EsperError as error:
        print(f"esper {verb}: {_printable(str(error))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"esper {verb}: stopped", file=sys.stderr)
        return 130
    except OSError as error:  # what Python still holds for standard output must not complain at its end
        if error.errno not in (errno.EPIPE, errno.ENOSPC, errno.EBADF) or error.filename is not None:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if error.errno == errno.EPIPE:  # nobody reads any more
            return 0
        print(f"esper {verb or '--help'}: cannot print: {error.strerror}", file=sys.stderr)
        return 2


def _run(verb: str | None, words: Sequence[str]) -> int:
    if verb is None and (not words or {"-h", "--help"} & set(words)):
        print(usage())
        return 0
    if verb is None and words[0] in ("--version", "-V"):
        from esper.leyline.provenance import VERSION

        print(f"esper {VERSION}")
        return 0
    if verb is None:
        near = difflib.get_close_matches(words[0], COMMANDS, 1)
        hint = f"; did you mean esper {near[0]}?" if near else f"; there are {', '.join(COMMANDS)}"
        print(f"esper: no command {_printable(' '.join(words))!r}{hint}", file=sys.stderr)
        return 2
    kind, module, _ = COMMANDS[verb]
    config: Any = tyro.cli(kind, args=words[len(verb.split()) :], prog=f"esper {verb}")
    keep_freed_memory()
    console = Console(highlight=False, markup=False, soft_wrap=not sys.stdout.isatty())  # names may hold [
    if module != "tasks" and (changed := choose_threads()):
        console.print(changed, style="dim")
    return import_module(f"esper.cli.{module}").run(config, console) or 0


def _printable(text: str) -> str:
    """Names come from anywhere; escape codes in them must not reach a terminal."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)
