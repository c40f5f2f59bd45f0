"""`esper prove`: do trained controllers beat every control on scenarios and samples that nothing was chosen with?"""

import datetime
import json
import math
import platform
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from esper.bench import check_device
from esper.karn import write_report
from esper.leyline import ActionSpec, EsperError
from esper.nissa import Store, read
from esper.simic.controls import Tuned, tune
from esper.simic.court import Claim
from esper.simic.prove import Mind, Proof, ProofConfig, prove
from esper.simic.training import CHECKPOINT
from esper.tamiyo import POLICIES, Learned, PolicyBundle
from esper.tolaria import PreviewConfig, find_family

PLAIN = ("wait", "random", "heuristic")
"""Policies that can be put before the court by name, to see it refuse them."""


@dataclass(frozen=True)
class Prove:
    """Put trained controllers before the court: tune the controls, play all arms, judge, write a report.

    Example: esper prove --minds runs/first runs/second runs/third --out proof
    """

    minds: tuple[str, ...]
    """Folders of runs; or wait, random, heuristic, which must fail."""
    out: Path
    """Folder for proof.json, report.html, proof.db and controls.json."""
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
    device: str = "cpu"
    """cpu, or cuda."""
    commit: str = ""
    """Noted in the result."""

    def __post_init__(self) -> None:
        if not self.minds:
            raise EsperError("name at least one run with --minds")
        if self.rows < 1 or self.episodes < 0:
            raise EsperError("--rows must be at least 1, --episodes at least 0")
        if self.out.exists() and not self.out.is_dir():
            raise EsperError(f"--out {self.out} is a file; name a folder")
        if (self.out / "proof.json").exists():
            raise EsperError(f"--out {self.out} already holds a proof; choose another folder")
        check_device(self.device)


@dataclass(frozen=True)
class Candidate:
    """Who is put before the court."""

    mind: Mind
    family: str | None
    previews: PreviewConfig | None
    run: Path | None


def candidate(name: str, device: str) -> Candidate:
    if name in PLAIN:
        return Candidate(Mind(name, lambda spec: POLICIES[name](), 0), None, None, None)
    folder = Path(name)
    try:
        about = json.loads((folder / "run.json").read_text())
        family, every, steps = about["family"], about["config"]["preview_every"], about["config"]["preview_steps"]
    except (OSError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise EsperError(f"--minds {name} is neither the folder of a run nor one of {', '.join(PLAIN)}: {error}") from error
    episodes = read(folder / "run.db", "SELECT ifnull(sum(episodes), 0) FROM round")[0][0]

    def make(spec: ActionSpec) -> PolicyBundle:
        return Learned.load(folder / CHECKPOINT, spec, device, greedy=True)

    return Candidate(Mind(folder.name, make, episodes), family, PreviewConfig(every, steps) if every else None, folder / "run.db")


def run(options: Prove, console: Console) -> None:
    candidates = [candidate(name, options.device) for name in options.minds]
    names = [c.mind.name for c in candidates]
    if len(set(names)) < len(names):
        raise EsperError(f"--minds must have different names; these are {', '.join(names)}")
    families = {c.family for c in candidates if c.family} | ({options.family} if options.family else set())
    previews = {c.previews for c in candidates if c.run}
    if len(families) != 1 or len(previews) > 1:
        raise EsperError("--minds must be of one family with the same previews; "
                         f"found {', '.join(sorted(families)) or 'no family, so name one with --family'}")
    family = find_family(families.pop())
    options.out.mkdir(parents=True, exist_ok=True)
    say = _speaker(console)
    tuned = _tuned(options, family, max(options.episodes, *(c.mind.episodes for c in candidates), 1), say)
    store_path = options.out / "proof.db"
    for old in options.out.glob("proof.db*"):
        old.unlink()  # of a proof that did not end
    store = Store(store_path)
    config = ProofConfig(options.scenarios, options.pilot, options.effect, previews.pop() if previews else PreviewConfig())
    proof = prove(family, [c.mind for c in candidates], tuned, config, store, say, device=options.device)
    store.close()
    facts = _facts(options, family.name, proof)
    write_report(store_path, {c.mind.name: c.run for c in candidates if c.run}, facts, options.out / "report.html")
    claims = [{name: None if value != value else value for name, value in asdict(claim).items()} for claim in proof.claims]
    (options.out / "proof.json").write_text(json.dumps(facts | {"claims": claims}, indent=1) + "\n")
    console.print(_table(proof))
    console.print(f"{proof.verdict}: {proof.reason}")
    console.print(f"the report: {options.out / 'report.html'}; every figure: {options.out / 'proof.json'}")


def _speaker(console: Console) -> Callable[[str], object]:
    """What is being played: one line that changes, or nothing off a terminal."""
    if not console.is_terminal:
        return lambda what: None
    return lambda what: console.print(f"[dim]{what[:70]:<70}[/dim]", end="\r")


def _tuned(options: Prove, family: Any, episodes: int, say: Callable[[str], object]) -> Tuned:
    """Controls that were tuned in this folder before, if they had enough episodes; else new ones."""
    path = options.out / "controls.json"
    if path.exists():
        tuned = Tuned.load(path)
        if tuned.family == family.name and min(tuned.episodes.values()) >= episodes:
            return tuned
    tuned = tune(family, episodes, options.rows, watch=lambda what, done, total: say(f"tuning {what}: {done} of {total}"),
                 device=options.device)
    tuned.save(path)
    return tuned


def _facts(options: Prove, family: str, proof: Proof) -> dict[str, Any]:
    threads = f"{platform.machine()}, {torch.get_num_threads()} threads"
    hardware = torch.cuda.get_device_name() if options.device != "cpu" else threads
    return {"family": family, "verdict": proof.verdict, "reason": proof.reason, "scenarios": options.scenarios,
            "pilot": options.pilot, "effect": options.effect, "date": datetime.date.today().isoformat(), "commit": options.commit,
            "command": " ".join(["esper", *sys.argv[1:]]), "hardware": hardware, "torch": torch.__version__}


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
