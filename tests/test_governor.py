"""The governor: faults are found, that row alone is put back, and healthy rows are left in peace."""

import pytest
import torch
from torch import Tensor

from esper.leyline import LifecycleOp
from esper.tamiyo import Random, Scripted, Wait, entry
from esper.tolaria import Kind, MorphogeneticEnv, play
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


@pytest.mark.parametrize("fault", ["nan", "rate", "labels"])
def test_a_fault_is_found_and_put_back_alone(fault: str) -> None:
    env, measured = run(fault)
    healthy, calm = run(None)
    assert not healthy.rollbacks
    assert len(env.rollbacks) == 1
    (record,) = env.rollbacks
    assert record.key == int(env.scenarios.key[SICK])
    assert record.epoch in (6, 7)
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
