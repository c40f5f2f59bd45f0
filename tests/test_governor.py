"""The governor: faults are found, that row alone is put back, and healthy rows are left in peace."""

import math

import pytest
import torch
from torch import Tensor

from esper.leyline import LifecycleOp
from esper.tamiyo import Random, Scripted, Wait, entry
from esper.tolaria import GovernorConfig, Kind, MorphogeneticEnv, play
from esper.tolaria.governor import RULES
from tests.workshop import toy_env, toy_family

ROWS, SICK = 32, 7


def steady() -> MorphogeneticEnv:
    env = toy_env(ROWS, toy_family(horizons=(12,), lrs=(5e-3,), kinds=(Kind("plain"), Kind("wrong", label_noise=0.2))))
    env.reset(env.family.scenarios(ROWS))
    return env


def run(fault: str | None, epochs: int = 9) -> tuple[MorphogeneticEnv, list[dict[str, Tensor]]]:
    """A fault during the sixth epoch, in one row."""
    env, measured = steady(), []
    rate, labels = env.scenarios.lr.clone(), env.feed.labels.clone()
    for epoch in range(epochs):
        if epoch == 5 and fault == "nan":
            env.population.banks[0].weights[SICK, 3] = float("nan")
        if fault == "rate":
            env.scenarios.lr[SICK] = rate[SICK] * (1e4 if epoch == 5 else 1)
        if fault == "labels":
            swap = torch.randperm(10, generator=torch.Generator().manual_seed(0))
            env.feed.labels[SICK] = swap[labels[SICK]] if epoch == 5 else labels[SICK]
        measured.append({name: t.clone() for name, t in env.step(Wait()(env.view())).tensors().items()})
    return env, measured


@pytest.fixture(scope="module")
def untouched() -> tuple[MorphogeneticEnv, list[dict[str, Tensor]]]:
    return run(None)


@pytest.mark.parametrize(("fault", "rule"), [("nan", "non-finite"), ("rate", "far above chance"), ("labels", "jump")])
def test_a_fault_is_found_and_put_back_alone(fault: str, rule: str,
                                             untouched: tuple[MorphogeneticEnv, list[dict[str, Tensor]]]) -> None:
    env, measured = run(fault)
    healthy, calm = untouched
    assert not healthy.rollbacks
    assert len(env.rollbacks) == 1
    (record,) = env.rollbacks
    assert record.key == int(env.scenarios.key[SICK])
    assert record.epoch in (6, 7)
    assert record.rule == rule
    assert record.action == tuple(env.spec.action(LifecycleOp.WAIT))
    assert not record.ended
    others = torch.tensor([row for row in range(ROWS) if row != SICK])
    for mine, theirs in zip(measured, calm, strict=True):
        for name, tensor in mine.items():
            assert torch.equal(tensor[others], theirs[name][others]), name
    mine, theirs = env.population.snapshot(others), healthy.population.snapshot(others)
    for name, tensor in mine.items():
        assert torch.equal(tensor, theirs[name]), name
    assert all(bool(m["all_on.loss"].isfinite().all()) for m in measured)
    assert float(measured[-1]["all_on.loss"][SICK]) < float(measured[4]["all_on.loss"][SICK]) + 0.2
    assert env.clock.tolist() == [9] * ROWS  # the clock did not rewind


CHANCE = math.log(10)


def judged(losses: list[float], validation: list[float] | None = None, **limits: float) -> list[str]:
    """Which rule each of these epochs breaks, from its losses in units of chance; a row that is put back has none of it."""
    env = toy_env(2, toy_family(horizons=(30,)), governor=GovernorConfig(**limits))
    env.reset(env.family.scenarios(2))
    governor, told = env.governor, []
    assert governor.chance == pytest.approx(CHANCE)
    for clock, loss in enumerate(losses, 1):
        train = torch.tensor([0.3, loss]) * CHANCE  # the first row is steady
        held = torch.tensor([0.3, (validation or losses)[clock - 1]]) * CHANCE
        verdict = governor.verdicts(held, train)
        governor.settle(verdict, torch.zeros(2, dtype=torch.bool), train, torch.full((2,), clock))
        assert int(verdict[0]) == 0
        told.append(RULES[int(verdict[1])])
    return told


def test_a_jump_is_measured_from_the_epoch_before() -> None:
    assert judged([0.5, 0.5, 0.64]) == ["", "", ""]
    assert judged([0.5, 0.5, 0.66]) == ["", "", "jump"]
    assert judged([0.5, 0.3, 0.46]) == ["", "", "jump"], "not from the oldest"
    assert judged([0.2, 0.3, 0.4, 0.44]) == ["", "", "", ""], "steps that are small enough are none, wherever it began"
    assert judged([0.5]) == [""], "the first epoch has nothing before it"


def test_a_drift_must_last_to_be_a_jump() -> None:
    """Above the best of the last epochs by a quarter of chance, twice in a row."""
    assert judged([0.3, 0.44, 0.56, 0.56]) == ["", "", "", "lasting jump"]
    assert judged([0.3, 0.44, 0.56, 0.54, 0.56]) == ["", "", "", "", ""], "an epoch between clears it, and history is short"
    assert judged([0.3, 0.44, 0.54, 0.56]) == ["", "", "", ""], "once is not twice"
    assert judged([0.3, 0.44, 0.56, 0.56], memory=2) == ["", "", "", ""], "what lies further back is forgotten"


def test_far_above_chance_is_broken_from_the_first_epoch_on_either_split() -> None:
    assert judged([4.1]) == ["far above chance"]
    assert judged([3.9]) == [""]
    assert judged([0.5], [4.1]) == ["far above chance"]
    assert judged([0.5, 0.5], [0.5, 3.9]) == ["", ""], "validation losses may rise"
    assert judged([math.inf]) == judged([math.nan]) == judged([0.5], [math.nan]) == ["non-finite"]


def test_a_bad_epoch_leaves_no_trace_in_the_history() -> None:
    """Else the row would be compared with what it was put back from."""
    assert judged([0.5, 2.0, 0.66]) == ["", "jump", "jump"]
    assert judged([0.5, 2.0, 0.5, 0.66]) == ["", "jump", "", "jump"]
    assert judged([0.3, 0.44, 2.0, 0.56, 0.56]) == ["", "", "jump", "", "lasting jump"], "the best stays 0.3"


def test_weights_that_are_no_numbers_are_found_before_any_loss_shows_it() -> None:
    """A seed that is not blended in yet is in no loss."""
    env = toy_env(3, toy_family(horizons=(10,)))
    env.reset(env.family.scenarios(3))
    env.step(torch.tensor([env.spec.action(LifecycleOp.GERMINATE, slot=1, blueprint="mlp_small")] * 3))
    env.population._flush()
    env.population.banks[2].weights[1, 0] = float("nan")
    measured = env.step(Wait()(env.view()))
    assert measured.rolled_back.tolist() == [False, True, False]
    assert [record.rule for record in env.rollbacks] == ["non-finite"]
    assert bool(env.population.banks[2].weights.isfinite().all())


@pytest.mark.parametrize(("apart", "ended"), [(1, True), (3, True), (4, False)])
def test_patience_counts_epochs_from_one_rollback_to_the_next(apart: int, ended: bool) -> None:
    env = toy_env(2, toy_family(horizons=(20,)), governor=GovernorConfig(patience=3))
    env.reset(env.family.scenarios(2))
    for clock in range(1, 10):
        verdict = torch.tensor([0, int(clock in (2, 2 + apart))])
        over = env.governor.settle(verdict, torch.zeros(2, dtype=torch.bool), torch.ones(2), torch.full((2,), clock))
        assert over.tolist() == [False, ended and clock == 2 + apart]


def test_the_retry_meets_other_data() -> None:
    env = steady()
    orders = []
    for clock in (5, 6):
        env.feed.begin_epoch(torch.full((ROWS,), clock))
        orders.append(env.feed._order.clone())
    assert not torch.equal(orders[0], orders[1])


def test_a_second_rollback_ends_the_episode_with_the_last_good_state() -> None:
    env = steady()
    for epoch in range(8):
        if epoch in (5, 6):
            good = env.population.snapshot(torch.tensor([SICK]))
            env.population.banks[0].weights[SICK, 3] = float("nan")
        measured = env.step(Wait()(env.view()))
        if epoch == 6:
            assert bool(measured.done[SICK])
            assert int(measured.done.sum()) == 1
            for name, tensor in env.population.snapshot(torch.tensor([SICK])).items():
                if name != "lr":
                    assert torch.equal(tensor, good[name]), name
    assert [record.ended for record in env.rollbacks] == [False, True]


def test_pruning_a_useful_seed_is_not_a_fault() -> None:
    """Its loss jumps, but that was a decision."""
    frozen = (Kind("frozen", frozen=(True, True)),)
    env = toy_env(4, toy_family(horizons=(14,), kinds=frozen))
    script = [entry(env.spec, 0, LifecycleOp.GERMINATE, slot=0, blueprint="mlp_heavy", tempo=3),
              entry(env.spec, 1, LifecycleOp.ADVANCE, slot=0), entry(env.spec, 10, LifecycleOp.PRUNE, slot=0)]
    trace = play(env, Scripted([script] * 4), env.family.scenarios(4))
    loss = trace.measured["train_loss"]
    assert bool((loss[10] > loss[9] + env.governor.config.jump * env.governor.chance).all())
    assert env.rollbacks == []
    assert not bool(env.population.life.planted.any())


def test_a_retried_seed_is_born_anew() -> None:
    env = toy_env(2, toy_family(horizons=(14,)))
    env.reset(env.family.scenarios(2))
    germinate = torch.tensor([env.spec.action(LifecycleOp.GERMINATE, slot=0, blueprint="mlp_small")] * 2)
    births = []
    for _ in range(2):
        env.population.begin_epoch(germinate)
        births.append(env.population.tensors()["bank.1.weights"][0].clone())
        env.population.end_epoch()
        verdict = torch.tensor([1, 0])
        env.governor.settle(verdict, torch.tensor([False, True]), torch.zeros(2), env.clock)
        assert not bool(env.population.life.planted[0].any())
    assert not torch.equal(births[0], births[1])


def test_healthy_episodes_are_never_rolled_back() -> None:
    """200 episodes under random growth, label noise among them."""
    env = toy_env(100, toy_family(horizons=(12,)))
    for start in (0, 100):
        play(env, Random(start), env.family.scenarios(100, start=start))
    assert env.rollbacks == []
