"""`esper train`: a controller learns; everything about the run lies in one folder."""

import json
import os
import platform
import signal
import sys
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.live import Live

from esper.bench import check_device
from esper.karn import panel, summary
from esper.leyline import EsperError
from esper.leyline.storage import whole
from esper.nissa import Store
from esper.runs import DESCRIPTION, STORE, changed, described, make_folder, stored
from esper.simic.training import CHECKPOINT, TrainConfig, Training
from esper.tamiyo import Heuristic, Learned
from esper.tolaria import Family, find_family

PRESETS: dict[str, dict[str, Any]] = {
    "quick": {"rounds": 16, "rows": 48, "scenarios": 192, "exam_every": 16, "exam_rows": 32, "preview_every": 0,
              "ppo": {"entropy": (0.1, 0.002), "explore": (0.05, 0.0)}},
    "cpu": {"rounds": 150, "rows": 64, "scenarios": 1024, "exam_every": 25, "exam_rows": 128, "preview_every": 0,
            "ppo": {"entropy": (0.1, 0.002), "explore": (0.05, 0.0)}},
    "gpu": {"rounds": 32, "rows": 192, "scenarios": 1152, "exam_every": 16, "exam_rows": 128, "preview_every": 20,
            "device": "cuda", "ppo": {"entropy": (0.1, 0.002), "explore": (0.05, 0.0), "minibatches": 8}},
}
"""name -> what differs from the defaults of `TrainConfig`."""


@dataclass(frozen=True)
class Train:
    """Train a controller on a family of scenarios.

    Example: esper train --family mlp --preset quick --out runs/first
    """

    out: Path
    """Folder of the run: run.json, run.db, agent.safetensors, twins.safetensors."""
    family: str | None = None
    """mlp (default), mnist1d or fashion."""
    preset: str | None = None
    """quick (minutes; default), cpu or gpu."""
    config: Path | None = None
    """TOML file with keys of the run, and tables [ppo] and [network]."""
    rounds: int | None = None
    """The budget: rounds of one episode per row; over preset and file."""
    rows: int | None = None
    """Episodes that run together; over preset and file."""
    seed: int | None = None
    """Over preset and file."""
    device: str | None = None
    """cpu, or cuda; over preset and file."""
    resume: bool = False
    """Go on with the run in --out, bit for bit; needs no other option."""
    more: int = 0
    """With --resume: so many rounds beyond those that were declared; rates and exploration then end with the last of these, and
    the controller so far is replaced as it learns on."""

    def __post_init__(self) -> None:
        if self.family is not None:
            find_family(self.family)
        if self.preset is not None and self.preset not in PRESETS:
            raise EsperError(f"no --preset {self.preset!r}; choose from {', '.join(PRESETS)}")
        if self.more < 0 or (self.more and not self.resume):
            raise EsperError("--more is a number of rounds for a run to --resume")


def resolved(options: Train, stored: TrainConfig | None = None) -> TrainConfig:
    """Defaults and a preset, or what a run has stored and a preset if one is named; then the file, then the command line."""
    preset = options.preset or ("quick" if stored is None else None)
    config = changed(stored or TrainConfig(), PRESETS[preset] if preset else {}, "preset")
    if options.config is not None:
        try:
            config = changed(config, tomllib.loads(options.config.read_text()), str(options.config))
        except (OSError, ValueError) as error:  # bytes that are no text, text that is no TOML
            raise EsperError(f"cannot read --config {options.config}: {error}") from error
    given = {name: getattr(options, name) for name in ("rounds", "rows", "seed", "device")}
    config = changed(config, {name: value for name, value in given.items() if value is not None}, "command line")
    check_device(config.device)
    return config


def run(options: Train, console: Console) -> None:
    folder, (family, config) = options.out, resumed(options) if options.resume else begun(options)
    store = Store(folder / STORE)
    training = Training(family, config, folder, store)
    if options.more:
        _declare(folder, config, options.more)
    asked: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: asked.append(number))
    try:
        with Live(console=console, auto_refresh=False, transient=False) if console.is_terminal else _Lines() as live:
            training.run(lambda: bool(asked), lambda done: _show(folder, config.rounds, console, live))
    finally:
        signal.signal(signal.SIGINT, before)
    if training.agent.updates < config.rounds:
        store.close()
        console.print(f"stopped after round {training.agent.updates}; go on with: esper train --out {folder} --resume",
                      markup=False)
        return
    _conclude(training, console)
    store.close()
    console.print(f"the controller: {folder / CHECKPOINT}; everything measured: {folder / STORE}", markup=False)


class _Lines:
    """Off a terminal each round is a line."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, *stop: object) -> None:
        return None


def _show(folder: Path, rounds: int, console: Console, live: Live | None) -> None:
    state = summary(folder / STORE, rounds)
    assert state is not None
    if live is None:
        console.print(state.line())
    else:
        live.update(panel(state), refresh=True)


def begun(options: Train) -> tuple[Family, TrainConfig]:
    """A new run: its folder is made and described."""
    folder, family, config = options.out, find_family(options.family or "mlp"), resolved(options)
    if os.path.lexists(folder / DESCRIPTION):
        raise EsperError(f"--out {folder} already holds a run; add --resume to go on with it, or choose another folder")
    make_folder(folder)
    versions = {"python": platform.python_version(), "torch": torch.__version__, "precision": "float32",
                "threads": torch.get_num_threads(), "command": " ".join(["esper", *sys.argv[1:]])}
    with whole(folder / DESCRIPTION) as temporary:
        temporary.write_text(json.dumps({"family": family.name, "config": described(config)} | versions, indent=1) + "\n")
    return family, config


def resumed(options: Train) -> tuple[Family, TrainConfig]:
    """The run of a folder as it was begun; options that say otherwise are refused."""
    found = stored(options.out)
    if found is None:
        raise EsperError(f"--out {options.out} holds no run to resume")
    family, config = found
    check_device(config.device)
    same = {"family": options.family in (None, family.name), "config": resolved(options, config) == config}
    if different := [name for name, equal in same.items() if not equal]:
        raise EsperError(f"the run in {options.out} has another {' and '.join(different)}; resume it with its own options, "
                         "or with none")
    return family, replace(config, rounds=config.rounds + options.more)


def _declare(folder: Path, longer: TrainConfig, more: int) -> None:
    """The description of a run that has more rounds now; it also says how many were declared before."""
    told = json.loads((folder / DESCRIPTION).read_text())
    told |= {"config": described(longer), "declared": [*told.get("declared", []), longer.rounds - more]}
    with whole(folder / DESCRIPTION) as temporary:
        temporary.write_text(json.dumps(told, indent=1) + "\n")


def _conclude(training: Training, console: Console) -> None:
    """The last examination beside the heuristic's and no growth's."""
    rounds = training.config.rounds
    learned = training.examine("learned", Learned(training.agent.controller, greedy=True), rounds)
    heuristic = training.examine("heuristic", Heuristic(), rounds)
    training.sink.commit()
    for name, utility in (("learned", learned), ("heuristic", heuristic)):
        error = 196 * float(utility.std()) / len(utility) ** 0.5
        console.print(f"{name:>9}: {100 * float(utility.mean()):+.2f} ± {error:.2f} points above no growth on "
                      f"{len(utility)} validation scenarios")

