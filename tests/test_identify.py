"""Identify, then plan: the control tells kinds apart, plants early, prunes what it has no use for, and reaches the optimum where that can be seen."""

import dataclasses

import numpy as np
import pytest
import torch
from experiments.orchard import FAMILY, Orchard, optimum

from esper.leyline import LifecycleOp
from esper.leyline.codec import from_dict, to_dict
from esper.simic.proof.evaluator import Evaluator
from esper.simic.proof.identify import Identification, Watching, identify
from esper.simic.proof.plans import Plan, Survey, played
from esper.tamiyo import Switched, Wait
from esper.tolaria import play

NOTHING, BOTH, GLU = Plan((None, None)), Plan(("low_rank", "norm")), Plan((None, "glu"))


@pytest.fixture(scope="module")
def found() -> Identification:
    survey = Survey(Evaluator(FAMILY, make=Orchard), 64, lambda *told: None)
    return identify(survey, 300, BOTH, [NOTHING, BOTH, GLU, Plan(("norm", "glu"))], lambda *told: None)


def test_it_reaches_the_optimum_where_the_kind_can_be_seen(found: Identification) -> None:
    evaluator, drawn = Evaluator(FAMILY, make=Orchard), FAMILY.scenarios(96, "validation", 5000)
    identified = evaluator.play(Watching(found.first, found.watched, found=found), drawn)
    gain = identified.utility() - evaluator.play(Wait(), drawn).utility()
    best = optimum(drawn, Orchard(FAMILY, 96))
    fixed = evaluator.play(played([BOTH] * 96, evaluator.config.spec), drawn).utility() - evaluator.play(Wait(), drawn).utility()
    assert float((best - gain).mean()) < 0.005
    assert float((gain - fixed).mean()) > 0.03
    assert found.watched > 0
    assert found.episodes >= 300


def test_it_watches_no_longer_than_there_is_to_see_or_to_gain() -> None:
    short = dataclasses.replace(FAMILY, horizons=(4,))
    found = identify(Survey(Evaluator(short, make=Orchard), 64, lambda *told: None), 20, BOTH, [NOTHING, BOTH], lambda *told: None)
    assert (found.watched, found.first) == (0, NOTHING), "nothing is kept in four epochs: of equals the simplest"


def test_it_is_never_told_the_kind(found: Identification) -> None:
    """Where kinds look alike, it can only do what is best on average."""
    class Blind(Orchard):
        def train(self) -> torch.Tensor:
            return torch.ones_like(super().train())

    survey = Survey(Evaluator(FAMILY, make=Blind), 64, lambda *told: None)
    blind = identify(survey, 150, NOTHING, [NOTHING, BOTH, GLU], lambda *told: None)
    evaluator, drawn = Evaluator(FAMILY, make=Blind), FAMILY.scenarios(96, "validation", 6000)
    gain = evaluator.play(Watching(blind.first, blind.watched, found=blind), drawn).utility() - evaluator.play(Wait(), drawn).utility()
    assert float((optimum(drawn, Orchard(FAMILY, 96)) - gain).mean()) > 0.02


def test_beliefs_and_prices_decide(found: Identification) -> None:
    one = Identification(1, NOTHING, [NOTHING, BOTH], [10], [[[9.0, -9.0], [0.0, 0.0]]], [[[[0.5, 0, 0], [0.6, 100, 0.5]], [[0.5, 0, 0], [0.4, 100, 0.5]]]], 1)
    features = np.array([[1.0], [-1.0], [1.0], [1.0]])
    assert np.allclose(one.beliefs(features, np.full(4, 10)).sum(1), 1)
    free, dear = 0.0, 2e-3
    chosen = one.choose(features, np.full(4, 10), np.array([free, free, dear, free]), np.array([0, 0, 0, 0.3]))
    assert chosen.tolist() == [1, 0, 0, 0], "the first kind gains, the second loses; parameters and compute can cost too much"
    assert from_dict(Identification, to_dict(found), "a file") == found


def test_it_prunes_what_the_second_plan_has_no_use_for() -> None:
    long = dataclasses.replace(FAMILY, horizons=(16,))
    env = Orchard(long, 3)
    plans = [GLU, Plan((None, "low_rank")), NOTHING]
    policy = Switched(played([Plan((None, "low_rank"))] * 3, env.spec), played(plans, env.spec), 2)
    episodes = play(env, policy, long.scenarios(3))
    told = [[(d.epoch, d.op, d.blueprint) for d in episodes.decisions() if d.scenario == row] for row in range(3)]
    assert all(row[0] == (0, "GERMINATE", "low_rank") for row in told)
    assert told[0][1][:2] == (2, "PRUNE")
    assert told[0][2][1:] == ("GERMINATE", "glu")
    assert told[0][3][1] == "FOSSILIZE"
    assert [op for _, op, _ in told[1]] == ["GERMINATE", "FOSSILIZE"], "what is wanted stays"
    assert [op for _, op, _ in told[2]] == ["GERMINATE", "PRUNE"]
    assert not bool((episodes.actions[:2, :, 0] == env.spec.ops.index(LifecycleOp.PRUNE)).any()), "nothing is pruned before it has seen enough"
