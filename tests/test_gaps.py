"""Families whose answer is known: what each level of knowledge is worth, and that noise is worth nothing."""

import dataclasses
import io
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from esper.leyline import EsperError
from esper.simic.proof import value_of_information as gaps
from esper.simic.proof.value_of_information import (
    FIXED,
    HIDDEN,
    LEVELS,
    NO_GROWTH,
    RANDOM,
    RULE,
    SCENARIO,
    VISIBLE,
    Level,
    Outcomes,
    gap,
    knowledge,
)

INITS, CONDITIONS, TYPES = 32, 2, 4
VALUE = 0.05 * np.eye(5)[1:]  # [type, choice]: choice t + 1 is worth 5 points for type t, the others nothing


def family(mean: np.ndarray, noise: float, features: np.ndarray | None = None, seed: int = 0, init_noise: float = 0.0,
           inits: int = INITS) -> Outcomes:  # fmt: skip
    """mean [V, H, C]; every init meets every condition and type once. Both slices have noise of their own."""
    rng = np.random.default_rng(seed)
    init, visible, hidden = (grid.ravel() for grid in np.indices((inits, *mean.shape[:2])))
    common = init_noise * rng.normal(size=(inits, 1))[init]
    slices = [mean[visible, hidden] + common + noise * rng.normal(size=(len(init), mean.shape[2])) for _ in range(2)]
    features = rng.normal(size=(len(init), 3)) if features is None else features
    names = ["no growth", *(f"choice {at}" for at in range(1, mean.shape[2]))]
    return Outcomes(names, *slices, visible, hidden, init, features, [f"f{at}" for at in range(features.shape[1])])


def typed() -> np.ndarray:
    """[V, H, C]: no growth is worth 0; choice 5 is right in condition 1 whatever the type, up to the type's own choice."""
    mean = np.zeros((CONDITIONS, TYPES, 6))
    mean[:, :, :5] = VALUE
    mean[1, :, 5] = 0.03
    mean[:, :, 1] += 0.004  # so that the best fixed choices are not ties
    return mean


def by_name(levels: list[Level]) -> dict[str, Level]:
    assert [level.name for level in levels] == list(LEVELS)
    return {level.name: level for level in levels}


def test_a_known_family_is_measured_as_it_is() -> None:
    levels = knowledge(family(typed(), 0.002))
    means = {name: level.mean for name, level in by_name(levels).items()}
    right = 0.05 + 0.004 / 4  # each type's own choice, one type's being the better one
    truth = {NO_GROWTH: 0, RANDOM: (0.05 + 0.004 + 0.03 / 2) / 5, FIXED: 0.05 / 4 + 0.004, SCENARIO: right, HIDDEN: right,
             VISIBLE: (0.05 / 4 + 0.004 + 0.03) / 2}  # fmt: skip
    for name, expected in truth.items():
        assert means[name] == pytest.approx(expected, abs=6e-4), name
    assert gap(levels, VISIBLE, HIDDEN).value == pytest.approx(truth[HIDDEN] - truth[VISIBLE], abs=6e-4)
    taken = {name: level.choices_taken for name, level in by_name(levels).items()}
    assert taken[FIXED] == {(0,): "choice 1"}
    assert taken[VISIBLE] == {(0,): "choice 1", (1,): "choice 5"}
    assert taken[HIDDEN] == {(v, h): f"choice {h + 1}" for v in range(CONDITIONS) for h in range(TYPES)}


def test_noise_is_worth_nothing_though_in_sample_it_looks_like_much() -> None:
    pulls = []
    for seed in range(12):
        outcomes = family(np.zeros((CONDITIONS, TYPES, 20)), 0.02, seed=seed)
        levels = knowledge(outcomes, repeats=4)
        for name in (VISIBLE, RULE, HIDDEN, SCENARIO):
            difference = gap(levels, FIXED, name)
            pulls.append(difference.value / difference.standard_error)
        cells = outcomes.visible * TYPES + outcomes.hidden
        naive = gaps._best(outcomes.scored_on, cells, np.zeros(CONDITIONS * TYPES, int))[cells]
        assert outcomes.scored_on[np.arange(len(cells)), naive].mean() > levels[2].mean + 3 * levels[2].standard_error
    assert abs(np.mean(pulls)) < 3 / np.sqrt(12)  # the four of one family are related: count twelve
    assert max(map(abs, pulls)) < 4


def test_a_revealing_feature_lifts_the_rule_to_the_hidden_type() -> None:
    outcomes = family(typed(), 0.01)
    features = np.random.default_rng(1).normal(size=(len(outcomes.init), 6))
    features[:, 4] = outcomes.hidden + 0.01 * features[:, 4]
    levels = knowledge(dataclasses.replace(outcomes, features=features, feature_names=list("abcdef")), repeats=3)
    assert gaps.share(levels).value == pytest.approx(1, abs=0.02)
    assert gap(levels, VISIBLE, RULE).value == pytest.approx(0.051 - 0.02325, abs=0.002)


def test_useless_features_cost_little(monkeypatch: pytest.MonkeyPatch) -> None:
    def mean_share() -> float:
        parts = []
        for seed in range(4):
            features = np.random.default_rng(seed).normal(size=(INITS * CONDITIONS * TYPES, 30))
            parts.append(gaps.share(knowledge(family(typed(), 0.03, features, seed=seed), repeats=5)).value)
        return float(np.mean(parts))

    assert abs(mean_share()) < 0.06
    monkeypatch.setattr(gaps, "_fit_rule", lambda features, utility, visible, init, conditions, rng: gaps._grow(
        features, utility, visible, conditions)[2])  # fmt: skip
    assert mean_share() < -0.1  # what asking other inits for the depth prevents


def test_exclusive_or_needs_and_gets_both_levels() -> None:
    """Neither feature helps alone, so a greedy tree finds neither: every even first split is followed to its end."""
    mean = np.zeros((1, 2, 3))
    mean[0, 0, 1] = mean[0, 1, 2] = 0.05
    outcomes = family(mean, 0.005, inits=200)
    rng = np.random.default_rng(0)
    features = rng.random((len(outcomes.init), 20)) - 0.5
    features[:, 11] = np.where(outcomes.hidden ^ (features[:, 3] > 0), 1, -1) * rng.random(len(features))
    outcomes = dataclasses.replace(outcomes, features=features, feature_names=[f"f{at}" for at in range(20)])
    assert gaps.share(knowledge(outcomes, repeats=2)).value > 0.85
    rule = gaps.decide(outcomes).rule
    assert {split.feature for split in rule.splits if split} == {3, 11}
    assert "f11 ≤" in rule.describe(outcomes.feature_names)
    greedy = gaps._grow(features, outcomes.chosen_on, outcomes.visible, 1)[1]
    assert abs((greedy.decide(features, outcomes.visible) == outcomes.hidden + 1).mean() - 0.5) < 0.1


def brute_force(features: np.ndarray, utility: np.ndarray, visible: np.ndarray, splits: tuple[Any, ...]) -> float:
    leaves = gaps._leaf(splits, features)
    return sum(utility[(leaves == leaf) & (visible == v)].sum(0).max() for leaf in range(4) for v in range(visible.max() + 1))


def test_the_search_agrees_with_trying_every_tree() -> None:
    rng = np.random.default_rng(3)
    features, utility, visible = rng.normal(size=(90, 2)), gaps._centred(rng.normal(size=(90, 4))), rng.integers(0, 2, 90)
    features[rng.random(90) < 0.3, 0] = np.nan
    columns, cuts, _ = gaps._candidates(features, 10)
    options = [*(gaps.Split(column, cut if np.isfinite(cut) else None)
                for column, cut in zip(columns.tolist(), cuts.tolist(), strict=True)), None]
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    _, stump, tree = gaps._grow(features, utility, visible, 2)
    assert torch.get_num_threads() == threads + 1
    torch.set_num_threads(threads)
    assert brute_force(features, utility, visible, stump.splits) == pytest.approx(
        max(brute_force(features, utility, visible, (option, None, None)) for option in options), abs=1e-5)  # fmt: skip
    best = -np.inf
    for a in options:
        for b in options:
            sizes = np.bincount(gaps._leaf((tree.splits[0], a, b), features), minlength=4)
            if sizes[sizes > 0].min() >= 10 and (a is None or (sizes[:2] > 0).all()) and (b is None or (sizes[2:] > 0).all()):
                best = max(best, brute_force(features, utility, visible, (tree.splits[0], a, b)))
    assert brute_force(features, utility, visible, tree.splits) == pytest.approx(best, abs=1e-5)
    leaves = gaps._leaf(tree.splits, features)
    assert np.bincount(leaves).min() >= 10
    for leaf, condition in np.ndindex(4, 2):
        inside = (leaves == leaf) & (visible == condition)
        assert tree.choices[leaf][condition] == utility[inside].sum(0).argmax()


def test_what_is_missing_is_above_every_cut_and_can_itself_tell() -> None:
    outcomes = family(typed(), 0.01)
    told = np.where(outcomes.hidden < 2, outcomes.hidden, np.where(outcomes.hidden == 2, np.nan, np.inf))
    features = np.stack([told, np.full(len(told), np.nan), np.where(outcomes.hidden == 3, -1.0, np.nan)], 1)
    outcomes = dataclasses.replace(outcomes, features=features, feature_names=["told", "never", "last"])
    assert gaps.share(knowledge(outcomes, repeats=2)).value == pytest.approx(1, abs=0.02)
    values = np.random.default_rng(0).normal(size=len(told))  # what is present says nothing, that it is present does
    features = np.stack([np.where(outcomes.hidden >= 2, values, np.nan), np.where(outcomes.hidden % 2, values, np.nan)], 1)
    rule = gaps.decide(dataclasses.replace(outcomes, features=features, feature_names=["late", "odd"])).rule
    assert (rule.decide(features, outcomes.visible) == outcomes.hidden + 1).all()
    rule = gaps.Rule((gaps.Split(0, 5.0), None, None), ((0,), (1,), (2,), (3,)))
    assert rule.decide(np.array([[5.0], [5.1], [np.nan], [-np.inf]]), np.zeros(4, int)).tolist() == [0, 2, 2, 2]
    assert "present" in gaps.Rule((gaps.Split(0, None), None, None), rule.choices).describe(["told"])


def test_what_no_training_init_met_gets_the_coarser_choice() -> None:
    """Every init is of a type of its own and the last of a condition of its own: knowing either cannot help those held out."""
    rng = np.random.default_rng(0)
    init = np.repeat(np.arange(8), 6)
    utility = rng.normal(size=(8, 5))[init]  # the same on both slices: one leaked scenario would give the answer away
    visible = (init == 7).astype(int)
    names = ["no growth", *"abcd"]
    outcomes = Outcomes(names, utility, utility, visible, init, init, rng.normal(size=(48, 1)), ["f"])
    levels = by_name(knowledge(outcomes, repeats=5))
    np.testing.assert_array_equal(levels[HIDDEN].scores, levels[VISIBLE].scores)
    np.testing.assert_array_equal(levels[VISIBLE].scores[:, init == 7], levels[FIXED].scores[:, init == 7])
    assert levels[SCENARIO].mean > levels[HIDDEN].mean + 0.5


@pytest.mark.parametrize("folds", [2, 3, 5])
def test_whole_inits_are_held_out_each_once_per_repeat(folds: int) -> None:
    init = np.random.default_rng(0).integers(0, 11, 60) * 7 + 3
    held_out = np.zeros((4, 60), int)
    draws = set()
    for repeat, train, held in gaps._folds(init, folds, 4, np.random.default_rng(1)):
        assert not set(init[train]) & set(init[held])
        assert (train ^ held).all()
        held_out[repeat] += held
        draws.add((repeat, *held.tolist()))
    assert (held_out == 1).all()
    assert len({draw[1:] for draw in draws}) > folds  # repeats differ


def test_standard_errors_are_those_of_repeated_sampling() -> None:
    """Inits differ by 3 points, so an error that ignored them would be far too small for means and too large for gains."""
    names = (FIXED, VISIBLE, HIDDEN, SCENARIO)
    found: dict[str, list[tuple[float, float, float, float]]] = {name: [] for name in names}
    parts = []
    for seed in range(150):
        outcomes = family(typed(), 0.02, seed=seed, init_noise=0.03, inits=16)
        outcomes = dataclasses.replace(outcomes, features=outcomes.hidden[:, None] // 2 * 1.0, feature_names=["half"])
        levels = knowledge(outcomes, repeats=2, seed=seed)
        for name, level in by_name(levels).items():
            if name in found:
                found[name].append((level.mean, level.standard_error, level.gain, level.gain_error))
        parts.append(gaps.share(levels))
    for name in names:
        mean, error, gain, gain_error = np.array(found[name]).T
        assert np.sqrt((error**2).mean()) == pytest.approx(mean.std(), rel=0.2), name
        assert np.sqrt((gain_error**2).mean()) == pytest.approx(gain.std(), rel=0.2), name
    truth = ((0.027 + 0.03) / 2 - 0.02325) / (0.051 - 0.02325)  # knowing which half the type is in
    part, part_error = np.array(parts).T
    assert part.mean() == pytest.approx(truth, abs=0.03)
    assert np.sqrt((part_error**2).mean()) == pytest.approx(part.std(), rel=0.2)


def test_standard_errors_hold_where_all_choices_are_tied() -> None:
    """The hardest case: repeats choose differently, and averaging them must not look like more data."""
    rng = np.random.default_rng(0)
    gains = [gaps.head_effects(rng.normal(size=(64, 6)), np.arange(64) // 2, seed=seed).gain for seed in range(600)]
    value, error = np.array(gains).T
    assert abs(value.mean()) < 4 * value.std() / np.sqrt(len(value))
    assert np.sqrt((error**2).mean()) == pytest.approx(value.std(), rel=0.12)


def test_unequal_inits_count_by_their_scenarios() -> None:
    estimate = gaps._estimate(np.array([[1.0, 1.0, 1.0, 5.0]]), np.array([4, 4, 4, 9]))
    assert estimate == pytest.approx((2.0, np.sqrt((3.0**2 + 3.0**2) * 2) / 4))


def test_a_head_has_an_effect_only_where_it_changes_the_outcome() -> None:
    rng = np.random.default_rng(0)
    init, hidden = np.repeat(np.arange(64), 4), np.tile(np.arange(4) % 2, 64)
    noise = rng.normal(0, 0.02, (256, 6))
    plain = gaps.head_effects(noise, init)
    assert abs(plain.gain.value) < 3 * plain.gain.standard_error
    assert plain.spread > 0  # what looking at the data alone would have called an effect
    better = gaps.head_effects(noise + 0.02 * (np.arange(6) == 3), init)
    assert better.gain.value == pytest.approx(0.02, abs=3 * better.gain.standard_error)
    assert better.best == {(0,): 3}
    typed_values = noise + 0.03 * np.where(hidden[:, None] == 0, np.eye(6)[1] - np.eye(6)[2], np.eye(6)[2] - np.eye(6)[1])
    assert gaps.head_effects(typed_values, init).gain.value < 0.01
    per_type = gaps.head_effects(typed_values, init, group=hidden)
    assert per_type.gain.value == pytest.approx(0.03, abs=3 * per_type.gain.standard_error)
    assert per_type.best == {(0,): 1, (1,): 2}
    assert per_type.spread == pytest.approx(0.06, abs=0.01)


def test_the_table_reads_at_80_columns() -> None:
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(gaps.render(knowledge(family(typed() + 0.6, 0.01, inits=8), repeats=2)))
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= 80
    assert all(any(name in line and "±" in line for line in lines) for name in LEVELS)
    assert any("60." in line for line in lines)
    flat = knowledge(family(np.zeros((1, 2, 3)), 0.01, inits=8), repeats=1)
    assert np.isnan(gaps.share(flat).value)
    assert "within noise" in str(gaps.render(flat).caption)


@pytest.mark.parametrize(("change", "words"), [
    ({"names": ["grow", *"abcde"]}, "no growth"), ({"hidden": np.zeros(3, int)}, "hidden has shape"),
    ({"feature_names": ["one"]}, "features has shape"), ({"visible": np.full(INITS * CONDITIONS * TYPES, -1)}, "count from 0"),
    ({"scored_on": np.full((INITS * CONDITIONS * TYPES, 6), np.nan)}, "not finite")])  # fmt: skip
def test_outcomes_that_do_not_fit_are_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(EsperError, match=words):
        dataclasses.replace(family(typed(), 0.01), **change)


@pytest.mark.parametrize(("inits", "folds"), [(8, 1), (8, 9), (1, 2), (3, 2)])
def test_too_few_inits_are_refused(inits: int, folds: int) -> None:
    with pytest.raises(EsperError, match="folds"):
        knowledge(family(typed(), 0.01, inits=inits), folds=folds, repeats=1)
