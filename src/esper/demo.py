"""`esper demo`: a population grows by random legal decisions; its life becomes a picture, its speed a table."""

from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from esper.bench import PopulationBench, bench_table, run_population_bench
from esper.kasmina import Host, Population
from esper.leyline import Contribution, EsperError, SeedStage, View
from esper.picture import Frame, growth_svg
from esper.tamiyo import Random
from esper.tolaria.env import seeds_of


@dataclass(frozen=True)
class Demo:
    """Grow a small population on a toy task, draw it, and measure its speed.

    Example: esper demo --rows 24 --epochs 20
    """

    out: Path = Path("demo")
    """Folder for growth.svg."""
    rows: int = 24
    """Hosts that grow."""
    epochs: int = 20
    """Epochs of their life; one decision per host and epoch."""
    seed: int = 0
    """Decides weights, data and decisions."""

    def __post_init__(self) -> None:
        if self.out.exists() and not self.out.is_dir():
            raise EsperError(f"--out {self.out} is a file; name a folder")
        if min(self.rows, self.epochs) < 1:
            raise EsperError("--rows and --epochs must be at least 1")


def random_actions(population: Population, generator: torch.Generator) -> Tensor:
    """One legal action per row, [N, heads], from the random policy."""
    life = population.life
    nothing = torch.zeros(life.rows, dtype=torch.int64)
    keys = torch.randint(2**62, (life.rows,), generator=generator)
    return Random()(View(population.spec, keys, nothing, nothing, nothing, nothing, nothing > 0, life.verdicts(),
                         life.free_targets(), seeds_of(life)))


def waves(batch: int, rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """A toy task for 40-sample sequences: which of ten chirps is hidden in the noise? x [B, N, 1, 40], y [B, N]."""
    label = torch.randint(10, (batch, rows), generator=generator)
    time = torch.linspace(0, 1, 40)
    phase = torch.rand(batch, rows, 1, generator=generator)
    chirp = torch.sin(2 * torch.pi * (phase + (1 + label[..., None] * 0.6) * time * (1 + time)))
    return (chirp + 0.5 * torch.randn(chirp.shape, generator=generator)).unsqueeze(2), label


def grow(config: Demo, steps: int = 8, batch: int = 32) -> tuple[Population, list[Frame], list[float]]:
    """(population, one frame per epoch, mean loss per epoch) of a life under random legal decisions."""
    generator = torch.Generator().manual_seed(config.seed)
    population = Population(Host("conv1d"), config.rows, seed=config.seed)
    frames, losses = [], []
    for _ in range(config.epochs):
        population.begin_epoch(random_actions(population, generator))
        losses.append(float(torch.stack([population.train_step(*waves(batch, config.rows, generator))
                                         for _ in range(steps)]).mean()))
        life = population.life
        frames.append(Frame(life.stage.clone(), life.blueprint.clone(), life.alpha.clone()))
        population.end_epoch(_contributions(population, *waves(4 * batch, config.rows, generator)))
    return population, frames, losses


def _contributions(population: Population, x: Tensor, y: Tensor) -> Contribution:
    """Accuracy with all seeds on, minus accuracy with one off: extra rows, live state untouched."""
    rows, slots = population.life.alpha.shape
    right = (population.forward(x).argmax(2) == y).float()
    value, error = torch.zeros(rows, slots), torch.zeros(rows, slots)
    for slot in range(slots):
        alpha = population.life.alpha.clone()
        alpha[:, slot] = 0
        change = right - (population.forward(x, alpha=alpha).argmax(2) == y).float()
        value[:, slot], error[:, slot] = change.mean(0), change.std(0) / len(x) ** 0.5
    return Contribution(value, error, population.life.alpha > 0)


def run(config: Demo, console: Console) -> None:
    console.print(f"Growing {config.rows} conv1d hosts for {config.epochs} epochs by random legal decisions ...")
    population, frames, losses = grow(config)
    moves = population.life.drain_transitions()
    kept, pruned = (sum(move.target is stage for move in moves) for stage in (SeedStage.FOSSILIZED, SeedStage.PRUNED))
    born = int(population.life.germinations.sum())
    config.out.mkdir(parents=True, exist_ok=True)
    path = config.out / "growth.svg"
    path.write_text(growth_svg(frames, population.spec.blueprints, f"{config.rows} growing hosts, {config.epochs} epochs"))
    console.print(f"{born} seeds germinated, {kept} fossilized, {pruned} pruned; mean loss {losses[0]:.2f} -> {losses[-1]:.2f}")
    console.print("Training 32 hosts with three seeds each, as a population and as a loop of modules ...")
    result = run_population_bench(PopulationBench(rows=32, rounds=3, steps=10, warm_up=1), lambda line: None)
    console.print(bench_table(result))
    console.print(f"Picture: {path}\nNext: esper bench population --help, or docs/architecture.md")
