"""Controls are what their names say, and no two of them are the same."""

import dataclasses
import functools
import gc
import importlib.util
import itertools
import json
import os
import sys
import time
import weakref
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from experiments import orchard
from experiments.controls_table import Row, differences, table

from esper.cli.prove import _decides
from esper.leyline import ActionSpec, EsperError, SeedStage
from esper.leyline.codec import to_dict
from esper.simic.on_ray import RayWorkers
from esper.simic.proof.baselines import Tuned, births, family_digest, halving, shuffled, tune
from esper.simic.proof.evaluator import Evaluator
from esper.simic.proof.identify import Identification
from esper.simic.proof.plans import Plan
from esper.simic.proof.proving import Contestant, ProofConfig, prove
from esper.simic.proof.sweep import conditions
from esper.simic.proof.value_of_information import Rule, Split
from esper.simic.workers import Processes, Workers
from esper.tamiyo import Controller, Planned, Random, TriggerConfig, Triggered, Wait
from esper.tolaria import Decision, EnvConfig, Episodes, MorphogeneticEnv, PreviewConfig, batches
from tests.workshop import toy_data, toy_family

FAMILY = toy_family(horizons=(10, 12), prices=(0.0, 1e-4))
TUNED = Tuned(
    "toy", family_digest(FAMILY), {},
    {"periodic": TriggerConfig("periodic", 3, "low_rank", 2), "converged": TriggerConfig("converged", 0.2, "glu"),
     "gap": TriggerConfig("gap", 0.0, "mlp_small", backwards=True)},
    Plan(("low_rank", None)), [Plan(("low_rank", None)), Plan((None, "glu")), Plan((None, None)), Plan(("norm", "norm"), 1)],
    [[Plan(("glu", None)), Plan((None, "norm")), Plan((None, "low_rank")), Plan((None, None)), Plan(("mlp_heavy", "norm"))]] * 4,
    Rule((Split(0, 2.0), None, None), ((0,) * 4, (0,) * 4, (1,) * 4, (1,) * 4)),
    [Plan(("norm", None), 2), Plan(("glu", "norm"), 2)], 2,
    Identification(1, Plan((None, None)), [Plan((None, None)), Plan(("norm", None))], [10, 12], [[[0.0] * 5] * 9] * 2, [[[[0.5, 0, 0], [0.6, 9, 0]]] * 5] * 2, 8))
N = 24
CONFIG = EnvConfig(FAMILY, previews=PreviewConfig(4, 2))


def on_toy_data(config: EnvConfig, rows: int) -> MorphogeneticEnv:
    return MorphogeneticEnv(config, rows, toy_data(inputs=config.family.host.inputs))


@pytest.fixture(scope="module")
def evaluator() -> Evaluator:
    return Evaluator(CONFIG, make=on_toy_data)


def somebody() -> Planned:
    """Stands for a controller: seeds of all kinds here and there, early enough to be kept."""
    draw = torch.Generator().manual_seed(0)
    blueprints = len(CONFIG.spec.blueprints)
    return Planned(torch.randint(-2, 4, (N, 2), generator=draw), torch.randint(1, blueprints, (N, 2), generator=draw))


@pytest.fixture(scope="module")
def rows(evaluator: Evaluator) -> dict[str, Row]:
    return table(evaluator, TUNED, FAMILY.scenarios(N), somebody())


def test_an_evaluator_holds_two_environments() -> None:
    """A search plays in a dozen sizes, and on a GPU each has gigabytes of buffers."""
    evaluator = Evaluator(CONFIG, make=on_toy_data)
    on_toy_data(CONFIG, 2)  # what PyTorch imports at first use keeps the frames that asked for it
    gc.disable()
    try:
        made = []
        for rows in (3, 4, 5):
            evaluator.play(Random(0), FAMILY.scenarios(rows))
            made.append(weakref.ref(evaluator.environment(rows)))
        again = evaluator.environment(4)
        evaluator.environment(6)
        assert [found() is None for found in made] == [True, False, True]
        assert again is evaluator.environment(4)
    finally:
        gc.enable()


def test_every_control_keeps_its_promise(rows: dict[str, Row]) -> None:
    broken = {name: (row.statistic, row.value) for name, row in rows.items() if not row.kept and name != "heuristic"}
    assert broken == {}, "what a heuristic grows pays on data that can be learned, not on made-up clusters"
    still = {name for name, row in rows.items() if not row.delivered.decisions()}
    assert still == {"no growth", "wider host", "from scratch, equal epochs", "from scratch, equal FLOPs"}


def test_no_two_controls_are_the_same(rows: dict[str, Row]) -> None:
    apart = differences(rows, N)
    assert len(apart) == len(rows) * (len(rows) - 1) // 2
    assert {pair: share for pair, share in apart.items() if share == 0} == {}


def test_a_trigger_that_cannot_fire_never_grows(evaluator: Evaluator) -> None:
    drawn = FAMILY.scenarios(N)
    for config in (TriggerConfig("converged", -9, "glu"), TriggerConfig("gap", -99, "glu")):
        assert evaluator.play(Triggered(config), drawn).decisions() == []


def test_triggers_fill_slots_from_either_end_up_to_their_most(evaluator: Evaluator) -> None:
    drawn = FAMILY.scenarios(N)
    for most, backwards, slots in ((1, False, {0}), (1, True, {1}), (2, False, {0, 1})):
        done = evaluator.play(Triggered(TriggerConfig("periodic", 2, "norm", most, backwards)), drawn)
        born = [d for d in done.decisions() if d.op == "GERMINATE"]
        assert {d.slot for d in born} == slots
        assert len(born) == most * N
    mixed = Triggered(*(TriggerConfig("periodic", 2, "norm" if row % 2 else "glu") for row in range(N)))
    born = [d for d in evaluator.play(mixed, drawn).decisions() if d.op == "GERMINATE"]
    assert all((d.blueprint == "norm") == bool(d.scenario % 2) for d in born)
    with pytest.raises(EsperError, match="one to each"):
        evaluator.play(Triggered(*mixed.configs[:3]), drawn)


@pytest.mark.parametrize("fields", [("sometimes", 1, "glu"), ("periodic", 0, "glu"), ("gap", 0.1, "glu", 0)])
def test_impossible_triggers_are_refused(fields: tuple) -> None:
    with pytest.raises(EsperError):
        TriggerConfig(*fields)


def test_shuffling_keeps_counts_and_moves_the_rest(evaluator: Evaluator) -> None:
    """As many seeds in every row; times, slots and blueprints come from the same pool, in another order each."""
    drawn = FAMILY.scenarios(N)
    learned = evaluator.play(somebody(), drawn)
    plan, own = shuffled(learned, FAMILY, drawn, evaluator.min_epochs_to_keep), births(learned)
    kept = (learned.blueprint >= 0).sum(1)
    assert torch.equal((plan.birth >= 0).sum(1), kept)
    assert int(kept.sum()) > 10
    before, after = (sorted(d.tolist()) for d in (learned.blueprint[learned.blueprint >= 0], plan.blueprint[plan.birth >= 0]))
    assert before == after, "the same seeds"
    assert not torch.equal(torch.where(plan.birth >= 0, plan.blueprint, -1), learned.blueprint), "elsewhere"
    times = torch.full_like(plan.birth, -1)
    times[own[:, 0], own[:, 2]] = own[:, 1]
    shared = (times >= 0) & (plan.birth >= 0)
    assert bool((times != plan.birth)[shared].any()), "at other times"
    other = shuffled(learned, FAMILY, drawn, evaluator.min_epochs_to_keep, seed=1)
    assert not torch.equal(other.birth, plan.birth)
    played = evaluator.play(plan, drawn)
    assert torch.equal((played.blueprint >= 0).sum(1), kept), "and all of them are kept in the end"


def test_seeds_due_at_the_last_moment_are_not_kept_waiting(evaluator: Evaluator) -> None:
    """One seed could be fossilized in the very epoch in which the other must be born."""
    drawn = FAMILY.scenarios(N)
    latest = drawn.horizon - evaluator.min_epochs_to_keep
    for earlier in range(1, 7):
        birth = torch.stack([(latest - earlier).clamp(min=0), latest], 1)
        done = evaluator.play(Planned(birth, torch.full_like(birth, 1)), drawn)
        assert bool((done.blueprint == 1).all()), earlier


def test_only_the_last_birth_of_a_fossil_counts() -> None:
    life = [Decision(0, 0, "GERMINATE", 0, "norm"), Decision(0, 2, "PRUNE", 0, None), Decision(0, 4, "GERMINATE", 0, "glu"),
            Decision(0, 1, "GERMINATE", 1, "norm"), Decision(0, 9, "FOSSILIZE", 0, None)]
    done = SimpleNamespace(blueprint=torch.tensor([[3, -1]]), decisions=lambda: life)
    assert births(cast(Episodes, done)).tolist() == [[0, 4, 0, 3]]


def test_scores_come_from_the_samples_that_were_held_out() -> None:
    """Labels that are all wrong make every score another one; the validation slice is not what is scored."""
    data, drawn = toy_data(inputs=FAMILY.host.inputs), FAMILY.scenarios(N)
    right, wrong = ((data.validation_x, label) for label in (data.validation_y, (data.validation_y + 5) % 10))
    scores = [Evaluator(FAMILY, held, on_toy_data).play(Wait(), drawn).delivered.score for held in (right, wrong)]
    assert float(scores[0].mean()) > 0.5
    assert float(scores[1].mean()) < 0.1


def test_flops_have_a_price(evaluator: Evaluator) -> None:
    dear = dataclasses.replace(FAMILY, flop_prices=(0.1,))
    arms = Evaluator(dataclasses.replace(CONFIG, family=dear), make=on_toy_data)
    drawn = dear.scenarios(N)
    done, bare = arms.play(Random(seed=3), drawn), arms.play(Wait(), drawn)
    torch.testing.assert_close(done.utility(), done.delivered.score - drawn.price * done.params - 0.1 * done.spent)
    assert torch.equal(bare.utility(), bare.delivered.score)
    looked = arms.play(Wait(), drawn, previews=True)
    assert bool((looked.utility() < bare.utility()).all()), "looking at candidates is paid for"


def test_equal_flops_are_equal_flops(evaluator: Evaluator) -> None:
    drawn = FAMILY.scenarios(N)
    grown = evaluator.play(Random(seed=3), drawn, previews=True)
    again = evaluator.equal_flops(grown, drawn)
    assert torch.equal(again.blueprint, grown.blueprint)
    assert float((again.spent - grown.spent).abs().max()) <= float(((1 + grown.flops) / drawn.horizon).max()) / 2 + 1e-5
    assert bool((1 + again.spent > 1.05 * (1 + evaluator.from_scratch(grown.blueprint, drawn).spent)).any())


def test_topologies_from_scratch_start_untrained_and_cost_what_they_should(evaluator: Evaluator) -> None:
    drawn = FAMILY.scenarios(N)
    topology = torch.tensor([[1, -1], [3, 2]] * (N // 2))
    env = evaluator.environment(N)
    env.reset(drawn)
    env.install(topology)
    assert torch.equal(env.population.life.at(SeedStage.FOSSILIZED), topology >= 0)
    bare, same = evaluator.play(Wait(), drawn), evaluator.from_scratch(topology, drawn)
    assert torch.equal(same.blueprint, topology)
    torch.testing.assert_close(same.spent, same.flops, atol=1e-5, rtol=0)
    assert bool((same.delivered.score != bare.delivered.score).any())
    half = evaluator.from_scratch(topology, drawn, drawn.horizon // 2)
    torch.testing.assert_close(1 + half.spent, (1 + half.flops) / 2, atol=1e-5, rtol=0)
    torch.testing.assert_close(same.delivered.score - drawn.price * same.params, same.utility())


def test_wider_hosts_are_as_narrow_as_may_be_and_cost_what_was_grown(evaluator: Evaluator) -> None:
    drawn, needed = FAMILY.scenarios(N), torch.tensor([0, 1, 300, 900] * (N // 4))
    wide, bare = evaluator.wider(needed, drawn), evaluator.play(Wait(), drawn)
    assert torch.equal(wide.params, needed)
    torch.testing.assert_close(wide.utility(), wide.delivered.score - drawn.price * needed)
    assert torch.equal(wide.delivered.score[needed == 0], bare.delivered.score[needed == 0])
    flops = [(1 + wide.spent)[needed == asked].unique() for asked in (0, 1, 300, 900)]
    assert all(len(each) == 1 for each in flops)
    assert 1 == float(flops[0]) < float(flops[1]) <= float(flops[2]) < float(flops[3])
    assert bool(evaluator.wider(torch.full((N,), 10**7), drawn).utility().isnan().all()), "no host is that wide"


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


def test_halving_goes_on_with_what_is_known_on_other_scenarios() -> None:
    """What is known stays unless something is surely better; luck in few scenarios is not enough."""
    jobs: list[torch.Tensor] = []

    def play(part: torch.Tensor) -> torch.Tensor:
        jobs.append(part)
        return torch.where(part[:, 0] == 7, 10.0 * (len(jobs) == 4), part[:, 0] / 50.0)

    assert halving(50, 400, play, first=1000)[0] == 49
    assert min(int(part[:, 1].min()) for part in jobs) == 1000
    jobs.clear()
    assert halving(50, 400, play, known=7)[0] == 7
    assert len(jobs) == 4
    jobs.clear()
    assert halving(50, 400, play, known=6)[0] == 49
    noise, worth = torch.Generator().manual_seed(0), torch.zeros(50).index_fill(0, torch.tensor([7]), 0.5)
    kept = [halving(50, 60, lambda part: worth[part[:, 0]] + torch.randn(len(part), generator=noise), known=7)[0] == 7
            for _ in range(40)]
    assert sum(kept) >= 36


def test_conditions_are_numbered_as_the_sweep_numbers_them() -> None:
    drawn = FAMILY.scenarios(200)
    told = conditions(FAMILY, drawn)
    pairs = {(float(p), int(h)): int(c) for p, h, c in zip(drawn.price, drawn.horizon, told, strict=True)}
    price = float(torch.tensor(1e-4))
    assert pairs == {(0.0, 10): 0, (0.0, 12): 1, (price, 10): 2, (price, 12): 3}


@pytest.mark.parametrize("several", [Processes, pytest.param(RayWorkers, marks=[
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed"), pytest.mark.filterwarnings("ignore")])])
def test_several_processes_find_the_same(several: type[Workers], monkeypatch: pytest.MonkeyPatch) -> None:
    """Controls as they are tuned, and a rehearsal of a chance policy and a controller that knows nothing."""
    family = dataclasses.replace(orchard.FAMILY, kinds=FAMILY.kinds[:1], horizons=(8,), prices=(0.0,))
    known = Tuned(family.name, family_digest(family), {"periodic": 8, "converged": 8}, dict(list(TUNED.triggers.items())[:2]))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    wheres = Workers(), several(2)
    one, two = (tune(Evaluator(family, make=orchard.Orchard), 8, 256, 0, workers=each, known=known) for each in wheres)
    assert json.dumps(to_dict(one)) == json.dumps(to_dict(two)), "in the same order"
    controller = Controller.fresh(EnvConfig(family).spec)
    contestants = [Contestant("a", functools.partial(_random, 1), 8),
                   Contestant("b", functools.partial(_decides, controller, "cpu"), 8)]
    config = ProofConfig(scenarios=8, pilot=2, rehearsal=True)
    with wheres[1]:
        alone, together = (prove(EnvConfig(family), contestants, one, config, workers=each, make=on_toy_data) for each in wheres)
        assert str(alone) == str(together)
        assert len({worker.name for worker in wheres[1].workers}) == 2


def test_batches_hold_every_episode_once_and_short_ones_first() -> None:
    horizon = FAMILY.scenarios(50).horizon
    parts = list(batches(horizon, 16))
    assert sorted(torch.cat([part for part, _ in parts]).tolist()) == list(range(50))
    assert all(len(padded) == 16 and set(padded.tolist()) == set(part.tolist()) for part, padded in parts)
    assert sum(len(horizon[part].unique()) > 1 for part, _ in parts) <= 1


def test_a_process_that_fails_or_dies_is_a_sentence() -> None:
    with pytest.raises(EsperError, match="an action spec"):
        list(Processes(2).run({"one": functools.partial(_fails, "an action spec"), "two": _sleeps}))


def _fails(message: str) -> None:
    raise EsperError(message)


def _sleeps() -> None:
    time.sleep(0.1)


def _random(seed: int, spec: ActionSpec) -> Random:
    return Random(seed)
