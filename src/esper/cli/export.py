"""`esper export`: the network that a recorded episode delivered, as files that need no Esper."""

from rich.console import Console

from esper.cli.options import Export
from esper.cli.replay import play_again
from esper.door.export import check_formats, export


def run(config: Export, console: Console) -> None:
    check_formats(config.formats)  # before anything is computed
    _, env = play_again(config, console)
    samples, _ = next(env.validation(0, 8))  # [B, N, *inputs]
    for written in export(env.population.extract(config.row, kept=True), config.out, samples[:, config.row],
                          config.formats):
        console.print(f"{config.out}/{written}")
