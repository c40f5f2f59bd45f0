"""`esper.grow`: a model and two loaders in, a grown model out; killed and resumed, the same bits."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import esper
from esper.door import Grown, Report
from esper.leyline import EsperError

GENERATOR = torch.Generator().manual_seed(1)
X = torch.randn(400, 2, generator=GENERATOR)
Y = (X.norm(dim=1) > 1.2).long()  # two rings: no linear map parts them


def loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def right(model: nn.Module, batch: Any) -> Tensor:
    return (model(batch[0]).argmax(1) == batch[1]).double()


def run(**options: Any) -> Grown:
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(0)
    model = nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.05), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    train = DataLoader(TensorDataset(X[:300], Y[:300]), 50, shuffle=True)
    validation = DataLoader(TensorDataset(X[300:], Y[300:]), 50)
    settings = {"slots": ["0", "2"], "epochs": 16, "lr": 2e-2, "score": right, "shadow_steps": 6}
    return esper.grow(model, train, validation, loss, **settings | options)


class Killed(Exception):
    pass


def test_it_grows_what_the_model_lacks() -> None:
    told: list[Report] = []
    grown, static = run(tell=told.append), run(controller="wait")
    assert grown.score > static.score + 0.15
    assert grown.params > 0 == static.params
    assert told == grown.history
    assert len(told) == 16
    parameters = sum(p.numel() for p in static.module.parameters())
    assert sum(p.numel() for p in grown.module.parameters()) == parameters + grown.params
    accuracy = float((grown.module.eval()(X[300:]).argmax(1) == Y[300:]).double().mean())
    assert accuracy == pytest.approx(grown.score), "the last epoch had nothing on trial"
    assert str(grown).count("\n") == 16
    assert "GERMINATE" in str(grown)


@pytest.mark.parametrize("epoch", [0, 4, 9])
def test_killed_and_resumed_it_is_the_same(epoch: int, tmp_path: Path) -> None:
    """Killed after its checkpoint was written, or in the middle of the next epoch."""
    def stop(report: Report) -> None:
        if report.epoch == epoch + 1:
            raise Killed

    whole = run()
    with pytest.raises(Killed):
        run(folder=tmp_path / "run", tell=stop)
    again = run(folder=tmp_path / "run")
    assert again.history == whole.history
    for (name, a), b in zip(whole.module.state_dict().items(), again.module.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    assert run(folder=tmp_path / "run").history == whole.history, "a run that is over is not trained again"


def test_it_stops_when_nothing_gets_better() -> None:
    stopped = run(controller="wait", epochs=200, patience=5)
    assert len(stopped.history) < 100
    best = max(report.score for report in stopped.history[:-5])
    assert all(report.score <= best for report in stopped.history[-5:])


def test_an_optimizer_of_ones_own_keeps_its_rate() -> None:
    model = nn.Sequential(nn.Linear(2, 8), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    data = [(X[:40], Y[:40])]
    grown = esper.grow(model, data, data, loss, epochs=3, optimizer=optimizer, slots="0", controller="wait")
    assert optimizer.param_groups[0]["lr"] == 0.05
    assert grown.history[-1].score < 0, "minus the loss"


def test_a_mind_leads_it() -> None:
    grown = run(controller="tamiyo-small", objective="classification", epochs=6, previews=0, score=lambda model, batch: (model(batch[0]), batch[1]))
    assert "GERMINATE" in str(grown)
    accuracy = float((grown.module.eval()(X[300:]).argmax(1) == Y[300:]).double().mean())
    assert 0 < accuracy <= 1


class Stream(torch.utils.data.IterableDataset[tuple[Tensor, Tensor]]):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return zip(X[:40], Y[:40], strict=True)


def test_streams_have_no_length() -> None:
    data = DataLoader(Stream(), 8)
    model = nn.Sequential(nn.Linear(2, 8), nn.Linear(8, 2))
    grown = esper.grow(model, data, data, loss, epochs=8, slots="0", shadow_steps=6, controller={"0": "norm"})
    assert grown.history[-1].params > 0


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.inner, self.head = nn.Embedding(5, 8), nn.Linear(8, 8), nn.Linear(8, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.inner(self.embed(x)))
        return out


def test_tied_weights_and_a_loader_with_a_generator_of_its_own_go_on_bit_for_bit(tmp_path: Path) -> None:
    tokens = torch.arange(40) % 5

    def once(epochs: int, folder: Path | None) -> Grown:
        torch.manual_seed(0)
        data = DataLoader(TensorDataset(tokens, tokens), 8, shuffle=True, generator=torch.Generator().manual_seed(1))
        return esper.grow(Tied(), data, [(tokens, tokens)], loss, epochs=4, slots="inner", folder=folder,
                          tell=lambda report: stop(report.epoch + 1 == epochs))

    def stop(now: bool) -> None:
        if now:
            raise Killed

    whole = once(9, None)
    with pytest.raises(Killed):
        once(3, tmp_path)
    assert once(9, tmp_path).history == whole.history


@pytest.mark.parametrize(("change", "sentence"), [
    ({"train": []}, "train yields no batches"), ({"validation": []}, "validation yields no batches"),
    ({"train": iter([(X, Y)])}, "train can be iterated over only once"), ({"slots": ["9"]}, "no submodule '9'"), ({"epochs": 0}, "at least 1"),
    ({"schedulers": []}, "grow has schedulers of its own"), ({"objective": "classification"}, "pass a score")])
def test_what_cannot_be_is_one_sentence(change: dict[str, Any], sentence: str) -> None:
    model = nn.Sequential(nn.Linear(2, 8), nn.Linear(8, 2))
    settings: dict[str, Any] = {"train": [(X, Y)], "validation": [(X, Y)], "loss": loss, "epochs": 2, "slots": ["0"]} | change
    with pytest.raises(EsperError, match=sentence):
        esper.grow(model, settings.pop("train"), settings.pop("validation"), settings.pop("loss"), **settings)


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    data = [(X, Y)]
    esper.grow(nn.Sequential(nn.Linear(2, 8), nn.Linear(8, 2)), data, data, loss, epochs=2, slots="0", folder=tmp_path)
    with pytest.raises(EsperError, match="other slots, widths or blueprints"):
        esper.grow(nn.Sequential(nn.Linear(2, 9), nn.Linear(9, 2)), data, data, loss, epochs=2, slots="0", folder=tmp_path)
