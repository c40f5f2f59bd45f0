"""`esper sweep`: is there anything to decide in a family, and how much of it can be known?"""

import math
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from esper.cli.machine import open_workers
from esper.cli.options import Sweep as Options
from esper.cli.runs import make_folder, use_plugins
from esper.leyline import EsperError
from esper.leyline.provenance import provenance
from esper.leyline.storage import write_json, write_state
from esper.simic.proof import value_of_information as voi
from esper.simic.proof.sweep import Sweep, choices, head_choices, run_sweep
from esper.simic.workers import Workers
from esper.tolaria import EnvConfig, find_family


def run(config: Options, console: Console) -> None:
    use_plugins(config.plugin)
    if config.inits < 4 or config.rows < 1 or config.previews < 0:
        raise EsperError("--inits must be at least 4, --rows at least 1, --previews at least 0")
    if config.out is not None:
        make_folder(config.out)
    if config.record is not None and not config.record.parent.is_dir():
        raise EsperError(f"--record {config.record} lies in a folder that does not exist")
    env, started = EnvConfig(find_family(config.family), device=config.device), time.perf_counter()
    table = choices(env.family)
    with (open_workers(config, config.threads) as workers,
          Progress(console=console, transient=True, disable=not console.is_terminal) as progress):
        bar = progress.add_task("episodes", total=None)

        def watch(done: int, total: int) -> None:
            progress.update(bar, completed=done, total=total)

        sweep = run_sweep(env, table, config.inits, config.rows, config.previews, config.record, watch,
                          workers)
        effects = _heads(config, env, sweep, watch, workers) if config.heads else {}
    outcomes, scenarios = sweep.outcomes(), len(sweep.init)
    levels, rule = voi.knowledge(outcomes), voi.decide(outcomes).rule.describe(sweep.feature_names)
    title = f"{config.family}: {scenarios} scenarios, {len(table)} choices, in points"
    console.print(voi.render(levels, title))
    console.print(_kinds(sweep))
    console.print(f"rule: {rule}")
    for head, effect in effects.items():
        gain, error = (100 * part for part in effect.gain)
        console.print(f"head {head}: {gain:+.1f} ± {error:.1f} points")
    seconds = time.perf_counter() - started
    console.print(f"{scenarios * len(table)} episodes in {seconds:.0f} s, {sweep.rollbacks} rollbacks")
    if config.out is not None:
        _write(config, config.out, sweep, levels, rule, effects, seconds)
        console.print(f"Written: {config.out}/sweep-{env.family.name}.json")


def _heads(config: Options, env: EnvConfig, sweep: Sweep, watch: Any,
           workers: Workers) -> dict[str, voi.HeadEffect]:
    """For the seed that helps most on average: what every other head of it is worth, per kind and horizon."""
    singles = [i for i, name in enumerate(sweep.names)
               if name.rpartition("@")[2].isdigit() and ", then " not in name]
    best = max(singles, key=lambda i: float(sweep.score[:, i].mean()))
    blueprint, slot = sweep.names[best].split(" @")
    effects = {}
    for head, scripts in head_choices(sweep.family, int(slot), blueprint).items():
        runs = run_sweep(env, scripts, config.inits, config.rows, 0, watch=watch, workers=workers)
        horizon = runs.scenarios.horizon
        group = runs.scenarios.kind * (horizon.max() + 1) + horizon
        score = runs.score.mean(2).double()
        effects[head] = voi.head_effects(score.numpy(), runs.init.numpy(), group.numpy())
    return effects


def _kinds(sweep: Sweep) -> Table:
    table = Table("hidden type", "no growth", "best choice", "its score", title_justify="left",
                  title="Scores before prices, by hidden type")
    score = sweep.score.mean(2)
    for number, kind in enumerate(sweep.family.kinds):
        mean = score[sweep.scenarios.kind == number].mean(0)
        best = int(mean.argmax())
        bare, most = (f"{100 * float(mean[choice]):.1f}" for choice in (0, best))
        table.add_row(kind.name, bare, sweep.names[best], most)
    return table


def _write(config: Options, out: Path, sweep: Sweep, levels: list[voi.Level], rule: str,
           effects: dict[str, voi.HeadEffect], seconds: float) -> None:
    gap, part = voi.gap(levels, voi.VISIBLE, voi.HIDDEN), voi.share(levels)
    summary = {
        "family": sweep.family.name, "inits": config.inits, "scenarios": len(sweep.init),
        "choices": sweep.names,
        "levels": {v.name: {"utility": v.mean, "error": v.standard_error, "gain": v.gain,
                            "gain_error": v.gain_error,
                            "choices": {str(k): c for k, c in v.choices_taken.items()}} for v in levels},
        "oracle_gap": gap._asdict(), "rule_share": None if math.isnan(part.value) else part._asdict(),
        "rollbacks": sweep.rollbacks, "rule": rule,
        "heads": {name: {**each.gain._asdict(), "spread": each.spread} for name, each in effects.items()},
        "seconds": seconds, **provenance(config.device, config.commit)}
    write_json(out / f"sweep-{sweep.family.name}.json", "sweep", summary)
    arrays = {name: getattr(sweep, name) for name in ("score", "params", "spent", "features", "init")}
    arrays |= {f"scenarios.{name}": t for name, t in sweep.scenarios.columns().items()}
    write_state(out / f"sweep-{sweep.family.name}.safetensors", "sweep", summary, arrays)
