"""`esper replay`: run recorded episodes again and compare them bit by bit."""

import torch
from rich.console import Console

from esper.cli.options import Export, Replay
from esper.cli.runs import use_plugins
from esper.leyline import EsperError
from esper.leyline.provenance import provenance
from esper.tolaria import Episodes, MorphogeneticEnv
from esper.tolaria.episodes import replayed


def run(config: Replay, console: Console) -> None:
    episodes, _ = play_again(config, console)
    epochs, rows = episodes.actions.shape[:2]
    what = f"row {config.row}" if config.row is not None else f"all {rows} rows"
    console.print(f"{what}, {epochs} epochs: {len(episodes.measured)} measurements, bit for bit the same")


def play_again(config: Replay | Export, console: Console) -> tuple[Episodes, MorphogeneticEnv]:
    """(what was recorded, the environment as it ended); refused where a measurement differs."""
    use_plugins(config.plugin)
    episodes, header = Episodes.load(config.trace)
    epochs, rows = episodes.actions.shape[:2]
    if config.row is not None and not 0 <= config.row < rows:
        raise EsperError(f"--row {config.row} is outside 0..{rows - 1}")
    if isinstance(header.get("threads"), int) and 1 <= header["threads"] <= 4096:
        torch.set_num_threads(header["threads"])
    here = provenance()
    if other := "; ".join(f"{name} {header.get(name)} then, {here[name]} now" for name in
                          ("threads", "torch", "deterministic") if header.get(name) != here[name]):
        console.print(f"Bits are only promised for the same build, threads and mode: {other}")
    with console.status(f"{epochs} epochs of {rows} rows"):
        env, places = replayed(episodes)
    mine = (f", row {config.row}", "every row")
    if different := [place for place in places if config.row is None or place.endswith(mine)]:
        raise EsperError(f"{len(different)} of the measurements differ, first {different[0]}")
    return episodes, env
