"""The learner learns: the fast rungs of `experiments/ladder.py`."""

import pytest
from experiments.ladder import bandit, cartpole, garden, lottery
from experiments.toys import Garden


@pytest.mark.parametrize("ratio", ["joint", "per_head"])
def test_a_good_op_that_starts_at_one_percent_is_found(ratio: str) -> None:
    result = bandit(0, ratio, updates=24)
    assert result["germinates at first"] < 0.03
    assert result["reward"] > 0.9


def test_the_garden_is_what_dynamic_programming_says() -> None:
    """By hand: without a price keep the best kind of each slot; with one, plant as late as they still ripen."""
    assert Garden.optimum(0) == pytest.approx(1.0 + 0.9)
    rent = 0.15 / 6 * 2.5
    assert Garden.optimum(1) == pytest.approx(max(1.9 - 4 * rent - 3 * rent, 1.0 + 0.8 - 4 * 0.15 / 6 * 0.5 - 3 * rent,
                                                  1.0 + 0.8 - 4 * rent - 3 * 0.15 / 6 * 0.5))


def test_a_lifecycle_is_learned_to_near_its_optimum() -> None:
    assert garden(0, updates=40, rows=64)["share"] > 0.9


def test_a_critic_that_is_told_of_luck_lets_the_rest_be_learned() -> None:
    told, blind = (lottery(0, tell, updates=40)["right"] for tell in (True, False))
    assert told > 0.9
    assert blind < 0.3


def test_memory_is_used_where_it_is_needed() -> None:
    with_memory, without = (cartpole(0, memory=memory, updates=12)["return"] for memory in (True, False))
    assert with_memory > 100
    assert without < 80
