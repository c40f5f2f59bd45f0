"""Controls are what their names say, and no two of them are the same."""

import itertools

import numpy as np
import pytest
import torch
from experiments.controls_table import Row, differences, kept_by_scenario, table

from esper.leyline import EsperError, SeedStage
from esper.simic.controls import Tuned, halving, shuffled
from esper.simic.gaps import Rule, Split
from esper.simic.sweep import choices, conditions
from esper.simic.trials import Decision, Trials
from esper.tamiyo import Random, TriggerConfig, Triggered, Wait
from esper.tolaria import PreviewConfig
from tests.workshop import toy_data, toy_family

FAMILY = toy_family(horizons=(10, 12), prices=(0.0, 1e-4))
TUNED = Tuned(
    "toy", {}, {"periodic": TriggerConfig("periodic", 3, "low_rank", 2), "converged": TriggerConfig("converged", 0.2, "glu"),
                "gap": TriggerConfig("gap", 0.0, "mlp_small", backwards=True)},
    "low_rank @0", ["low_rank @0", "glu @1", "no growth", "norm @0+1"],
    [["glu @0", "norm @1", "low_rank @1", "no growth", "mlp_heavy @0"]] * 4,
    Rule((Split(0, 2.0), None, None), np.array([[1, 1, 1, 1], [1, 1, 1, 1], [2, 2, 2, 2], [2, 2, 2, 2]])),
    list(choices(FAMILY)), 2)
N = 40


@pytest.fixture(scope="module")
def trials() -> Trials:
    return Trials(FAMILY, PreviewConfig(4, 2), data=toy_data(inputs=FAMILY.host.inputs))


@pytest.fixture(scope="module")
def rows(trials: Trials) -> dict[str, Row]:
    return table(trials, TUNED, FAMILY.scenarios(N), Random(seed=3))


def test_every_control_keeps_its_promise(rows: dict[str, Row]) -> None:
    broken = {name: (row.statistic, row.value) for name, row in rows.items() if not row.kept and name != "heuristic"}
    assert broken == {}, "what a heuristic grows pays on data that can be learned, not on made-up clusters"
    still = {name for name, row in rows.items() if not row.delivered.decisions}
    assert still == {"no growth", "wider host", "from scratch, equal epochs", "from scratch, equal FLOPs"}


def test_no_two_controls_are_the_same(rows: dict[str, Row]) -> None:
    apart = differences(rows, N)
    assert len(apart) == len(rows) * (len(rows) - 1) // 2
    assert {pair: share for pair, share in apart.items() if share == 0} == {}


def test_a_trigger_that_cannot_fire_never_grows(trials: Trials) -> None:
    drawn = FAMILY.scenarios(N)
    for config in (TriggerConfig("periodic", 99, "glu"), TriggerConfig("converged", -9, "glu"), TriggerConfig("gap", -99, "glu")):
        assert trials.play(Triggered(config), drawn).decisions == []


def test_triggers_fill_slots_from_either_end_up_to_their_most(trials: Trials) -> None:
    drawn = FAMILY.scenarios(N)
    for most, backwards, slots in ((1, False, {0}), (1, True, {1}), (2, False, {0, 1})):
        done = trials.play(Triggered(TriggerConfig("periodic", 2, "norm", most, backwards)), drawn)
        born = [d for d in done.decisions if d.op == "GERMINATE"]
        assert {d.slot for d in born} == slots
        assert len(born) == most * N
    mixed = Triggered(*(TriggerConfig("periodic", 2, "norm" if row % 2 else "glu") for row in range(N)))
    born = [d for d in trials.play(mixed, drawn).decisions if d.op == "GERMINATE"]
    assert all((d.blueprint == "norm") == bool(d.scenario % 2) for d in born)
    with pytest.raises(EsperError, match="one to each"):
        trials.play(Triggered(*mixed.configs[:3]), drawn)


@pytest.mark.parametrize("fields", [("sometimes", 1, "glu"), ("periodic", 0, "glu"), ("gap", 0.1, "glu", 0)])
def test_impossible_triggers_are_refused(fields: tuple) -> None:
    with pytest.raises(EsperError):
        TriggerConfig(*fields)


def test_shuffling_keeps_counts_and_moves_the_rest(trials: Trials) -> None:
    drawn = FAMILY.scenarios(N)
    learned = trials.play(Random(seed=3), drawn)
    plan = shuffled(learned.decisions, FAMILY, drawn)
    kept = torch.tensor(kept_by_scenario(learned.decisions, N))
    assert torch.equal((plan.birth >= 0).sum(1), kept)
    assert int(kept.sum()) > 0
    before, after = (sorted(d.tolist()) for d in (learned.blueprint[learned.blueprint >= 0], plan.blueprint[plan.birth >= 0]))
    assert before == after, "the same seeds"
    assert not torch.equal(torch.where(plan.birth >= 0, plan.blueprint, -1), learned.blueprint), "elsewhere"
    other = shuffled(learned.decisions, FAMILY, drawn, seed=1)
    assert not torch.equal(other.birth, plan.birth)


def test_a_seed_pruned_and_grown_again_counts_once() -> None:
    life = [Decision(0, 0, "GERMINATE", 0, "norm"), Decision(0, 2, "PRUNE", 0, None), Decision(0, 4, "GERMINATE", 0, "glu"),
            Decision(0, 9, "FOSSILIZE", 0, None)]
    plan = shuffled(life, FAMILY, FAMILY.scenarios(1))
    assert (plan.birth >= 0).sum() == 1
    assert plan.birth.max() == min(4, int(FAMILY.scenarios(1).horizon) - 6)


def test_topologies_from_scratch_start_untrained_and_cost_what_they_should(trials: Trials) -> None:
    drawn = FAMILY.scenarios(N)
    topology = torch.tensor([[1, -1], [3, 2]] * (N // 2))
    env = trials.environment(N)
    env.reset(drawn)
    env.install(topology)
    assert torch.equal(env.population.life.at(SeedStage.FOSSILIZED), topology >= 0)
    bare, same = trials.play(Wait(), drawn), trials.from_scratch(topology, drawn)
    assert torch.equal(same.blueprint, topology)
    torch.testing.assert_close(same.flops, 1 + same.weight, atol=1e-5, rtol=0)
    assert bool((same.score != bare.score).any())
    half = trials.from_scratch(topology, drawn, drawn.horizon // 2)
    torch.testing.assert_close(half.flops, (1 + half.weight) / 2, atol=1e-5, rtol=0)
    torch.testing.assert_close(same.score - drawn.price * same.params, same.utility)


def test_wider_hosts_are_as_narrow_as_may_be(trials: Trials) -> None:
    drawn, needed = FAMILY.scenarios(N), torch.tensor([0, 1, 300, 900] * (N // 4))
    wide = trials.wider(needed, drawn)
    assert bool((wide.params >= needed).all())
    assert bool((wide.params[needed == 0] == 0).all())
    assert bool((wide.flops[needed > 0] > 1).all())
    bare = trials.play(Wait(), drawn)
    assert torch.equal(wide.score[needed == 0], bare.score[needed == 0])
    torch.testing.assert_close(wide.utility, wide.score - drawn.price * wide.params)


def test_halving_finds_the_best_and_spends_its_budget() -> None:
    truth = torch.linspace(0, 1, 50).roll(20)
    jobs: list[torch.Tensor] = []

    def play(part: torch.Tensor) -> torch.Tensor:
        jobs.append(part)
        return truth[part[:, 0]] + 0.3 * torch.randn(len(part), generator=torch.Generator().manual_seed(len(jobs)))

    best, used = halving(50, 2000, play)
    assert truth[best] > 0.9
    assert used == sum(map(len, jobs)) >= 2000
    assert used < 2200
    seen = [set(part[:, 1].tolist()) for part in jobs]
    assert not any(a & b for a, b in itertools.pairwise(seen)), "every rung brings new scenarios"
    assert halving(1, 10, lambda part: torch.zeros(len(part))) == (0, 10)


def test_conditions_are_numbered_as_the_sweep_numbers_them() -> None:
    drawn = FAMILY.scenarios(200)
    told = conditions(FAMILY, drawn)
    pairs = {(float(p), int(h)): int(c) for p, h, c in zip(drawn.price, drawn.horizon, told, strict=True)}
    price = float(torch.tensor(1e-4))
    assert pairs == {(0.0, 10): 0, (0.0, 12): 1, (price, 10): 2, (price, 12): 3}
