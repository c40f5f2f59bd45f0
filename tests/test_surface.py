"""What users meet first: `import esper`, and arguments in Python that cannot be meant."""

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import esper
from esper.cli import machine
from esper.leyline import View
from esper.leyline.keys import Purpose, mix
from tests.workshop import toy_env, unmixed


def test_import_esper_is_enough_and_imports_nothing_heavy() -> None:
    code = "import sys, esper; assert 'torch' not in sys.modules; print(esper.Host, esper.__version__, len(dir(esper)))"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "esper.kasmina.hosts.Host" in said
    for name in esper.__all__:
        assert getattr(esper, name).__doc__, f"{name} says what it is"
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        esper.nonsense  # noqa: B018


def population() -> esper.Population:
    return esper.Population(esper.Host("mlp", (4,), (8,), classes=3), rows=2)


def begun() -> esper.Population:
    made = population()
    made.begin_epoch(torch.tensor([made.spec.action("WAIT")] * 2))
    return made


X, Y = torch.zeros(5, 2, 4), torch.zeros(5, 2, dtype=torch.int64)
MISTAKES: dict[str, tuple[Callable[[], object], str]] = {
    "labels too high": (lambda: begun().train_step(X, Y + 3), "labels go from 3 to 3; 3 classes are 0 to 2"),
    "labels below 0": (lambda: begun().train_step(X, Y - 1), "labels go from -1"),
    "float labels": (lambda: begun().train_step(X, Y.float()), "labels are torch.float32"),
    "NaN samples": (lambda: begun().train_step(X / 0, Y), "samples hold NaN or infinite"),
    "empty batch": (lambda: begun().train_step(X[:0], Y[:0]), "batch of at least 1"),
    "no epoch": (lambda: population().train_step(X, Y), "no epoch has begun"),
    "rows 2.5": (lambda: esper.Population(esper.Host("mlp"), 2.5), "2.5 rows is impossible"),
    "a torch optimiser": (lambda: esper.Population(esper.Host("mlp"), 2, optim=torch.optim.SGD), "expected an OptimConfig"),
    "a model as host": (lambda: esper.Population(nn.Linear(2, 2), 2), "needs a Host"),
    "no such device": (lambda: esper.Population(esper.Host("mlp"), 2, device="gpu"), "no device 'gpu' here"),
    "row 9": (lambda: population().extract(9), "there is no row 9"),
    "no such op": (lambda: population().spec.action("EXPLODE"), "no op 'EXPLODE'"),
    "list of actions": (lambda: population().begin_epoch([[0] * 8] * 2), "expected a tensor of whole numbers"),
    "inputs 8": (lambda: esper.Host("mlp", inputs=8), "inputs is 8; expected a tuple"),
    "horizons 8": (lambda: family(horizons=8), "horizons of family 'x' is a int; expected a tuple"),
    "a bare kind": (lambda: family(kinds=esper.Kind("k")), "kinds of family 'x' is a Kind"),
    "negative price": (lambda: family(prices=(-1.0,)), "negative price"),
    "negative rate": (lambda: family(lrs=(-1.0,)), "a learning rate not above 0|a learning rate that is not above 0"),
    "step before reset": (lambda: toy_env(2).step(torch.zeros(2, 8, dtype=torch.int64)), "no episode has begun"),
    "seed returns a tuple": (lambda: tuple_seed(), "returns a tuple"),
    "a folder as mind": (lambda: esper.Learned.load(".", population().spec), "is a folder; name the agent"),
}


def family(**changes: object) -> esper.Family:
    given = {"kinds": (esper.Kind("k"),)} | changes
    return esper.Family("x", "digits", esper.Host("mlp", (64,)), **given)


class Pair(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


def tuple_seed() -> None:
    made = esper.register_blueprint("pair of tensors", lambda channels: Pair(), "mlp")
    try:
        made.prototype(esper.Host("mlp").slots.shapes[0])
    finally:
        from esper.kasmina import BLUEPRINTS

        del BLUEPRINTS["mlp", "pair of tensors"]


@pytest.mark.parametrize("case", MISTAKES)
def test_what_cannot_be_meant_is_one_sentence(case: str) -> None:
    call, message = MISTAKES[case]
    with pytest.raises(esper.EsperError, match=message):
        call()


def test_a_view_does_not_tell_the_key_of_a_scenario() -> None:
    keys = torch.tensor([5, -7, 2**40])
    assert torch.equal(unmixed(mix(keys, Purpose.ACTION), Purpose.ACTION), keys), "the hash alone hides nothing"
    env = toy_env(64)
    drawn = env.family.scenarios(64, "test")
    env.reset(drawn)
    view: View = env.view()
    shown = [value for name, value in vars(view).items() if isinstance(value, Tensor) and value.dtype == torch.int64
             and value.dim() == 1]
    for value in shown:
        for purpose in Purpose:
            assert not bool((unmixed(value, purpose) == drawn.key).any())
            guessed = env.family.draw(unmixed(value, purpose)).kind
            assert float((guessed == drawn.kind).float().mean()) < 0.8, "no better than chance"
    later = env.family.scenarios(64, "test", start=10**9)
    assert torch.equal(later.luck, drawn.luck), "luck depends on the place among those that were drawn, on nothing else"


def test_a_busy_machine_gets_fewer_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before, ticks = torch.get_num_threads(), iter([(0, 0), (10, 100), (0, 0), (100, 100)])
    monkeypatch.setattr(machine, "_ticks", lambda: next(ticks))
    monkeypatch.setattr(machine.os, "cpu_count", lambda: 4)
    try:
        torch.set_num_threads(4)
        assert machine.choose_threads().startswith("using 1 of 4 threads")
        assert torch.get_num_threads() == 1
        torch.set_num_threads(4)
        assert machine.choose_threads() == "", "nobody else is there"
        monkeypatch.setenv("OMP_NUM_THREADS", "4")
        assert machine.choose_threads() == "", "the user has chosen"
    finally:
        torch.set_num_threads(before)
