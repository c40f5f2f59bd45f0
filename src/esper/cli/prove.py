"""`esper prove`: do trained controllers beat every control on data that nothing was chosen with?"""

import contextlib
import functools
import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from esper.cli.machine import open_workers
from esper.cli.options import Prove
from esper.cli.runs import STORE, load_controller, load_run, make_folder, points, remove_left, use_plugins
from esper.karn import write_report
from esper.karn.report import cost_of, rows_of
from esper.kasmina import check_device
from esper.leyline import ActionSpec, EsperError
from esper.leyline.codec import to_dict
from esper.leyline.provenance import provenance
from esper.leyline.storage import locked, read_json, write_json
from esper.nissa import Store, verify
from esper.simic.proof.baselines import Tuned, tune
from esper.simic.proof.claims import CONTROLLERS
from esper.simic.proof.evaluator import Evaluator
from esper.simic.proof.proving import POOLED, SHARED, Contestant, Proof, ProofConfig, prove
from esper.simic.proof.surveyed import PlanTable, plans_for
from esper.simic.proof.universal import (
    Controls,
    Universal,
    digest_of,
    load_table,
    prove_universe,
    save_table,
    survey_all,
    tune_kind,
)
from esper.simic.workers import Workers
from esper.tamiyo import POLICIES, Controller, Learned, PolicyBundle, named_policies
from esper.tamiyo.minds import Member, read_mind, shipped
from esper.tolaria import EnvConfig, Family, PreviewConfig, Universe, find_family
from esper.tolaria.tasks import task_digest


def _check(options: Prove) -> ProofConfig:
    """Whatever is wrong with the options is found before anything is computed."""
    if not options.minds:
        raise EsperError("name at least one run with --minds")
    if options.rows < 1 or options.episodes < 0:
        raise EsperError("--rows must be at least 1, --episodes at least 0")
    if not 1e-6 <= options.effect <= 1:  # nor if it is no number
        raise EsperError(f"--effect is {options.effect}; it must lie between 1e-06 and 1")
    if os.path.lexists(options.out / f"{options.name}.json"):
        raise EsperError(f"--out {options.out} already holds a {options.name}; choose another folder")
    check_device(options.device)
    return ProofConfig(options.scenarios, options.pilot, options.effect, options.rehearsal)


@dataclass(frozen=True)
class Candidate(Contestant):
    """Who is put before the court; a policy that was not trained has no environment of its own."""

    env: EnvConfig | None = None  # that it was trained in
    folder: Path | None = None
    digest: str = ""
    seed: str = ""  # what its training drew its randomness from
    cost: Mapping[str, Any] = field(default_factory=dict)  # by column of the table `round`
    universe: Universe | None = None  # that it was trained on


def load_candidates(name: str, device: str) -> list[Candidate]:
    """Loaded and checked as far as it can be without playing; a shipped mind has one for every family."""
    if name in named_policies():
        return [Candidate(name, functools.partial(_plays, name), 0)]
    if name in shipped():
        return [_member(name, member, device) for member in read_mind(name)]
    folder = Path(name)
    if (found := load_run(folder)) is None:
        names = ", ".join((*shipped(), *named_policies()))
        raise EsperError(f"--minds {name} is neither the folder of a run nor one of {names}")
    (config, _), called = found, folder.resolve().name
    if called in (POOLED, SHARED):
        raise EsperError(f"--minds {name} cannot be called {called}, which stands for all of them; "
                         "rename its folder")
    if (folder / STORE).exists():
        verify(folder / STORE)
    (controller, digest), cost = load_controller(folder, config, "cpu"), cost_of(folder / STORE)
    if cost["round"] < config.rounds or not cost["episodes"]:
        raise EsperError(f"{folder / STORE} tells of {cost['round']} of {config.rounds} rounds and "
                         f"of {cost['episodes'] or 0} episodes; put back the whole one")
    return [Candidate(called, functools.partial(_decides, controller, device), cost["episodes"], config.env,
                      folder, digest, f"{config.env.family.name} {config.seed}", cost, config.universe)]


def _member(mind: str, member: Member, device: str) -> Candidate:
    """A controller of a shipped mind, in an environment like the one it was trained in."""
    about, run, family = member.about, member.about["run"]["config"], member.about["family"]
    previews = PreviewConfig(run["preview_every"], run["preview_steps"]) if run["preview_every"] else None
    return Candidate(f"{mind} ({family})", functools.partial(_decides, member.controller, device),
                     about["episodes"], EnvConfig(find_family(family), previews=previews),
                     digest=about["agent sha256"], seed=f"{family} {run['seed']}")


def _decides(controller: Controller, device: str, spec: ActionSpec) -> Learned:
    return Learned(controller.on(device).bound_to(spec), greedy=True)


def _plays(name: str, spec: ActionSpec) -> PolicyBundle:
    return POLICIES[name]()


def resolve_env(candidates: Sequence[Candidate], family: str, device: str) -> EnvConfig:
    """What all of them were trained in; whoever cannot be judged beside the others is refused."""
    names, seen = [c.name for c in candidates], dict[str, str]()
    if len(set(names)) < len(names):
        raise EsperError(f"--minds must have different names; these are {', '.join(names)}")
    for one in candidates:
        for what, key in (("the same controller", one.digest), ("runs of one seed", one.seed)):
            if key and seen.setdefault(key, one.name) != one.name:
                raise EsperError(f"--minds {seen[key]} and {one.name} are {what}, so they are not "
                                 "independent; train one with another --seed")
    envs = {json.dumps(to_dict(replace(c.env, device="cpu")), sort_keys=True): c.env
            for c in candidates if c.env is not None}
    families = {env.family.name for env in envs.values()} | ({find_family(family).name} if family else set())
    if len(families) != 1:
        raise EsperError("--minds must be of one family; "
                         f"found {', '.join(sorted(families)) or 'no family, so name one with --family'}")
    universes = [c.universe for c in candidates if c.env is not None]
    if len(envs) > 1 or any(each != universes[0] for each in universes):
        raise EsperError("--minds must have been trained in equal environments; "
                         "their families, previews or action spaces differ")
    base = next(iter(envs.values())) if envs else EnvConfig(find_family(family), previews=PreviewConfig())
    return replace(base, device=device)


def run(options: Prove, console: Console) -> int:
    config = _check(options)
    use_plugins(options.plugin)
    loaded = [each for name in options.minds for each in load_candidates(name, options.device)]
    called = find_family(options.family).name if options.family else ""
    candidates = [c for c in loaded if c.folder or c.env is None or c.env.family.name == called or not called]
    if not candidates:
        raise EsperError(f"none of --minds {' '.join(options.minds)} was trained on the family {called}; "
                         "train one there, or name another --family")
    if len(candidates) < CONTROLLERS and not options.rehearsal:
        raise EsperError(f"{len(candidates)} controllers are no finding, which needs {CONTROLLERS}; the test "
                         "split stays closed. Add --rehearsal to compare on validation scenarios")
    env = resolve_env(candidates, options.family, options.device)
    universe = next((c.universe for c in candidates if c.env is not None), None)
    for one in candidates:
        one.make(env.spec)  # who cannot act there is refused before anything is tuned
    make_folder(options.out)
    path, page, figures = (options.out / f"{options.name}.{kind}" for kind in ("db", "html", "json"))
    with locked(options.out):
        remove_left("proof", path)
        with (contextlib.closing(Store(path)) as store,  # early: a folder that cannot be written is found now
              open_workers(options, options.threads) as workers):
            if not options.rehearsal:
                _declare(options, env, universe, candidates)
            say, most = _speaker(console), max(options.episodes, *(c.episodes for c in candidates), 1)
            if universe is None:
                tuned = _tuned(options, env, most, say, workers)
                proof = prove(env, candidates, tuned, config, store, say, workers)
            else:
                court = _universal(options, universe, env, most, say, workers)
                proof = prove_universe(court, candidates, config, store, say, workers)
    console.print(_table(proof))
    facts = _facts(options, env.family.name if universe is None else universe.name, proof)
    console.print(f"{facts['verdict']}: {facts['reason']}")
    write_report(path, {c.name: c.folder / STORE for c in candidates if c.folder}, facts, page)
    result = facts | {"controllers": {c.name: _about(c) for c in candidates},
                      "summary": rows_of(path, "summary"), "claims": [asdict(c) for c in proof.claims]}
    write_json(figures, options.name, _finite(result))
    console.print(f"the report: {page}; every figure: {figures}")
    return 0 if options.rehearsal or proof.verdict == "holds" else 1


def _declare(options: Prove, env: EnvConfig, universe: Universe | None,
             candidates: Sequence[Candidate]) -> None:
    """What will be asked, written down before anything is played; it cannot be changed afterwards."""
    path = options.out / "declaration.json"
    asked = {"family": to_dict(env.family), "controllers": {c.name: c.digest for c in candidates},
             **{name: getattr(options, name) for name in ("effect", "scenarios", "pilot")}}
    if universe is not None:
        asked["universe"] = to_dict(universe)
        asked["task"] = {family.task: task_digest(family.task) for family in universe.test}
    elif digest := task_digest(env.family.task):
        asked["task"] = digest
    if path.exists():
        said = read_json(path, "declaration")
        if different := [name for name, value in asked.items() if said.get(name) != value]:
            raise EsperError(f"{path} declared another {', '.join(different)}; "
                             "keep to it, or choose another --out")
        return
    write_json(path, "declaration", asked | {"declared with": provenance(options.device, options.commit)})


def _about(one: Candidate) -> dict[str, Any]:
    """Where a controller comes from, and what it cost; previews and examinations count no host-epochs."""
    counts = {name: one.cost.get(name, 0) for name in ("episodes", "host_epochs", "seconds")}
    return {"run": one.folder and str(one.folder), "sha256": one.digest or None,
            "rounds": one.cost.get("round", 0), **counts}


def _finite(value: Any) -> Any:
    """What was not measured is null: JSON has no other word for it."""
    return json.loads(json.dumps(value), parse_constant=lambda name: None)


def _speaker(console: Console) -> Callable[[str], object]:
    """What is being played: one line that changes; off a terminal a line a minute."""
    last = [-math.inf]

    def say(what: str) -> None:
        if console.is_terminal:
            console.print(f"{what[:70]:<70}", style="dim", end="\r")
        elif time.monotonic() - last[0] >= 60:
            last[0] = time.monotonic()
            console.print(what)

    return say


def _tuned(options: Prove, env: EnvConfig, episodes: int, say: Callable[[str], object],
           workers: Workers) -> Tuned:
    """Controls tuned in this folder before, as far as they had enough episodes; the rest is tuned now."""
    path = options.out / "controls.json"
    return tune(Evaluator(replace(env, previews=None)), episodes, options.rows, workers=workers,
                known=Tuned.load(path) if path.exists() else None, keep=lambda tuned: tuned.save(path),
                watch=lambda what, done, total: say(f"tuning {what}: {done:,} of {total:,} episodes"))


def _universal(options: Prove, universe: Universe, env: EnvConfig, episodes: int,
               say: Callable[[str], object], workers: Workers) -> Universal:
    """Plans and controls of every kind of host that were tuned in this folder before, or are now. Each kind
    has its share of the episodes: as often as training meets it."""
    def env_of(family: Family) -> EnvConfig:
        return replace(env, family=family, spec=None)  # type: ignore[arg-type]

    path, tables = options.out / "controls.json", dict[str, PlanTable]()
    controls = Controls(digest_of(universe.training), episodes)
    if path.exists() and replace(known := Controls.load(path), kinds={}) == controls:
        controls = known  # tuned on the same families, with as many episodes
    for kind, share in universe.kinds.items():
        mine = [family for family in universe.training if family.host.kind == kind]
        kept, asked = options.out / f"plans-{kind}.safetensors", math.ceil(share * episodes)
        if not kept.exists():
            plans = len(plans_for(env_of(mine[0]).spec))
            count = max(2, -(-asked // (plans * len(mine))))  # scenarios of each: one chooses, one scores
            table = survey_all(env_of, mine, universe.source_of(mine), count, watch=say)
            save_table(kept, table, digest_of(mine))
        tables[kind] = load_table(kept, digest_of(mine))
        if kind not in controls.kinds:
            found = tune_kind(env_of, mine, tables[kind], asked, watch=say, workers=workers)
            controls = replace(controls, kinds=controls.kinds | {kind: found})
            controls.save(path)
    return Universal(universe, env_of, controls, tables)


def _facts(options: Prove, family: str, proof: Proof) -> dict[str, Any]:
    verdict, reason = proof.verdict, proof.reason
    if options.rehearsal:
        verdict, reason = "rehearsal", f"it proves nothing; before the court: {verdict}, {reason}"
    return {"family": family, "verdict": verdict, "reason": reason, "scenarios": options.scenarios,
            "pilot": options.pilot, "effect": options.effect, "openings of the test split": proof.openings,
            **provenance(options.device, options.commit)}


def _table(proof: Proof) -> Table:
    """One line per control: each controller if there are at most two, else their mean and the least."""
    table = Table("control", title="Points above each control, with 95 % intervals", title_justify="left")
    names = list(dict.fromkeys(claim.controller for claim in proof.claims if claim.controller != POOLED))
    for name in (*(names if len(names) <= 2 else ("pooled", "least controller")), "verdict"):
        table.add_column(name, justify="right", no_wrap=True)
    for control, asked in dict.fromkeys((claim.control, claim.asked) for claim in proof.claims):
        mine = [claim for claim in proof.claims if (claim.control, claim.asked) == (control, asked)]
        together, each = mine[-1], mine[:-1]
        least = min(each, key=lambda claim: math.inf if math.isnan(claim.difference) else claim.difference)
        counts = {said: sum(claim.verdict == verdict for claim in each)
                  for verdict, said in (("holds", "hold"), ("fails", "fail"), ("refused", "refused"))}
        verdict = ", ".join(f"{count} {said}" for said, count in counts.items() if count) or "reported"
        said = {"half": "half way to the oracle", "matches": f"{control} (matched)"}.get(asked, control)
        shown = (points(claim.difference, claim.low, claim.high)
                 for claim in (each if len(names) <= 2 else (together, least)))
        table.add_row(said, *shown, verdict)
    return table
