"""The lives of seeds in a round: born, blended, kept or pruned, and what was known when that was decided."""

import math
from collections.abc import Callable, Mapping
from typing import Any

Rows = list[tuple[Any, ...]]
Places = dict[tuple[int, int], Rows]  # (row, slot) -> what happened there, by epoch
FATES: Mapping[str | None, str] = {"FOSSILIZED": "kept", "PRUNED": "pruned"}
QUERIES = ("epoch, blueprint FROM step WHERE op = 'GERMINATE'",
           "epoch, 100 * chance FROM step WHERE op IN ('FOSSILIZE', 'PRUNE')",
           "epoch, target FROM move WHERE target IN ('BLENDING', 'FOSSILIZED', 'PRUNED')",
           "epoch, 100 * ifnull(contribution, preview) AS evidence, 100 * error FROM seed "
           "WHERE evidence IS NOT NULL")


def lives_of(ask: Callable[..., Rows], number: int | None) -> Rows:
    """(row, slot, blueprint, born, blended, decided, ended, fate, evidence, error, chance) for each birth of
    a round, until the next in its slot."""
    births, told, moves, known = (
        _by_place(ask(f"SELECT row, slot, {query} AND round = :round ORDER BY epoch", round=number))
        for query in QUERIES)
    lives: Rows = []
    for place in sorted(births):
        ends = [epoch for epoch, _ in births[place][1:]] + [math.inf]
        for (born, blueprint), end in zip(births[place], ends, strict=True):
            decided, chance = _last(told, place, born + 1, end) or (None, None)
            moved = {stage: epoch for epoch, stage in reversed(moves.get(place, [])) if born <= epoch < end}
            fate = next((stage for stage in FATES if stage in moved), None)
            evidence = _last(known, place, born, min(end, decided or end)) or (None, None, None)
            lives.append((*place, blueprint, born, moved.get("BLENDING"), decided, moved.get(fate),
                          FATES.get(fate, "unfinished"), *evidence[1:], chance))
    return lives


def _by_place(rows: Rows) -> Places:
    found: Places = {}
    for row, slot, *about in rows:
        found.setdefault((row, slot), []).append(tuple(about))
    return found


def _last(found: Places, place: tuple[int, int], first: float, end: float) -> tuple[Any, ...] | None:
    return next((each for each in reversed(found.get(place, [])) if first <= each[0] < end), None)
