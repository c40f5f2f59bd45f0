"""`esper demo`: a controller learns for a minute, the shipped one meets the controls; a page shows both."""

import statistics
from contextlib import closing
from pathlib import Path

from rich.console import Console
from rich.table import Table

from esper.cli.options import Demo, Train
from esper.cli.runs import DESCRIPTION, STORE, make_folder, points, remove_left
from esper.cli.train import run as train
from esper.karn import write_report
from esper.karn.growth import Frame, growth_svg
from esper.karn.report import cost_of
from esper.leyline import EsperError
from esper.leyline.storage import atomic_write
from esper.nissa import Store, read
from esper.simic.proof.baselines import play_plans
from esper.simic.proof.claims import Arms, interval
from esper.simic.proof.evaluator import Evaluator
from esper.simic.proof.plans import Plan
from esper.simic.proof.proving import SHARED, SPARE, Part, Played, ProofResults
from esper.simic.training import CHECKPOINT, PREVIOUS, TWINS
from esper.tamiyo import Controller, Heuristic, Learned, PolicyBundle, Random, Wait
from esper.tamiyo.minds import Member, read_mind
from esper.tolaria import Family, MorphogeneticEnv, find_family, play

FAMILY, MIND, MINE = "mlp", "tamiyo-small", "trained just now"
PICTURED = 24


def run(config: Demo, console: Console) -> None:
    if config.rounds < 3 or config.hosts < 2:
        raise EsperError("--rounds must be at least 3, --hosts at least 2")
    family = find_family(FAMILY)
    member = next(m for m in read_mind(MIND) if m.about["family"] == FAMILY)
    folder = _emptied(config.out)
    console.print("1 of 2: a controller learns to grow small networks "
                  f"({config.rounds} rounds of 48 trainings each)")
    train(Train(folder, family=FAMILY, preset="quick", rounds=config.rounds, seed=config.seed), console)
    returns = [each for (each,) in read(folder / STORE, "SELECT 100 * utility FROM round ORDER BY round")]
    if len(returns) < config.rounds:
        return
    third = len(returns) // 3
    first, last = statistics.fmean(returns[:third]), statistics.fmean(returns[-third:])
    console.print(f"points above no growth: {first:+.1f} in its first third of rounds, "
                  f"{last:+.1f} in its last\n\n2 of 2: it, and {MIND} from the package, "
                  f"on {config.hosts} scenarios that neither has met")
    path, page, drawing = (config.out / name for name in ("demo.db", "report.html", "growth.svg"))
    with closing(Store(path)) as store:
        court = _played(family, folder, member, config.hosts)
        court.record(store)
        court.conclude([], store, pool=False)
    console.print(_table(court.arms))
    _draw(family, member.controller, drawing)
    facts = {"family": FAMILY, "verdict": "demo", "reason": "it claims nothing", "scenarios": config.hosts,
             "seed": config.seed}
    write_report(path, {MINE: folder / STORE}, facts, page)
    console.print(f"the report: {page}; what {MIND} grows: {drawing}")
    console.print("next: esper train --family mlp --preset cpu --out runs/mine    a quarter of an hour\n"
                  "      esper prove --minds runs/mine --rehearsal --out proof    beside every control")


def _emptied(out: Path) -> Path:
    """Where the run will lie. What an earlier demo left there is removed, and nothing else is."""
    folder, mark = out / "run", out / "run" / "of-a-demo"
    if (folder / DESCRIPTION).exists() and not mark.exists():
        raise EsperError(f"{folder} holds a run that no demo made; choose another --out")
    make_folder(out)
    make_folder(folder)
    remove_left("demo", out / "demo.db",
                *(folder / name for name in (DESCRIPTION, CHECKPOINT, PREVIOUS, TWINS, STORE)))
    atomic_write(mark, "")
    return folder


def _played(family: Family, folder: Path, member: Member, count: int) -> ProofResults:
    evaluator, drawn = Evaluator(family), family.scenarios(count, "validation", SPARE)
    spec, told = evaluator.config.spec, member.about["plan"]
    mine, known = Learned.load(folder / CHECKPOINT, spec, greedy=True), member.controller.bound_to(spec)
    plans = [Plan(tuple(told["seeds"]), told["start"])] * count
    controls: dict[str, PolicyBundle] = {"no growth": Wait(), "random": Random(), "heuristic": Heuristic()}
    shared: Played = {name: (evaluator.play(policy, drawn), None) for name, policy in controls.items()}
    shared["best fixed"] = play_plans(evaluator, plans, drawn), told["episodes"]
    ours = evaluator.play(mine, drawn), cost_of(folder / STORE)["episodes"]
    theirs = evaluator.play(Learned(known, greedy=True), drawn), member.about["episodes"]
    played = {SHARED: shared, MINE: {"learned": ours}, MIND: {"learned": theirs}}
    return ProofResults([Part(drawn, played)])


def _table(arms: dict[str, Arms]) -> Table:
    table = Table("", title="What each way of deciding delivers, with 95 % intervals", title_justify="left")
    for name in ("points above no growth", "accuracy", "grown parameters"):
        table.add_column(name, justify="right")
    shown = {name: arm for name, arm in arms[MIND].items() if name != "learned"}
    for name, arm in (shown | {who: each["learned"] for who, each in arms.items()}).items():
        above = arm.utility - shown["no growth"].utility
        gain = "" if name == "no growth" else points(above.mean(), *interval(above))
        table.add_row(name, gain, f"{100 * arm.score.mean():.1f} %", f"{arm.params.mean():,.0f}")
    return table


def _draw(family: Family, controller: Controller, path: Path) -> None:
    """A few hosts of every kind, and what the controller lets them grow."""
    env = MorphogeneticEnv(family, PICTURED)
    drawn = family.scenarios(8 * PICTURED, "validation", SPARE)
    longest = (drawn.horizon == max(family.horizons)).nonzero().flatten()[:PICTURED]
    longest = longest[drawn.kind[longest].argsort(stable=True)]
    episodes = play(env, Learned(controller.bound_to(env.spec), greedy=True), drawn.take(longest))
    names = [drawn.kinds[kind].name for kind in drawn.kind[longest].tolist()]
    title = f"{PICTURED} hosts grown by {MIND}, and what is wrong with them"
    frames = zip(*(episodes.measured[name] for name in ("stage", "blueprint", "alpha")), strict=True)
    atomic_write(path, growth_svg([Frame(*frame) for frame in frames], env.spec.blueprints, title, names))
