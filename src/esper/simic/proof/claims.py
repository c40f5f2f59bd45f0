"""The court: what the evidence supports, and what it does not. Arithmetic only: nothing trains here.

Legend: n scenarios, on which all arms were played and scored alike. Utilities are scores less prices, so a
difference of 0.01 is one point. A claim holds, fails, or is refused because evidence is missing.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from esper.leyline import EsperError

CONFIDENCE = 0.95
RESAMPLES = 10_000
FEWEST = 32  # scenarios; below, an interval means little
CONTROLLERS = 3  # trained independently, that a finding needs
SOURCES = 8  # of data, below which a claim about others is refused
BEATEN = ("no growth", "random", "periodic", "converged", "gap", "heuristic", "best fixed",
          "best per visible condition", "shuffled", "halving over plans", "preview-greedy")
"""Controls that a controller must beat, each with its whole interval above zero."""
MATCHED = {"best rule": 0.01, "identify, then plan": 0.003, "best of K": 0.003}
"""Controls that it must at least match -> by how much of the score it may stay behind."""
BETWEEN = ("best per visible condition", "oracle")  # it must be half of the way from the first to the second
REPORTED = ("from scratch, equal epochs", "from scratch, equal FLOPs", "wider host", "oracle")
"""Reported whichever way they fall."""
MEANS = ("utility", "score", "params", "flops")


@dataclass(frozen=True)
class Rules:
    """What is asked of a controller."""

    beaten: tuple[str, ...] = BEATEN
    matched: Mapping[str, float] = field(default_factory=lambda: MATCHED)
    between: tuple[str, str] = BETWEEN
    reported: tuple[str, ...] = REPORTED

    def __iter__(self) -> Iterator[tuple[str, str]]:
        """(control, what is asked)."""
        yield from ((control, "beats") for control in self.beaten)
        yield from ((control, "matches") for control in self.matched)
        yield " and ".join(self.between), "half"
        yield from ((control, "reported") for control in self.reported)


ONE_FAMILY = Rules()
UNIVERSE = Rules(
    beaten=(*(name for name in BEATEN if name != "best per visible condition"), "best of K"),
    matched={"best per visible condition": 0.003, "identify, then plan": 0.003},
    between=("best fixed", "oracle"), reported=(*REPORTED, "static widths, halved"))
"""On data sets that nobody was tuned on; the oracle is the best plan tuned on each of them."""


@dataclass(frozen=True, eq=False)
class Arm:
    """What one way of deciding delivered on n scenarios, [n] each."""

    scenario: np.ndarray  # keys: arms are compared only where these are equal
    utility: np.ndarray
    score: np.ndarray
    params: np.ndarray  # grown, in the delivered network
    flops: np.ndarray  # of the episode, previews and pruned seeds included, in trainings of the bare host
    episodes: int = 0  # that it was tuned or trained with
    tuned: bool = False  # by episodes, so that it must have had as many as the controller
    group: np.ndarray | None = None  # sources of data, over which claims generalise; None: there is one


Arms = Mapping[str, Arm]


@dataclass(frozen=True)
class Claim:
    """One sentence about one controller and one control."""

    controller: str
    control: str
    asked: str  # beats, matches, half, or reported
    n: int
    difference: float
    low: float
    high: float
    improvement: float  # probability that the controller does better on a scenario; ties count half
    needed: int  # scenarios at which the effect asked for is found in four of five experiments
    verdict: str  # holds, fails, refused, or reported
    reason: str = ""


def interval(values: np.ndarray, seed: int = 0, resamples: int = RESAMPLES,
             group: np.ndarray | None = None) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean of values [n]; of several groups [n], groups are drawn first,
    then values of each."""
    rng, n = np.random.default_rng(seed), len(values)
    if group is not None:
        members, mean = [values[group == each] for each in np.unique(group)], values.mean()
        return _quantiles(mean + _few(len(members)) * (_grouped(rng, members, resamples) - mean))
    parts = np.array_split(np.arange(resamples), max(1, resamples * n // 4_000_000))
    means = [values[rng.integers(n, size=(len(part), n))].mean(1) for part in parts]
    return _quantiles(np.concatenate(means))


def _quantiles(means: np.ndarray) -> tuple[float, float]:
    low, high = np.quantile(means, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)


def _few(groups: int) -> float:
    """By how much a bootstrap over few groups is too narrow: their spread is underestimated, and Student's
    quantile is above the normal one (an expansion in the degrees of freedom)."""
    free, z = max(groups - 1, 1), 1.959964
    student = z + (z**3 + z) / (4 * free) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * free**2)
    return math.sqrt(max(groups, 2) / free) * student / z


def _grouped(rng: np.random.Generator, members: Sequence[np.ndarray], resamples: int) -> np.ndarray:
    """[resamples]: means of groups that are drawn, each of values that are drawn from it."""
    sizes = np.array([len(each) for each in members])
    sums = np.stack([each[rng.integers(size, size=(resamples, size))].sum(1)
                     for each, size in zip(members, sizes, strict=True)], 1)
    drawn = rng.integers(len(members), size=(resamples, len(members)))
    return np.asarray(np.take_along_axis(sums, drawn, 1).sum(1) / sizes[drawn].sum(1))


def interquartile_mean(values: np.ndarray) -> float:
    """Mean of the middle half; scenarios at its edges count in part."""
    ordered, n = np.sort(values), len(values)
    inside = np.clip(np.minimum(np.arange(1, n + 1) - n / 4, 3 * n / 4 - np.arange(n)), 0, 1)
    return float((ordered * inside).sum() / inside.sum())


def improvement(better: np.ndarray, worse: np.ndarray) -> float:
    return float(((better > worse) + 0.5 * (better == worse)).mean())


def needed(spread: float, effect: float) -> int:
    """Scenarios at which a mean difference of `effect` passes a two-sided 5 % test with 80 % power."""
    return math.ceil(((1.959964 + 0.841621) * spread / effect) ** 2)


def judge(controllers: Mapping[str, Arms], pilot: Mapping[str, Arms], effect: float = 0.02,
          rules: Rules = ONE_FAMILY) -> list[Claim]:
    """`controllers`: for each, its own arm ("learned") and those of its controls. `pilot`: the same on other
    scenarios and another split, from which the number of scenarios that is needed is estimated."""
    claims = []
    for name, arms in controllers.items():
        if "learned" not in arms:
            raise EsperError(f"controller {name!r} was never played")
        claims += [_judged(name, control, what, arms, pilot.get(name, {}), effect, rules)
                   for control, what in rules]
    return claims


def _paired(arms: Arms, control: str, asked: str, rules: Rules) -> np.ndarray | str:
    """Differences [n] that a claim is about, or why there are none."""
    names: tuple[str, ...] = rules.between if asked == "half" else (control,)
    if missing := [name for name in names if name not in arms]:
        return f"{' and '.join(missing)} was never played"
    learned, others = arms["learned"], [arms[name] for name in names]
    if any(not np.array_equal(other.scenario, learned.scenario) for other in others):
        return "it was played on other scenarios"
    if not all(np.isfinite(arm.utility).all() for arm in (learned, *others)):
        return "a utility is missing"
    if short := [name for name in names if arms[name].tuned and arms[name].episodes < learned.episodes]:
        return f"{short[0]} was tuned with fewer episodes than the controller was trained with"
    return np.asarray(learned.utility - sum(other.utility for other in others) / len(others))


def _judged(name: str, control: str, asked: str, arms: Arms, pilot: Arms, effect: float,
            rules: Rules) -> Claim:
    differences = _paired(arms, control, asked, rules)
    if isinstance(differences, str):
        unknown = math.nan
        return Claim(name, control, asked, 0, unknown, unknown, unknown, unknown, 0, "refused", differences)
    n, group = len(differences), arms["learned"].group
    spare = _paired(pilot, control, asked, rules) if "learned" in pilot else "no pilot was played"
    required = 0 if isinstance(spare, str) else max(FEWEST, needed(float(spare.std(ddof=1)), effect))
    low, high = interval(differences, group=group)
    figures = (n, float(differences.mean()), low, high, improvement(differences, np.zeros(n)), required)
    margin = rules.matched.get(control, 0.0)
    passed, lost = {"beats": (low > 0, high <= 0), "matches": (low > -margin, high <= -margin),
                    "half": (low >= 0, high < 0), "reported": (True, False)}[asked]
    verdict, reason = "refused", ""
    if asked == "reported":
        verdict = "reported"
    elif asked == "half" and interval(_way(arms, rules), group=group)[0] <= 0:
        reason = f"{rules.between[1]} is not above {rules.between[0]}: there is no way to go"
    elif lost:  # no further scenario would help
        verdict = "fails"
    elif group is not None and len(np.unique(group)) < SOURCES:
        reason = f"{len(np.unique(group))} sources of data are too few to speak of others, not {SOURCES}"
    elif isinstance(spare, str):
        reason = f"pilot: {spare}"
    elif n < required:
        reason = f"{n} scenarios are too few; the pilot asks for {required}"
    else:
        verdict = "holds" if passed else "fails"
    return Claim(name, control, asked, *figures, verdict, reason)


def _way(arms: Arms, rules: Rules) -> np.ndarray:
    """[n]: from the lower to the upper end of what is halved."""
    low, high = (arms[name].utility for name in rules.between)
    return np.asarray(high - low)


def finding(claims: Sequence[Claim]) -> tuple[str, str]:
    """(verdict, reason) on all claims together: what one controller of three shows is no finding."""
    judged = [claim for claim in claims if claim.verdict != "reported"]
    controllers = {claim.controller for claim in judged}
    for verdict in ("fails", "refused"):
        if odd := [claim for claim in judged if claim.verdict == verdict]:
            verb = "is half of the way between" if odd[0].asked == "half" else odd[0].asked
            what = f"{odd[0].controller} {verb} {odd[0].control}"
            return verdict, f"{len(odd)} of {len(judged)} claims, the first: {what}"
    if len(controllers) < CONTROLLERS:
        return "refused", f"{len(controllers)} trained controllers; a finding needs {CONTROLLERS}"
    return "holds", f"{len(judged)} claims about {len(controllers)} controllers"


def pooled(controllers: Mapping[str, Arms]) -> dict[str, Arm]:
    """Every arm averaged over controllers, scenario by scenario; arms that some lack are left out."""
    groups, arms = list(controllers.values()), {}
    for name in (name for name in groups[0] if all(name in group for group in groups)):
        each = [group[name] for group in groups]
        means = {what: np.mean([getattr(arm, what) for arm in each], axis=0) for what in MEANS}
        arms[name] = replace(each[0], **means, episodes=min(arm.episodes for arm in each))
    return arms
