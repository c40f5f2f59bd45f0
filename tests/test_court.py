"""The court: intervals that cover, claims that can fail, and refusals where evidence is missing."""

import dataclasses
import math

import numpy as np
import pytest

from esper.leyline import EsperError
from esper.simic.proof.claims import (
    BEATEN,
    BETWEEN,
    FEWEST,
    MATCHED,
    REPORTED,
    Arm,
    Arms,
    finding,
    improvement,
    interquartile_mean,
    interval,
    judge,
    needed,
    pooled,
)

CONTROLS = tuple(dict.fromkeys((*BEATEN, *MATCHED, *BETWEEN, *REPORTED)))


def arm(utility: np.ndarray, episodes: int = 0, tuned: bool = False) -> Arm:
    return Arm(np.arange(len(utility)), utility, utility, utility * 0, utility * 0 + 1, episodes, tuned)


def arms(lead: float = 0.05, n: int = 256, seed: int = 0, **others: float) -> Arms:
    """A controller that is `lead` above every control (half of it above the oracle), but for those named."""
    rng = np.random.default_rng(seed)
    base = rng.normal(0.5, 0.1, n)
    controls = {name: arm(base + rng.normal(0, 0.05, n) + (name == "oracle") * abs(lead) / 2) for name in CONTROLS}
    return {**controls, "learned": arm(base + lead), **{name: arm(base + value) for name, value in others.items()}}


def three(lead: float = 0.05, n: int = 256) -> dict[str, Arms]:
    return {f"mind {seed}": arms(lead, n, seed) for seed in range(3)}


PILOT = three(n=64)


@pytest.mark.parametrize("skewed", [False, True])
def test_a_95_percent_interval_covers_the_truth_95_times_in_100(skewed: bool) -> None:
    rng, covered = np.random.default_rng(1), 0
    for experiment in range(1000):
        values = rng.gamma(2.0, 1.0, 128) - 2 if skewed else rng.normal(0, 1, 128)
        low, high = interval(values, experiment, resamples=1000)
        covered += low <= 0 <= high
    assert 930 <= covered <= 970


@pytest.mark.parametrize("sources", [3, 8, 14])
def test_an_interval_over_few_sources_covers_the_truth_as_often(sources: int) -> None:
    """Without Student's factor three sources that differ as much as scenarios do would cover it in 70 of 100."""
    rng, covered = np.random.default_rng(1), 0
    for experiment in range(600):
        values = np.repeat(rng.normal(0, 1, sources), 16) + rng.normal(0, 1, 16 * sources)
        low, high = interval(values, experiment, 600, np.repeat(np.arange(sources), 16))
        covered += low <= 0 <= high
    assert 0.92 <= covered / 600 <= 0.985


def test_few_sources_of_data_say_nothing_about_others() -> None:
    def sourced(count: int) -> dict[str, Arms]:
        return {who: {name: dataclasses.replace(each, group=np.arange(256) % count) for name, each in part.items()} for who, part in three().items()}

    assert finding(judge(sourced(8), PILOT))[0] == "holds"
    verdict, reason = finding(judge(sourced(7), PILOT))
    assert verdict == "refused"
    assert "7 sources of data are too few to speak of others" in judge(sourced(7), PILOT)[0].reason
    assert "claims" in reason


def test_the_interval_is_that_of_the_mean() -> None:
    values = np.random.default_rng(0).normal(3, 2, 400)
    low, high = interval(values)
    assert low == pytest.approx(values.mean() - 1.96 * values.std() / 20, abs=0.02)
    assert high == pytest.approx(values.mean() + 1.96 * values.std() / 20, abs=0.02)
    assert interval(values) == (low, high), "the same evidence gives the same verdict"
    assert interval(np.full(50, 0.25)) == (0.25, 0.25)


def test_interquartile_mean_and_probability_of_improvement_by_hand() -> None:
    assert interquartile_mean(np.array([-100.0, 1, 2, 3, 4, 5, 6, 1000])) == pytest.approx((2 + 3 + 4 + 5) / 4)
    assert interquartile_mean(np.array([0.0, 1, 2, 3, 40, 50])) == pytest.approx((0.5 * 1 + 2 + 3 + 0.5 * 40) / 3)
    assert improvement(np.array([1.0, 0, 2, 2]), np.array([0.0, 1, 2, 1])) == pytest.approx((1 + 0 + 0.5 + 1) / 4)


def test_the_power_estimate_finds_the_effect_in_four_of_five_experiments() -> None:
    spread, effect = 0.1, 0.02
    n = needed(spread, effect)
    assert n == math.ceil((2.801585 * 5) ** 2)
    drawn = np.random.default_rng(0).normal(effect, spread, (4000, n))
    found = drawn.mean(1) > 1.96 * drawn.std(1) / math.sqrt(n)
    assert found.mean() == pytest.approx(0.8, abs=0.02)


def test_a_controller_that_leads_everywhere_holds() -> None:
    claims = judge(three(), PILOT)
    assert finding(claims)[0] == "holds"
    assert {claim.verdict for claim in claims} == {"holds", "reported"}
    assert len(claims) == 3 * (len(BEATEN) + len(MATCHED) + 1 + len(REPORTED))
    assert all(0.01 < claim.difference < 0.07 and claim.low < claim.difference < claim.high for claim in claims)


@pytest.mark.parametrize("control", BEATEN)
def test_one_control_that_is_as_good_is_enough_to_fail(control: str) -> None:
    """Doing nothing is as good as no growth; deciding at random as good as random."""
    everyone = three(n=96)
    everyone["mind 1"] = {**everyone["mind 1"], control: everyone["mind 1"]["learned"]}
    claims = judge(everyone, PILOT)
    assert finding(claims)[0] == "fails"
    assert [(c.controller, c.control) for c in claims if c.verdict == "fails"] == [("mind 1", control)]


@pytest.mark.parametrize("control", CONTROLS)
def test_a_missing_arm_is_refused(control: str) -> None:
    everyone = {name: {k: v for k, v in each.items() if k != control} for name, each in three(n=128).items()}
    claims = judge(everyone, PILOT)
    verdict, reason = finding(claims)
    assert verdict == "refused"
    assert all("never played" in claim.reason for claim in claims if claim.verdict == "refused")
    assert control in reason
    with pytest.raises(EsperError, match="never played"):
        judge({"mind": {"no growth": arms()["no growth"]}}, {})


def test_other_refusals() -> None:
    good = arms()
    cases = {
        "other scenarios": good | {"random": dataclasses.replace(good["random"], scenario=np.arange(1, 257))},
        "missing": good | {"random": arm(np.where(np.arange(256) == 3, np.nan, good["random"].utility))},
        "fewer episodes": {**good, "random": dataclasses.replace(good["random"], tuned=True, episodes=10),
                           "learned": dataclasses.replace(good["learned"], episodes=11)},
    }
    for reason, each in cases.items():
        claim = next(c for c in judge({"mind 0": each}, PILOT) if c.control == "random")
        assert claim.verdict == "refused", reason
        assert reason in claim.reason
    assert all("pilot" in c.reason for c in judge({"mind 0": good}, {}) if c.verdict == "refused")
    assert finding(judge({"mind 0": good}, PILOT)) == ("refused", "1 trained controllers; a finding needs 3")


def test_too_few_scenarios_cannot_hold_but_can_fail() -> None:
    """Needed are about 50 at this spread; what is clearly worse needs no more of them."""
    assert judge({"mind 0": arms(n=31)}, {"mind 0": arms(0.05, 64, **dict.fromkeys(CONTROLS, 0.0))})[0].needed == FEWEST == 32
    few = judge({"mind 0": arms(n=20)}, PILOT)
    assert {c.verdict for c in few} == {"refused", "reported"}
    assert all("too few" in c.reason and c.needed > 20 for c in few if c.verdict == "refused" and c.asked != "half")
    assert {c.verdict for c in judge({"mind 0": arms(-0.2, n=20)}, PILOT)} == {"fails", "reported"}


def test_matching_has_a_margin_and_half_way_is_half_way() -> None:
    behind = judge({"mind 0": arms(0.05, **{"best rule": 0.055})}, PILOT)
    assert next(c for c in behind if c.asked == "matches").verdict == "holds"
    further = judge({"mind 0": arms(0.05, **{"best rule": 0.061})}, PILOT)
    assert next(c for c in further if c.asked == "matches").verdict == "fails"
    flat = arms(0.05, **{BETWEEN[0]: 0.0, BETWEEN[1]: -0.3})
    half = next(c for c in judge({"mind 0": flat}, PILOT) if c.asked == "half")
    assert half.verdict == "refused", "an oracle below the others shows no way to go"
    for top, verdict in ((0.09, "holds"), (0.12, "fails")):
        each = arms(0.05, **{BETWEEN[0]: 0.0, BETWEEN[1]: top})
        half = next(c for c in judge({"mind 0": each}, PILOT) if c.asked == "half")
        assert half.difference == pytest.approx(0.05 - top / 2)
        assert half.verdict == verdict


def test_half_way_is_asked_of_the_whole_interval() -> None:
    """A mean past half way is luck as long as the interval reaches below it."""
    noise = np.random.default_rng(0).normal(0, 0.2, 256)
    base = arms(0.05, **{BETWEEN[0]: 0.0, BETWEEN[1]: 0.06})
    for lead, verdict in ((0.01, "fails"), (0.06, "holds")):
        lucky = arm(base["learned"].utility - 0.02 + lead + noise - noise.mean())
        half = next(c for c in judge({"mind 0": {**base, "learned": lucky}}, PILOT) if c.asked == "half")
        assert half.difference == pytest.approx(lead)
        assert (half.low > 0, half.verdict) == (verdict == "holds", verdict)


def test_pooling_averages_controllers_scenario_by_scenario() -> None:
    each = {"a": {"learned": arm(np.array([0.0, 1.0]), 5)},
            "b": {"learned": arm(np.array([1.0, 1.0]), 7), "extra": arm(np.ones(2))}}
    together = pooled(each)
    assert list(together) == ["learned"]
    assert together["learned"].utility.tolist() == [0.5, 1.0]
    assert together["learned"].episodes == 5
