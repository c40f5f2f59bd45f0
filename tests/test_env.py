"""The environment: data per row, evidence, twins, replay, another objective."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from esper.kasmina import Host, blueprints_for
from esper.leyline import ActionSpec, EsperError, Head, LifecycleOp, SeedStage, StateFormatError
from esper.tamiyo import Random, Scripted, Wait, entry
from esper.tolaria import (
    TASKS,
    EnvConfig,
    Episodes,
    Family,
    Kind,
    MorphogeneticEnv,
    PreviewConfig,
    TaskData,
    Twins,
    evaluate,
    play,
    preview_candidates,
    replay,
)
from esper.tolaria.evaluation import plan
from tests.workshop import KINDS, Scenario, columns_of, toy_data, toy_env, toy_family


def test_scenarios_depend_on_their_keys_alone() -> None:
    family = toy_family()
    many, few = family.scenarios(200), family.scenarios(3, start=150)
    for name, column in few.columns().items():
        if name != "luck":
            assert torch.equal(column, getattr(many, name)[150:153]), name
    assert torch.equal(few.luck, many.luck[:3]), "luck depends on the place among those that were drawn, and travels with them"
    assert torch.equal(many.take(torch.tensor([7])).luck, many.luck[[7]])
    assert set(many.kind.tolist()) == set(range(len(KINDS)))
    assert set(many.horizon.tolist()) == {6, 8}
    held_out = family.scenarios(200, "test")
    assert not set(many.key.tolist()) & set(held_out.key.tolist())
    with pytest.raises(EsperError, match="no scenario split 'exam'"):
        family.scenarios(1, "exam")


@pytest.mark.parametrize("options", [{"horizons": ()}, {"batch": 0}, {"task": "cats"}, {"kinds": (Kind("x", label_noise=1.0),)}])
def test_impossible_families_are_refused(options: dict[str, object]) -> None:
    settings = {"name": "bad", "task": "mnist1d", "host": Host("mlp"), "kinds": KINDS} | options
    with pytest.raises(EsperError, match=r"^(family|no task) .*[^.]$"):
        Family(**settings)  # type: ignore[arg-type]


def one_row(kind: Kind, host: Host | None = None, **options: object) -> tuple[torch.Tensor, torch.Tensor, object]:
    """(x [n, inputs], y [n], feed) of one epoch of a single row."""
    family = toy_family(host, kinds=(kind,), **options)
    env = toy_env(1, family)
    env.reset(family.scenarios(1))
    env.feed.begin_epoch(env.clock)
    batches = [env.feed.train(step) for step in range(env.feed.steps)]
    return torch.cat([x[:, 0] for x, _ in batches]), torch.cat([y[:, 0] for _, y in batches]), env.feed


def test_an_epoch_meets_every_sample_once_with_its_label() -> None:
    x, y, _feed = one_row(Kind("plain"))
    data = toy_data(inputs=(40,))
    distance = (x[:, None] - data.x).norm(dim=2)
    assert sorted(distance.argmin(1).tolist()) == list(range(240))
    assert float(distance.amin(1).max()) < 1e-4
    assert torch.equal(y, data.y[distance.argmin(1)])


def test_a_small_training_set_is_cycled_evenly() -> None:
    x, _, feed = one_row(Kind("few", samples=40))
    _, counts = x.unique(dim=0, return_counts=True)
    assert counts.tolist() == [6] * 40
    assert feed.steps == 6


def test_label_noise_reaches_training_labels_alone() -> None:
    _, _, feed = one_row(Kind("wrong", label_noise=0.5))
    changed = float((feed.labels[0] != feed.y).float().mean())
    assert 0.35 < changed < 0.55  # a tenth of the drawn labels is right by luck
    assert torch.equal(feed.validation(0, 120)[1][:, 0], feed.validation_y)


def test_shuffling_permutes_positions_alike_in_both_splits() -> None:
    _, _, feed = one_row(Kind("shuffled", shuffle=True))
    data = toy_data(inputs=(40,))
    moved = feed.validation(0, 120)[0][:, 0]
    assert not torch.equal(moved, data.validation_x)
    assert torch.equal(moved, data.validation_x[:, feed.places[0]])
    assert sorted(feed.places[0].tolist()) == list(range(40))


def test_shifts_roll_each_sample_by_a_fixed_distance() -> None:
    _, _, feed = one_row(Kind("moved", shift=2), Host("conv1d", widths=(4, 4)))
    data = toy_data()
    once, again = (feed.validation(0, 120)[0][:, 0] for _ in range(2))
    assert torch.equal(once, again)
    rolls = [int(torch.stack([(data.validation_x[i].roll(r, 1) - once[i]).abs().max() for r in range(-2, 3)]).argmin()) - 2
             for i in range(120)]
    assert set(rolls) == {-2, -1, 0, 1, 2}
    assert all(torch.equal(data.validation_x[i].roll(r, 1), once[i]) for i, r in enumerate(rolls))


def test_images_move_in_both_directions_and_anew_each_epoch() -> None:
    host = Host("cnn", inputs=(1, 8, 8), widths=(4, 4))
    family = toy_family(host, kinds=(Kind("plain"),), augment=1, batch=240)
    env = toy_env(1, family)
    env.reset(family.scenarios(1))
    seen = []
    for clock in (0, 0, 1):
        env.feed.begin_epoch(torch.tensor([clock]))
        x = env.feed.train(0)[0][:, 0]
        seen.append(x[env.feed._order[:, 0].argsort()])
    data = toy_data(inputs=(1, 8, 8))
    assert torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[0], seen[2])
    rolled = torch.stack([data.x.roll((a, b), (2, 3)) for a in (-1, 0, 1) for b in (-1, 0, 1)])
    matches = (rolled == seen[0]).flatten(2).all(2)  # [9, n]
    assert bool(matches.any(0).all())
    assert bool(matches.any(1).all())


def test_noise_is_fixed_per_sample_and_of_the_stated_size() -> None:
    _, _, feed = one_row(Kind("noisy", noise=0.3))
    data = toy_data(inputs=(40,))
    noise = feed.validation(0, 120)[0][:, 0] - data.validation_x
    assert float(noise.std()) == pytest.approx(0.3, rel=0.05)
    assert torch.equal(feed.validation(0, 120)[0][:, 0] - data.validation_x, noise)
    assert abs(float(torch.corrcoef(noise[:2])[0, 1])) < 0.6


def test_noise_of_validation_samples_is_not_that_of_training_samples() -> None:
    """Else what was fitted to the noise would be worth something on the other split."""
    data = toy_data(inputs=(40,))
    same = replace(data, validation_x=data.x[:120], validation_y=data.y[:120])
    family = toy_family(kinds=(Kind("noisy", noise=0.3),), batch=240)
    env = MorphogeneticEnv(family, 2, same)
    env.reset(family.scenarios(2))
    env.feed.begin_epoch(env.clock)
    order = env.feed._order.argsort(0)  # [n, N]
    x = env.feed.train(0)[0]
    trained = torch.stack([x[order[:, row], row] for row in range(2)], 1)[:120] - data.x[:120, None]
    validated = env.feed.validation(0, 120)[0] - data.x[:120, None]
    held = torch.cat([x for x, _ in env.held_out(data.x[:120], data.y[:120])]) - data.x[:120, None]
    for one, other in ((trained, validated), (validated, held), (trained, held), (trained[:, :1], trained[:, 1:])):
        assert float((one - other).abs().amax(2).min(0).values.min()) > 0.1
    assert float(trained.std()) == pytest.approx(0.3, rel=0.05)


def test_finished_rows_wait_and_are_reset_in_place() -> None:
    env = toy_env(8)
    scenarios = env.family.scenarios(8)
    env.reset(scenarios)
    for _ in range(6):
        measured = env.step(Wait()(env.view()))
    assert torch.equal(measured.done, scenarios.horizon == 6)
    assert 0 < int(measured.done.sum()) < 8
    grow = Wait()(env.view())
    grow[:, Head.OP] = LifecycleOp.GERMINATE
    grow[:, Head.BLUEPRINT] = 1
    with pytest.raises(EsperError, match="is done; reset it or let it WAIT"):
        env.step(grow)
    over = env.done.nonzero().flatten()
    running = (~env.done).nonzero().flatten()
    before = env.population.snapshot(running)
    env.reset(env.family.scenarios(len(over), start=100), over)
    for name, tensor in env.population.snapshot(running).items():
        assert torch.equal(tensor, before[name]), name
    assert env.clock[over].tolist() == [0] * len(over)
    assert env.clock[running].tolist() == [6] * len(running)


def test_a_finished_row_keeps_what_it_delivered() -> None:
    env = toy_env(8)
    env.reset(env.family.scenarios(8))
    for _ in range(6):
        measured = env.step(Random(1)(env.view()))
    over = env.done.nonzero().flatten()
    then, state = {n: t[over].clone() for n, t in measured.tensors().items()}, env.population.snapshot(over)
    for _ in range(2):
        measured = env.step(Wait()(env.view()))
    for name, tensor in env.population.snapshot(over).items():
        assert name == "lr" or torch.equal(tensor, state[name]), name
    for name, tensor in measured.tensors().items():
        assert torch.equal(tensor[over].nan_to_num(), then[name].nan_to_num()), name
    assert bool(env.done.all())


@pytest.mark.parametrize("kind", ["mlp", "conv1d"])
def test_rows_whose_episode_is_over_are_not_trained_on(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the others do is what they did when everybody trained to the end, and so is all that is reported."""
    host = Host(kind, (40,) if kind == "mlp" else (1, 40), (4, 4, 4))
    family = toy_family(host, kinds=KINDS[:2], horizons=(5, 8))
    scenarios = family.scenarios(9)
    long = int((scenarios.horizon == 8).sum())
    assert 0 < long < 9
    widths: list[int] = []

    def played() -> Episodes:
        env = toy_env(9, family, dtype="float64")
        train = env.population.train_step

        def watched(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            widths.append(x.shape[1])
            return train(x, y)

        env.population.train_step = watched  # type: ignore[method-assign]
        return play(env, Random(seed=3), scenarios)

    rested = played()
    steps = len(widths) // 8
    assert widths == [9] * (5 * steps) + [long] * (3 * steps)
    monkeypatch.setattr(MorphogeneticEnv, "_resting", lambda env: torch.zeros(9, dtype=torch.bool))
    whole = played()
    assert set(widths[8 * steps :]) == {9}
    for epoch in (4, 7):
        assert bool(whole.measured["seed_params"][epoch].any()), "seeds lived when rows began to rest, and to the end"
    for name, tensor in whole.tensors().items():
        torch.testing.assert_close(rested.tensors()[name], tensor, rtol=0, atol=1e-6, equal_nan=True, msg=name)


def test_a_new_episode_knows_nothing_of_the_last_one() -> None:
    env = toy_env(4)
    env.reset(env.family.scenarios(4))
    last = env.step(Wait()(env.view()))
    before = last.evidence.all_on.loss.clone()
    env.reset(env.family.scenarios(1, start=50), torch.tensor([2]))
    assert torch.equal(last.evidence.all_on.loss, before)  # what was handed out stays as it was
    env.population.banks[0].weights[2] = float("nan")
    measured = env.step(Wait()(env.view()))
    assert bool(measured.rolled_back[2])
    classes = env.family.host.classes
    assert float(measured.evidence.all_on.loss[2]) == pytest.approx(math.log(classes)), "it has learned nothing: chance"
    assert float(measured.evidence.delivered.score[2]) == pytest.approx(1 / classes)
    assert not bool(measured.evidence.contribution.known[2].any())


def test_policies_see_price_and_horizon_but_no_key_to_the_rest() -> None:
    env = toy_env(6)
    scenarios = env.family.scenarios(6)
    env.reset(scenarios)
    view = env.view()
    assert torch.equal(view.price, scenarios.price)
    assert torch.equal(view.horizon, scenarios.horizon)
    assert not set(view.luck.tolist()) & set(scenarios.key.tolist())


def test_waiting_episodes_equal_their_twin_exactly() -> None:
    env, other = toy_env(10), toy_env(10)
    scenarios = env.family.scenarios(10)
    trace = play(env, Wait(), scenarios)
    shuffled = torch.randperm(10, generator=torch.Generator().manual_seed(0))
    twins = Twins(other)
    paths = twins(scenarios.take(shuffled))  # other places in the population
    for row, place in enumerate(shuffled.tolist()):
        end = int(scenarios.horizon[place])
        mine = torch.stack([trace.measured[f"all_on.{name}"][:end, place] for name in ("loss", "score", "smooth")], 1)
        assert torch.equal(mine, paths[row, :end])
        assert bool(paths[row, end:].isnan().all())


def test_twins_are_computed_once_and_kept(tmp_path: Path) -> None:
    env = toy_env(4)
    scenarios = env.family.scenarios(6)
    twins = Twins(env)
    paths = twins(scenarios)
    assert len(twins.known) == 6
    twins.save(tmp_path / "twins.safetensors")
    again = Twins(toy_env(4))
    again.load(tmp_path / "twins.safetensors")
    again.env = None  # type: ignore[assignment]  # nothing may be played
    assert torch.equal(again(scenarios).nan_to_num(), paths.nan_to_num())
    with pytest.raises(StateFormatError, match="twins of another family"):
        Twins(toy_env(4, toy_family(horizons=(3,)))).load(tmp_path / "twins.safetensors")


def test_growth_changes_a_row_and_not_its_neighbours() -> None:
    def run(grows: bool) -> Episodes:
        env = toy_env(6)
        script = [entry(env.spec, 0, LifecycleOp.GERMINATE, slot=0, blueprint="mlp_small"),
                  entry(env.spec, 1, LifecycleOp.ADVANCE, slot=0)]
        return play(env, Scripted([script if row == 2 and grows else [] for row in range(6)]), env.family.scenarios(6))

    grown, bare = run(True), run(False)
    others = torch.tensor([0, 1, 3, 4, 5])
    for name in grown.measured:
        assert torch.equal(grown.measured[name][:, others], bare.measured[name][:, others]), name
    assert not torch.equal(grown.measured["all_on.loss"][:, 2], bare.measured["all_on.loss"][:, 2])
    assert float(grown.measured["spent"][-1, 2]) > 0
    assert bare.measured["spent"].abs().sum() == 0


def grown_env(rows: int = 10, epochs: int = 5, **options: object):  # type: ignore[no-untyped-def]
    """Rows with seeds of every age in both slots."""
    env = toy_env(rows, toy_family(horizons=(30,)), **options)
    env.reset(env.family.scenarios(rows))
    policy = Random(1)
    for _ in range(epochs):
        env.step(policy(env.view()))
    return env


def test_evidence_equals_plain_forwards_of_each_network() -> None:
    env = grown_env(24, 8, dtype=torch.float64)
    population, life = env.population, env.population.life
    chunks = list(env.validation())
    evidence = evaluate(population, chunks)
    x, y = (torch.cat(parts) for parts in zip(*chunks, strict=True))

    def probability(alpha: torch.Tensor) -> torch.Tensor:
        logits = population.forward(x, torch.arange(24), alpha)
        return logits.softmax(2).gather(2, y[..., None]).squeeze(2)  # [B, N]

    base = probability(life.alpha)
    torch.testing.assert_close(evidence.all_on.smooth, base.mean(0).float(), rtol=0, atol=1e-6)
    bare = probability(torch.zeros_like(life.alpha)).mean(0).float()
    torch.testing.assert_close(evidence.all_off.smooth, bare, rtol=0, atol=1e-6)
    fossils = torch.where(life.at(SeedStage.FOSSILIZED), life.alpha, 0.0)
    torch.testing.assert_close(evidence.delivered.smooth, probability(fossils).mean(0).float(), rtol=0, atol=1e-6)
    assert int(evidence.contribution.known.sum()) > 5
    assert int(evidence.preview.known.sum()) > 3
    for slot in range(2):
        questions = ((evidence.contribution, torch.zeros(24), 1), (evidence.preview, life.target[:, slot], -1))
        for given, alpha_there, sign in questions:
            alpha = life.alpha.clone()
            alpha[:, slot] = alpha_there
            change = sign * (base - probability(alpha))
            known = given.known[:, slot]
            torch.testing.assert_close(given.value[:, slot][known], change.mean(0)[known].float(), rtol=0, atol=1e-6)
            error = change.std(0)[known].float() / len(x) ** 0.5
            torch.testing.assert_close(given.standard_error[:, slot][known], error, rtol=1e-3, atol=1e-7)
            assert not bool(given.value[:, slot][~known].any())
    assert torch.equal(evidence.contribution.known, (life.alpha > 0) & life.planted)
    assert torch.equal(evidence.preview.known, life.incubating)


def test_equal_networks_are_measured_once() -> None:
    env = toy_env(3, toy_family(horizons=(30,)))
    env.reset(env.family.scenarios(3))
    assert len(plan(env.population).env) == 0
    env.population.install(torch.tensor([1, 2]), torch.tensor([[4, -1], [4, 4]]), torch.zeros(2, 2, dtype=torch.int64),
                           torch.full((2, 2), 0.5))
    assert plan(env.population).env.tolist() == [1, 2, 2, 2]  # one seed: off is all off; two: each off, both off


def test_an_identity_seed_contributes_exactly_nothing() -> None:
    env = toy_env(4, toy_family(horizons=(30,)))
    env.reset(env.family.scenarios(4))
    env.population.install(torch.arange(4), torch.tensor([[4, 4]] * 4), torch.zeros(4, 2, dtype=torch.int64), torch.ones(4, 2))
    evidence = evaluate(env.population, env.validation())  # seeds are the zero function at birth
    assert bool(evidence.contribution.known.all())
    assert not bool(evidence.contribution.value.any())
    assert not bool(evidence.contribution.standard_error.any())


def test_leave_one_out_is_the_true_effect_on_an_additive_toy() -> None:
    """A host whose seed adds a known number to the right class's logit: the effect has a closed form."""
    env = toy_env(1, toy_family(Host("mlp", widths=(16,)), horizons=(30,), kinds=(Kind("plain"),)), dtype=torch.float64)
    env.reset(env.family.scenarios(1))
    population = env.population
    number = population.spec.blueprints.index("low_rank")
    population.install(torch.tensor([0]), torch.tensor([[number]]), torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1))
    population.banks[1].weights += 0.3
    evidence = evaluate(population, env.validation())
    x, y = (torch.cat(parts)[:, 0] for parts in zip(*env.validation(), strict=True))
    net = population.extract(0)
    with torch.no_grad():
        whole = net(x.double()).softmax(1).gather(1, y[:, None]).mean()
        net.grafts[0].alpha.fill_(0.0)
        bare = net(x.double()).softmax(1).gather(1, y[:, None]).mean()
    assert float(evidence.contribution.value[0, 0]) == pytest.approx(float(whole - bare), abs=1e-6)
    assert abs(float(whole - bare)) > 1e-3


def test_previews_rank_candidates_and_leave_the_row_alone() -> None:
    env = toy_env(6, toy_family(horizons=(30,), kinds=(Kind("plain"),)))
    env.reset(env.family.scenarios(6))
    env.step(Wait()(env.view()))
    env.population.install(torch.tensor([0]), torch.tensor([[4, -1]]), torch.zeros(1, 2, dtype=torch.int64), torch.ones(1, 2))
    before = {name: tensor.clone() for name, tensor in env.population.tensors().items()}
    previews = preview_candidates(env, steps=12)
    for name, tensor in env.population.tensors().items():
        assert torch.equal(tensor, before[name]), name
    names = env.spec.blueprints
    assert not bool(previews.known[0, 0].any())  # taken
    assert not bool(previews.known[..., names.index("noop")].any())
    assert bool(previews.known[1:, :, names.index("mlp_heavy")].all())
    heavy = previews.value[1:, 0, names.index("mlp_heavy")]
    assert bool((heavy > 2 * previews.standard_error[1:, 0, names.index("mlp_heavy")]).all())  # it does learn
    assert float(env.spent[1]) > float(env.spent[0]) > 0


def test_previews_that_come_too_late_are_not_taken() -> None:
    """A seed needs six epochs to be kept; what nobody can act on is not paid for."""
    family = toy_family(horizons=(12,))
    spec = ActionSpec.decisive(len(family.host.slots), blueprints_for("mlp"))
    env = toy_env(3, family, spec=spec, previews=PreviewConfig(every=3, steps=2))
    env.reset(family.scenarios(3))
    paid = []
    while not bool(env.done.all()):
        before = env.spent.clone()
        env.step(Wait()(env.view()))
        paid.append(bool((env.spent > before).all()))
    assert [epoch + 1 for epoch, did in enumerate(paid) if did] == [1, 4]


def test_nothing_to_preview_is_no_error() -> None:
    env = toy_env(3, toy_family(horizons=(1,)))
    env.reset(env.family.scenarios(3))
    env.step(Wait()(env.view()))
    assert not bool(preview_candidates(env, steps=2).known.any())
    assert not bool(env.spent.any())


def test_random_policy_reaches_fossils_and_only_legal_actions() -> None:
    env = toy_env(64, toy_family(horizons=(20,)))
    trace = play(env, Random(3), env.family.scenarios(64))
    fossilized = (trace.actions[:, :, Head.OP] == LifecycleOp.FOSSILIZE).any(0)
    assert float(fossilized.float().mean()) >= 0.05


def test_random_draws_do_not_depend_on_places() -> None:
    env = toy_env(8)
    scenarios = env.family.scenarios(8)
    env.reset(scenarios)
    there = Random(5)(env.view())
    order = torch.tensor([3, 1, 7, 0, 2, 6, 5, 4])
    env.reset(scenarios.take(order))
    assert torch.equal(Random(5)(env.view()), there[order])


@pytest.mark.parametrize(("preset", "heads"), [(ActionSpec.compact, 4), (ActionSpec.decisive, 3)])
def test_smaller_specs_reach_fossils_too(preset: Callable[..., ActionSpec], heads: int) -> None:
    env = toy_env(64, toy_family(horizons=(20,)), spec=preset(2, blueprints_for("mlp")))
    trace = play(env, Random(2), env.family.scenarios(64))
    assert trace.actions.shape[2] == heads
    keeps = trace.actions[:, :, 0] == env.spec.ops.index(LifecycleOp.FOSSILIZE)
    assert float(keeps.any(0).float().mean()) >= 0.05


def test_replay_is_bit_identical_and_finds_a_change(tmp_path: Path) -> None:
    env = toy_env(8)
    trace = play(env, Random(4), env.family.scenarios(8))
    trace.save(tmp_path / "round.safetensors")
    loaded, header = Episodes.load(tmp_path / "round.safetensors")
    assert {"commit", "torch", "threads", "version"} <= header.keys()
    data = toy_data(inputs=(40,))
    assert replay(loaded, data=data) == []
    assert torch.equal(loaded.utility(), trace.utility())
    assert loaded.decisions() == trace.decisions() != []
    assert loaded.moves == trace.moves != ()
    assert loaded.config == env.config
    loaded.measured["all_on.loss"][3, 5] += 1e-6
    assert replay(loaded, data=data) == ["all_on.loss, epoch 4, row 5"]
    longer = replace(trace, actions=torch.cat([trace.actions, trace.actions[-1:]]))
    assert replay(longer, data=data)[0] == "length, epoch 9, every row"


def test_an_episode_is_recorded_as_it_was_played() -> None:
    env = toy_env(6, spec=ActionSpec.decisive(2, blueprints_for("mlp")))
    seen = []
    trace = play(env, Random(4), env.family.scenarios(6), watch=lambda measured: seen.append(measured.clock.clone()))
    assert len(trace) == 6
    assert len(seen) == len(trace.actions) == 8
    assert torch.equal(torch.stack(seen), trace.measured["clock"])
    wait, grow = (env.spec.ops.index(op) for op in (LifecycleOp.WAIT, LifecycleOp.GERMINATE))
    decisions = trace.decisions()
    assert len(decisions) == int((trace.actions[..., 0] != wait).sum()) > 0
    for decision in decisions:
        op, slot, blueprint = trace.actions[decision.epoch, decision.scenario].tolist()
        assert (decision.op, decision.slot) == (env.spec.ops[op].name, slot)
        assert decision.blueprint == (env.spec.blueprints[blueprint] if op == grow else None)
    births = [move for move in trace.moves if move[4] == "GERMINATED"]
    assert {(epoch - 1, row, slot) for epoch, row, slot, *_ in births} == {
        (d.epoch, d.scenario, d.slot) for d in decisions if d.op == "GERMINATE"}
    kept, price = trace.params.float(), torch.tensor(0.5)
    expected = trace.delivered.score - price * kept - 2 * trace.spent
    torch.testing.assert_close(trace.utility(price, 2.0), expected)
    torch.testing.assert_close(trace.utility(), trace.delivered.score - trace.scenarios.price * kept)
    short = play(env, Random(4), env.family.scenarios(6), most=2)
    assert torch.equal(short.actions, trace.actions[:2])


def test_fossils_to_begin_with_are_as_untrained_as_their_hosts() -> None:
    env = toy_env(3, toy_family(kinds=(Kind("plain"),)))
    seeds = torch.tensor([[-1, -1], [4, -1], [4, 4]])
    held = toy_data(inputs=(40,))
    samples = (held.validation_x[:50], held.validation_y[:50])
    grown = play(env, Wait(), env.family.scenarios(3), fossils=seeds, samples=lambda: env.held_out(*samples))
    assert torch.equal(grown.blueprint, seeds)
    assert (grown.params > 0).tolist() == (grown.flops > 0).tolist() == (grown.spent > 0).tolist() == [False, True, True]
    assert int(grown.params[2]) == 2 * int(grown.params[1])
    assert bool(((grown.delivered.score * 50).round() - grown.delivered.score * 50).abs().max() < 1e-4), "of 50 samples"
    bare = play(env, Wait(), env.family.scenarios(3))
    assert torch.equal(bare.measured["all_on.loss"][:, 0], grown.measured["all_on.loss"][:, 0])
    assert not torch.equal(bare.measured["all_on.loss"][:, 1], grown.measured["all_on.loss"][:, 1])


def test_one_config_makes_an_environment() -> None:
    family = toy_family()
    config = EnvConfig(family, previews=PreviewConfig(2, 3))
    env = MorphogeneticEnv(config, 2, toy_data(inputs=(40,)), dtype=torch.float64)
    assert env.config == replace(config, dtype="float64")
    assert env.spec == config.spec == ActionSpec.decisive(2, blueprints_for("mlp"))
    assert env.population.config == env.config.population
    assert MorphogeneticEnv(family, 2, toy_data(inputs=(40,)), previews=PreviewConfig(2, 3)).config == config
    with pytest.raises(EsperError, match="needs a Family, not a Host"):
        EnvConfig(family.host)  # type: ignore[arg-type]


def test_learning_rates_follow_a_cosine_to_their_floor() -> None:
    env = toy_env(9, toy_family(horizons=(4, 6), lrs=(0.01, 0.02), floor=0.2))
    scenarios = env.family.scenarios(9)
    env.reset(scenarios)
    for epoch in range(4):
        env.step(Wait()(env.view()))
        turn = [(1 + math.cos(math.pi * epoch / horizon)) / 2 for horizon in scenarios.horizon.tolist()]
        expected = scenarios.lr * (0.2 + 0.8 * torch.tensor(turn, dtype=torch.float64))
        torch.testing.assert_close(env.population.lr, expected[:, None].expand(9, 3), atol=0, rtol=1e-12)
    assert set(scenarios.lr.tolist()) == {0.01, 0.02}
    assert set(scenarios.horizon.tolist()) == {4, 6}
    assert bool((env.population.lr[:, 0] < 0.7 * scenarios.lr).all()), "it did fall"


def regression_data(samples: int = 200, validation: int = 100) -> TaskData:
    """A smooth number of forty inputs, standardised by its own formula."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(samples + validation, 40, generator=generator)
    y = x[:, :8].sum(1) / 8**0.5 + 0.3 * torch.sin(2 * x[:, 8])
    y = (y - y[:samples].mean()) / y[:samples].std()
    return TaskData(TASKS["slope"], x[:samples], y[:samples], x[samples:], y[samples:])


def test_regression_grows_like_anything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another objective is a word in the task: no class numbers, scores are the variance explained."""
    monkeypatch.setitem(TASKS, "slope", replace(TASKS["digits"], name="slope", inputs=(40,), classes=1, objective="regression"))
    host = Host("mlp", (40,), (24, 24), classes=1)
    kinds = (Kind("plain"), Kind("noisy", noise=0.1), Kind("wrong", label_noise=0.2))
    family = Family("slope", "slope", host, kinds, horizons=(16,), batch=20)
    spec = ActionSpec.full(2, blueprints_for("mlp"))
    env = MorphogeneticEnv(family, 24, data=regression_data(), spec=spec, previews=PreviewConfig(4, 4))
    assert env.feed.labels.dtype == env.feed.validation_y.dtype == torch.float32
    episodes = play(env, Random(3), family.scenarios(24))
    measured = episodes.measured
    assert env.rollbacks == []
    assert bool((measured["train_loss"][-1] < 0.5 * measured["train_loss"][0]).all())
    score, plain = measured["all_on.score"], episodes.scenarios.kind == 0
    assert bool(((score >= 0) & (score <= 1)).all())
    assert float(score[-1][plain].min()) > 0.5
    assert float(score[0].mean()) < float(score[-1].mean())
    loss = measured["all_on.loss"]
    assert float((score - (1 - loss).clamp(0, 1)).abs().max()) < 1e-5
    assert torch.equal(score, measured["all_on.smooth"])
    assert bool(measured["contribution.known"].any())
    assert float(measured["contribution.value"].abs().max()) > 0.01
    assert bool(env.candidates.known.any())
    assert int((episodes.blueprint >= 0).sum()) > 0
    wrong = (env.feed.labels != env.feed.y).float().mean(1)
    assert 0.1 < float(wrong[episodes.scenarios.kind == 2].mean()) < 0.25
    assert float(wrong[episodes.scenarios.kind != 2].max()) == 0


def test_labels_must_be_those_of_the_objective(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TASKS, "slope", replace(TASKS["digits"], name="slope", inputs=(40,), classes=1, objective="regression"))
    data = regression_data()
    whole = replace(data, y=torch.ones(200, dtype=torch.int64))
    assert whole.y.dtype == torch.float32, "whole numbers are numbers"
    with pytest.raises(EsperError, match=r"^y: regression labels must be finite"):
        replace(data, y=torch.full((200,), math.nan))
    with pytest.raises(EsperError, match=r"^y is torch.complex64; expected real numbers"):
        replace(data, y=torch.ones(200) + 1j)
    family = Family("slope", "slope", Host("mlp", (40,), (8,)), (Kind("plain"),))
    with pytest.raises(EsperError, match="a host with 10 outputs cannot regress one number"):
        MorphogeneticEnv(family, 1, data)
    classes = Family("classes", "mnist1d", Host("mlp", (40,), (8,)), (Kind("plain"),))
    with pytest.raises(EsperError, match="classification needs whole class numbers"):
        MorphogeneticEnv(classes, 1, data)


def test_scenarios_can_be_written_by_hand() -> None:
    own = columns_of([Scenario(1, KINDS[0], horizon=3), Scenario(2, KINDS[1], price=1e-3, horizon=3)])
    env = toy_env(2, toy_family(kinds=KINDS[:2]))
    trace = play(env, Wait(), own)
    assert len(trace.actions) == 3
    with pytest.raises(EsperError, match="one to each"):
        env.reset(own, torch.tensor([0]))
    other = toy_env(2, toy_family(kinds=KINDS[::-1]))
    other.reset(own)
    assert [other.family.kinds[i].name for i in other.scenarios.kind.tolist()] == ["plain", "noisy"]
    with pytest.raises(EsperError, match="of another family"):
        toy_env(2, toy_family(kinds=KINDS[2:])).reset(own)
