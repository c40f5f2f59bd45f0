"""A proof on a universe, taken apart by data set: who gains where, what it costs, and whether it does harm.

    python -m experiments.universe_by_source proof/rehearsal.db

writes results/universe_by_source.json and prints a table: points above no growth, mean over controllers.
"""

from pathlib import Path

import numpy as np

from esper.nissa import read
from esper.simic.proof.claims import interval
from esper.tolaria import find_universe
from experiments.shared import parser, write

SHOWN = ("learned", "best fixed", "best per visible condition", "identify, then plan", "best of K", "oracle", "wider host",
         "static widths, halved")
NOTHING_TO_GAIN = 0.002  # of score: the best plan tuned on the data set gains no more


def gains(path: Path) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], list[str]]:
    """(arm -> utility above no growth [n], arm -> FLOPs [n], family of each scenario), means over controllers."""
    rows = read(path, "SELECT arm, scenario, avg(utility), avg(flops), min(kind) FROM arm GROUP BY arm, scenario ORDER BY scenario")
    arms = dict.fromkeys(row[0] for row in rows)
    worth = {arm: np.array([np.nan if row[2] is None else row[2] for row in rows if row[0] == arm]) for arm in arms}
    flops = {arm: np.array([row[3] for row in rows if row[0] == arm]) for arm in arms}
    families = [row[4].partition(": ")[0] for row in rows if row[0] == "no growth"]
    return {arm: each - worth["no growth"] for arm, each in worth.items()}, flops, families


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("proof", type=Path)
    options = arguments.parse_args()
    worth, flops, families = gains(options.proof)
    universe = find_universe(Path(__file__).parent / "universe" / "small.toml")
    judged = (*universe.validation, *universe.test)
    sources = dict(zip((family.name for family in judged), universe.source_of(judged), strict=True))
    place = np.array([list(dict.fromkeys(families)).index(family) for family in families])
    table = {}
    print(f"| family | {' | '.join(SHOWN)} | FLOPs |\n|---|{'---|' * (len(SHOWN) + 1)}")
    for number, family in enumerate(dict.fromkeys(families)):
        mine = place == number
        table[family] = {arm: 100 * float(np.nanmean(worth[arm][mine])) for arm in SHOWN} | {"FLOPs": float(flops["learned"][mine].mean())}
        points = " | ".join(f"{table[family][arm]:+.1f}" for arm in SHOWN)
        print(f"| {family} | {points} | {table[family]['FLOPs']:.2f} |")
    idle = np.isin(place, [n for n, family in enumerate(table) if table[family]["oracle"] <= 100 * NOTHING_TO_GAIN])
    harm = 100 * float(worth["learned"][idle].mean()) if idle.any() else None
    ahead = worth["learned"] - worth["static widths, halved"]
    low, high = interval(ahead, group=np.array([sources[family] for family in families]))
    print(f"where nothing is to be gained ({len(set(place[idle]))} families): {harm} points")
    print(f"less static widths, halved: {100 * ahead.mean():+.2f} ({100 * low:+.2f} to {100 * high:+.2f})")
    write(options, "universe_by_source", {"families": table, "no harm": {"families": len(set(place[idle])), "points": harm},
                                          "less static widths, halved": [100 * float(ahead.mean()), 100 * low, 100 * high]})


if __name__ == "__main__":
    main()
