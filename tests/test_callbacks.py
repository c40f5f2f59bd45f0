"""Growth in loops of libraries: Hugging Face's Trainer and Lightning. Waiting changes no bit; what grows is delivered; a checkpoint goes on."""

import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from esper.door.callbacks import lightning_callback, trainer_callback
from esper.leyline import EsperError
from tests.test_door import Script

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import pytorch_lightning as pl
    import transformers as hf

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("quiet")]
GENERATOR = torch.Generator().manual_seed(0)
IDS = torch.randint(20, (48, 8), generator=GENERATOR)
X = torch.randn(48, 6, generator=GENERATOR)
Y = (X.norm(dim=1) > 2.4).long()
GROW = {"e0": ("GERMINATE", 1, "norm"), "e5": ("FOSSILIZE", 1, "")}


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    hf.utils.logging.set_verbosity_error()


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return len(IDS)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": IDS[index], "labels": IDS[index]}


def hugging(folder: Path, controller: Any = None, go_on: Path | None = None, epochs: int = 7, evaluate: bool = True, **arguments: Any) -> tuple[Any, Any]:
    """A small GPT-2, trained with warm-up, clipping and accumulated gradients."""
    hf.set_seed(0)
    model = hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=20, n_positions=8, n_embd=8, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0))
    settings = {"max_grad_norm": 0.5, "gradient_accumulation_steps": 2, "save_strategy": "epoch", "warmup_steps": 2, "learning_rate": 1e-2} | arguments
    trainer = hf.Trainer(model, hf.TrainingArguments(
        output_dir=str(folder), num_train_epochs=epochs, per_device_train_batch_size=8, per_device_eval_batch_size=16,
        use_cpu=True, report_to=[], disable_tqdm=True, logging_strategy="no", **settings), train_dataset=Rows(), eval_dataset=Rows() if evaluate else None)
    callback = None if controller is None else trainer_callback(trainer, controller=controller, shadow_steps=3)
    trainer.train(resume_from_checkpoint=go_on and str(go_on))
    return trainer, callback


def equal(one: nn.Module, two: nn.Module) -> bool:
    mine, other = one.state_dict(), two.state_dict()
    return mine.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in mine.items())


@pytest.mark.parametrize("arguments", [{}, {"bf16": True}], ids=["float32", "bf16"])
def test_a_trainer_goes_on_as_without_us_and_delivers_what_grew(tmp_path: Path, arguments: dict[str, Any]) -> None:
    plain, _ = hugging(tmp_path / "plain", epochs=3, **arguments)
    waited, callback = hugging(tmp_path / "waited", "wait", epochs=3, **arguments)
    assert equal(plain.model, waited.model)
    assert equal(callback.grown, waited.model)
    grown, callback = hugging(tmp_path / "grown", Script(**GROW), **arguments)
    told = callback.growing.history
    assert [report.decision.split()[0] for report in told] == ["GERMINATE", "WAIT", "WAIT", "WAIT", "WAIT", "FOSSILIZE", "WAIT"]
    assert told[0].score < 0, "minus the loss"
    assert set(told[-1].contributions) == {"transformer.h.1"}
    extra = sum(p.numel() for p in callback.grown.parameters()) - sum(p.numel() for p in grown.model.parameters())
    assert extra == told[-1].params > 0
    with torch.no_grad():
        before = callback.grown.eval()(input_ids=IDS).logits
        for parameter in grown.model.parameters():
            parameter.fill_(0.0)
        assert torch.equal(callback.grown(input_ids=IDS).logits, before), "a model of its own"


def test_a_trainer_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    """After epoch 3 a seed blends in, and the optimizer knows it."""
    whole, first = hugging(tmp_path / "whole", Script(**GROW))
    path = tmp_path / "whole" / "checkpoint-9"
    saved = torch.load(path / "optimizer.pt")
    assert sum(len(group["params"]) for group in saved["param_groups"]) == len(list(whole.model.parameters())), "without seeds"
    again, second = hugging(tmp_path / "whole", Script(**GROW), go_on=path)
    assert equal(whole.model, again.model)
    assert equal(first.grown, second.grown)
    assert [r.decision for r in second.growing.history] == [r.decision for r in first.growing.history[3:]]
    with pytest.raises(EsperError, match="resume in the output_dir"):
        hugging(tmp_path / "elsewhere", Script(**GROW), go_on=path)


def test_a_callback_serves_again(tmp_path: Path) -> None:
    """What an earlier training delivered, or went on from, is not taken for the next one's."""
    trainer, callback = hugging(tmp_path / "first", "wait", epochs=1)
    first, callback.saved = callback.grown, None
    trainer.train()
    assert callback.grown is not first
    assert not any(m._forward_hooks for m in trainer.model.modules())
    _, growth, _ = lightning(tmp_path / "second", "wait", epochs=1)
    first, other = growth.grown, Rings()
    with torch.no_grad():
        other.net[2].bias.copy_(torch.tensor([9.0, -9.0]))
    fit(other, [growth], 1)
    assert growth.grown is not first
    assert equal(growth.grown, other)
    assert growth.growing.history[-1].score < -1, "of the other module"


def test_a_loader_with_a_generator_of_its_own_draws_as_before(tmp_path: Path) -> None:
    modules = []
    for callbacks in ([], [lightning_callback(controller="wait", slots=["net.0"])]):
        pl.seed_everything(0, verbose=False)
        modules.append(Rings())
        fit(modules[-1], callbacks, 2, DataLoader(TensorDataset(X, Y), 8, shuffle=True, generator=torch.Generator().manual_seed(1)))
    assert equal(*modules)


@pytest.mark.parametrize(("change", "sentence"), [
    ({"load_best_model_at_end": True, "eval_strategy": "epoch"}, "leave load_best_model_at_end out"), ({"evaluate": False}, "give the Trainer an eval_dataset")])
def test_what_a_trainer_cannot_do_is_one_sentence(change: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(EsperError, match=sentence):
        hugging(tmp_path, "wait", **change)


class Rings(pl.LightningModule):
    def __init__(self, told: str = "val_loss") -> None:
        super().__init__()
        self.net, self.told = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 2)), told

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, index: int) -> Tensor:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log_dict({self.told: F.cross_entropy(self(batch[0]), batch[1]), "acc": (self(batch[0]).argmax(1) == batch[1]).float().mean()})

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)]


def lightning(folder: Path, controller: Any = None, go_on: str | None = None, epochs: int = 7, told: str = "val_loss", monitor: str = "val_loss",
              shuffle: bool = True, **settings: Any) -> tuple[pl.LightningModule, Any, Any]:
    pl.seed_everything(0, verbose=False)
    module = Rings(told)
    callback = None if controller is None else lightning_callback(monitor, "max" if monitor == "acc" else "min", controller=controller,
                                                                  slots=["net.0", "net.1"], shadow_steps=3)
    keep = pl.callbacks.ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)
    trainer = pl.Trainer(max_epochs=epochs, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
                         accumulate_grad_batches=2, gradient_clip_val=0.5, callbacks=[*([callback] if callback else []), keep], **settings)
    trainer.fit(module, DataLoader(TensorDataset(X, Y), 8, shuffle=shuffle), DataLoader(TensorDataset(X, Y), 16), ckpt_path=go_on)
    return module, callback, trainer


def fit(module: pl.LightningModule, callbacks: list[Any], epochs: int, data: Any = None) -> None:
    trainer = pl.Trainer(max_epochs=epochs, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
                         enable_checkpointing=False, callbacks=callbacks)
    trainer.fit(module, data or DataLoader(TensorDataset(X, Y), 48), DataLoader(TensorDataset(X, Y), 16))


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_lightning_goes_on_as_without_us_and_delivers_what_grew(tmp_path: Path, precision: Any) -> None:
    plain, _, _ = lightning(tmp_path / "plain", epochs=3, precision=precision)
    waited, callback, _ = lightning(tmp_path / "waited", "wait", epochs=3, precision=precision)
    assert equal(plain, waited)
    assert equal(callback.grown, waited)
    grown, callback, trainer = lightning(tmp_path / "grown", Script(**GROW), precision=precision, monitor="acc")
    told = callback.growing.history
    assert [report.decision.split()[0] for report in told] == ["GERMINATE", "WAIT", "WAIT", "WAIT", "WAIT", "FOSSILIZE", "WAIT"]
    assert 0 <= told[0].score <= 1, "accuracies"
    assert set(trainer.logged_metrics) == {"loss", "val_loss", "acc"}, "what is measured for seeds is not logged"
    assert sum(p.numel() for p in callback.grown.parameters()) - sum(p.numel() for p in grown.parameters()) == told[-1].params > 0
    assert not torch.equal(callback.grown.eval()(X), grown.eval()(X))


def test_lightning_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    """Lightning keeps no random state: batches come in a fixed order."""
    whole, first, _ = lightning(tmp_path / "whole", Script(**GROW), shuffle=False)
    assert (tmp_path / "whole" / "epoch=2.ckpt").exists()
    again, second, _ = lightning(tmp_path / "again", Script(**GROW), shuffle=False, go_on=str(tmp_path / "whole" / "epoch=2.ckpt"))
    assert equal(whole, again)
    assert equal(first.grown, second.grown)
    assert [r.decision for r in second.growing.history] == [r.decision for r in first.growing.history[3:]]


def test_what_lightning_cannot_do_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(EsperError, match="must log 'other' as a number"):
        lightning(tmp_path, "wait", monitor="other", epochs=1)
    with pytest.raises(EsperError, match="mode is min or max"):
        lightning_callback(mode="best")


@pytest.mark.parametrize(("make", "package"), [(lambda: trainer_callback(None), "transformers"), (lightning_callback, "lightning")])
def test_a_library_that_is_missing_is_named(make: Any, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("transformers", "lightning.pytorch", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(EsperError, match=f"is not installed; pip install {package}"):
        make()
