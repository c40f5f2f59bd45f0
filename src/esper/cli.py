"""The `esper` command: a table of verbs. Each is a dataclass of options next to the function that runs it."""

import sys
from collections.abc import Sequence
from importlib import import_module

import tyro
from rich.console import Console

from esper.leyline import EsperError
from esper.memory import keep_freed_memory

COMMANDS = {
    "demo": ("esper.demo", "Demo", "run", "train a controller for a minute and meet the shipped one"),
    "tasks": ("esper.tasks_cli", "TasksList", "run_list", "list the tasks, their published scores and their data"),
    "tasks add-data": ("esper.tasks_cli", "TasksAddData", "run_add_data", "check a task's files and remember their folder"),
    "train": ("esper.train_cli", "Train", "run", "let a controller learn on a family of scenarios"),
    "prove": ("esper.prove_cli", "Prove", "run", "put trained controllers before the court"),
    "sweep": ("esper.sweep_cli", "SweepOptions", "run", "play scripted decisions: what is knowledge worth?"),
    "replay": ("esper.replay_cli", "Replay", "run", "run a recorded round again and compare it bit by bit"),
    "bench env": ("esper.bench_env", "EnvBench", "run", "compare the environment with a loop over modules"),
    "bench rl": ("esper.bench_rl", "RLBench", "run", "compare the learner with sb3-contrib's RecurrentPPO"),
    "bench population": ("esper.bench", "PopulationBench", "run", "compare a population with a loop over modules"),
}
"""verb -> (module, options, function, what it does); modules are imported when their verb is used."""


def usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  esper {verb:<{width}}  {row[3]}" for verb, row in COMMANDS.items()]
    return "\n".join(["Esper grows neural networks while they train.", "", *lines, "", "Add --help to any of them."])


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    console = Console(highlight=False, soft_wrap=not sys.stdout.isatty())
    verb = next((v for v in sorted(COMMANDS, key=len, reverse=True) if words[: len(v.split())] == v.split()), None)
    if verb is None and (not words or {"-h", "--help"} & set(words)):
        print(usage())
        return 0
    if verb is None:
        print(f"esper: no command {' '.join(words)!r}; there are {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    keep_freed_memory()
    module, options, function, _ = COMMANDS[verb]
    room = import_module(module)
    try:
        config = tyro.cli(getattr(room, options), args=words[len(verb.split()) :], prog=f"esper {verb}")
        getattr(room, function)(config, console)
    except EsperError as error:
        print(f"esper {verb}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
