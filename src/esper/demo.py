"""`esper demo`: a controller learns for a minute, then the one that ships with Esper meets the controls; a page shows both."""

import statistics
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from esper.karn import write_report
from esper.karn.report import cost_of
from esper.leyline import EsperError
from esper.nissa import Store, read
from esper.picture import Frame, growth_svg
from esper.runs import DESCRIPTION, STORE, make_folder
from esper.simic.controls import play_plans
from esper.simic.court import Arms, interval
from esper.simic.plans import Plan
from esper.simic.proving import SHARED, SPARE, Court
from esper.simic.training import CHECKPOINT, TWINS
from esper.simic.trials import Trials
from esper.tamiyo import Controller, Heuristic, Learned, Random, Wait
from esper.tamiyo.minds import Member, read_mind
from esper.tolaria import Family, MorphogeneticEnv, find_family
from esper.train_cli import Train
from esper.train_cli import run as train

FAMILY, MIND, MINE = "mlp", "tamiyo-small", "trained just now"
PICTURED = 24


@dataclass(frozen=True)
class Demo:
    """Train a controller for a minute, then watch the shipped one at work.

    Example: esper demo --seed 1
    """

    out: Path = Path("demo")
    """Folder for report.html, growth.svg and the run."""
    rounds: int = 20
    """Rounds of 48 episodes that the live training takes."""
    hosts: int = 64
    """Held-out scenarios, one host each, that every arm is played on."""
    seed: int = 0
    """Of the training."""

    def __post_init__(self) -> None:
        if self.out.exists() and not self.out.is_dir():
            raise EsperError(f"--out {self.out} is a file; name a folder")
        if self.rounds < 3 or self.hosts < 2:
            raise EsperError("--rounds must be at least 3, --hosts at least 2")


def run(config: Demo, console: Console) -> None:
    family, member = find_family(FAMILY), next(m for m in read_mind(MIND) if m.about["family"] == FAMILY)
    folder = _emptied(config.out)
    console.print(f"1 of 2: a controller learns to grow small networks ({config.rounds} rounds of 48 trainings each)")
    train(Train(folder, family=FAMILY, preset="quick", rounds=config.rounds, seed=config.seed), console)
    returns = [utility for (utility,) in read(folder / STORE, "SELECT 100 * utility FROM round ORDER BY round")]
    if len(returns) < config.rounds:
        return
    third = len(returns) // 3
    console.print(f"points above no growth: {statistics.fmean(returns[:third]):+.1f} in its first third of rounds, "
                  f"{statistics.fmean(returns[-third:]):+.1f} in its last")
    console.print(f"\n2 of 2: it, and {MIND} from the package, on {config.hosts} scenarios that neither has met")
    store = Store(config.out / "demo.db")
    court = _played(family, folder, member, config.hosts)
    court.record(store)
    court.conclude([], store, pool=False)
    store.close()
    console.print(_table(court.arms))
    _draw(family, member.controller, config.out / "growth.svg")
    facts = {"family": FAMILY, "verdict": "demo", "reason": "it claims nothing", "scenarios": config.hosts,
             "seed": config.seed}
    write_report(config.out / "demo.db", {MINE: folder / STORE}, facts, config.out / "report.html")
    console.print(f"the report: {config.out / 'report.html'}; what {MIND} grows: {config.out / 'growth.svg'}", markup=False)
    console.print("next: esper train --family mlp --preset cpu --out runs/mine    a quarter of an hour\n"
                  "      esper prove --minds runs/mine --rehearsal --out proof    beside every control", markup=False)


def _emptied(out: Path) -> Path:
    """Where the run will lie. What an earlier demo left there is removed, and nothing else is."""
    folder, mark = out / "run", out / "run" / "of-a-demo"
    if (folder / DESCRIPTION).exists() and not mark.exists():
        raise EsperError(f"{folder} holds a run that no demo made; choose another --out")
    make_folder(folder)
    try:
        mine = [folder / name for name in (DESCRIPTION, CHECKPOINT, TWINS)]
        for old in (*mine, *folder.glob(f"{STORE}*"), *out.glob("demo.db*")):
            old.unlink(missing_ok=True)
        mark.touch()
    except OSError as error:
        raise EsperError(f"cannot empty {folder}: {error}; choose another --out") from error
    return folder


def _played(family: Family, folder: Path, member: Member, count: int) -> Court:
    trials, drawn = Trials(family), family.scenarios(count, "validation", SPARE)
    spec, plan = trials.environment(count).spec, Plan(tuple(member.about["plan"]["seeds"]), member.about["plan"]["start"])
    mine, episodes = Learned.load(folder / CHECKPOINT, spec, greedy=True), cost_of(folder / STORE)["episodes"]
    known = Learned(member.controller.bound_to(spec), greedy=True)
    shared = {"no growth": (trials.play(Wait(), drawn), None), "random": (trials.play(Random(), drawn), None),
              "heuristic": (trials.play(Heuristic(), drawn), None),
              "best fixed": (play_plans(trials, [plan] * count, drawn), member.about["plan"]["episodes"])}
    return Court(drawn, {SHARED: shared, MINE: {"learned": (trials.play(mine, drawn), episodes)},
                         MIND: {"learned": (trials.play(known, drawn), member.about["episodes"])}})


def _table(arms: dict[str, Arms]) -> Table:
    table = Table("", title="What each way of deciding delivers, with 95 % intervals", title_justify="left")
    for name in ("points above no growth", "accuracy", "grown parameters"):
        table.add_column(name, justify="right")
    controls = {name: arm for name, arm in arms[MIND].items() if name != "learned"}
    bare = controls["no growth"].utility
    for name, arm in (controls | {who: each["learned"] for who, each in arms.items()}).items():
        above = 100 * (arm.utility - bare)
        low, high = interval(above)
        gain = "" if name == "no growth" else f"{above.mean():+.1f} ({low:+.1f} to {high:+.1f})"
        table.add_row(name, gain, f"{100 * arm.score.mean():.1f} %", f"{arm.params.mean():,.0f}")
    return table


def _draw(family: Family, controller: Controller, path: Path) -> None:
    """A few hosts of every kind, and what the controller lets them grow."""
    env = MorphogeneticEnv(family, PICTURED)
    drawn = family.scenarios(8 * PICTURED, "validation", SPARE)
    longest = (drawn.horizon == max(family.horizons)).nonzero().flatten()[:PICTURED]
    longest = longest[drawn.kind[longest].argsort(stable=True)]
    env.reset(drawn.take(longest))
    policy, frames = Learned(controller.bound_to(env.spec), greedy=True), []
    while not bool(env.done.all()):
        env.step(policy(env.view()))
        life = env.population.life
        frames.append(Frame(life.stage.clone(), life.blueprint.clone(), life.alpha.clone()))
    names = [drawn.kinds[kind].name for kind in drawn.kind[longest].tolist()]
    title = f"{PICTURED} hosts grown by {MIND}, and what is wrong with them"
    path.write_text(growth_svg(frames, env.spec.blueprints, title, names))
