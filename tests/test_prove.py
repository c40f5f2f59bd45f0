"""The proof: a planted policy passes, doing nothing and chance fail, and the test split stays shut until then."""

import dataclasses
import functools
import json
import secrets
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from experiments import orchard
from experiments.orchard import FAMILY, Gardener, Orchard
from torch import Tensor

from esper.cli import main, prove as prove_cli
from esper.leyline import ActionSpec, EsperError, View
from esper.leyline.codec import to_dict
from esper.leyline.keys import Purpose, mix
from esper.nissa import Store, read
from esper.simic.proof import proving
from esper.simic.proof.baselines import Tuned, play_plans, play_rule, schedule, trigger_candidates, tune
from esper.simic.proof.claims import BEATEN, FEWEST, MATCHED, REPORTED
from esper.simic.proof.evaluator import Evaluator
from esper.simic.proof.plans import played
from esper.simic.proof.proving import Contestant, EvaluationSet, Played, Proof, ProofConfig
from esper.simic.proof.sweep import conditions
from esper.simic.proof.value_of_information import Rule, Split
from esper.tamiyo import Planned, PolicyBundle, Random, Triggered, Wait
from esper.tolaria import FAMILIES, EnvConfig, Episodes, PreviewConfig, Scenarios, openings
from tests.workshop import unmixed

EPISODES = 400
ENV = EnvConfig(FAMILY)
QUICK = ProofConfig(scenarios=FEWEST, pilot=4, effect=1.0)
"""Asks for an effect that no pilot needs more scenarios for."""
prove = functools.partial(proving.prove, make=Orchard)


@pytest.fixture(autouse=True)
def _known_scenarios(monkeypatch: pytest.MonkeyPatch) -> None:
    """Proofs begin with scenario 0 of the test split instead of one that nobody can know."""
    monkeypatch.setattr(secrets, "randbits", lambda bits: 0)


@pytest.fixture(scope="module")
def arms() -> Evaluator:
    return Evaluator(FAMILY, make=Orchard)


@pytest.fixture(scope="module")
def tuned(arms: Evaluator) -> Tuned:
    return tune(arms, EPISODES, rows=128, preview_steps=0)


@pytest.fixture(scope="module")
def known() -> dict[tuple, Played]:
    return {}


@pytest.fixture
def _once(known: dict[tuple, Played], monkeypatch: pytest.MonkeyPatch) -> None:
    """Arms that were played are not played again: those of the same policy, and those that all share."""
    real = EvaluationSet.play

    def play(self: EvaluationSet, mind: Contestant | None, watch: Callable[[str], object]) -> Played:
        key = (mind and mind.make, self.tuned.family_digest, self.held is None, *self.scenarios.key.tolist())
        return known[key] if key in known else known.setdefault(key, real(self, mind, watch))

    monkeypatch.setattr(EvaluationSet, "play", play)


def plants(spec: ActionSpec) -> PolicyBundle:
    return Gardener(Orchard(FAMILY, 1))


def gardener(name: str = "gardener", episodes: int = EPISODES) -> Contestant:
    return Contestant(name, plants, episodes)


def put(name: str, policy: PolicyBundle, tuned: Tuned, store: Store | None = None,
        config: ProofConfig | None = None) -> Proof:
    def make(spec: ActionSpec) -> PolicyBundle:
        return policy

    everybody = [Contestant(f"{name} {number}", make, EPISODES) for number in range(3)]
    return prove(ENV, everybody, tuned, config or ProofConfig(scenarios=96, pilot=32, effect=0.1), store)


def test_the_planted_policy_is_optimal_and_sees_only_what_all_policies_see(arms: Evaluator) -> None:
    drawn, env = FAMILY.scenarios(64, "test"), Orchard(FAMILY, 64)
    best, bare = (arms.play(policy, drawn).utility() for policy in (Gardener(env), Wait()))
    torch.testing.assert_close(best - bare, orchard.optimum(drawn, env), atol=1e-6, rtol=0)


@pytest.mark.usefixtures("_once")
def test_a_planted_policy_passes(tuned: Tuned, tmp_path: Path) -> None:
    store = Store(tmp_path / "proof.db")
    proof = put("gardener", Gardener(Orchard(FAMILY, 1)), tuned, store, ProofConfig(scenarios=320, pilot=64))
    assert (proof.verdict, proof.reason) == ("holds", "45 claims about 3 controllers")
    path = store.path
    assert read(path, "SELECT count(*), count(DISTINCT controller) FROM claim") == [(4 * 19, 4)]
    arms = {row[0] for row in read(path, "SELECT DISTINCT arm FROM arm")}
    assert arms == {"learned", *BEATEN, *MATCHED, *REPORTED}
    assert read(path, "SELECT count(*) FROM arm WHERE arm = 'learned'") == [(3 * 320,)]
    drawn = FAMILY.scenarios(320, "test")
    truth = float(orchard.optimum(drawn, Orchard(FAMILY, 1)).mean())
    gain = read(path, "SELECT gain, low, high FROM summary WHERE controller = 'pooled' AND arm = 'learned'")[0]
    assert gain[0] == pytest.approx(truth, abs=1e-6)
    assert gain[1] < truth < gain[2]
    difference = read(path, "SELECT a.utility - b.utility FROM arm a JOIN arm b USING (scenario) "
                            "WHERE a.arm = 'learned' AND a.controller = 'gardener 1' AND b.arm = 'random'")
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


@pytest.mark.usefixtures("_once")
@pytest.mark.parametrize("policy", [Wait(), Random(), Random(seed=5)])
def test_doing_nothing_and_chance_fail(policy: PolicyBundle, tuned: Tuned) -> None:
    proof = put("nobody", policy, tuned)
    assert proof.verdict == "fails"
    failed = {c.control for c in proof.claims if c.controller == "nobody 0" and c.verdict == "fails"}
    assert {"no growth", "best fixed", "shuffled"} <= failed


class Inverter(Gardener):
    """Takes a view's random number for a function of the scenario's key, inverts it, and plants what that kind needs."""

    def __call__(self, view: View) -> Tensor:
        kind = FAMILY.draw(unmixed(view.luck, Purpose.ACTION)).kind
        best = (orchard.WORTH[kind] - view.price[:, None, None] * self.params).max(2)
        return Planned(torch.where(best.values > 0, 0, -1), best.indices)(view)


class Leaking(Orchard):
    """What a view must not do: its number is a function of the key."""

    def view(self) -> View:
        return dataclasses.replace(super().view(), luck=mix(self.scenarios.key, Purpose.ACTION))


@pytest.mark.usefixtures("_once")
def test_a_policy_that_inverts_keys_fails(tuned: Tuned, arms: Evaluator) -> None:
    cheat, drawn = Inverter(Orchard(FAMILY, 1)), FAMILY.scenarios(96, "validation")
    best = orchard.optimum(drawn, Orchard(FAMILY, 1)).mean()
    bare = arms.play(Wait(), drawn).utility()
    leaked, honest = (Evaluator(FAMILY, make=make).play(cheat, drawn).utility() - bare for make in (Leaking, Orchard))
    torch.testing.assert_close(leaked.mean(), best, atol=1e-5, rtol=0, msg="with a leak it would be perfect")
    assert float(honest.mean()) < 0.5 * float(best)
    proof = put("inverter", cheat, tuned)
    assert proof.verdict == "fails"


@pytest.mark.usefixtures("_once")
def test_a_blind_plan_fails_however_good_it_is(tuned: Tuned) -> None:
    """The best that price and horizon alone can do is a control: who looks at nothing else cannot win."""
    drawn = FAMILY.scenarios(320, "test")

    class Blind:
        def __call__(self, view: View) -> Tensor:
            told = (view.price > 0).long()
            return played([tuned.visible[condition] for condition in told.tolist()], view.spec)(view)

    proof = put("blind", Blind(), tuned)
    assert proof.verdict == "fails"
    assert "best per visible condition" in {c.control for c in proof.claims if c.verdict == "fails"}
    assert len({*conditions(FAMILY, drawn).tolist()}) == 2


def test_the_search_finds_the_best_plans_there_are(tuned: Tuned, arms: Evaluator) -> None:
    """The oracle's plans are optimal for every price and kind; some have seeds of two blueprints."""
    drawn, env = FAMILY.scenarios(320, "test"), Orchard(FAMILY, 320)
    plans = schedule(tuned, "oracle", FAMILY, drawn)
    bare = arms.play(Wait(), drawn).utility()
    gain = play_plans(arms, plans, drawn).utility() - bare
    torch.testing.assert_close(gain, orchard.optimum(drawn, env), atol=1e-6, rtol=0)
    assert any(len({*filter(None, plan.seeds)}) == 2 for plan in plans)
    told = schedule(tuned, "best per visible condition", FAMILY, drawn)
    assert float(orchard.net(drawn, env).mean(0).amax(1).sum()) > 0
    assert len(set(plans)) > len(set(told)) >= 1
    assert float(gain.mean()) > float((play_plans(arms, told, drawn).utility() - bare).mean()) + 0.02


def test_the_rule_follows_what_it_sees(tuned: Tuned, arms: Evaluator) -> None:
    """The training loss tells the kind, so a rule that reads it is as good as the oracle."""
    drawn = FAMILY.scenarios(320, "test")
    oracle = play_plans(arms, schedule(tuned, "oracle", FAMILY, drawn), drawn)
    rule = play_rule(arms, tuned, drawn)
    torch.testing.assert_close(rule.utility(), oracle.utility(), atol=1e-6, rtol=0)
    blind = dataclasses.replace(tuned, rule=Rule((None, None, None), tuned.rule.choices))
    assert float(play_rule(arms, blind, drawn).utility().mean()) < float(rule.utility().mean()) - 0.02


def test_triggers_are_tuned(tuned: Tuned, arms: Evaluator) -> None:
    """The best blueprint at one's chosen place is better than the first of the list; who tunes finds it."""
    drawn = FAMILY.scenarios(320, "test")
    for name, config in tuned.triggers.items():
        first = trigger_candidates(FAMILY, name)[0]
        mine, other = (arms.play(Triggered(c), drawn).utility().mean() for c in (config, first))
        assert float(mine) > float(other) + 0.005, name
        assert tuned.episodes[name] >= EPISODES


def test_controls_that_had_enough_episodes_are_kept(tuned: Tuned, arms: Evaluator) -> None:
    said: list[str] = []
    again = functools.partial(tune, arms, EPISODES, rows=128, preview_steps=0)

    def name(what: str, done: int, total: int) -> None:
        said.append(what)

    def count(what: str, done: int, total: int) -> None:
        said.append(f"{what} {done}")

    assert to_dict(again(watch=name, known=tuned)) == to_dict(tuned)
    assert not said
    other = dataclasses.replace(tuned.triggers["gap"], blueprint="none")
    short = dataclasses.replace(tuned, episodes=tuned.episodes | {"gap": 1},
                                triggers=tuned.triggers | {"gap": other})
    kept: list[Tuned] = []
    done = again(watch=name, known=short, keep=kept.append)
    assert set(said) == {"gap"}
    assert (done.episodes, done.triggers) == (tuned.episodes, tuned.triggers)
    assert kept == [done], "what is known is kept after every part"
    said.clear()
    short = dataclasses.replace(tuned, episodes=tuned.episodes | {"gap": EPISODES - 40})
    done = again(watch=count, known=short)
    assert EPISODES <= done.episodes["gap"] < EPISODES + 200
    assert min(int(each.removeprefix("gap ")) for each in said) > EPISODES - 40, "it goes on with the rest"
    foreign = dataclasses.replace(tuned, family_digest="of another family")
    assert tune(arms, 8, rows=256, preview_steps=0, known=foreign).episodes["gap"] < tuned.episodes["gap"]


def test_who_looks_at_previews_is_shown_them(tuned: Tuned, monkeypatch: pytest.MonkeyPatch) -> None:
    """The controller, the heuristic and preview-greedy; nobody else pays for them."""
    shown: dict[str, set[bool]] = {}
    real = Evaluator.play

    def play(self: Evaluator, policy: PolicyBundle, drawn: Scenarios, previews: bool = False) -> Episodes:
        shown.setdefault(type(policy).__name__, set()).add(previews)
        return real(self, policy, drawn)

    monkeypatch.setattr(Evaluator, "play", play)
    prove(ENV, [gardener()], tuned, ProofConfig(scenarios=8, pilot=4, rehearsal=True))
    others = {name: {False} for name in ("Wait", "Random", "Triggered", "Planned", "Watching")}
    assert shown == {"Gardener": {True}, "Heuristic": {True}, "Greedy": {True}, **others}


@pytest.mark.usefixtures("_once")
def test_controls_without_enough_episodes_are_refused(tuned: Tuned) -> None:
    proof = prove(ENV, [gardener(f"m {n}", 10 * EPISODES) for n in range(3)], tuned, QUICK)
    assert proof.verdict == "refused"
    short = {c.control for c in proof.claims if "fewer episodes" in c.reason}
    assert short >= {"periodic", "best fixed", "best rule"}


def test_the_test_split_is_opened_once_after_the_pilot(tuned: Tuned, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    real = proving.open_test
    monkeypatch.setattr(proving, "open_test", lambda *a: (events.append("opened"), real(*a))[1])
    proof = prove(ENV, [Contestant("m", lambda spec: Wait(), EPISODES)], tuned, QUICK, watch=events.append)
    assert events.count("opened") == 1
    at = events.index("opened")
    assert events[:at]
    assert all(event.startswith("pilot") for event in events[:at])
    assert not any(event.startswith("pilot") for event in events[at:])
    assert proof.openings == "this one alone"


def test_every_opening_is_told_and_brings_other_scenarios(tuned: Tuned, tmp_path: Path,
                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = iter((17, 2**39))
    monkeypatch.setattr(secrets, "randbits", lambda bits: next(numbers))
    told, played = [], []
    for name in ("first", "second"):
        store = Store(tmp_path / f"{name}.db")
        told.append(prove(ENV, [gardener()], tuned, QUICK, store).openings)
        played.append(read(store.path, "SELECT utility FROM arm WHERE arm = 'no growth' ORDER BY scenario"))
    assert told[0] == "this one alone"
    assert told[1].startswith("2, this one included; before it: ")
    assert "proof of orchard: 32 scenarios from 17 on, effect 1" in told[1]
    assert [line["reason"].count("from 549755813888 on") for line in openings(FAMILY.task)] == [0, 1]
    assert played[0] != played[1]


def test_a_pilot_that_asks_for_more_leaves_the_test_split_closed(tuned: Tuned) -> None:
    told = r"the pilot asks for \d+ scenarios .* stays closed; use --scenarios \d+ in another"
    with pytest.raises(EsperError, match=told):
        prove(ENV, [gardener()], tuned, ProofConfig(scenarios=FEWEST, pilot=8, effect=0.001))
    assert openings(FAMILY.task) == []


def test_a_rehearsal_leaves_the_test_split_closed(tuned: Tuned, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*facts: object) -> None:
        raise AssertionError("the test split was opened")

    monkeypatch.setattr(proving, "open_test", never)
    kept: list[Tensor] = []
    real = Evaluator.play
    monkeypatch.setattr(Evaluator, "play", lambda arms, policy, drawn, previews=False: (
        kept.append(drawn.key), real(arms, policy, drawn, previews))[1])
    rehearsed = prove(ENV, [gardener()], tuned, ProofConfig(scenarios=64, pilot=8, rehearsal=True))
    assert {claim.control for claim in rehearsed.claims} >= set(BEATEN)
    assert rehearsed.openings == "none: it is closed"
    test = set(FAMILY.scenarios(64, "test").key.tolist())
    assert not test & set(torch.cat(kept).tolist())


def test_controls_of_another_family_are_refused(tuned: Tuned) -> None:
    for other in (dataclasses.replace(FAMILY, name="other"), dataclasses.replace(FAMILY, horizons=(11,))):
        with pytest.raises(EsperError, match="tuned for 'orchard'"):
            prove(EnvConfig(other), [], tuned)


def test_tuned_controls_survive_a_file(tuned: Tuned, tmp_path: Path) -> None:
    path = tmp_path / "controls.json"
    present = dataclasses.replace(tuned, rule=Rule((Split(1, None), None, None), tuned.rule.choices))
    for each in (tuned, present):
        each.save(path)
        again = Tuned.load(path)
        assert to_dict(again) == to_dict(each)
        assert (again.rule.splits, again.rule.choices) == (each.rule.splits, each.rule.choices)
    assert "Infinity" not in path.read_text()
    for damaged in ("{}", "[]", path.read_text().replace("low_rank", "glu")):
        path.write_text(damaged)
        with pytest.raises(EsperError, match="cannot read tuned controls"):
            Tuned.load(path)


def test_the_command_refuses_bad_input_in_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "done").mkdir()
    (tmp_path / "done" / "proof.json").write_text("{}")
    everybody = ["wait", "random", "heuristic"]
    cases = {
        "neither the folder of a run": ["--minds", str(tmp_path / "nowhere"), "--out", str(tmp_path / "a")],
        "already holds a proof": ["--minds", "wait", "--family", "mlp", "--out", str(tmp_path / "done")],
        "name one with --family": ["--minds", *everybody, "--out", str(tmp_path / "b")],
        "different names": ["--minds", *everybody, "wait", "--family", "mlp", "--out", str(tmp_path / "c")],
    }
    for message, arguments in cases.items():
        assert main(["prove", *arguments]) == 2
        said = capsys.readouterr().err
        assert message in said
        assert said.count("\n") == 1


def test_the_command_writes_a_verdict_and_a_report(tuned: Tuned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                   capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(FAMILIES, "orchard", FAMILY)
    monkeypatch.setattr(prove_cli, "prove", prove)
    tuned.save(tmp_path / "controls.json")
    monkeypatch.setattr(prove_cli, "PreviewConfig", functools.partial(PreviewConfig, 9, 1))
    words = "--minds wait random heuristic --family orchard --episodes 60 --scenarios 32 --pilot 4 --effect 1"
    assert main(["prove", *words.split(), "--commit", "abc", "--out", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert "fails: " in said
    result = json.loads((tmp_path / "proof.json").read_text())
    assert (result["verdict"], result["commit"], result["family"]) == ("fails", "abc", "orchard")
    assert result["openings of the test split"] == "this one alone"
    first = result["claims"][0]
    assert {"controller", "control", "n", "difference", "low", "high", "verdict"} <= first.keys()
    assert "<svg" in (tmp_path / "proof.html").read_text()
    assert json.loads((tmp_path / "controls.json").read_text())["family"] == "orchard"
