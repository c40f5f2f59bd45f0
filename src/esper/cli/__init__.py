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

import esper
from esper.cli import options
from esper.cli.machine import choose_threads, keep_freed_memory
from esper.leyline import EsperError

COMMANDS = {
    "demo": (options.Demo, "train a controller for a minute and meet the shipped one"),
    "tasks": (options.TasksList, "list the tasks, their published scores and their data"),
    "tasks add": (options.TasksAdd, "make a task of your own data"),
    "tasks remove": (options.TasksRemove, "forget a task of your own"),
    "tasks add-data": (options.TasksAddData, "check a task's files and remember their folder"),
    "train": (options.Train, "let a controller learn on a family of scenarios"),
    "prove": (options.Prove, "put trained controllers before the court"),
    "sweep": (options.Sweep, "play scripted decisions: what is knowledge worth?"),
    "runs": (options.RunsList, "list the runs of a folder: state, family, examinations, age"),
    "runs show": (options.RunsShow, "print one panel of a run: a question and its answer"),
    "runs compare": (options.RunsCompare, "which run is better, and may that be luck?"),
    "watch": (options.Watch, "look at a run in the terminal, live or afterwards"),
    "dashboard": (options.Dashboard, "see runs in a browser, while they train or afterwards"),
    "report": (options.Report, "write runs, or their comparison, as one page"),
    "sql": (options.Sql, "ask the store of a run a question of your own"),
    "replay": (options.Replay, "run recorded episodes again and compare them bit by bit"),
    "export": (options.Export, "write a network that was grown as files that need no Esper"),
    "doctor": (options.Doctor, "say what is installed and found here, and test it")}
"""verb -> (options, what it does); `run` of the module that its first word names takes the options."""
IDLE = ("tasks", "runs", "watch", "dashboard", "report", "sql")  # they compute nothing


def usage() -> str:
    width = max(map(len, COMMANDS))
    lines = "\n".join(f"  esper {verb:<{width}}  {what}" for verb, (_, what) in COMMANDS.items())
    return f"Esper grows neural networks while they train.\n\n{lines}\n\nAdd --help to any of them."


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0 is done, 1 a verdict that fails, 2 one sentence on what is wrong, 130 is Ctrl-C."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    verb = max((v for v in COMMANDS if words[: len(v.split())] == v.split()), key=len, default=None)
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
    helped = not words or bool({"-h", "--help"} & set(words))
    if verb is None and (helped or words[0] in ("--version", "-V")):
        print(usage() if helped else f"esper {esper.__version__}")
        return 0
    if verb is None:
        near = difflib.get_close_matches(words[0], COMMANDS, 1)
        hint = f"; did you mean esper {near[0]}?" if near else f"; there are {', '.join(COMMANDS)}"
        print(f"esper: no command {_printable(' '.join(words))!r}{hint}", file=sys.stderr)
        return 2
    module, *more = verb.split()
    config: Any = tyro.cli(COMMANDS[verb][0], args=words[1 + len(more) :], prog=f"esper {verb}")
    keep_freed_memory()
    console = Console(highlight=False, markup=False, soft_wrap=not sys.stdout.isatty())  # names may hold [
    if module not in IDLE and (changed := choose_threads()):
        console.print(changed, style="dim")
    return import_module(f"esper.cli.{module}").run(config, console) or 0


def _printable(text: str) -> str:
    """Names come from anywhere; escape codes in them must not reach a terminal."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)
