"""The proof: a planted policy passes, doing nothing and chance fail, and the test split stays shut until the verdict."""

import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from esper.simic.controls import Tuned, play_plans, play_rule, schedule, trigger_candidates, tune
from esper.simic.court import BEATEN, MATCHED, REPORTED
from esper.simic.gaps import Rule, Split
from esper.simic.plans import played
from esper.simic.proving import Mind, Proof, ProofConfig, prove
from esper.simic.sweep import conditions
from esper.simic.trials import Delivered, Trials
from experiments import orchard
from experiments.orchard import FAMILY, Gardener, Orchard
from torch import Tensor

from esper.cli import main
from esper.leyline import EsperError, View
from esper.nissa import Store, read
from esper.simic import proving, sweep, trials
from esper.tamiyo import PolicyBundle, Random, Triggered, Wait
from esper.tolaria import Scenarios

EPISODES = 400


@pytest.fixture(scope="module", autouse=True)
def _in_the_orchard() -> Iterator[None]:
    """Arms are played where training and scores are a table."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (sweep, trials):
            patch.setattr(module, "MorphogeneticEnv", Orchard)
        yield


@pytest.fixture(scope="module")
def tuned() -> Tuned:
    return tune(FAMILY, EPISODES, rows=128, preview_steps=0)


def put(name: str, policy: PolicyBundle, tuned: Tuned, store: Store | None = None) -> Proof:
    minds = [Mind(f"{name} {number}", lambda spec: policy, EPISODES) for number in range(3)]
    return prove(FAMILY, minds, tuned, ProofConfig(scenarios=320, pilot=64), store)


def test_the_planted_policy_is_optimal_and_sees_only_what_all_policies_see() -> None:
    drawn, env = FAMILY.scenarios(64, "test"), Orchard(FAMILY, 64)
    arms = [Trials(FAMILY).play(policy, drawn).utility for policy in (Gardener(env), Wait())]
    torch.testing.assert_close(arms[0] - arms[1], orchard.optimum(drawn, env), atol=1e-6, rtol=0)


def test_a_planted_policy_passes(tuned: Tuned, tmp_path: Path) -> None:
    store = Store(tmp_path / "proof.db")
    proof = put("gardener", Gardener(Orchard(FAMILY, 1)), tuned, store)
    assert (proof.verdict, proof.reason) == ("holds", "33 claims about 3 controllers")
    path = store.path
    assert read(path, "SELECT count(*), count(DISTINCT controller) FROM claim") == [(4 * 15, 4)]
    arms = {row[0] for row in read(path, "SELECT DISTINCT arm FROM arm")}
    assert arms == {"learned", *BEATEN, *MATCHED, *REPORTED}
    assert read(path, "SELECT count(*) FROM arm WHERE arm = 'learned'") == [(3 * 320,)]
    drawn = FAMILY.scenarios(320, "test")
    truth = float(orchard.optimum(drawn, Orchard(FAMILY, 1)).mean())
    gain = read(path, "SELECT gain, low, high FROM summary WHERE controller = 'pooled' AND arm = 'learned'")[0]
    assert gain[0] == pytest.approx(truth, abs=1e-6)
    assert gain[1] < truth < gain[2]
    difference = read(path, "SELECT a.utility - b.utility FROM arm a JOIN arm b USING (scenario) WHERE a.arm = 'learned' AND "
                            "a.controller = 'gardener 1' AND b.arm = 'random' ORDER BY scenario")
    claim = next(c for c in proof.claims if (c.controller, c.control) == ("gardener 1", "random"))
    assert claim.difference == pytest.approx(sum(d[0] for d in difference) / 320, abs=1e-6)
    mean = dict(read(path, "SELECT arm, gain FROM summary WHERE controller = 'pooled'"))
    assert mean["oracle"] == pytest.approx(truth, abs=1e-6)
    assert mean["oracle"] > mean["best per visible condition"] >= mean["best fixed"] > mean["random"]
    flops = dict(read(path, "SELECT arm, flops FROM summary WHERE controller = 'gardener 0'"))
    late, early = (abs(flops[f"from scratch, equal {what}"] - flops["learned"]) for what in ("FLOPs", "epochs"))
    assert late < early / 3
    born = "SELECT count(*) FROM decision WHERE arm = 'learned' AND controller = 'gardener 0' AND op = 'GERMINATE'"
    assert read(path, born)[0][0] > 100


@pytest.mark.parametrize("policy", [Wait(), Random(), Random(seed=5)])
def test_doing_nothing_and_chance_fail(policy: PolicyBundle, tuned: Tuned) -> None:
    proof = put("nobody", policy, tuned)
    assert proof.verdict == "fails"
    failed = {claim.control for claim in proof.claims if claim.controller == "nobody 0" and claim.verdict == "fails"}
    assert {"no growth", "best fixed", "shuffled"} <= failed


def test_a_blind_plan_fails_however_good_it_is(tuned: Tuned) -> None:
    """The best that price and horizon alone can do is a control, so a controller that looks at nothing else cannot win."""
    drawn = FAMILY.scenarios(320, "test")

    class Blind:
        def __call__(self, view: View) -> Tensor:
            told = (view.price > 0).long()
            return played([tuned.visible[condition] for condition in told.tolist()], view.spec)(view)

    proof = put("blind", Blind(), tuned)
    assert proof.verdict == "fails"
    assert "best per visible condition" in {c.control for c in proof.claims if c.verdict == "fails"}
    assert len({*conditions(FAMILY, drawn).tolist()}) == 2


def test_the_search_finds_the_best_plans_there_are(tuned: Tuned) -> None:
    """The oracle's plans are optimal for every price and kind; two seeds of different blueprints are among them."""
    drawn, env = FAMILY.scenarios(320, "test"), Orchard(FAMILY, 320)
    plans = schedule(tuned, "oracle", FAMILY, drawn)
    arms = Trials(FAMILY)
    gain = play_plans(arms, plans, drawn).utility - arms.play(Wait(), drawn).utility
    torch.testing.assert_close(gain, orchard.optimum(drawn, env), atol=1e-6, rtol=0)
    assert any(len({*filter(None, plan.seeds)}) == 2 for plan in plans)
    told = schedule(tuned, "best per visible condition", FAMILY, drawn)
    assert float(orchard.net(drawn, env).mean(0).amax(1).sum()) > 0
    assert len(set(plans)) > len(set(told)) >= 1
    assert float(gain.mean()) > float((play_plans(arms, told, drawn).utility - arms.play(Wait(), drawn).utility).mean()) + 0.02


def test_the_rule_follows_what_it_sees(tuned: Tuned) -> None:
    """The training loss tells the kind, so a rule that reads it is as good as the oracle."""
    drawn = FAMILY.scenarios(320, "test")
    arms = Trials(FAMILY)
    rule, oracle = play_rule(arms, tuned, drawn), play_plans(arms, schedule(tuned, "oracle", FAMILY, drawn), drawn)
    torch.testing.assert_close(rule.utility, oracle.utility, atol=1e-6, rtol=0)
    blind = dataclasses.replace(tuned, rule=Rule((None, None, None), tuned.rule.choices))
    assert float(play_rule(arms, blind, drawn).utility.mean()) < float(rule.utility.mean()) - 0.02


def test_triggers_are_tuned(tuned: Tuned) -> None:
    """The best blueprint at one's chosen place is better than the first of the list; who tunes finds it."""
    drawn, arms = FAMILY.scenarios(320, "test"), Trials(FAMILY)
    for name, config in tuned.triggers.items():
        first = trigger_candidates(FAMILY, name)[0]
        mine, other = (arms.play(Triggered(c), drawn).utility.mean() for c in (config, first))
        assert float(mine) > float(other) + 0.005, name
        assert tuned.episodes[name] >= EPISODES


def test_controls_that_had_enough_episodes_are_kept(tuned: Tuned) -> None:
    said: list[str] = []
    again = tune(FAMILY, EPISODES, rows=128, preview_steps=0, watch=lambda what, done, total: said.append(what), known=tuned)
    assert not said
    assert (again.episodes, again.triggers, again.fixed) == (tuned.episodes, tuned.triggers, tuned.fixed)
    short = dataclasses.replace(tuned, episodes=tuned.episodes | {"gap": 1},
                                triggers=tuned.triggers | {"gap": dataclasses.replace(tuned.triggers["gap"], blueprint="none")})
    again = tune(FAMILY, EPISODES, rows=128, preview_steps=0, watch=lambda what, done, total: said.append(what), known=short)
    assert set(said) == {"gap"}
    assert (again.episodes, again.triggers) == (tuned.episodes, tuned.triggers)
    said.clear()
    short = dataclasses.replace(tuned, episodes=tuned.episodes | {"gap": EPISODES - 40})
    again = tune(FAMILY, EPISODES, rows=128, preview_steps=0, watch=lambda what, done, total: said.append(f"{what} {done}"),
                 known=short)
    assert EPISODES <= again.episodes["gap"] < EPISODES + 200
    assert min(int(each.removeprefix("gap ")) for each in said) > EPISODES - 40, "it goes on with the rest"
    other = dataclasses.replace(tuned, about="of another family")
    assert tune(FAMILY, 8, rows=128, preview_steps=0, known=other).episodes["gap"] < tuned.episodes["gap"]


def test_who_looks_at_previews_is_shown_them(tuned: Tuned, monkeypatch: pytest.MonkeyPatch) -> None:
    """The controller and the heuristic; nobody else pays for them."""
    shown: dict[str, set[bool]] = {}
    real = Trials.play

    def play(self: Trials, policy: PolicyBundle, drawn: Scenarios, previews: bool = False) -> Delivered:
        shown.setdefault(type(policy).__name__, set()).add(previews)
        return real(self, policy, drawn)

    monkeypatch.setattr(Trials, "play", play)
    prove(FAMILY, [Mind("m", lambda spec: Gardener(Orchard(FAMILY, 1)), EPISODES)], tuned, ProofConfig(scenarios=8, pilot=4))
    assert shown == {"Gardener": {True}, "Heuristic": {True}, "Wait": {False}, "Random": {False}, "Triggered": {False},
                     "Planned": {False}}


def test_controls_without_enough_episodes_are_refused(tuned: Tuned) -> None:
    minds = [Mind(f"m {n}", lambda spec: Gardener(Orchard(FAMILY, 1)), 10 * EPISODES) for n in range(3)]
    proof = prove(FAMILY, minds, tuned, ProofConfig(scenarios=64, pilot=16))
    assert proof.verdict == "refused"
    assert {c.control for c in proof.claims if "fewer episodes" in c.reason} >= {"periodic", "best fixed", "best rule"}


def test_the_test_split_is_opened_once_after_the_pilot(tuned: Tuned, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    real = proving.open_test
    monkeypatch.setattr(proving, "open_test", lambda *a: (events.append("opened"), real(*a))[1])
    minds = [Mind("m", lambda spec: Wait(), EPISODES)]
    prove(FAMILY, minds, tuned, ProofConfig(scenarios=8, pilot=4), watch=lambda what: events.append(what))
    assert events.count("opened") == 1
    at = events.index("opened")
    assert events[:at]
    assert all(event.startswith("pilot") for event in events[:at])
    assert not any(event.startswith("pilot") for event in events[at:])


def test_a_rehearsal_leaves_the_test_split_closed(tuned: Tuned, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*facts: object) -> None:
        raise AssertionError("the test split was opened")

    monkeypatch.setattr(proving, "open_test", never)
    mind = Mind("gardener", lambda spec: Gardener(Orchard(FAMILY, 1)), EPISODES)
    kept: list[Tensor] = []
    real = Trials.play
    monkeypatch.setattr(Trials, "play", lambda trials, policy, drawn, previews=False: (
        kept.append(drawn.key), real(trials, policy, drawn, previews))[1])
    rehearsed = prove(FAMILY, [mind], tuned, ProofConfig(scenarios=64, pilot=8, rehearsal=True))
    assert {claim.control for claim in rehearsed.claims} >= set(BEATEN)
    test = set(FAMILY.scenarios(64, "test").key.tolist())
    assert not test & set(torch.cat(kept).tolist())


def test_controls_of_another_family_are_refused(tuned: Tuned) -> None:
    for other in (dataclasses.replace(FAMILY, name="other"), dataclasses.replace(FAMILY, horizons=(11,))):
        with pytest.raises(EsperError, match="tuned for 'orchard'"):
            prove(other, [], tuned)


def test_tuned_controls_survive_a_file(tuned: Tuned, tmp_path: Path) -> None:
    tuned.save(tmp_path / "controls.json")
    again = Tuned.load(tmp_path / "controls.json")
    assert {k: v for k, v in vars(again).items() if k != "rule"} == {k: v for k, v in vars(tuned).items() if k != "rule"}
    assert again.rule.splits == tuned.rule.splits
    assert (again.rule.choices == tuned.rule.choices).all()
    present = dataclasses.replace(tuned, rule=Rule((Split(1, math.inf), None, None), tuned.rule.choices))
    present.save(tmp_path / "controls.json")
    assert "Infinity" not in (tmp_path / "controls.json").read_text()
    assert Tuned.load(tmp_path / "controls.json").rule.splits == present.rule.splits
    (tmp_path / "controls.json").write_text("{}")
    with pytest.raises(EsperError, match="cannot read tuned controls"):
        Tuned.load(tmp_path / "controls.json")


def test_the_command_refuses_bad_input_in_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "done").mkdir()
    (tmp_path / "done" / "proof.json").write_text("{}")
    cases = {
        "neither the folder of a run": ["--minds", str(tmp_path / "nowhere"), "--out", str(tmp_path / "a")],
        "already holds a proof": ["--minds", "wait", "--family", "mlp", "--out", str(tmp_path / "done")],
        "name one with --family": ["--minds", "wait", "--out", str(tmp_path / "b")],
        "different names": ["--minds", "wait", "wait", "--family", "mlp", "--out", str(tmp_path / "c")],
    }
    for message, arguments in cases.items():
        assert main(["prove", *arguments]) == 2
        said = capsys.readouterr().err
        assert message in said
        assert said.count("\n") == 1


def test_the_command_writes_a_verdict_and_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    import esper.tolaria.families as families

    monkeypatch.setitem(families.FAMILIES, "orchard", FAMILY)
    out = tmp_path / "proof"
    assert main(["prove", "--minds", "wait", "random", "heuristic", "--family", "orchard", "--episodes", "60", "--rows", "256",
                 "--scenarios", "48", "--pilot", "8", "--out", str(out), "--commit", "abc"]) == 0
    said = capsys.readouterr().out
    assert "fails: " in said
    result = json.loads((out / "proof.json").read_text())
    assert (result["verdict"], result["commit"], result["family"]) == ("fails", "abc", "orchard")
    first = result["claims"][0]
    assert {"controller", "control", "n", "difference", "low", "high", "verdict"} <= first.keys()
    assert "<svg" in (out / "proof.html").read_text()
    assert json.loads((out / "controls.json").read_text())["family"] == "orchard"
