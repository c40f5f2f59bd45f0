"""Observations and masks of a living environment."""

import dataclasses
import math

import pytest
import torch

from esper.kasmina.lifecycle import expand_actions
from esper.leyline import (
    SCORES,
    TEMPOS,
    ActionSpec,
    EsperError,
    Field,
    Head,
    InvalidStateMachineError,
    LifecycleOp,
    Observation,
    ObservationSpec,
    SeedStage,
    View,
)
from esper.tamiyo import (
    OBSERVATION,
    ActionDistribution,
    ActionLogits,
    ActionMasks,
    Normaliser,
    Random,
    action_masks,
    observe,
)
from esper.tamiyo.controller import PolicyInput
from esper.tolaria import Kind, MorphogeneticEnv, PreviewConfig
from tests.minds import SPEC, every_action, random_masks
from tests.workshop import toy_env, toy_family


def grown(rows: int = 12, epochs: int = 5, **options: object) -> MorphogeneticEnv:
    env = toy_env(rows, **options)
    env.reset(env.family.scenarios(rows))
    for _ in range(epochs):
        env.step(Random(3)(env.view()))
    return env


def column(part: str, name: str, seen: Observation) -> torch.Tensor:
    at = 0
    for field in getattr(OBSERVATION, part):
        if field.name == name:
            return getattr(seen, part)[..., at : at + field.width]
        at += field.width
    raise KeyError(name)


@pytest.mark.parametrize("compact", [False, True])
def test_what_can_be_expressed_is_what_the_lifecycle_accepts(compact: bool) -> None:
    """Every action of the space, in every row of a grown population: possible if and only if it is legal, and has an effect."""
    options = {"spec": ActionSpec.compact(2, toy_env(1).spec.blueprints)} if compact else {}
    env = grown(16, **options)
    view, spec = env.view(), env.spec
    masks = action_masks(view)
    actions = torch.tensor(list(every_action(spec)))
    checked = 0
    for row in range(env.rows):
        mine = _repeated(masks, row, len(actions))
        distribution = ActionDistribution(spec, ActionLogits.flat(spec, mine), mine, validate=False)
        said = distribution.score(actions).joint > -1000
        for number, action in enumerate(actions.tolist()):
            life = env.population.life
            full = torch.tensor([env.spec.action(LifecycleOp.WAIT)]).repeat(env.rows, 1)
            full[row] = torch.tensor(action)
            try:
                life.check(expand_actions(spec, full))
                legal = not bool(view.done[row]) or action[0] == 0
            except InvalidStateMachineError:
                legal = False
            assert bool(said[number]) == (legal and not _pointless(env, row, action)), (row, action)
            checked += legal
    assert checked > 100


def _repeated(masks: ActionMasks, row: int, count: int) -> ActionMasks:
    named = {name: mask[row].expand(count, *mask.shape[1:]) for name, mask in masks.named().items()}
    return ActionMasks(named["op"], named["slot"], {p: named[n] for p, n in zip(masks.values, list(named)[2:], strict=True)})


def _pointless(env: MorphogeneticEnv, row: int, action: list[int]) -> bool:
    """A seed that computes nothing, or another name for an action."""
    chosen = dict(zip((head.name.lower() for head in env.spec.heads), action, strict=True))
    op, slot = env.spec.ops[chosen["op"]], chosen["slot"]
    if op is LifecycleOp.GERMINATE and env.spec.blueprints[chosen["blueprint"]] == "noop":
        return True
    tempo = TEMPOS[chosen.get("tempo", env.spec.defaults[Head.TEMPO])]
    ramp = min(tempo, 2) if LifecycleOp.SET_ALPHA_TARGET in env.spec.ops else tempo
    if op is LifecycleOp.GERMINATE and int(env.scenarios.horizon[row] - env.clock[row]) < 1 + ramp + 1 + 1:
        return True  # one epoch to learn, the ramp, one to hold, and one that it is kept in
    at_once = chosen.get("alpha_speed", 0) == 0
    if op is LifecycleOp.PRUNE and float(env.population.life.alpha[row, slot]) == 0 and not at_once:
        return True
    return op in (LifecycleOp.PRUNE, LifecycleOp.SET_ALPHA_TARGET) and at_once and chosen.get("alpha_curve", 0) != 0


@pytest.mark.parametrize("full", [False, True])
def test_a_seed_born_as_late_as_the_masks_allow_is_kept(full: bool) -> None:
    """And an epoch later the masks do not allow it: the count of epochs is exact, also where a ramp can be cut short."""
    family = toy_family(horizons=(8,))
    spec = (ActionSpec.full if full else ActionSpec.decisive)(2, toy_env(1).spec.blueprints)
    env, latest = toy_env(4, family, spec=spec), 5 if full else 6
    env.reset(family.scenarios(4))
    germinate, keep = spec.ops.index(LifecycleOp.GERMINATE), spec.ops.index(LifecycleOp.FOSSILIZE)
    plan = {latest: spec.action(LifecycleOp.GERMINATE, slot=0, blueprint="norm"), 1: spec.action(LifecycleOp.FOSSILIZE, slot=0)}
    if full:
        plan |= {4: spec.action(LifecycleOp.ADVANCE, slot=0),
                 3: spec.action(LifecycleOp.SET_ALPHA_TARGET, slot=0, alpha_target=1.0, alpha_speed=0)}
    for left in range(8, 0, -1):
        masks = action_masks(env.view())
        assert bool(masks.op[:, germinate].all()) == (left >= latest)
        assert left > 1 or bool(masks.op[:, keep].all()), "the last decision can keep it"
        env.step(torch.tensor([plan.get(left, spec.action(LifecycleOp.WAIT))]).repeat(4, 1))
    assert bool((env.population.life.stage[:, 0] == SeedStage.FOSSILIZED).all())


def test_rows_that_are_done_can_only_wait() -> None:
    env = grown(8, epochs=8)
    assert bool(env.done.all())
    masks = action_masks(env.view())
    assert masks.op.sum() == 8
    assert bool(masks.op[:, 0].all())


@pytest.mark.parametrize(("change", "message"), [
    (lambda m: m | {"slot": m["slot"][:, :1]}, r"mask 'slot' has shape \[4, 1, 3\]; expected \[4, 6, 3\]"),
    (lambda m: m | {"op": m["op"][0]}, r"mask 'op' has shape \[6\]; expected \[4, 6\]"),
    (lambda m: m | {"op": m["op"].float()}, r"mask 'op' is torch.float32 on cpu; expected torch.bool on cpu"),
    (lambda m: m | {"op": torch.zeros_like(m["op"])}, r"mask 'op' allows nothing at \[0\]"),
    (lambda m: m | {"op": torch.ones_like(m["op"]), "slot": torch.zeros_like(m["slot"])}, r"mask 'slot' allows nothing"),
    (lambda m: m | {"germinate.blueprint": torch.zeros_like(m["germinate.blueprint"]), "slot": torch.ones_like(m["slot"])},
     r"mask 'germinate.blueprint' allows nothing"),
])
def test_bad_masks_are_refused_by_name(change: object, message: str) -> None:
    masks = random_masks(SPEC, 4, torch.Generator().manual_seed(0))
    changed = ActionMasks.from_named(SPEC, change(masks.named()))  # type: ignore[operator]
    with pytest.raises(EsperError, match=message):
        changed.check(SPEC, (4,), torch.device("cpu"))
    masks.check(SPEC, (4,), torch.device("cpu"))


def test_observations_follow_their_spec_and_miss_nothing_silently() -> None:
    env = toy_env(6)
    env.reset(env.family.scenarios(6))
    first = observe(env.view())
    assert tuple(part.shape[-1] for part in first) == OBSERVATION.widths
    assert all(bool(part.isfinite().all()) for part in first)
    for name in ("measured", "scores", "gap", "moving", "slopes"):
        assert bool((column("row", name, first) == 0).all()), "nothing has been measured"
    measured = env.step(Random(1)(env.view()))
    second = observe(env.view())
    assert bool((column("row", "measured", second) == 1).all())
    assert bool((column("row", "moving", second) == 0).all())
    on = measured.evidence.all_on
    latest = torch.stack([on.loss, on.score, on.smooth, measured.train_loss], 1)
    torch.testing.assert_close(column("row", "scores", second), latest)
    env.step(Random(1)(env.view()))
    third = observe(env.view())
    torch.testing.assert_close(column("row", "slopes", third), column("row", "scores", third) - latest)
    assert bool((column("candidate", "previewed", third) == 0).all()), "nobody asked for previews"


def test_fields_of_a_row_are_what_their_names_say() -> None:
    """Row by row from the view, in plain numbers: the clock, the gap, and both prices in the cost."""
    env = grown(8, family=toy_family(flop_prices=(0.5,), prices=(1e-4,), horizons=(6, 9)))
    view = env.view()
    facts, seen = view.facts, observe(view)
    assert facts is not None
    params = float(facts.host.params)
    assert bool((facts.spent > 0).any())
    for row in range(8):
        loss, _, _, train_loss = facts.scores[row].tolist()
        left, horizon = int(view.horizon[row] - view.clock[row]), int(view.horizon[row])
        size = float(facts.costs[row, :, 0].sum()) / params
        expected = {"epochs_left": math.log(1 + left) / math.log(31),
                    "horizon": math.log(1 + horizon) / math.log(31),
                    "progress": int(view.clock[row]) / horizon, "gap": loss - train_loss,
                    "price": 1e-4 * params, "flop_price": 0.5, "size": size, "spent": float(facts.spent[row]),
                    "cost": 1e-4 * params * size + 0.5 * float(facts.spent[row])}
        found = {name: float(column("row", name, seen)[row, 0]) for name in expected}
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert len({int(left) for left in view.horizon - view.clock}) > 1, "clock and epochs left differ"


def test_a_ramp_shows_how_far_it_has_to_go() -> None:
    spec = ActionSpec.full(2, toy_env(1).spec.blueprints)
    env = toy_env(2, toy_family(horizons=(12,)), spec=spec)
    env.reset(env.family.scenarios(2))
    wait, longest = spec.action(LifecycleOp.WAIT), max(TEMPOS)
    plan = [spec.action(LifecycleOp.GERMINATE, slot=0, blueprint="norm", tempo=longest), wait,
            spec.action(LifecycleOp.ADVANCE, slot=0), *[wait] * (longest - 1)]
    shown = []
    for action in plan:
        env.step(torch.tensor([action, wait]))
        seen = observe(env.view())
        left, direction = (column("slot", name, seen)[..., 0] for name in ("ramp_left", "ramp_direction"))
        shown.append((float(left[0, 0]), float(direction[0, 0])))
        assert bool((left[1] == 0).all()), "nothing ramps there"
        assert float(left[0, 1]) == 0
    ramp = [((longest - done) / longest, 1.0) for done in range(1, longest)]
    assert shown == [(0.0, 0.0), (0.0, 0.0), *ramp, (0.0, 0.0)]


def test_draws_depend_on_scenario_seed_and_clock_and_rows_that_are_done_wait() -> None:
    env = grown(6, epochs=6)
    view = env.view()
    assert {*view.done.tolist()} == {True, False}

    def shown(view: View, seed: int = 0) -> PolicyInput:
        return PolicyInput.of(view, (seed,), torch.device("cpu"))

    first = shown(view)
    assert torch.equal(first.valid, ~view.done)
    assert torch.equal(first.reset, view.clock == 0)
    assert torch.equal(first.u, shown(view).u)
    changes = {"clock": view.clock - 1, "luck": view.luck + 1}
    others = [shown(dataclasses.replace(view, **{name: value})).u for name, value in changes.items()]
    for other in (*others, shown(view, seed=1).u):
        assert bool((other != first.u).all())
    assert first.u.unique().numel() == first.u.numel()


def test_a_target_that_is_not_chosen_must_be_free_too() -> None:
    """A spec without the target's head always names the default; a seed that holds it cannot take it."""
    names, target = toy_env(1).spec.blueprints, SPEC.defaults[Head.ALPHA_TARGET]
    spec = ActionSpec(2, names, heads=(Head.OP, Head.SLOT, Head.BLUEPRINT, Head.ALPHA_SPEED))
    env = toy_env(4, toy_family(horizons=(8,)), spec=spec)
    env.reset(env.family.scenarios(4))
    view, number = env.view(), spec.ops.index(LifecycleOp.SET_ALPHA_TARGET)
    verdicts, free = torch.ones_like(view.verdicts), torch.ones_like(view.free_targets)
    free[0, 1, target], free[2, :, target] = False, False
    masks = action_masks(dataclasses.replace(view, verdicts=verdicts, free_targets=free))
    assert torch.equal(masks.slot[:, number], free[..., target])
    assert masks.op[:, number].tolist() == [True, True, False, True]


def test_scaled_fields_are_cut_at_the_limit() -> None:
    spec = ObservationSpec((Field("a", 1, True), Field("b")), (Field("s"),), (Field("c"),))

    def seen(values: list[float]) -> Observation:
        row = torch.tensor([[value, value] for value in values])
        return Observation(row, torch.zeros(len(values), 1, 1), torch.zeros(len(values), 1, 1, 1))

    for limit in (5.0, 2.0):
        normaliser = Normaliser(spec) if limit == 5 else Normaliser(spec, limit=limit)
        normaliser.update(seen([-1.0, 1.0] * 50))
        row = normaliser(seen([-100.0, -1.0, 1.5, 100.0])).row
        torch.testing.assert_close(row[:, 0], torch.tensor([-limit, -1.0, 1.5, limit]))
        assert row[:, 1].tolist() == [-100.0, -1.0, 1.5, 100.0], "what is not scaled passes"


def test_evidence_enters_with_its_bit() -> None:
    env = grown(24)
    view = env.view()
    assert view.facts is not None
    seen = observe(view)
    known = view.facts.contribution.known
    assert bool(known.any())
    assert not bool(known.all())
    assert torch.equal(column("slot", "contributes", seen)[..., 0].bool(), known)
    torch.testing.assert_close(column("slot", "contribution", seen)[..., 0][known], view.facts.contribution.value[known])
    assert bool((column("slot", "contribution", seen)[..., 0][~known] == 0).all())
    planted = column("slot", "planted", seen)[..., 0].bool()
    assert torch.equal(planted, env.population.life.planted)
    chosen = view.facts.descriptors[torch.arange(2), view.seeds.blueprint.clamp(min=0)]
    torch.testing.assert_close(column("slot", "descriptor", seen)[planted], chosen[planted])


def test_previews_enter_where_the_environment_makes_them() -> None:
    env = toy_env(6, toy_family(horizons=(10,)), previews=PreviewConfig(every=2, steps=4))
    env.reset(env.family.scenarios(6))
    bits, spent = [], []
    for epoch in range(4):
        if epoch:
            env.step(torch.tensor([env.spec.action(LifecycleOp.WAIT)]).repeat(6, 1))
        seen = observe(env.view())
        bits.append(column("candidate", "previewed", seen)[..., 0].bool())
        spent.append(env.spent.clone())
    real = torch.tensor([name != "noop" for name in env.spec.blueprints])
    assert not bool(bits[0].any())
    assert torch.equal(bits[1], real.expand(6, 2, -1))
    assert bool((column("candidate", "drop", observe(env.view()))[..., 0][bits[3]] != 0).any())
    assert torch.equal(spent[0], torch.zeros(6, dtype=torch.float64))
    assert bool((spent[1] > 0).all()), "previews are paid for"
    assert torch.equal(spent[2], spent[1])
    assert bool((spent[3] > spent[2]).all()), "the next comes two epochs later"
    env.step(torch.tensor([env.spec.action(LifecycleOp.GERMINATE, slot=0, blueprint="norm")]).repeat(6, 1))
    after = column("candidate", "previewed", observe(env.view()))[..., 0].bool()
    assert not bool(after[:, 0].any()), "the slot is taken"
    assert torch.equal(after[:, 1], bits[3][:, 1])
    env.reset(env.family.scenarios(1), torch.tensor([0]))
    assert not bool(column("candidate", "previewed", observe(env.view()))[0].any())


def test_nothing_hidden_enters_an_observation() -> None:
    """Neither which kind of data a row has, nor its key, nor a twin or the test split: a view has no place for them."""
    kinds = (Kind("plain"), Kind("noisy", noise=3.0, label_noise=0.5))
    env = toy_env(8, toy_family(kinds=kinds, prices=(1e-4,), horizons=(6,)))
    scenarios = env.family.scenarios(8)
    assert set(scenarios.kind.tolist()) == {0, 1}
    env.reset(scenarios)
    for part in observe(env.view()):
        assert torch.equal(part, part[:1].expand_as(part)), "before training rows look alike whatever is hidden"
    env.step(Random(0)(env.view()))
    view = env.view()
    moved = dataclasses.replace(view, luck=view.luck + 1)
    assert all(torch.equal(a, b) for a, b in zip(observe(view), observe(moved), strict=True))
    names = {f.name for f in dataclasses.fields(View)} | {f.name for f in dataclasses.fields(view.facts)}  # type: ignore[arg-type]
    assert not names & {"kind", "kinds", "twin", "test", "scenario", "lr", "impairment"}


def test_observations_belong_to_their_rows() -> None:
    env = grown(6)
    seen = observe(env.view())
    order = torch.tensor([3, 1, 5, 0, 2, 4])
    view = env.view()

    def permuted(value: object) -> object:
        if isinstance(value, torch.Tensor):
            return value[order] if value.shape[:1] == (6,) else value
        if dataclasses.is_dataclass(value) and not isinstance(value, (ActionSpec, type)):
            return dataclasses.replace(value, **{f.name: permuted(getattr(value, f.name)) for f in dataclasses.fields(value)})
        return value

    moved = observe(permuted(view))  # type: ignore[arg-type]
    for a, b in zip(seen, moved, strict=True):
        assert torch.equal(a[order], b)


def test_scaling_counts_every_measured_value_once() -> None:
    row = (Field("flag"), Field("a", 2, True), Field("b", 1, True, "flag"))
    spec = ObservationSpec(row, (Field("s", 1, True),), (Field("c"),))
    generator = torch.Generator().manual_seed(0)
    normaliser, rows = Normaliser(spec), []
    for count in (3, 50, 7):
        part = 5 + 3 * torch.randn(count, 4, generator=generator)
        part[:, 0] = (torch.rand(count, generator=generator) < 0.5).float()
        part[:, 3] *= part[:, 0]
        rows.append(part)
        normaliser.update(Observation(part, torch.randn(count, 2, 1, generator=generator), torch.zeros(count, 2, 2, 1)))
    every = torch.cat(rows)
    out = normaliser(Observation(every, torch.zeros(60, 2, 1), torch.full((60, 2, 2, 1), 9.0)))
    known = every[:, 0] > 0
    expected = (every - every.mean(0)) / every.std(0, correction=0)
    torch.testing.assert_close(out.row[:, 1:3], expected[:, 1:3], atol=1e-5, rtol=1e-5)
    third = (every[known, 3] - every[known, 3].mean()) / every[known, 3].std(correction=0)
    torch.testing.assert_close(out.row[known, 3], third, atol=1e-5, rtol=1e-5)
    assert bool((out.row[~known, 3] == 0).all())
    assert torch.equal(out.row[:, 0], every[:, 0])
    assert bool((out.candidate == 9).all()), "flags pass as they are"
    again = Normaliser(spec)
    again.load(normaliser.tensors())
    assert torch.equal(again(Observation(every, torch.ones(60, 2, 1), torch.zeros(60, 2, 2, 1))).row, out.row)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_number_that_is_none_is_refused_before_anything_is_counted(value: float) -> None:
    row, slot = (Field("flag"), Field("a", 2, True)), (Field("s", 1, True),)
    spec = ObservationSpec(row, slot, (Field("c", 1, True),))
    normaliser = Normaliser(spec)
    clean = Observation(torch.randn(4, 3), torch.randn(4, 2, 1), torch.randn(4, 2, 2, 1))
    normaliser.update(clean)
    for name, field in (("row", "a"), ("slot", "s"), ("candidate", "c")):
        broken = Observation(*(part.clone() for part in clean))
        getattr(broken, name)[1, ..., -1] = value
        before = [stat.clone() for stat in normaliser.stats]
        with pytest.raises(EsperError, match=f"the {name} field '{field}' of an observation is not finite"):
            normaliser.update(broken)
        assert all(torch.equal(a, b) for a, b in zip(before, normaliser.stats, strict=True))
        rows = torch.tensor([True, False, True, True])
        normaliser.update(broken, rows)  # a row that is not counted may hold anything
        twin = Normaliser(spec)
        twin.load(dict(zip(Observation._fields, before, strict=True)))
        twin.update(Observation(*(part[rows] for part in clean)))
        assert all(torch.equal(a, b) for a, b in zip(twin.stats, normaliser.stats, strict=True))


def test_what_is_kept_by_another_field_is_compared_with_its_own() -> None:
    """After one epoch losses are high everywhere; what is low for one epoch in is high for ten epochs in."""
    row = (Field("epoch", 3), Field("loss", 1, True, by="epoch"), Field("size", 1, True))
    spec = ObservationSpec(row, (Field("s"),), (Field("c"),))
    generator, normaliser = torch.Generator().manual_seed(0), Normaliser(spec)

    def seen(epoch: int, loss: torch.Tensor) -> Observation:
        row = torch.cat([torch.eye(3)[epoch].expand(len(loss), 3), loss[:, None], torch.arange(len(loss))[:, None]], 1)
        return Observation(row, torch.zeros(len(loss), 1, 1), torch.zeros(len(loss), 1, 1, 1))

    early, late = 2 + 0.1 * torch.randn(40, generator=generator), 1 + 0.5 * torch.randn(40, generator=generator)
    for part in (early[:15], early[15:]):
        normaliser.update(seen(0, part))
    normaliser.update(seen(1, late))
    for epoch, loss in ((0, early), (1, late), (2, late)):  # the third was never met: as the second
        scaled = normaliser(seen(epoch, loss)).row
        torch.testing.assert_close(scaled[:, 3], (loss - loss.mean()) / loss.std(correction=0), atol=1e-4, rtol=1e-4)
        assert torch.equal(scaled[:, :3], seen(min(epoch, 1), loss).row[:, :3])
    assert float(normaliser(seen(0, early)).row[-1, 4]) > 1, "other fields are counted over all epochs"
    with pytest.raises(EsperError, match="one field only"):
        ObservationSpec((Field("a", 2), Field("b", 2), Field("c", by="a"), Field("d", by="b")), (), ())
    with pytest.raises(EsperError, match="a one-hot"):
        ObservationSpec((Field("a"), Field("c", by="a")), (), ())


def test_specs_with_missing_flags_are_refused() -> None:
    with pytest.raises(EsperError, match="flags that exist"):
        ObservationSpec((Field("a", known_by="b"),), (), ())
    with pytest.raises(EsperError, match="flags that exist"):
        ObservationSpec((Field("a", by="b"),), (), ())
    assert len(SCORES) == 4


def test_a_view_without_measurements_cannot_be_observed() -> None:
    env = grown(2, epochs=1)
    with pytest.raises(EsperError, match="nothing measures here"):
        observe(dataclasses.replace(env.view(), facts=None))
