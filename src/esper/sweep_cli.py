"""`esper sweep`: is there anything to decide in a family, and how much of it can be known?"""

import datetime
import json
import math
import platform
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from esper.bench import check_device
from esper.leyline import EsperError
from esper.leyline.storage import write_state
from esper.simic import gaps
from esper.simic.sweep import Sweep, choices, head_choices, run_sweep
from esper.tolaria import FAMILIES, find_family


@dataclass(frozen=True)
class SweepOptions:
    """Play scripted decisions: what is each level of knowledge worth?

    Example: esper sweep --family mlp --inits 8
    """

    family: str = "mlp"
    """Which family: mlp, mnist1d or fashion."""
    inits: int = 8
    """Random inits of every kind and horizon; at least 4."""
    rows: int = 512
    """Hosts that train at once."""
    previews: int = 30
    """Shadow steps of each candidate preview; 0 takes none."""
    heads: bool = False
    """Also measure the effect of every action head."""
    device: str = "cpu"
    """cpu, or cuda."""
    out: Path | None = None
    """Folder for the summary (JSON) and every outcome (safetensors)."""
    record: Path | None = None
    """File for one recorded round of the sweep, for `esper replay`."""
    commit: str = ""
    """Noted in the summary."""

    def __post_init__(self) -> None:
        find_family(self.family)
        if self.inits < 4 or self.rows < 1 or self.previews < 0:
            raise EsperError("--inits must be at least 4, --rows at least 1, --previews at least 0")
        check_device(self.device)
        if self.out is not None and self.out.exists() and not self.out.is_dir():
            raise EsperError(f"--out {self.out} is a file; name a folder")
        if self.record is not None and not self.record.parent.is_dir():
            raise EsperError(f"--record {self.record} lies in a folder that does not exist")


def run(config: SweepOptions, console: Console) -> None:
    family, started = FAMILIES[config.family], time.perf_counter()
    table = choices(family)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("episodes", total=None)
        sweep = run_sweep(family, table, config.inits, config.rows, config.previews, config.record, device=config.device,
                          watch=lambda done, total: progress.update(bar, completed=done, total=total))
        effects = _heads(config, sweep, lambda done, total: progress.update(bar, completed=done, total=total))
    outcomes = sweep.outcomes()
    levels = gaps.knowledge(outcomes)
    episodes = len(sweep.init) * len(table)
    console.print(gaps.render(levels, f"{config.family}: {len(sweep.init)} scenarios, {len(table)} choices, in points"))
    console.print(_kinds(sweep))
    console.print(f"rule: {gaps.decide(outcomes).rule.describe(sweep.feature_names)}")
    for head, effect in effects.items():
        console.print(f"head {head}: {100 * effect.gain.value:+.1f} ± {100 * effect.gain.standard_error:.1f} points")
    seconds = time.perf_counter() - started
    console.print(f"{episodes} episodes in {seconds:.0f} s, {sweep.rollbacks} rollbacks")
    if config.out is not None:
        _write(config, sweep, levels, effects, seconds)
        console.print(f"Written: {config.out}/sweep-{config.family}.json")


def _heads(config: SweepOptions, sweep: Sweep, watch: Any) -> dict[str, gaps.HeadEffect]:
    """For the seed that helps most on average: what every other head of it is worth, per kind and horizon."""
    if not config.heads:
        return {}
    singles = [i for i, name in enumerate(sweep.names) if name[-2] == "@" and ", then " not in name]
    best = sweep.names[max(singles, key=lambda i: float(sweep.accuracy[:, i].mean()))]
    blueprint, slot = best.split(" @")
    effects = {}
    for head, scripts in head_choices(sweep.family, int(slot), blueprint).items():
        runs = run_sweep(sweep.family, scripts, config.inits, config.rows, 0, watch=watch, device=config.device)
        group = runs.scenarios.kind * 100 + runs.scenarios.horizon
        effects[head] = gaps.head_effects(runs.accuracy.mean(2).double().numpy(), runs.init.numpy(), group.numpy())
    return effects


def _kinds(sweep: Sweep) -> Table:
    table = Table("hidden type", "no growth", "best choice", "its accuracy", title="Accuracy before prices, by hidden type",
                  title_justify="left")
    accuracy = sweep.accuracy.mean(2)
    for number, kind in enumerate(sweep.family.kinds):
        mean = accuracy[sweep.scenarios.kind == number].mean(0)
        best = int(mean.argmax())
        table.add_row(kind.name, f"{100 * float(mean[0]):.1f}", sweep.names[best], f"{100 * float(mean[best]):.1f}")
    return table


def _write(config: SweepOptions, sweep: Sweep, levels: list[gaps.Level], effects: dict[str, gaps.HeadEffect],
           seconds: float) -> None:
    assert config.out is not None
    config.out.mkdir(parents=True, exist_ok=True)
    gap, part = gaps.gap(levels, gaps.VISIBLE, gaps.HIDDEN), gaps.share(levels)
    threads = f"{platform.machine()}, {torch.get_num_threads()} threads"
    summary = {
        "family": config.family, "inits": config.inits, "scenarios": len(sweep.init), "choices": sweep.names,
        "levels": {v.name: {"utility": v.mean, "error": v.standard_error, "gain": v.gain, "gain_error": v.gain_error,
                            "choices": {str(k): c for k, c in v.choices_taken.items()}} for v in levels},
        "oracle_gap": gap._asdict(), "rule_share": None if math.isnan(part.value) else part._asdict(),
        "rollbacks": sweep.rollbacks,
        "rule": gaps.decide(sweep.outcomes()).rule.describe(sweep.feature_names),
        "heads": {name: {**effect.gain._asdict(), "spread": effect.spread} for name, effect in effects.items()},
        "seconds": seconds, "date": datetime.date.today().isoformat(), "commit": config.commit, "torch": torch.__version__,
        "hardware": torch.cuda.get_device_name() if config.device != "cpu" else threads,
    }
    (config.out / f"sweep-{config.family}.json").write_text(json.dumps(summary, indent=1) + "\n")
    arrays = {"accuracy": sweep.accuracy, "params": sweep.params, "spent": sweep.spent, "features": sweep.features,
              "init": sweep.init, **{f"scenarios.{name}": t for name, t in sweep.scenarios.columns().items()}}
    write_state(config.out / f"sweep-{config.family}.safetensors", "sweep", summary, arrays)
