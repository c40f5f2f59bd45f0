"""The benchmark compares what it says it compares."""

import os
import subprocess
import sys

import pytest
import torch

from esper.bench import Loop, PopulationBench, random_topology, run_population_bench
from esper.kasmina import Host, OptimConfig, Population
from tests.reference import batch, small_hosts


def test_the_loop_trains_the_same_hosts_in_the_same_way() -> None:
    optim = OptimConfig(lr=0.02, weight_decay=0.1, host_clip=0.2, seed_clip=0.1)
    population = Population(Host("conv1d", **small_hosts()["conv1d"]), 6, dtype=torch.float64, optim=optim)
    generator = torch.Generator().manual_seed(0)
    random_topology(population, generator)
    loop = Loop(population, 4)
    for _ in range(3):
        x, y = batch(population, 5, generator)
        population.train_step(x, y)
        loop.step(x, y)
    for row, net in enumerate(loop.nets):
        mine = dict(population.extract(row).named_parameters())
        for name, parameter in net.named_parameters():
            torch.testing.assert_close(parameter, mine[name], rtol=0, atol=1e-8)


def test_every_round_redraws_its_topology(monkeypatch: pytest.MonkeyPatch) -> None:
    draws = []
    monkeypatch.setattr("esper.bench.random_topology", lambda *args: (draws.append(1), random_topology(*args)))
    run_population_bench(PopulationBench(host="mlp", rows=2, batch=3, steps=1, rounds=3, warm_up=2), lambda line: None)
    assert len(draws) == 2 + 2 * 3  # warm-up, and once for each way in each round


def test_every_draw_fills_every_slot_anew() -> None:
    population = Population(Host("mlp"), 40)
    generator = torch.Generator().manual_seed(0)
    random_topology(population, generator)
    first = population.life.blueprint.clone()
    population.end_epoch()
    random_topology(population, generator)
    assert not torch.equal(first, population.life.blueprint)
    assert sorted(first.unique().tolist()) == [1, 2, 3, 4, 5]  # all but noop
    assert sorted(population.life.style.unique().tolist()) == [0, 1, 2]
    assert bool((population.life.alpha == 1).all())


def test_freed_memory_is_kept() -> None:
    code = """
import resource, sys, torch
from esper.memory import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
def work():
    return [torch.ones(1_000_000) for _ in range(40)]
work(); work()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    work()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
    hand_back = os.environ | {"MALLOC_TRIM_THRESHOLD_": "131072", "MALLOC_MMAP_THRESHOLD_": "131072"}  # glibc's worst day
    faults = {}
    for how in ("keep", "plain"):
        command = [sys.executable, "-c", code, how]
        faults[how] = int(subprocess.run(command, capture_output=True, text=True, check=True, env=hand_back).stdout)
    assert faults["keep"] < faults["plain"] / 10, faults
