"""The court for a universe: controls tuned on training data sets, arms on others, claims over sources of data."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from esper.cli import main
from esper.kasmina import Host
from esper.leyline import ActionSpec, EsperError
from esper.leyline.codec import from_dict, to_dict
from esper.nissa import Store, read
from esper.simic.proof import universal
from esper.simic.proof.claims import UNIVERSE as RULES
from esper.simic.proof.plans import Plan
from esper.simic.proof.proving import Contestant, ProofConfig
from esper.simic.proof.surveyed import PlanTable, price_pairs
from esper.simic.proof.universal import (
    Controls,
    Universal,
    by_condition,
    prove_universe,
    shortlist,
    survey_all,
    tune_kind,
)
from esper.tamiyo import Random, Wait
from esper.tolaria import EnvConfig, Kind, Task, Universe
from tests.test_training import toys
from tests.workshop import toy_family

FLAT = toy_family(name="flat", host=Host("mlp", widths=(8, 8)), kinds=(Kind("plain"),), horizons=(6,), prices=(1e-4, 1e-3),
                  flop_prices=(0.01,), batch=60)
UNIVERSE = Universe("toys", (FLAT, replace(FLAT, name="other", task="digits")),
                    tuple(replace(FLAT, name=task, task=task) for task in ("fashion", "mnist")))
CONTESTANTS = [Contestant("waits", lambda spec: Wait(), 0), Contestant("guesses", lambda spec: Random(1), 0)]


@pytest.fixture(scope="module")
def court() -> Universal:
    table = survey_all(EnvConfig, UNIVERSE.training, ["a", "b"], 2, make=toys)
    found = tune_kind(EnvConfig, UNIVERSE.training, table, 40, make=toys)
    return Universal(UNIVERSE, EnvConfig, Controls("toys", 40, {"mlp": found}), {"mlp": table}, toys)


def test_every_arm_is_played_on_every_family_and_judged_over_sources(court: Universal, tmp_path: Path) -> None:
    store = Store(tmp_path / "proof.db")
    proof = prove_universe(court, CONTESTANTS, ProofConfig(scenarios=3, pilot=2, rehearsal=True), store)
    store.close()
    assert proof.openings == "none: it is closed"
    assert {(claim.control, claim.asked) for claim in proof.claims} == set(RULES)
    arms = {arm for (arm,) in read(tmp_path / "proof.db", "SELECT DISTINCT arm FROM arm")}
    assert arms == {"learned", *RULES.beaten, *RULES.matched, *RULES.reported}
    ((count, kinds),) = read(tmp_path / "proof.db", "SELECT count(*), count(DISTINCT kind) FROM arm WHERE arm = 'no growth'")
    assert (count, kinds) == (6, 2), "three scenarios of two families"
    same = [claim for claim in proof.claims if claim.controller == "waits" and claim.control == "no growth"]
    assert [(claim.difference, claim.low, claim.high, claim.n) for claim in same] == [(0, 0, 0, 6)]
    prices = read(tmp_path / "proof.db", "SELECT kind, group_concat(price) FROM arm WHERE arm = 'no growth' GROUP BY kind")
    assert prices[0][1] != prices[1][1], "families meet scenarios of their own"
    numbers = dict(read(tmp_path / "proof.db", "SELECT scenario, kind FROM arm WHERE arm = 'no growth'"))
    assert set(numbers) == set(range(6))
    assert numbers[0].startswith("fashion: ")
    assert numbers[5].startswith("mnist: ")


def test_a_universe_without_test_families_proves_nothing(court: Universal) -> None:
    with pytest.raises(EsperError, match="has no test families, so nothing can be proven; use --rehearsal"):
        prove_universe(court, CONTESTANTS, ProofConfig(scenarios=3, pilot=2))


def test_controls_had_their_episodes_and_are_kept(court: Universal, tmp_path: Path) -> None:
    found = court.controls.kinds["mlp"]
    assert min(found.episodes.values()) >= 40
    assert set(found.episodes) >= {"best fixed", "periodic", "converged", "gap", "identify, then plan", "best of K",
                                   "halving over plans", "preview-greedy"}
    court.controls.save(tmp_path / "controls.json")
    assert Controls.load(tmp_path / "controls.json") == court.controls
    assert from_dict(Controls, to_dict(court.controls), "here") == court.controls
    (tmp_path / "controls.json").write_text("{")
    with pytest.raises(EsperError, match="controls"):
        Controls.load(tmp_path / "controls.json")


def table() -> PlanTable:
    """Of three plans on two sources: the second is best where parameters are cheap, the third never."""
    plans = (Plan((None, None)), Plan(("norm", None)), Plan((None, "norm")))
    runs = np.zeros((4, 3, 3))
    runs[..., 0] = [0.5, 0.6, 0.4]
    runs[:, 1, 1] = 500 / FLAT.host.cost.params
    return PlanTable(plans, np.array([0, 0, 1, 1]), np.full(4, 6), np.zeros((4, 3, 2)), runs)


def test_families_of_a_survey_meet_different_scenarios(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is drawn by a number is the same in every family: alike numbers would leave out whole conditions."""
    met: list[int] = []
    monkeypatch.setattr(universal, "survey", lambda evaluator, plans, drawn, number, rows: (
        met.extend(drawn.key.tolist()), table())[1])
    survey_all(EnvConfig, UNIVERSE.training, ["a", "b"], 3, make=toys)
    assert len(set(met)) == 6


def test_the_best_plan_follows_the_price() -> None:
    cheap, dear = price_pairs(FLAT)
    assert dear[0] == pytest.approx(10 * cheap[0])
    assert by_condition(table(), FLAT) == [Plan(("norm", None)), Plan((None, None))], "0.1 of score for 0.05, and for 0.5"
    assert shortlist(table(), FLAT) == [Plan((None, None)), Plan(("norm", None))], "what is never best is not trained"


def test_the_command_trains_rehearses_and_says_how(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                   capsys: pytest.CaptureFixture[str]) -> None:
    """A run on a universe, before its own court, in one process; nothing was opened."""
    monkeypatch.setenv("ESPER_DATA", str(tmp_path / "data"))
    rng = np.random.default_rng(0)
    for name in ("one", "two"):
        x = rng.normal(size=(150, 4))
        Task.from_arrays(name, x, (x[:, 0] * x[:, 1] > 0).astype(int))
    family = replace(FLAT, host=Host("mlp", (4,), (4,), 2), batch=30)
    parts = {part: [to_dict(replace(family, name=task, task=task))] for part, task in (("training", "one"), ("validation", "two"))}
    plain = {"name": "mine", **parts}
    (tmp_path / "u.toml").write_text("\n".join(_toml(plain)))
    (tmp_path / "c.toml").write_text("exam_rows = 2\nscenarios = 0\n[ppo]\nminibatches = 2\nepochs = 1\n")
    run, out = str(tmp_path / "run"), tmp_path / "proof"
    words = ["--universe", str(tmp_path / "u.toml"), "--config", str(tmp_path / "c.toml"), "--rounds", "1", "--rows", "4"]
    assert main(["train", *words, "--out", run]) == 0
    asked = ["prove", "--minds", run, "--rehearsal", "--scenarios", "2", "--pilot", "2", "--out", str(out)]
    assert main(asked) == 0
    told = json.loads((out / "rehearsal.json").read_text())
    assert told["family"] == "mine"
    assert {claim["control"] for claim in told["claims"]} >= set(RULES.beaten)
    assert (out / "rehearsal.html").exists()
    assert main(["prove", "--minds", run, "--scenarios", "2", "--out", str(tmp_path / "real")]) == 2
    assert "controllers are no finding" in capsys.readouterr().err.replace("\n", " ")


def _toml(value: dict[str, object]) -> list[str]:
    """As TOML: inline tables are JSON with other signs."""
    def inline(each: object) -> str:
        if isinstance(each, dict):
            return "{" + ", ".join(f"{name} = {inline(part)}" for name, part in each.items() if part is not None) + "}"
        if isinstance(each, list):
            return "[" + ", ".join(map(inline, each)) + "]"
        return json.dumps(each)

    return [f"{name} = {inline(each)}" for name, each in value.items()]


def test_the_spec_decides_which_blueprints_plans_may_use() -> None:
    from esper.simic.proof.surveyed import plans_for

    plans = plans_for(ActionSpec.decisive(2, ("noop", "norm")))
    assert plans == [Plan((None, None)), Plan(("norm", "norm")), Plan(("norm", None)), Plan(("norm", "norm"), 2), Plan(("norm", None), 2)]
