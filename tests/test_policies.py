"""Every policy behind the one door: legal, tied to rows, forgetful at clock 0; and a heuristic that means what it does."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from esper.kasmina import blueprints_for
from esper.leyline import ActionSpec, EsperError, Head, LifecycleOp, SeedStage, View
from esper.simic import PPOAgent
from esper.tamiyo import (
    POLICIES,
    Controller,
    Heuristic,
    HeuristicConfig,
    Learned,
    PolicyBundle,
    TriggerConfig,
    entry,
)
from esper.tolaria import MorphogeneticEnv, PreviewConfig, play
from tests.workshop import toy_env, toy_family

FAMILY = toy_family(horizons=(10,))
SPECS = {"full": ActionSpec.full, "compact": ActionSpec.compact, "decisive": ActionSpec.decisive}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A saved agent for each action space."""
    folder, paths = tmp_path_factory.mktemp("agents"), {}
    for name, make in SPECS.items():
        torch.manual_seed(0)
        paths[name] = folder / f"{name}.safetensors"
        PPOAgent(Controller.fresh(make(2, blueprints_for("mlp")))).save(paths[name])
    return paths


def made(name: str, spec: ActionSpec, path: Path) -> PolicyBundle:
    script = [entry(spec, 1, LifecycleOp.GERMINATE, slot=0, blueprint="glu"), entry(spec, 2, LifecycleOp.FOSSILIZE, slot=0)]
    arguments: dict[str, tuple] = {"scripted": ([script] * 8,), "learned": (path, spec),
                                   "triggered": (TriggerConfig("periodic", 2, "glu"),),
                                   "planned": (torch.tensor([[1, 3]] * 8), torch.tensor([[2, 3]] * 8))}
    return POLICIES[name](*arguments.get(name, ()))


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("space", SPECS)
def test_every_policy_plays_whole_episodes_legally(name: str, space: str, checkpoint: dict[str, Path]) -> None:
    """The environment refuses anything illegal; twice the same policy is the same, also when it is used again."""
    spec = SPECS[space](2, blueprints_for("mlp"))
    env = toy_env(8, FAMILY, spec=spec, previews=PreviewConfig(every=3, steps=2) if space == "decisive" else None)
    policy = made(name, spec, checkpoint[space])
    first, again = (play(env, policy, FAMILY.scenarios(8)).actions for _ in range(2))
    assert torch.equal(first, again), "what it remembers of a row it forgets at clock 0"
    assert len(first) == 10
    if name == "wait":
        assert not bool(first[..., 0].any())
    elif name != "heuristic":
        assert bool((first[..., 0] == spec.ops.index(LifecycleOp.GERMINATE)).any())


@pytest.mark.parametrize("name", ["random", "learned"])
def test_draws_belong_to_scenarios_not_to_rows(name: str, checkpoint: dict[str, Path]) -> None:
    spec = SPECS["full"](2, blueprints_for("mlp"))
    env, order = toy_env(8, FAMILY, spec=spec), torch.tensor([5, 0, 3, 1, 7, 2, 6, 4])
    scenarios = FAMILY.scenarios(8)
    there = play(env, made(name, spec, checkpoint["full"]), scenarios, most=1).actions
    here = play(env, made(name, spec, checkpoint["full"]), scenarios.take(order), most=1).actions
    assert torch.equal(there[:, order], here)


def test_a_learned_policy_is_its_distribution_or_its_mode(checkpoint: dict[str, Path]) -> None:
    spec = SPECS["full"](2, blueprints_for("mlp"))
    env = toy_env(8, FAMILY, spec=spec)
    runs = [play(env, Learned.load(checkpoint["full"], spec, greedy=greedy, seed=seed), FAMILY.scenarios(8)).actions
            for greedy, seed in ((False, 0), (False, 1), (True, 0), (True, 1))]
    assert not torch.equal(runs[0], runs[1])
    assert torch.equal(runs[2], runs[3])


def test_unknown_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(EsperError, match="cannot read a agent"):
        POLICIES["learned"](tmp_path / "nothing", SPECS["full"](2, ("a",)))


# The heuristic ------------------------------------------------------------------------------------------------------


def world(rows: int = 4, horizon: int = 20, price: float = 1e-4, **options: object) -> MorphogeneticEnv:
    family = toy_family(horizons=(horizon,), prices=(price,))
    env = toy_env(rows, family, spec=ActionSpec.full(2, blueprints_for("mlp")), **options)
    env.reset(family.scenarios(rows))
    return env


def stalled(view: View, clock: int) -> View:
    """The same, `clock` epochs in, with scores that never move."""
    assert view.facts is not None
    scores = torch.full_like(view.facts.scores, 0.5)
    facts = dataclasses.replace(view.facts, scores=scores, before=scores)
    return dataclasses.replace(view, clock=torch.full_like(view.clock, clock), facts=facts)


def decisions(policy: Heuristic, views: list[View]) -> list[torch.Tensor]:
    return [policy(view) for view in views]


def test_it_grows_when_learning_stalls_and_not_before() -> None:
    env, policy = world(), Heuristic(HeuristicConfig(patience=2))
    view = env.view()
    ops = [actions[:, 0] for actions in decisions(policy, [view, *(stalled(view, clock) for clock in range(1, 5))])]
    waits = [bool((op == LifecycleOp.WAIT).all()) for op in ops]
    assert waits == [True, True, True, False, True], "a plateau of two epochs behind the first loss, then patience again"
    assert bool((ops[3] == LifecycleOp.GERMINATE).all())
    improving = Heuristic(HeuristicConfig(patience=2, progress=0.05))
    assert view.facts is not None
    for clock in range(8):
        scores = torch.full_like(view.facts.scores, 0.8**clock)
        moved = dataclasses.replace(view, clock=torch.full_like(view.clock, clock),
                                    facts=dataclasses.replace(view.facts, scores=scores))
        assert bool((improving(moved)[:, 0] == LifecycleOp.WAIT).all())


def test_it_does_not_grow_what_could_not_be_kept_in_time() -> None:
    policy, view = Heuristic(HeuristicConfig(patience=2)), world().view()
    late = [stalled(dataclasses.replace(view, horizon=torch.full_like(view.horizon, 8)), clock) for clock in range(4, 8)]
    assert all(bool((actions[:, 0] == LifecycleOp.WAIT).all()) for actions in decisions(policy, [view, *late]))


def test_a_price_makes_it_choose_smaller_seeds() -> None:
    sizes = []
    for price in (0.0, 5e-5):
        policy, view = Heuristic(HeuristicConfig(patience=2)), world().view()
        view = dataclasses.replace(view, price=torch.full_like(view.price, price))
        grown = decisions(policy, [view, *(stalled(view, clock) for clock in range(1, 4))])[-1]
        assert bool((grown[:, 0] == LifecycleOp.GERMINATE).all())
        assert view.facts is not None
        sizes.append(float(view.facts.prices[grown[:, Head.SLOT], grown[:, Head.BLUEPRINT], 0].float().mean()))
    assert 0 < sizes[1] < sizes[0]
    view = dataclasses.replace(world().view(), price=torch.full((4,), 1.0))
    policy = Heuristic(HeuristicConfig(patience=2))
    assert not any(bool(actions[:, 0].any()) for actions in decisions(policy, [view, *(stalled(view, c) for c in range(1, 6))]))


def test_previews_choose_the_slot_and_the_blueprint() -> None:
    policy, view = Heuristic(HeuristicConfig(patience=2)), world(previews=PreviewConfig(every=1, steps=1)).view()
    assert view.facts is not None
    assert view.facts.candidates is not None
    known = torch.ones_like(view.facts.candidates.known)
    value = torch.zeros_like(view.facts.candidates.value)
    value[:, 1, 2] = 3.0
    candidates = dataclasses.replace(view.facts.candidates, value=value, known=known)
    view = dataclasses.replace(view, facts=dataclasses.replace(view.facts, candidates=candidates))
    grown = decisions(policy, [view, *(stalled(view, clock) for clock in range(1, 4))])[-1]
    assert grown[:, [Head.OP, Head.SLOT, Head.BLUEPRINT]].tolist() == [[LifecycleOp.GERMINATE, 1, 2]] * 4


def holding(change: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]], slot: int = 1) -> torch.Tensor:
    """What it does with seeds that HOLD in one slot, with a contribution (value, error) [N, S]."""
    env = world()
    blueprint = torch.tensor([[-1, 3] if slot else [3, -1]] * 4)
    env.population.install(torch.arange(4), blueprint, torch.zeros_like(blueprint), torch.ones(4, 2))
    env.step(torch.tensor([env.spec.action(LifecycleOp.WAIT)]).repeat(4, 1))
    view = env.view()
    assert view.facts is not None
    assert bool((view.seeds.stage[:, slot] == SeedStage.HOLDING).all())
    value, error = change(torch.zeros(4, 2), torch.zeros(4, 2))
    evidence = dataclasses.replace(view.facts.contribution, value=value, standard_error=error)
    return Heuristic()(dataclasses.replace(view, facts=dataclasses.replace(view.facts, contribution=evidence)))


@pytest.mark.parametrize("slot", [0, 1])
def test_it_keeps_what_pays_and_prunes_what_does_not(slot: int) -> None:
    kept = holding(lambda value, error: (value + 0.5, error + 0.01), slot)
    assert kept[:, :2].tolist() == [[LifecycleOp.FOSSILIZE, slot]] * 4
    pruned = holding(lambda value, error: (value - 0.5, error + 0.01), slot)
    assert pruned[:, :2].tolist() == [[LifecycleOp.PRUNE, slot]] * 4
    unsure = holding(lambda value, error: (value + 0.05, error + 0.5), slot)
    assert unsure[:, 0].tolist() == [LifecycleOp.WAIT] * 4


def test_it_manages_every_slot_over_an_episode() -> None:
    env = world(16, horizon=30, price=0.0)
    trace = play(env, Heuristic(), env.family.scenarios(16))
    slots = trace.actions[..., Head.SLOT][trace.actions[..., 0] != LifecycleOp.WAIT]
    assert set(slots.tolist()) == {0, 1}
    assert bool(env.population.life.at(SeedStage.FOSSILIZED).any())
