"""`esper prove`: do trained controllers beat every control on scenarios and samples that nothing was chosen with?"""

import contextlib
import datetime
import functools
import json
import math
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from esper import __version__
from esper.bench import check_device
from esper.karn import write_report
from esper.karn.report import cost_of, rows_of
from esper.leyline import ActionSpec, EsperError
from esper.leyline.storage import whole
from esper.nissa import Store
from esper.runs import STORE, make_folder, stored, trained
from esper.simic.controls import Tuned, tune
from esper.simic.court import Claim
from esper.simic.proving import POOLED, SHARED, Mind, Proof, ProofConfig, prove
from esper.simic.training import TrainConfig
from esper.tamiyo import POLICIES, Controller, Learned, PolicyBundle
from esper.tolaria import Family, PreviewConfig, find_family

PROOF, REHEARSAL = "proof", "rehearsal"
"""Names of what is written: .json and .db."""
PLAIN = ("wait", "random", "heuristic")
"""Policies that can be put before the court by name, to see it refuse them."""
EFFECTS = (1e-6, 1.0)
"""Differences in score that can be asked for."""


@dataclass(frozen=True)
class Prove:
    """Put trained controllers before the court: tune, play all arms, judge, report.

    Example: esper prove --minds runs/first runs/second runs/third --out proof
    """

    minds: tuple[str, ...]
    """Folders of runs; or wait, random, heuristic, which must fail."""
    out: Path
    """Folder for proof.json, proof.html, proof.db and controls.json; a rehearsal's are called so."""
    family: str | None = None
    """Only needed where no run says it."""
    scenarios: int = 256
    """Test scenarios that every arm is played on."""
    pilot: int = 64
    """Validation scenarios from which the number that is needed is estimated."""
    effect: float = 0.02
    """Difference in score that the proof must be able to find; 0.01 is one point."""
    episodes: int = 0
    """That each control is tuned with; at least, and by default, as many as a controller was trained with."""
    rows: int = 512
    """Episodes of tuning that run together."""
    jobs: int = 1
    """Processes that tune or play arms at the same time; several keep a large device busier."""
    rehearsal: bool = False
    """Play on validation scenarios and samples and leave the test split closed: proves nothing, tells how it would go."""
    device: str = "cpu"
    """cpu, or cuda."""
    commit: str = ""
    """Noted in the result; by default that of the working directory."""

    @property
    def name(self) -> str:
        return REHEARSAL if self.rehearsal else PROOF

    def __post_init__(self) -> None:
        if not self.minds:
            raise EsperError("name at least one run with --minds")
        if self.rows < 1 or self.episodes < 0 or self.jobs < 1:
            raise EsperError("--rows must be at least 1, --episodes at least 0, --jobs at least 1")
        if not EFFECTS[0] <= self.effect <= EFFECTS[1]:  # nor if it is no number
            raise EsperError(f"--effect is {self.effect}; it must lie between {EFFECTS[0]:g} and {EFFECTS[1]:g}")
        ProofConfig(self.scenarios, self.pilot, self.effect)
        if os.path.lexists(self.out / f"{self.name}.json"):
            raise EsperError(f"--out {self.out} already holds a {self.name}; choose another folder")
        check_device(self.device)


@dataclass(frozen=True)
class Candidate:
    """Who is put before the court; a policy that was not trained comes from no folder."""

    mind: Mind
    folder: Path | None = None
    family: str | None = None
    previews: PreviewConfig | None = None
    digest: str = ""
    cost: Mapping[str, Any] = field(default_factory=dict)
    """Of its training, by column of the table `round`."""


def candidate(name: str, device: str) -> Candidate:
    """Loaded and checked as far as it can be without playing."""
    if name in PLAIN:
        return Candidate(Mind(name, functools.partial(_plays, name), 0))
    folder = Path(name)
    found = stored(folder)
    if found is None:
        raise EsperError(f"--minds {name} is neither the folder of a run nor one of {', '.join(PLAIN)}")
    (family, config), called = found, folder.resolve().name
    if called in (POOLED, SHARED):
        raise EsperError(f"--minds {name} cannot be called {called}, which stands for all of them; rename its folder")
    known, cost = trained(folder, config, "cpu"), cost_of(folder / STORE)
    if cost["round"] < config.rounds or not cost["episodes"]:
        raise EsperError(f"{folder / STORE} tells of {cost['round']} of {config.rounds} rounds and of {cost['episodes'] or 0} "
                         "episodes; put back the whole one")
    mind = Mind(called, functools.partial(_decides, known.controller, device), cost["episodes"])
    previews = PreviewConfig(config.preview_every, config.preview_steps) if config.preview_every else None
    return Candidate(mind, folder, family.name, previews, known.digest, cost)


def _decides(controller: Controller, device: str, spec: ActionSpec) -> Learned:
    return Learned(controller.on(device).bound_to(spec), greedy=True)


def _plays(name: str, spec: ActionSpec) -> PolicyBundle:
    return POLICIES[name]()


def settled(candidates: Sequence[Candidate], family: str | None) -> tuple[Family, PreviewConfig | None]:
    """What all of them were trained for, and with which previews; whoever cannot be judged beside the others is refused."""
    names, seen = [c.mind.name for c in candidates], dict[str, str]()
    if len(set(names)) < len(names):
        raise EsperError(f"--minds must have different names; these are {', '.join(names)}")
    for one in candidates:
        if one.digest and seen.setdefault(one.digest, one.mind.name) != one.mind.name:
            raise EsperError(f"--minds {seen[one.digest]} and {one.mind.name} are the same controller; "
                             "train it with another --seed")
    families = sorted({c.family for c in candidates if c.family} | ({family} if family else set()))
    if len(families) != 1:
        raise EsperError("--minds must be of one family; "
                         f"found {', '.join(families) or 'no family, so name one with --family'}")
    previews = {c.previews for c in candidates if c.folder}
    if len(previews) > 1:
        raise EsperError(f"--minds must have been trained with the same previews; found {', '.join(sorted(map(str, previews)))}")
    return find_family(families[0]), previews.pop() if previews else PreviewConfig()


def run(options: Prove, console: Console) -> None:
    candidates = [candidate(name, options.device) for name in options.minds]
    family, previews = settled(candidates, options.family)
    spec = TrainConfig(device=options.device).environment(family, 1, previews=False).spec
    for one in candidates:
        one.mind.make(spec)  # who cannot act there is refused before anything is tuned
    make_folder(options.out)
    path, say = options.out / f"{options.name}.db", _speaker(console)
    with contextlib.closing(_empty(path)) as store:
        tuned = _tuned(options, family, max(options.episodes, *(c.mind.episodes for c in candidates), 1), say)
        config = ProofConfig(options.scenarios, options.pilot, options.effect, previews, options.rehearsal)
        proof = prove(family, [c.mind for c in candidates], tuned, config, store, say, options.jobs, device=options.device)
    console.print(_table(proof))
    facts = _facts(options, family.name, proof)
    console.print(f"{facts['verdict']}: {facts['reason']}", markup=False)
    page, figures = (options.out / f"{options.name}.{kind}" for kind in ("html", "json"))
    write_report(path, {c.mind.name: c.folder / STORE for c in candidates if c.folder}, facts, page)
    _write(figures, facts | {"controllers": {c.mind.name: _about(c) for c in candidates},
                             "summary": rows_of(path, "summary"), "claims": [asdict(c) for c in proof.claims]})
    console.print(f"the report: {page}; every figure: {figures}", markup=False)


def _empty(path: Path) -> Store:
    """A new store, opened before anything is played: a folder that cannot be written is found out now."""
    try:
        for old in path.parent.glob(f"{path.name}*"):
            old.unlink()  # of a proof that did not end
    except OSError as error:
        raise EsperError(f"cannot remove what an earlier proof left: {error}; choose another --out") from error
    return Store(path)


def _about(one: Candidate) -> dict[str, Any]:
    """Where a controller comes from, and what it cost; previews and examinations are not counted in host-epochs."""
    names = {"round": "rounds", "episodes": "episodes", "host_epochs": "host_epochs", "seconds": "seconds"}
    return {"run": one.folder and str(one.folder), "sha256": one.digest or None,
            **{said: one.cost.get(name, 0) for name, said in names.items()}}


def _write(path: Path, result: Mapping[str, Any]) -> None:
    with whole(path) as temporary:
        temporary.write_text(json.dumps(_finite(result), indent=1, allow_nan=False) + "\n")


def _finite(value: Any) -> Any:
    """What was not measured is null: JSON has no other word for it."""
    if isinstance(value, Mapping):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _speaker(console: Console) -> Callable[[str], object]:
    """What is being played: one line that changes, or nothing off a terminal."""
    if not console.is_terminal:
        return lambda what: None
    return lambda what: console.print(f"[dim]{escape(f'{what[:70]:<70}')}[/dim]", end="\r")


def _tuned(options: Prove, family: Family, episodes: int, say: Callable[[str], object]) -> Tuned:
    """Controls that were tuned in this folder before, as far as they had enough episodes; the rest is tuned now."""
    path = options.out / "controls.json"
    tuned = tune(family, episodes, options.rows, watch=lambda what, done, total: say(f"tuning {what}: {done} of {total}"),
                 jobs=options.jobs, known=Tuned.load(path) if path.exists() else None, device=options.device)
    tuned.save(path)
    return tuned


def _facts(options: Prove, family: str, proof: Proof) -> dict[str, Any]:
    threads = f"{platform.machine()}, {torch.get_num_threads()} threads"
    hardware = torch.cuda.get_device_name() if options.device != "cpu" else threads
    verdict = {"verdict": "rehearsal", "reason": f"it proves nothing; before the court: {proof.verdict}, {proof.reason}"}
    if not options.rehearsal:
        verdict = {"verdict": proof.verdict, "reason": proof.reason}
    return {"family": family, **verdict, "scenarios": options.scenarios,
            "pilot": options.pilot, "effect": options.effect, "date": datetime.date.today().isoformat(),
            "commit": options.commit or _commit(), "version": __version__, "command": " ".join(["esper", *sys.argv[1:]]),
            "hardware": hardware, "torch": torch.__version__}


def _commit() -> str:
    """Of the working directory; empty where there is none, or no git."""
    try:
        told = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return told.stdout.strip()


def _table(proof: Proof) -> Table:
    """One line per control: all controllers together, the one that is least above it, and how many pass."""
    table = Table("control", title="Points above each control, with 95 % intervals", title_justify="left")
    for name in ("pooled", "least controller", "verdict"):
        table.add_column(name, justify="right", no_wrap=True)
    for control, asked in dict.fromkeys((claim.control, claim.asked) for claim in proof.claims):
        mine = [claim for claim in proof.claims if (claim.control, claim.asked) == (control, asked)]
        together, each = mine[-1], mine[:-1]
        least = min(each, key=lambda claim: math.inf if math.isnan(claim.difference) else claim.difference)
        counts = [sum(claim.verdict == verdict for claim in each) for verdict in ("holds", "fails", "refused")]
        verdict = ", ".join(f"{n} {what}" for n, what in zip(counts, ("hold", "fail", "refused"), strict=True) if n) or "reported"
        table.add_row({"half": "half way to the oracle", "matches": f"{control} (matched)"}.get(asked, control),
                      _points(together), _points(least), verdict)
    return table


def _points(claim: Claim) -> str:
    if math.isnan(claim.difference):
        return "-"
    return f"{100 * claim.difference:+.1f} ({100 * claim.low:+.1f} to {100 * claim.high:+.1f})"
