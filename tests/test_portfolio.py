"""Plans side by side: the best sets of known tables, budgets that are never passed, and choices that do not flatter themselves."""

import dataclasses
import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from experiments.orchard import FAMILY, Gardener, Orchard, optimum
from hypothesis import given, settings, strategies as st

from esper.kasmina import Host
from esper.leyline import EsperError
from esper.simic.proof.baselines import Tuned, play_plans
from esper.simic.proof.evaluator import Evaluator
from esper.simic.proof.plans import Plan
from esper.simic.proof.portfolio import (
    BUDGETS,
    Bracket,
    Portfolio,
    Table,
    best_of_worth,
    choose_plans,
    forward,
    halve,
    keep_best,
    play_best_of,
    play_halving,
    play_table,
    play_widths,
)
from esper.simic.proof.sweep import halves
from esper.tamiyo import Wait
from esper.tolaria import EnvConfig, Kind, MorphogeneticEnv
from tests.workshop import toy_data, toy_family

NOTHING, BOTH, GLU, PAIR = Plan((None, None)), Plan(("low_rank", "norm")), Plan((None, "glu")), Plan(("norm", "glu"))
PLANS = [NOTHING, BOTH, GLU, PAIR]
ROWS, EPOCHS = 120, 8


def table(score: np.ndarray, spent: float = 0.2, flop_price: float = 0.0, noise: float = 0.0, seed: int = 0) -> Table:
    """Plans [R, P] that score so much, the first of them for nothing; curves rise to it evenly."""
    rows, plans = score.shape
    rng, share = np.random.default_rng(seed), np.arange(1, EPOCHS + 1) / EPOCHS
    both = score[..., None] + rng.normal(0, noise, (rows, plans, 2))
    cost = np.where(np.arange(plans) > 0, spent, 0.0)
    every = np.ones(rows)
    return Table(np.zeros(rows, int), np.arange(rows) // 3, 0 * every, flop_price * every, np.full(rows, EPOCHS), both,
                 np.zeros((rows, plans)), both.mean(2)[..., None] * share, np.tile(cost[:, None] * share, (rows, 1, 1)))


def kinds() -> np.ndarray:
    """No growth, one plan for each of three kinds, one that is good on average, and one that is always worse."""
    worth = np.array([[0.5, 0.8, 0.3, 0.3, 0.6, 0.4], [0.5, 0.3, 0.8, 0.3, 0.6, 0.4], [0.5, 0.3, 0.3, 0.8, 0.6, 0.4]])
    return worth[np.arange(ROWS) % 3]


@pytest.mark.parametrize(("flop_price", "best"), [(0.0, {1, 2, 3}), (0.02, {1, 2, 3}), (0.5, {0})])
def test_best_of_k_is_the_best_set_that_there_is(flop_price: float, best: set[int]) -> None:
    known = table(kinds(), flop_price=flop_price, noise=0.01)

    def worth(few: tuple[int, ...]) -> np.ndarray:
        return best_of_worth(known.take(np.arange(ROWS), few))

    found, confirmed = forward(worth, 6, known.init)
    every = [few for size in range(1, 5) for few in itertools.combinations(range(6), size)]
    brute = max(worth(few).mean() for few in every)
    assert best <= set(found)
    assert worth(found).mean() == pytest.approx(brute, abs=0.003)
    assert confirmed == pytest.approx(brute, abs=0.01)


def test_a_choice_among_equals_gains_nothing() -> None:
    """Plans that differ by luck alone are as good as any of them: the half that chose is not the half that scores."""
    flat = table(np.full((3000, 4), 0.5), spent=0.0, noise=0.05)
    assert best_of_worth(flat).mean() == pytest.approx(0.5, abs=0.003)
    choice, _ = keep_best(flat, np.ones((3000, 4), bool))
    assert flat.score[np.arange(3000), choice[:, 0], 0].mean() > 0.54, "it would seem four points better"
    dear = table(np.full((600, 4), 0.5), spent=0.0, noise=0.05, flop_price=0.001)
    assert len(forward(lambda few: best_of_worth(dear.take(np.arange(600), few)), 4, dear.init)[0]) == 1


def test_everything_that_was_trained_is_paid_for() -> None:
    known = table(kinds(), spent=0.25)
    _, paid = keep_best(known, np.array([[True, True, True, False, False, False]] * ROWS))
    assert paid == pytest.approx(np.full(ROWS, 1 + 1.25 + 1.25 - 1))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 5), st.floats(0, 4))
def test_halving_never_passes_its_budget(seed: int, count: int, most: float) -> None:
    rng, rows = np.random.default_rng(seed), 24
    known = table(rng.random((rows, count)), seed=seed, noise=0.1)
    horizon = rng.integers(2, EPOCHS + 1, rows)
    paying = rng.exponential(0.1, (rows, count, EPOCHS)) * (np.arange(EPOCHS) < horizon[:, None, None])
    known = dataclasses.replace(known, horizon=horizon, spent=paying.cumsum(2))
    budget, usable = most * rng.random(rows), rng.random((rows, count)) < 0.8
    choice, paid = halve(known, usable, np.full(rows, 0.25), budget)
    assert bool((paid <= budget + 1e-9).all())
    some = choice >= 0
    assert bool(usable[some.nonzero()[0], choice[some]].all())
    whole = known.spent[np.arange(rows), choice, -1]
    assert bool((paid[some] >= whole[some] - 1e-9).all()), "what is delivered was trained to the end"
    assert bool((paid[~some] == 0).all())
    assert not bool((usable & (known.spent[..., -1] <= budget[:, None] - 1e-9))[~some].any()), "nothing is grown only where nothing is affordable"


def test_halving_by_hand() -> None:
    """Four plans, looked at after epochs 2 and 4 of 8: two leave, then one; a fourth, a half and a whole training each."""
    known = table(np.array([[0.5, 0.6, 0.9, 0.7]]), spent=0.0)
    first, everybody = np.array([0.25]), np.ones((1, 4), bool)
    choice, paid = halve(known, everybody, first, np.array([1.0]))
    assert (choice.tolist(), paid.tolist()) == ([2], [4 * 0.25 + 2 * 0.25 + 0.5 - 1])
    for budget, kept, used in ((0.99, 2, 0.75), (0.26, 1, 0.25), (0.2, 0, 0.0)):  # three, two and one of them
        choice, paid = halve(known, everybody, first, np.array([budget]))
        assert (choice.tolist(), paid.tolist()) == ([kept], [pytest.approx(used)]), budget
    later = known.shown.copy()
    later[:, :, 4:] = later[:, ::-1, 4:]
    choice, _ = halve(dataclasses.replace(known, shown=later), everybody, first, np.array([1.0]))
    assert choice.tolist() == [2], "what comes after the last look decides nothing"


def test_tables_are_pooled() -> None:
    one, two = table(kinds()), table(kinds()[::-1])
    short = dataclasses.replace(two, shown=two.shown[..., :5], spent=two.spent[..., :5])
    both = Table.joined([one, short])
    assert both.spent.shape == (2 * ROWS, 6, EPOCHS)
    assert bool((both.spent[ROWS:, :, 5:] == short.spent[..., -1:]).all())
    assert np.array_equal(both.score[ROWS:], two.score)


@pytest.fixture(scope="module")
def found() -> Portfolio:
    return choose_plans(*play_table([Evaluator(FAMILY, make=Orchard)] * 2, PLANS, 96, 64, lambda *told: None))


def test_where_compute_is_free_the_best_of_enough_plans_is_the_optimum(found: Portfolio) -> None:
    evaluator, drawn = Evaluator(FAMILY, make=Orchard), FAMILY.scenarios(64, "validation", 5000)
    done, bare = play_best_of(evaluator, found, drawn), evaluator.play(Wait(), drawn)
    torch.testing.assert_close(done.utility() - bare.utility(), optimum(drawn, Orchard(FAMILY, 64)), atol=1e-6, rtol=0)
    assert bool((done.spent > 2).all())
    dear = choose_plans(*play_table([Evaluator(dataclasses.replace(FAMILY, flop_prices=(1.0,)), make=Orchard)], PLANS, 24, 64, lambda *told: None))
    assert all(each == [NOTHING] for each in dear.sets)


def test_halving_within_a_controllers_flops(found: Portfolio) -> None:
    evaluator, drawn = Evaluator(FAMILY, make=Orchard), FAMILY.scenarios(64, "validation", 6000)
    learned = evaluator.play(Gardener(Orchard(FAMILY, 1)), drawn)
    for budget in (learned.spent, learned.spent * 0, learned.spent + 3):
        done = play_halving(evaluator, found, budget, drawn)
        assert bool((done.spent <= budget + 1e-6).all())
        born = {d.scenario for d in done.decisions()}
        assert born == set((done.blueprint >= 0).any(1).nonzero().flatten().tolist())
    gain = done.utility() - evaluator.play(Wait(), drawn).utility()
    assert float(gain.mean()) > 0.6 * float(optimum(drawn, Orchard(FAMILY, 64)).mean()), "with enough FLOPs it finds out"
    assert len(found.brackets) == len(BUDGETS)


def on_toy_data(config: EnvConfig, rows: int) -> MorphogeneticEnv:
    return MorphogeneticEnv(config, rows, toy_data(inputs=config.family.host.inputs))


def test_who_chose_on_a_half_is_scored_on_other_samples() -> None:
    family = toy_family(horizons=(6,), prices=(0.0,))
    sets, drawn, data = [[NOTHING, BOTH, GLU]], family.scenarios(24), toy_data(inputs=family.host.inputs)
    tuned = Portfolio(sets, [0.0], [[Bracket([BOTH], 0.25)]], 0)
    evaluator, scores, ends = Evaluator(family, make=on_toy_data), [], []
    for plan in sets[0]:
        ends.append(play_plans(evaluator, [plan] * 24, drawn))
        scores.append(torch.stack(halves(evaluator.environment(24)), 1))
    score, rows = torch.stack(scores), torch.arange(24)
    first, second = score.argmax(0).unbind(1)
    rehearsed = play_best_of(evaluator, tuned, drawn)
    torch.testing.assert_close(rehearsed.delivered.score, (score[first, rows, 1] + score[second, rows, 0]) / 2)
    torch.testing.assert_close(rehearsed.spent, sum(1 + end.spent for end in ends) - 1)
    held = Evaluator(family, (data.validation_x, (data.validation_y + 5) % 10), on_toy_data)
    proven, truth = play_best_of(held, tuned, drawn), [play_plans(held, [plan] * 24, drawn).delivered.score for plan in sets[0]]
    assert torch.equal(proven.delivered.score, torch.stack(truth)[first, rows]), "held-out samples score what the first half chose"
    assert float(proven.delivered.score.mean()) < 0.2


def test_controls_of_an_older_file_say_what_to_do() -> None:
    old = Tuned.load(Path(__file__).parent.parent / "experiments" / "proof" / "mlp" / "controls.json")
    assert (old.portfolio, old.greedy) == (None, None)
    evaluator, drawn = Evaluator(FAMILY, make=Orchard), FAMILY.scenarios(2)
    for play in (lambda: play_best_of(evaluator, old.portfolio, drawn), lambda: play_halving(evaluator, old.portfolio, torch.zeros(2), drawn)):
        with pytest.raises(EsperError, match="tune them again"):
            play()


def test_plans_side_by_side_survive_a_file(found: Portfolio, tmp_path: Path) -> None:
    Tuned("orchard", "", {}, portfolio=found).save(tmp_path / "controls.json")
    assert Tuned.load(tmp_path / "controls.json").portfolio == found


def test_static_widths_are_halved_within_the_budget() -> None:
    """Without any, the host itself is trained; with much, the widths that pay; never more than there is."""
    family = toy_family(host=Host("mlp", widths=(3, 3)), horizons=(6, 8), prices=(0.0,), kinds=(Kind("plain"),))
    evaluator, drawn = Evaluator(family, make=on_toy_data), family.scenarios(12)
    bare, none = evaluator.play(Wait(), drawn), play_widths(evaluator, torch.zeros(12), drawn)
    assert torch.equal(none.delivered.score, bare.delivered.score)
    assert torch.equal(none.spent, torch.zeros(12))
    for budget in (0.3, 1.0, 20.0):
        done = play_widths(evaluator, torch.full((12,), budget), drawn)
        assert bool((done.spent <= budget + 1e-6).all())
    assert float(done.params.float().mean()) > 0, "three units are few: wider hosts win"
    assert float(done.delivered.score.mean()) > float(bare.delivered.score.mean()) + 0.05
