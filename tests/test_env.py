"""The environment: data per row, evidence, twins, replay, resume."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from esper.kasmina import Host, blueprints_for
from esper.leyline import ActionSpec, EsperError, Head, LifecycleOp, SeedStage, StateFormatError
from esper.tamiyo import Random, Scripted, Wait, entry
from esper.tolaria import (
    Family,
    Kind,
    PreviewConfig,
    Scenario,
    Scenarios,
    Trace,
    Twins,
    evaluate,
    play,
    preview_candidates,
    replay,
)
from esper.tolaria.evaluation import plan
from tests.workshop import KINDS, toy_data, toy_env, toy_family


def test_scenarios_depend_on_their_keys_alone() -> None:
    family = toy_family()
    many, few = family.scenarios(200), family.scenarios(3, start=150)
    for name, column in few.columns().items():
        assert torch.equal(column, getattr(many, name)[150:153]), name
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
    assert bool(measured.evidence.all_on.loss[2].isnan())
    assert not bool(measured.evidence.contribution.known[2].any())


def test_policies_see_price_and_horizon_but_no_key_to_the_rest() -> None:
    env = toy_env(6)
    scenarios = env.family.scenarios(6)
    env.reset(scenarios)
    view = env.view()
    assert torch.equal(view.price, scenarios.price)
    assert torch.equal(view.horizon, scenarios.horizon)
    assert not set(view.key.tolist()) & set(scenarios.key.tolist())


def test_waiting_episodes_equal_their_twin_exactly() -> None:
    env, other = toy_env(10), toy_env(10)
    scenarios = env.family.scenarios(10)
    trace = play(env, Wait(), scenarios)
    shuffled = torch.randperm(10, generator=torch.Generator().manual_seed(0))
    twins = Twins(other)
    paths = twins(scenarios.take(shuffled))  # other places in the population
    for row, place in enumerate(shuffled.tolist()):
        end = int(scenarios.horizon[place])
        mine = torch.stack([trace.measured[f"all_on.{name}"][:end, place] for name in ("loss", "accuracy", "probability")], 1)
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
    def run(grows: bool) -> Trace:
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
    torch.testing.assert_close(evidence.all_on.probability, base.mean(0).float(), rtol=0, atol=1e-6)
    bare = probability(torch.zeros_like(life.alpha)).mean(0).float()
    torch.testing.assert_close(evidence.all_off.probability, bare, rtol=0, atol=1e-6)
    fossils = torch.where(life.at(SeedStage.FOSSILIZED), life.alpha, 0.0)
    torch.testing.assert_close(evidence.delivered.probability, probability(fossils).mean(0).float(), rtol=0, atol=1e-6)
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
        net.grafts[0].alpha = 0.0
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
    loaded = Trace.load(tmp_path / "round.safetensors")
    data = toy_data(inputs=(40,))
    assert replay(loaded, data=data) == []
    loaded.measured["all_on.loss"][3, 5] += 1e-6
    assert replay(loaded, data=data) == ["all_on.loss, epoch 4, row 5"]
    longer = Trace(trace.header, trace.scenarios, torch.cat([trace.actions, trace.actions[-1:]]), trace.measured)
    assert replay(longer, data=data)[0] == "length, epoch 9, every row"


def test_a_checkpoint_continues_bit_for_bit(tmp_path: Path) -> None:
    path = tmp_path / "env.safetensors"
    straight, policy = toy_env(8), Random(6)
    straight.reset(straight.family.scenarios(8))
    for epoch in range(6):
        if epoch == 3:
            straight.save(path)
        straight.step(policy(straight.view()))
    resumed = toy_env(8)
    resumed.load(path)
    for _ in range(3):
        resumed.step(policy(resumed.view()))
    mine, theirs = resumed.tensors(), straight.tensors()
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        assert torch.equal(tensor.nan_to_num(), theirs[name].nan_to_num()), name
    with pytest.raises(StateFormatError, match="of another environment: rows"):
        toy_env(9).load(path)


KILLED = """
import sys, torch
from pathlib import Path
from esper.tamiyo import Random
from tests.workshop import toy_env
path = Path(sys.argv[1])
torch.set_num_threads(1)
env, policy = toy_env(8), Random(6)
if path.exists():
    env.load(path)
else:
    env.reset(env.family.scenarios(8))
print("ready", flush=True)
while not bool(env.done.all()):
    env.step(policy(env.view()))
    env.save(path)
    print("saved", flush=True)
"""


def run_to_the_end(path: Path, kill_after: int | None) -> None:
    """Or until it was killed in the epoch after so many checkpoints."""
    root = Path(__file__).parent.parent
    job = subprocess.Popen([sys.executable, "-c", KILLED, str(path)], cwd=root, stdout=subprocess.PIPE,
                           env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert job.stdout is not None
    for _ in range(1 + (kill_after or 0)):
        job.stdout.readline()
    if kill_after is not None:
        job.send_signal(signal.SIGKILL)
    assert job.wait() == (0 if kill_after is None else -signal.SIGKILL)
    job.stdout.close()


def test_killed_runs_resume_bit_for_bit(tmp_path: Path) -> None:
    run_to_the_end(tmp_path / "whole.safetensors", None)
    whole = (tmp_path / "whole.safetensors").read_bytes()
    for saved in (0, 2, 5):
        path = tmp_path / f"killed{saved}.safetensors"
        run_to_the_end(path, saved)
        assert not path.exists() or path.read_bytes() != whole
        run_to_the_end(path, None)
        assert path.read_bytes() == whole


def test_scenarios_can_be_written_by_hand() -> None:
    own = Scenarios.of([Scenario(1, KINDS[0], horizon=3), Scenario(2, KINDS[1], price=1e-3, horizon=3)])
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
