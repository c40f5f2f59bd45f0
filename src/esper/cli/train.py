"""`esper train`: a controller learns; everything about the run lies in one folder."""

import functools
import os
import shlex
import signal
import tomllib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.live import Live

from esper.cli.machine import open_workers
from esper.cli.options import Train
from esper.cli.runs import (
    DESCRIPTION,
    STORE,
    load_run,
    make_folder,
    note_facts,
    use_plugins,
    write_description,
)
from esper.karn import panel, summary
from esper.leyline import ActionSpec, EsperError
from esper.leyline.codec import from_dict, merged, override, to_dict
from esper.leyline.storage import locked
from esper.nissa import Store, Tracked, open_tracker, verify
from esper.simic.training import CHECKPOINT, TrainConfig, Training
from esper.simic.workers import Workers
from esper.tamiyo import Heuristic, PolicyBundle
from esper.tolaria import Family, find_family, find_universe

_SOLVER = {"entropy": [0.1, 0.002], "explore": [0.05, 0.0]}
_SMALL = {"env": {"previews": False}, "ppo": _SOLVER}
PRESETS: dict[str, dict[str, Any]] = {
    "quick": {"rounds": 16, "rows": 48, "scenarios": 192, "exam_every": 16, "exam_rows": 32, **_SMALL},
    "cpu": {"rounds": 150, "rows": 64, "scenarios": 1024, "exam_every": 25, "exam_rows": 128, **_SMALL},
    "gpu": {"rounds": 32, "rows": 192, "scenarios": 1152, "exam_every": 16, "exam_rows": 128,
            "env": {"previews": {"every": 20, "steps": 20}, "device": "cuda"},
            "ppo": {**_SOLVER, "minibatches": 8}}}
"""name -> what differs from the defaults of `TrainConfig`."""


def resolve_config(options: Train, stored: TrainConfig | None = None) -> TrainConfig:
    """Defaults or what a run stored, a preset if named; then the file, then the command line."""
    preset = options.preset or ("quick" if stored is None else "")
    if preset and preset not in PRESETS:
        raise EsperError(f"no --preset {preset!r}; choose from {', '.join(PRESETS)}")
    layers: list[dict[str, Any]] = [
        PRESETS.get(preset, {}),
        {"env": {"family": to_dict(find_family(options.family)), "spec": False}} if options.family else {},
        _universe(options.universe) if options.universe else {},
        {} if options.config is None else _toml(options.config),
        {name: value for name in ("rounds", "rows", "seed", "shards")
         if (value := getattr(options, name)) is not None},
        {"reward": options.reward} if options.reward else {},
        {"env": {"device": options.device}} if options.device else {}]
    return override(stored or TrainConfig(), functools.reduce(merged, layers), "the config")


def _universe(path: Path) -> dict[str, Any]:
    """Its families, of which the first stands for all where one is asked for; and eyes that fit all."""
    universe = find_universe(path)
    family = to_dict(universe.training[0])
    return {"universe": to_dict(universe), "eyes": "universal", "env": {"family": family, "spec": False}}


def _toml(path: Path) -> dict[str, Any]:
    """Its keys; an action spec that it does not give follows from its family."""
    try:
        keys = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:  # bytes that are no text, text that is no TOML
        raise EsperError(f"cannot read --config {path}: {error}") from error
    env = keys.get("env")
    if isinstance(env, dict) and "family" in env:
        family = env["family"]
        env["family"] = to_dict(find_family(family) if isinstance(family, str) else
                                from_dict(Family, family, f"{path}: env.family", complete=False))
        env.setdefault("spec", False)
    return keys


def run(options: Train, console: Console) -> None:
    use_plugins(options.plugin)
    folder, again = options.out, f"esper train --out {shlex.quote(str(options.out))} --resume"
    if options.more < 0 or (options.more and not options.resume):
        raise EsperError("--more is a number of rounds for a run to --resume")
    trackers = list(map(open_tracker, options.log))
    with ExitStack() as stack:
        begin = _resumed if options.resume else _created
        training = begin(options, console, stack)
        config = training.config
        training.sink = Tracked(stack.enter_context(closing(Store(folder / STORE))), trackers)
        note_facts(training)
        asked = stack.enter_context(_interruptible(console))
        live = stack.enter_context(Live(console=console, auto_refresh=False)) if console.is_terminal else None

        def show(done: int) -> None:
            state = summary(folder / STORE, config.rounds)
            assert state is not None
            if live is None:
                console.print(state.line())
            else:
                live.update(panel(state), refresh=True)

        training.run(lambda: bool(asked), show)
        if training.agent.updates < config.rounds:
            console.print(f"stopped after round {training.agent.updates}; go on with: {again}")
            return
        _conclude(training, console)
    console.print(f"the controller: {folder / CHECKPOINT}; everything measured: {folder / STORE}")


@contextmanager
def _interruptible(console: Console) -> Iterator[list[int]]:
    """The first Ctrl-C asks to stop after the round, the second stops at once."""
    asked: list[int] = []

    def ask(number: int, frame: object) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)
        console.print("stopping after this round; Ctrl-C again stops at once and loses the round")

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)


def _workers(options: Train, config: TrainConfig, stack: ExitStack) -> Workers:
    if options.workers > config.shards:
        raise EsperError(f"--workers {options.workers} is more than the {config.shards} shards of a round; "
                         f"begin the run with --shards {options.workers}, or use fewer")
    return stack.enter_context(open_workers(options, config.threads_of_a_shard if options.workers else 0))


def _created(options: Train, console: Console, stack: ExitStack) -> Training:
    """A new run; its folder is described only when everything is there that it needs."""
    folder, config = options.out, resolve_config(options)
    if os.path.lexists(folder / DESCRIPTION):
        raise EsperError(f"--out {folder} already holds a run; add --resume to go on with it, "
                         "or choose another folder")
    make_folder(folder)
    stack.enter_context(locked(folder))
    training = Training(config, folder, workers=_workers(options, config, stack))
    write_description(folder, config)
    return training


def _resumed(options: Train, console: Console, stack: ExitStack) -> Training:
    """The run of a folder as it was begun; options that say otherwise are refused."""
    folder = options.out
    if (found := load_run(folder)) is None:
        raise EsperError(f"--out {folder} holds no run to resume")
    config, about = found
    if different := _differences(to_dict(config), to_dict(resolve_config(options, config))):
        raise EsperError(f"the run in {folder} has another {', '.join(different)}; "
                         "resume it with its own options, or with none")
    stack.enter_context(locked(folder))
    _as_before(about["made with"], console)
    longer = replace(config, rounds=config.rounds + options.more)
    training = Training(longer, folder, workers=_workers(options, longer, stack))
    if training.agent.updates:
        if not (folder / STORE).exists():
            raise EsperError(f"{folder / STORE} is missing, which holds {training.agent.updates} rounds; "
                             "put it back")
        verify(folder / STORE)
    if options.more:
        write_description(folder, longer, {**about, "declared": [*about["declared"], config.rounds]})
    return training


def _differences(stored: Any, asked: Any, where: str = "") -> list[str]:
    """Keys that differ, as a file of settings names them."""
    if isinstance(stored, dict) and isinstance(asked, dict):
        pairs = {name: (stored.get(name), asked.get(name)) for name in (*stored, *asked)}
        return [each for name, both in pairs.items()
                for each in _differences(*both, f"{where}.{name}".strip("."))]
    return [] if stored == asked else [where]


def _as_before(made_with: dict[str, Any], console: Console) -> None:
    """Bits depend on threads and build: threads are set as they were, and another build is told."""
    if made_with["threads"] != torch.get_num_threads():
        torch.set_num_threads(int(made_with["threads"]))
        console.print(f"using {made_with['threads']} threads, as the run was begun with")
    if made_with["torch"] != torch.__version__:
        console.print(f"the run was begun with torch {made_with['torch']}, this is {torch.__version__}: "
                      "it goes on, but not bit for bit")


def _conclude(training: Training, console: Console) -> None:
    """The last examination beside the heuristic's and no growth's."""
    policies: dict[str, Callable[[ActionSpec], PolicyBundle]] = {
        "learned": training.learned, "heuristic": lambda spec: Heuristic()}
    gains = {name: training.examine(name, each, training.config.rounds) for name, each in policies.items()}
    training.sink.commit()
    for name, gain in gains.items():
        error = 196 * float(gain.std()) / len(gain) ** 0.5
        console.print(f"{name:>9}: {100 * float(gain.mean()):+.2f} ± {error:.2f} points above no growth on "
                      f"{len(gain)} validation scenarios")
