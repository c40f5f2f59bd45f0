"""A universe: families of many data sets for one controller, eyes that mean the same everywhere, lessons from a teacher."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from esper.cli import main
from esper.kasmina import Host
from esper.leyline import EsperError
from esper.leyline.codec import from_dict, to_dict
from esper.leyline.views import About
from esper.nissa import Store, read
from esper.simic import PPOConfig
from esper.simic.cloning import clone, demonstrate
from esper.simic.proof.claims import interval
from esper.simic.proof.evaluator import Evaluator
from esper.simic.proof.plans import Plan, played
from esper.simic.proof.surveyed import (
    Identified,
    PlanTable,
    best,
    identify,
    levels,
    plans_for,
    price_pairs,
    survey,
)
from esper.simic.proof.universal import load_table, save_table
from esper.simic.shards import make_world
from esper.simic.training import CHECKPOINT, TrainConfig, Training
from esper.simic.workers import Processes
from esper.tamiyo import EYES, Controller, Learned, NetworkConfig, Random, Wait, observe
from esper.tolaria import EnvConfig, Task, Universe, find_universe, ordinary, play
from tests.test_training import toys
from tests.workshop import toy_env, toy_family

FLAT = toy_family(name="flat", horizons=(6, 7), prices=(1e-4,), flop_prices=(0.01,))
LONG = replace(FLAT, name="long", task="digits", host=Host("conv1d", widths=(4, 4, 4)))
HELD = replace(FLAT, name="held", task="fashion")
UNIVERSE = Universe("both", (FLAT, LONG), (HELD,))
CONFIG = TrainConfig(EnvConfig(FLAT), UNIVERSE, "universal", rounds=3, rows=16, shards=4, exam_every=2, exam_rows=6,
                     network=NetworkConfig(16, 8, 6, 12), ppo=PPOConfig(epochs=2, minibatches=2))


def test_whole_data_sets_are_held_out() -> None:
    with pytest.raises(EsperError, match="data of 'mnist1d' both in training and in test; hold out whole data sets"):
        replace(UNIVERSE, test=(replace(FLAT, name="again"),))
    with pytest.raises(EsperError, match="data of 'one' both in training and in validation"):
        replace(UNIVERSE, sources={"mnist1d": "one", "fashion": "one"})
    assert replace(UNIVERSE, sources={"mnist1d": "one"}).source_of(UNIVERSE.training) == ["one", "digits"]
    with pytest.raises(EsperError, match="two families called 'flat'"):
        replace(UNIVERSE, training=(FLAT, replace(LONG, name="flat")))
    with pytest.raises(EsperError, match="at least one training and one validation family"):
        replace(UNIVERSE, validation=())
    with pytest.raises(EsperError, match="has cnn hosts to be judged on and none to learn from"):
        replace(UNIVERSE, validation=(replace(HELD, host=Host("cnn")),))
    with pytest.raises(EsperError, match="3 weights for 2 training families"):
        replace(UNIVERSE, weights=(1.0, 1.0, 1.0))
    assert from_dict(Universe, to_dict(UNIVERSE), "here") == UNIVERSE


def test_families_of_a_round_depend_on_its_number_and_the_weights_alone() -> None:
    heavy = replace(UNIVERSE, weights=(3.0, 1.0))
    drawn = [family.name for number in range(200) for family in heavy.pick(number, 8)]
    assert drawn.count("flat") / len(drawn) == pytest.approx(0.75, abs=0.03)
    assert heavy.pick(7, 8) == heavy.pick(7, 8)
    assert heavy.pick(7, 4) == heavy.pick(7, 8)[:4]
    assert {family.name for number in range(50) for family in replace(UNIVERSE, weights=(0.0, 1.0)).pick(number, 4)} == {"long"}


def test_viewers_know_the_blueprints_of_all_families() -> None:
    facts = CONFIG.facts()
    assert facts["family"] == "both"
    assert {"mlp_small", "conv_small"} <= set(facts["blueprints"])
    assert replace(CONFIG, universe=None).facts()["blueprints"] == list(CONFIG.env.spec.blueprints)


def test_shards_of_a_universe_share_no_scenario() -> None:
    keys = [key for number in range(3) for _, drawn in CONFIG.shards_of(number) for key in drawn.key.tolist()]
    assert len(set(keys)) == 3 * CONFIG.rows
    again = replace(CONFIG, scenarios=CONFIG.rows).shards_of(2)
    assert all(torch.equal(one.key, other.key) for (_, one), (_, other) in zip(again, CONFIG.shards_of(0), strict=True))


def test_a_universe_in_a_file_and_what_is_wrong_with_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "u.toml"
    path.write_text('name = "mine"\ntraining = ["digits/mlp/tiny", "mnist1d/conv1d/small"]\nvalidation = ["mlp"]\n')
    with pytest.raises(EsperError, match="data of 'digits' both in training and in validation"):
        find_universe(path)
    path.write_text('name = "mine"\ntraining = ["digits/mlp/tiny"]\nvalidation = ["diabetes/mlp/small"]\n[sources]\ndigits = "sklearn"\n')
    assert find_universe(path).training == (ordinary("digits", "mlp", "tiny"),)
    assert find_universe(path).sources == {"digits": "sklearn"}
    for text, said in (('name = "x"\ntraining = ["digits/mlp/huge"]\nvalidation = []\n', "no ordinary mlp hosts of size 'huge'"),
                       ("name = 3\n", "lacks training, validation"), ("= 3", "cannot read the universe")):
        path.write_text(text)
        assert main(["train", "--universe", str(path), "--out", str(tmp_path / "run")]) == 2
        assert said in capsys.readouterr().err.replace("\n", " ")
        assert not (tmp_path / "run").exists()


def test_ordinary_hosts_are_healthy_and_prices_are_relative() -> None:
    small, tiny = (ordinary("digits", "mlp", size) for size in ("small", "tiny"))
    assert not any(kind.frozen or kind.width or kind.one_tap for kind in small.kinds)
    for one, other in zip(price_pairs(small), price_pairs(tiny), strict=True):
        assert one == pytest.approx(other), "as many parameters as the host has cost the same"
    assert min(small.flop_prices) > 0, "compute is never free"


def test_ordinary_gpt_hosts_learn_from_text_and_know_the_regimes_that_tokens_can_have(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ESPER_DATA", str(tmp_path / "data"))
    rng = np.random.default_rng(0)
    words = ["".join(rng.choice(list("abcdefgh"), 4)) for _ in range(20)]
    Task.from_text("poem", " ".join(rng.choice(words, 3_000)), context=16)
    family = ordinary("poem", size="tiny")
    assert family == ordinary("poem", "gpt", "tiny")
    assert {kind.name: kind.samples for kind in family.kinds} == {"plain": 0, "few samples": family.samples // 4}
    assert [price * family.host.cost.params for price in family.prices] == pytest.approx([0.003, 0.012, 0.05])
    family = replace(family, horizons=(12,))
    plain, few = (replace(family, kinds=(kind,)) for kind in family.kinds)
    scores = [Evaluator(each).play(Wait(), each.scenarios(4)).delivered.score for each in (plain, few)]
    assert float(scores[0].min()) > 0.2, "it explains a part of the text"
    assert float((scores[0] - scores[1]).mean()) > 0.01, "and less where it has few samples"


def column(part: str, name: str, values: torch.Tensor) -> torch.Tensor:
    start = 0
    for field in getattr(EYES["universal"].spec, part):
        if field.name == name:
            return values[..., start : start + field.width]
        start += field.width
    raise KeyError(name)


def test_eyes_mean_the_same_on_every_task_and_host() -> None:
    """Half of the way from chance to perfect is one half, whatever the classes; a price in points is one number."""
    spec = EYES["universal"].spec
    assert not any(field.scaled for part in vars(spec).values() for field in part), "no statistics of a family"
    seen = []
    for chance, params in (((2.0, 0.1, 0.1), 100), ((1.0, 0.5, 0.5), 5000)):
        env = toy_env(2)
        env.reset(env.family.scenarios(2))
        env.step(Random()(env.view()))
        view = env.view()
        assert view.facts is not None
        half = torch.tensor([[chance[0] / 2, (1 + chance[1]) / 2, (1 + chance[2]) / 2, chance[0] / 2]]).repeat(2, 1)
        facts = replace(view.facts, scores=half, before=half * torch.nan, host=replace(view.facts.host, params=params),
                        about=About(chance, 2, 1, torch.full((2,), 10 * params)))
        row = observe(replace(view, price=torch.full((2,), 0.02 / params), facts=facts), spec).row
        seen.append(torch.cat([column("row", name, row) for name in ("shares", "gap", "price", "samples_per_parameter")], 1))
    assert torch.allclose(seen[0], seen[1], atol=1e-5)
    assert torch.allclose(seen[0][:, :4], torch.tensor(0.5), atol=1e-5)


def test_evidence_is_seen_in_points_and_standard_errors() -> None:
    env = toy_env(4)
    env.reset(env.family.scenarios(4))
    for _ in range(4):
        env.step(Random()(env.view()))
    view = env.view()
    assert view.facts is not None
    slot, gain = observe(view, EYES["universal"].spec).slot, view.facts.contribution
    effect, sure = (column("slot", name, slot)[..., 0] for name in ("effect", "sure"))
    assert bool(gain.known.any())
    expected = torch.where(gain.known, (100 * gain.value).asinh() / 3, 0.0)
    assert torch.allclose(effect, expected, atol=1e-6)
    assert bool(((sure.sign() == gain.value.sign()) | ~gain.known | (gain.value == 0)).all())
    for part in observe(view, EYES["universal"].spec):
        assert bool(part.isfinite().all())
        assert float(part.abs().max()) < 6


def test_a_controller_of_either_eyes_sees_with_its_own() -> None:
    env = toy_env(4, spec=None)
    for eyes in EYES.values():
        controller = Controller.fresh(env.spec, NetworkConfig(16, 8, 6, 12), eyes.spec)
        assert len(play(env, Learned(controller.bound_to(env.spec)), env.family.scenarios(4))) == 4


def test_one_update_learns_from_hosts_with_other_slots_and_blueprints(tmp_path: Path) -> None:
    """Of two rollouts an update makes the gradient that their sum has."""
    training = Training(CONFIG, tmp_path, make=toys)
    shards, _ = training._play(1)
    assert len({shard.played.episodes.config.spec.blueprints for shard in shards}) == 2
    agent, gradients = training.agent, []
    buffers = training._joined(shards)
    for buffer in buffers:
        buffer.compute_advantages_and_returns(1.0, 0.95, torch.zeros(buffer.spec.rows))
    batches = [next(iter(buffer.get_batched_sequences())) for buffer in buffers]
    agent.config = replace(agent.config, max_grad_norm=1e9)
    for some in ([batches[0]], [batches[1]], batches):
        agent._gradient(some, agent._knobs())
        counts = [int(batch.valid.sum()) for batch in some], [int(batch.chosen.sum()) for batch in some]
        gradients.append((torch.cat([p.grad.flatten().clone() for p in agent.network.value_head.parameters()
                                     if p.grad is not None]), sum(counts[0])))
    (one, n), (other, m), (both, total) = gradients
    assert total == n + m
    assert torch.allclose(both, (one * n + other * m) / (n + m), atol=1e-6), "the value's loss is a mean over all steps"


def test_a_run_on_a_universe_goes_on_bit_for_bit_and_alike_with_workers(tmp_path: Path) -> None:
    tensors = {}
    for name, stop, workers in (("whole", 99, None), ("stopped", 1, None), ("two", 99, 2)):
        folder = tmp_path / name
        folder.mkdir()
        pool = None if workers is None else Processes(workers, threads=1)
        sink = Store(folder / "run.db")
        try:
            training = Training(CONFIG, folder, sink, toys, pool)
            training.run(lambda t=training, most=stop: t.agent.updates >= most)
            if stop < 99:
                Training(CONFIG, folder, sink, toys).run()
        finally:
            sink.close()
            if pool is not None:
                pool.close()
        tensors[name] = (folder / CHECKPOINT).read_bytes()
    assert tensors["whole"] == tensors["stopped"] == tensors["two"]
    path = tmp_path / "whole" / "run.db"
    grown = {row[0] for row in read(path, "SELECT DISTINCT blueprint FROM step WHERE op = 'GERMINATE'")}
    ((count,),) = read(path, "SELECT count(*) FROM exam")
    assert grown & {"mlp_small", "mlp_heavy", "glu", "low_rank"}
    assert grown & {"conv_small", "conv_light", "conv_heavy", "mixer", "depthwise"}
    assert count == 6, "the validation families are examined, and nothing else"


def test_a_clone_does_what_its_teacher_does() -> None:
    agent, lessons = CONFIG.agent(), []
    for family, seed in ((FLAT, "glu"), (LONG, "mixer")):
        world = make_world(CONFIG.env_of(family), 6, "utility", "delivered", toys)
        slots = world.env.spec.slots
        teacher = played([Plan((None,) * (slots - 1) + (seed,), 1)] * 6, world.env.spec)
        lessons.append(demonstrate(agent, world, teacher, family.scenarios(6)))
    curve = clone(agent, lessons, passes=150, learning_rate=5e-3)
    assert curve[-1] < 0.02 < curve[0]
    for (family, seed), lesson in zip(((FLAT, "glu"), (LONG, "mixer")), lessons, strict=True):
        env = toys(CONFIG.env_of(family), 6)
        policy = Learned(agent.controller.bound_to(env.spec), greedy=True)
        episodes = play(env, policy, family.scenarios(6))
        assert torch.equal(episodes.actions, lesson.actions)
        assert {d.blueprint for d in episodes.decisions() if d.op == "GERMINATE"} == {seed}


def made_up(groups: int = 12, runs: int = 10, noise: float = 0.01) -> PlanTable:
    """Two kinds of data set, which what is seen tells apart; the first plan that grows helps one, the second the other."""
    rng = np.random.default_rng(0)
    plans = (Plan((None,)), Plan(("norm",)), Plan(("glu",)), Plan(("norm",), 2), Plan(("glu",), 2))
    group = np.repeat(np.arange(groups), runs)
    side = (group % 2).astype(float)
    seen = rng.normal(size=(len(group), 3, 4))
    seen[..., 0] = (2 * side - 1)[:, None] + 0.1 * rng.normal(size=(len(group), 3))
    gains = np.stack([0 * side, 0.1 * side, 0.1 * (1 - side), 0.05 * side, 0.05 * (1 - side)], 1) - [0, 0.02, 0.02, 0.02, 0.02]
    gains[:, 0] = 0
    params = np.tile([0.0, 1.0, 1.0, 1.0, 1.0], (len(group), 1))
    score = 0.5 + gains + noise * rng.normal(size=gains.shape)
    return PlanTable(plans, group, np.full(len(group), 12), seen, np.stack([score, params, 0.5 * params], 2))


def test_levels_of_knowledge_and_the_regression_find_what_there_is() -> None:
    table, prices = made_up(), [(0.0, 0.0), (0.2, 0.0)]
    found = {name: gains.reshape(2, -1).mean(1) for name, gains in levels(table, prices).items()}
    assert found["for each data set, too"][0] == pytest.approx(0.08, abs=0.01)
    assert found["for each data set, too"][1] == pytest.approx(0.0, abs=0.005), "too dear: nothing is grown"
    assert found["one fixed plan"][0] < 0.04
    said: list[str] = []
    chosen = identify(table, prices, said.append)
    assert said[0].startswith("watching 0 epochs"), "what is seen at once tells all, and early plans are worth more"
    assert float(said[0].split()[-2]) > 3.4, "of 8 points at one price of two"
    cheap = chosen.choose(table.seen[:, 0], np.zeros((len(table.group), 2)))
    assert [chosen.plans[at].seeds[0] for at in cheap] == ["norm" if side else "glu" for side in table.group % 2]
    dear = chosen.choose(table.seen[:, 0], np.full((len(table.group), 2), 1.0))
    assert {chosen.plans[at].seeds[0] for at in dear} == {None}


def test_one_data_set_does_not_decide_for_all() -> None:
    """A plan that gains 60 points on one of six data sets and loses 2 on the others is not the best for all."""
    table = made_up(6, 4, noise=0.0)
    runs = np.zeros_like(table.runs)
    runs[:, 1, 0], runs[:, 2, 0] = np.where(table.group == 0, 0.6, -0.02), 0.005
    lucky = table._replace(runs=runs)
    assert lucky.utility((0.0, 0.0)).mean(0).argmax() == 1
    assert best(lucky, [(0.0, 0.0)]) == 2
    assert best(lucky, [(0.0, 0.0)], table.group == 0) == 1, "for itself it does"


def test_tables_are_kept(tmp_path: Path) -> None:
    table = made_up(4, 3)
    save_table(tmp_path / "plans.safetensors", table, "these")
    again = load_table(tmp_path / "plans.safetensors", "these")
    with pytest.raises(EsperError, match="about other families than these; remove it to play plans again"):
        load_table(tmp_path / "plans.safetensors", "others")
    assert again.plans == table.plans
    assert all(np.array_equal(a, b) for a, b in zip(again[1:], table[1:], strict=True))


def test_a_survey_is_what_the_plans_come_to_when_they_are_played() -> None:
    evaluator, drawn = Evaluator(EnvConfig(FLAT), make=toys), FLAT.scenarios(4)
    plans = plans_for(evaluator.config.spec)[:3]
    table = survey(evaluator, plans, drawn, 5, rows=5)
    assert table.runs.shape == (4, 3, 3)
    assert set(table.group) == {5}
    for place, plan in enumerate(plans):
        done = evaluator.play(played([plan] * 4, evaluator.config.spec), drawn)
        mine = torch.from_numpy(table.runs[:, place])
        assert torch.allclose(mine[:, 0], done.delivered.score.double(), atol=0.02)
        assert torch.allclose(mine[:, 1], done.params.double() / FLAT.host.cost.params)
    chosen = identify(survey(evaluator, plans_for(evaluator.config.spec), drawn, 0, 20)._replace(
        group=np.array([0, 1, 0, 1])), price_pairs(FLAT))
    episodes = evaluator.play(Identified(chosen), drawn)
    assert all(decision.epoch >= chosen.watched for decision in episodes.decisions())


def test_intervals_are_over_data_sets_first() -> None:
    rng = np.random.default_rng(1)
    group = np.repeat(np.arange(6), 50)
    effect = np.repeat(rng.normal(size=6), 50)
    low, high = interval(effect + 0.01 * rng.normal(size=300), group=group)
    assert high - low > 0.5, "six data sets that differ say little, however many scenarios each has"
    alone = np.arange(300)
    plain = interval(effect, group=alone)
    assert plain[1] - plain[0] < 0.5 * (high - low)
    assert low < effect.mean() < high


def test_a_task_that_changed_refuses_a_universe_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                    capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("ESPER_DATA", str(tmp_path / "data"))
    rng = np.random.default_rng(0)
    for name in ("one", "two"):
        Task.from_arrays(name, rng.normal(size=(120, 4)), rng.integers(0, 2, 120))
    (tmp_path / "u.toml").write_text('name = "u"\ntraining = ["one/mlp/tiny"]\nvalidation = ["two/mlp/tiny"]\n')
    words = ["train", "--universe", str(tmp_path / "u.toml"), "--out", str(tmp_path / "run"), "--rounds", "1", "--rows", "4"]
    (tmp_path / "c.toml").write_text("exam_rows = 2\nscenarios = 0\n[ppo]\nminibatches = 2\nepochs = 1\n")
    assert main([*words, "--config", str(tmp_path / "c.toml")]) == 0
    Task.from_arrays("two", rng.normal(size=(130, 4)), rng.integers(0, 2, 130), replace=True)
    capsys.readouterr()
    assert main(["train", "--out", str(tmp_path / "run"), "--resume", "--more", "1"]) == 2
    assert "the task two had other data" in capsys.readouterr().err.replace("\n", " ")
