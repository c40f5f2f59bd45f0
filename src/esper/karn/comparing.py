"""Several runs beside each other: which controller is better, and may that be luck?"""

import math
import statistics
from collections.abc import Sequence

from esper.karn.charts import Z95
from esper.karn.panels import Run, Table, exams_of, interval
from esper.leyline import EsperError

COLUMNS = ("run", "seed", "round", "gain", "low", "high", "n", "best", "difference", "diff_low", "diff_high",
           "verdict")
QUESTION = ("Which run is better, and may that be luck? Last examinations, each less the first run's; the "
            "interval is of the scenarios' luck, not of the training's: for that compare several seeds.")


def compare(runs: Sequence[Run], policy: str = "learned") -> Table:
    """A row for each run. Differences are paired where both runs were examined on the same scenarios, those
    of one family. `best` is the best examination, which flatters a run that took many."""
    if not runs:
        raise EsperError("there is no run to compare; name at least one")
    last: list[tuple[str | None, dict[int, float]]] = []
    rows = []
    for run in runs:
        exams = {number: found for (who, number), found in exams_of(run).items() if who == policy}
        facts, number = run.facts(), max(exams, default=None)
        if number is None:
            last.append((None, {}))
            rows.append((run.name, facts.get("seed"), *[None] * (len(COLUMNS) - 3), "not examined"))
            continue
        now = exams[number]
        last.append((facts.get("family"), now))
        best = max(100 * statistics.fmean(found.values()) for found in exams.values())
        rows.append((run.name, facts.get("seed"), number, *interval(list(now.values())), len(now), best,
                     *_difference(last[-1], last[0], run is runs[0])))
    return Table(COLUMNS, rows, QUESTION, "table")


def _difference(mine: tuple[str | None, dict[int, float]], first: tuple[str | None, dict[int, float]],
                same: bool) -> tuple[float | None, float | None, float | None, str]:
    """(difference in points, ends of its 95 % interval, verdict)."""
    if same or not first[1]:
        return None, None, None, "" if same else "nothing to compare with"
    shared = sorted(mine[1].keys() & first[1].keys())
    if mine[0] == first[0] and len(shared) > 1:
        mean, low, high = interval([mine[1][each] - first[1][each] for each in shared])
    else:
        a, b = list(mine[1].values()), list(first[1].values())
        if min(len(a), len(b)) < 2:
            return None, None, None, "too few scenarios"
        mean = 100 * (statistics.fmean(a) - statistics.fmean(b))
        half = 100 * Z95 * math.sqrt(statistics.variance(a) / len(a) + statistics.variance(b) / len(b))
        low, high = mean - half, mean + half
    assert low is not None
    assert high is not None
    return mean, low, high, "better" if low > 0 else "worse" if high < 0 else "may be luck"
