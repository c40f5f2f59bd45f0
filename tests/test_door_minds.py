"""Minds, plans, previews and budgets of compute at the door."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import esper
from esper.door import evidence
from esper.door.evidence import SCORE, by_sample, seen, settled
from esper.kasmina.objectives import NextToken, find_objective
from esper.leyline import EsperError, View
from esper.tamiyo import EYES, observe
from tests.test_door import Loop, Script, Y, incubating, same


class Judged(Loop):
    """A loop whose evaluation gives outputs and labels."""

    def __init__(self, controller: Any, kind: str = "blocks", **options: Any) -> None:
        super().__init__(kind, controller=controller, **incubating(Loop(kind)) | {"objective": "classification", "epochs": 12} | options)

    def evaluate(self) -> Any:
        self.model.eval()
        with torch.no_grad():
            return self.model(self.x), self.labels

    labels = Y


def test_scores_are_those_of_a_population() -> None:
    family = esper.find_family("mlp")
    env = esper.MorphogeneticEnv(family, rows=2)
    env.reset(family.scenarios(2))
    measured = env.step(torch.tensor([env.spec.action("WAIT")] * 2))
    x, y = next(iter(env.validation(0, 50)))
    evidence = env.evaluate(iter([(x, y)]))
    for row in range(2):
        with torch.no_grad():
            outputs = env.population.extract(row)(x[:, row])
        found = settled(by_sample((outputs, y[:, row]), find_objective("classification")), find_objective("classification"))
        expected = [getattr(evidence.all_on, name)[row] for name in ("loss", "score", "smooth")]
        torch.testing.assert_close(found.float(), torch.stack(expected), atol=1e-5, rtol=1e-4)
    assert measured.clock.tolist() == [1, 1]


def test_regression_is_scored_by_the_variance_explained() -> None:
    labels = torch.tensor([1.0, 2.0, 3.0, 6.0]) * 100
    outputs = labels + torch.tensor([10.0, -10.0, 20.0, 0.0])
    for shape in ((4,), (4, 1)):
        means = settled(by_sample((outputs.view(shape), labels), objective := find_objective("regression")), objective)
        assert math.isclose(float(means[SCORE]), 1 - float((outputs - labels).square().mean() / labels.var()), rel_tol=1e-5)


def test_tokens_are_scored_by_the_entropy_explained() -> None:
    labels = torch.tensor([[0, 0, 1], [2, 0, 1]])
    shares = torch.tensor([3, 2, 1]) / 6
    objective = find_objective("next_token")
    means = settled(by_sample((shares.log().expand(2, 3, 3), labels), objective), objective)
    assert abs(float(means[SCORE])) < 1e-6, "who knows the frequencies alone explains nothing"
    sure = F.one_hot(labels, 3) * 50.0
    assert float(settled(by_sample((sure, labels), objective), objective)[SCORE]) > 0.999


@pytest.mark.parametrize("kind", ["blocks", "picture"])
def test_a_shipped_mind_grows_a_foreign_model_and_goes_on_bit_for_bit(kind: str, tmp_path: Path) -> None:
    whole = Judged("tamiyo-small", kind)
    reports = [whole.epoch() for _ in range(10)]
    assert any("GERMINATE" in report.decision for report in reports)
    first = Judged("tamiyo-small", kind)
    for _ in range(4):
        first.epoch()
    first.growing.save(tmp_path / "growing")
    kept, optimizer, scheduler, rng = first.model.state_dict(), first.optimizer.state_dict(), first.scheduler.state_dict(), torch.get_rng_state()
    again = Judged("tamiyo-small", kind)
    again.growing.load(tmp_path / "growing")
    again.model.load_state_dict(kept)
    again.optimizer.load_state_dict(optimizer)
    again.scheduler.load_state_dict(scheduler)
    torch.set_rng_state(rng)
    later = [again.epoch() for _ in range(6)]
    assert later == reports[4:]
    same(whole.state(), again.state())


def test_a_mind_decides_before_the_first_step() -> None:
    clocks: list[int] = []

    class Spy(esper.Learned):
        def __call__(self, view: View) -> Tensor:
            clocks.append(int(view.clock))
            return super().__call__(view)

    spec = Judged("wait").growing.spec
    loop = Judged(Spy.load("tamiyo-small", spec))
    for _ in range(3):
        loop.epoch()
    assert clocks == [0, 1, 2, 3]


def test_saved_before_its_first_decision_a_mind_still_makes_it(tmp_path: Path) -> None:
    first, again = Judged("tamiyo-small"), Judged("tamiyo-small")
    first.growing.save(tmp_path / "growing")
    again.growing.load(tmp_path / "growing")
    assert not again.growing.life.open
    reports = [loop.epoch() for loop in (Judged("tamiyo-small"), first)]
    torch.manual_seed(3)
    assert again.epoch().decision == reports[0].decision


def test_growth_that_breaks_the_first_epoch_goes_back_to_its_first_step() -> None:
    """Weights that users load after `attach` are not lost."""
    loop = Judged("wait")
    spec = loop.growing.spec

    class Sower(esper.Learned):
        def __call__(self, view: View) -> Tensor:
            return torch.tensor([spec.action("GERMINATE", slot=0, blueprint="norm") if not int(view.clock) else spec.action("WAIT")])

    loop = Judged(Sower.load("tamiyo-small", spec))
    loaded = {name: value + 0.5 for name, value in loop.model.state_dict().items()}
    loop.model.load_state_dict(loaded)
    loop.evaluate = lambda: (loop.model(loop.x) * math.nan, loop.labels)
    report = loop.epoch()
    assert report.decision.startswith("GERMINATE norm behind 1; ROLLBACK"), "the loss is no number, though the accuracy is one"
    same(loaded, loop.model.state_dict())
    del loop.evaluate
    assert math.isfinite(loop.epoch().score)


def test_logits_of_many_tokens_are_judged_a_part_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    objective = find_objective("next_token")
    outputs, labels = torch.randn(7, 5, 11).bfloat16(), torch.randint(11, (7, 5))
    whole, sizes, judged = by_sample((outputs, labels), objective), list[int](), NextToken.samples

    def samples(self: NextToken, some: Tensor, their: Tensor) -> Tensor:
        sizes.append(some.numel())
        return judged(self, some, their)

    monkeypatch.setattr(NextToken, "samples", samples)
    monkeypatch.setattr(evidence, "AT_ONCE", 120)
    assert torch.equal(by_sample((outputs, labels), objective), whole)
    assert sizes == [110, 110, 110, 55]
    with pytest.raises(EsperError, match="objective's shapes"):
        by_sample((outputs, labels[:1]), objective)


def test_seeds_that_fail_to_learn_are_charged_for_it() -> None:
    loop, count = Judged(Script(e0=("GERMINATE", 0, "norm")), flops=100.0), iter(range(10**6))
    growing = loop.growing

    def failing(model: nn.Module, batch: Any) -> Tensor:
        if next(count) % 20 == 19:
            raise KeyboardInterrupt
        return F.cross_entropy(model(batch[0]), batch[1])

    object.__setattr__(growing.asked, "loss", failing)
    loop.epoch()
    before = growing.compute.spent
    with pytest.raises(KeyboardInterrupt):
        loop.epoch()
    assert growing.compute.spent > before


def test_a_preview_is_what_the_seed_would_learn() -> None:
    """With a model that stands still, a seed that is planted after its preview becomes the very same."""
    shown: list[Any] = []

    class Plant(Script):
        def __call__(self, view: View) -> Tensor:
            assert view.facts is not None
            shown.append(view.facts.candidates)
            return super().__call__(view)

    loop = Judged(Plant(e0=("GERMINATE", 1, "low_rank")), previews=20)
    for group in loop.optimizer.param_groups:
        group["lr"], group["weight_decay"] = 0.0, 0.0
    loop.scheduler.step = lambda: None
    losses = []
    for _ in range(2):
        loop.epoch()
        loop.growing.active.clear()
        with torch.no_grad():
            losses.append(float(F.cross_entropy(loop.model.eval()(loop.x), loop.labels)))
    growing = loop.growing
    assert losses[0] == losses[1]
    slot, number = 1, growing.spec.blueprints.index("low_rank")
    seen = shown[0]
    assert bool(seen.known[0, slot, number])
    assert seen.known.sum() == 3 * (len(growing.spec.blueprints) - 1), "all but noop, in every slot"
    growing.grafts[slot].alpha.fill_(1.0)
    growing.active[slot] = growing.grafts[slot]
    with torch.no_grad():
        planted = losses[0] - float(F.cross_entropy(loop.model(loop.x), loop.labels))
    assert planted > 0
    assert math.isclose(float(seen.value[0, slot, number]), planted, rel_tol=1e-4)
    assert not bool(shown[1].known[0, slot].any()), "what is planted is no candidate"


class Idle(esper.Learned):
    """A mind that looks at everything, and waits."""

    def __call__(self, view: View) -> Tensor:
        super().__call__(view)
        return torch.tensor([view.spec.action("WAIT")])


@pytest.mark.parametrize("kind", ["blocks", "picture", "speaker"])
def test_previews_leave_the_model_alone(kind: str) -> None:
    plain, looking = Loop(kind), None
    for _ in range(3):
        plain.epoch()
    expected = plain.state()
    controller: Any = "wait"
    if kind != "speaker":  # whose blueprints no mind knows
        controller = Idle.load("tamiyo-small", Judged("wait", kind).growing.spec)
    looking = Judged(controller, kind, previews=1)
    for _ in range(3):
        looking.epoch()
    assert bool(looking.growing.candidates.known.any())
    same(expected, looking.state())


def test_the_budget_of_compute_is_never_exceeded() -> None:
    grown = []
    for most in ("+0%", "+30%", 2.0):
        loop = Judged("random", flops=most, epochs=16, previews=0)
        for _ in range(16):
            loop.epoch()
            assert loop.growing.compute.spent <= {"+0%": 0, "+30%": 0.3, 2.0: 2.0}[most]
        grown.append(sum("GERMINATE" in r.decision and "exceed" not in r.decision for r in loop.growing.history))
    assert grown[0] == 0 < grown[1] < grown[2]


def test_a_plan_is_carried_out() -> None:
    loop = Judged({"1": "norm", "3": "low_rank"}, epochs=14)
    for _ in range(14):
        loop.epoch()
    assert {path: type(graft.seed) for path, graft in loop.growing.kept.items()}.keys() == {"1", "3"}


@pytest.mark.parametrize(("options", "sentence"), [
    ({"controller": {"7": "norm"}}, "a plan names slots"), ({"controller": {"1": "gold"}}, "a plan names slots"),
    ({"controller": "tamiyo-huge"}, "no controller 'tamiyo-huge'; choose from wait, random, heuristic, tamiyo-small"), ({"controller": 3}, "a controller is one of"),
    ({"controller": "tamiyo-small", "objective": None}, "a learned controller reads losses"), ({"objective": "fame"}, "no objective 'fame'"),
    ({"controller": "tamiyo-small", "loss": None, "data": None}, "a learned controller reads losses"),
    ({"previews": 2, "loss": None, "data": None}, "previews is a whole number"), ({"previews": -1}, "previews is a whole number"),
    ({"flops": "much"}, "number of trainings")])
def test_what_cannot_be_is_one_sentence(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(EsperError, match=sentence):
        Judged(**{"controller": "wait"} | options)


def test_evaluate_and_objective_belong_together() -> None:
    for objective, returned, sentence in (
            ("classification", 0.5, "returns \\(outputs, labels\\)"), (None, (torch.zeros(2, 3), torch.zeros(2)), "pass objective="),
            ("classification", (torch.zeros(2, 3), torch.tensor([0, 4])), "labels go from 0 to 4"),
            ("classification", (torch.zeros(2, 3), "no"), "of the objective's shapes"), ("regression", (torch.zeros(2, 3), torch.zeros(2)), "shapes")):
        with pytest.raises(EsperError, match=sentence):
            by_sample(returned, None if objective is None else find_objective(objective))


@pytest.mark.parametrize("eyes", EYES)
def test_a_trained_agent_decides_at_the_door(eyes: str, tmp_path: Path) -> None:
    spec = Judged("wait").growing.spec
    agent = esper.PPOAgent(esper.Controller.fresh(spec, observation=EYES[eyes].spec))
    agent.save(tmp_path / "agent.safetensors")
    loop = Judged(str(tmp_path / "agent.safetensors"))
    loop.epoch()
    assert isinstance(loop.growing.policy, esper.Learned)


def test_universal_eyes_see_shares_of_the_way_from_chance_at_the_door() -> None:
    loop = Judged("wait")
    loop.epoch()
    classes, (loss, score, smooth, train) = loop.evaluate()[0].shape[-1], loop.growing.scores[1].tolist()
    row = observe(seen(loop.growing), EYES["universal"].spec).row[0]
    names = [field.name for field in EYES["universal"].spec.row for _ in range(field.width)]
    shares = row[names.index("shares") : names.index("shares") + 4]
    expected = [1 - loss / math.log(classes), *((each - 1 / classes) / (1 - 1 / classes) for each in (score, smooth)), 1 - train / math.log(classes)]
    assert shares.tolist() == pytest.approx([max(-1.0, each) for each in expected], abs=1e-5)
    assert row[names.index("outputs")] == pytest.approx(math.log2(classes) / 6)


def test_it_helps_where_a_network_is_too_small() -> None:
    """The mind was trained on damaged hosts; on a net that cannot bend it beats waiting."""
    torch.manual_seed(0)
    x = torch.randn(600, 2)
    y = (x.norm(dim=1) > 1.2).long()
    batches = [(x[i : i + 50], y[i : i + 50]) for i in range(0, 500, 50)]

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    scores = {}
    for controller in ("wait", "tamiyo-small"):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(2, 8), nn.Linear(8, 8), nn.Linear(8, 2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        growing = esper.attach(model, optimizer, example=x[:8], slots=["0", "1"], epochs=16, controller=controller, loss=loss, data=batches,
                               objective="classification")
        for _ in range(16):
            for batch in batches:
                optimizer.zero_grad()
                loss(model, batch).backward()
                optimizer.step()
            growing.end_epoch(lambda m=model: (m(x[500:]), y[500:]))
        delivered = growing.deliver()
        with torch.no_grad():
            scores[controller] = float((delivered(x[500:]).argmax(1) == y[500:]).float().mean())
    assert scores["tamiyo-small"] > scores["wait"] + 0.1
