"""Exports: files of what was grown, which give the network's own outputs where there is no Esper."""

import importlib.util
import json
import os
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import esper
from esper.cli import main
from esper.door.export import FORMATS
from esper.kasmina import BLUEPRINTS, Host, Population, register_blueprint
from esper.kasmina.blending import Graft
from esper.kasmina.blueprints import KINDS
from esper.kasmina.foreign import grow_behind
from esper.leyline import EsperError, SeedStage, Style
from esper.simic.proof.sweep import full_spec, seed_script
from esper.tamiyo import Scripted
from esper.tolaria import Kind, MorphogeneticEnv, play
from tests import models
from tests.test_door import Script
from tests.workshop import toy_family

HOSTS = {"mlp": Host("mlp", (6,), (8, 8)), "conv1d": Host("conv1d", (1, 16), (4, 8)), "cnn": Host("cnn", (3, 8, 8), (4, 8)),
         "resnet": Host("resnet", (3, 8, 8), (4, 8), depth=1), "gpt": Host("gpt", (6,), (8, 8), heads=2, tied=True)}
STRANGER = """
import json, os, runpy, sys
sys.modules["esper"] = None  # who imports it fails
import torch
from safetensors.torch import load_file, save_file
from tests import models
for folder, model in json.loads(sys.argv[1]):
    x = load_file(folder + "/x")["x"].clone()  # products round by where numbers lie in memory
    net = runpy.run_path(folder + "/model.py")["load"](*[getattr(models, name)(*given) for name, given in model])
    outputs = {"model.py": net(x).detach()}
    if os.path.exists(folder + "/model.pt2"):
        outputs["model.pt2"] = torch.export.load(folder + "/model.pt2").module()(x).detach()
    save_file(outputs, folder + "/outputs")
"""


def stirred(net: nn.Module) -> nn.Module:
    """Newborn seeds do nothing; these do."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator).to(parameter)
    return net.eval()


def planted(kind: str, *names: str, **options: Any) -> tuple[nn.Module, Tensor]:
    """A host with a seed in every slot, in different styles, and samples."""
    host = HOSTS[kind]
    population = Population(host, 2, **options)
    known, slots = population.spec.blueprints, len(host.slots)
    chosen = [known.index(names[slot % len(names)]) for slot in range(slots)]
    population.install(torch.arange(2), torch.tensor([chosen] * 2), torch.tensor([[Style.GATE, Style.MULTIPLY]] * 2),
                       torch.tensor([[0.5, 1.0]] * 2), SeedStage.FOSSILIZED)
    return stirred(population.extract(1)), samples(host)


def samples(host: Host) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randint(10, (3, *host.inputs), generator=generator) if host.tokens else torch.randn(3, *host.inputs, generator=generator)


def attached(model: nn.Module, x: Tensor, slots: list[str], blueprint: str) -> nn.Module:
    """A model of a user's own in which a seed was planted and kept."""
    optimizer, y = torch.optim.AdamW(model.parameters(), lr=1e-2), torch.arange(len(x)) % 3
    script = Script(e1=("GERMINATE", 1, blueprint), e7=("FOSSILIZE", 1, ""))
    growing = esper.attach(model, optimizer, example=x, slots=slots, controller=script, epochs=20)
    for _ in range(10):
        for _ in range(2):
            optimizer.zero_grad()
            F.cross_entropy(model.train()(x), y).backward()
            optimizer.step()
        growing.end_epoch(lambda: (model.eval()(x).argmax(1) == y).double())
    assert list(growing.kept) == slots[1:]
    return growing.deliver().eval()


def twice() -> nn.Module:
    """Seeds behind seeds, inside of blocks with seeds, and inside of seeds."""
    def graft() -> Graft:
        return Graft(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), Style.ADD, 0.5, False)

    net = models.Shared()
    for path in ("blocks.0", "blocks.0", "blocks.1", "blocks.1.body.map", "blocks.1.graft.seed.0"):
        grow_behind(net, {path: graft()})
    return stirred(net)


torch.manual_seed(0)
X, TOKENS = torch.randn(12, 6), torch.randint(9, (12, 5))
CASES: dict[str, Any] = {
    "mlp": lambda: planted("mlp", "glu", "mlp_small"), "conv1d": lambda: planted("conv1d", "attention", "depthwise"),
    "cnn": lambda: planted("cnn", "attention", "conv_heavy"), "resnet": lambda: planted("resnet", "norm", "bottleneck"),
    "gpt": lambda: planted("gpt", "block", "gated_conv"), "float64": lambda: planted("mlp", "norm", dtype="float64"),
    "layers": lambda: (attached(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), X, ["0", "1"], "glu"), X),
    "class": lambda: (attached(models.Blocks(), X, ["blocks.0", "blocks.1"], "mlp_small"), X),
    "instance": lambda: (attached(models.Speaker(9, 8), TOKENS, ["layers.0", "layers.1"], "attention"), TOKENS),
    "twice": lambda: (twice(), X), "own seed": lambda: planted("mlp", "squash")}

PROGRAMS = ("cnn", "instance")


@pytest.fixture(scope="module", autouse=True)
def _own_seed() -> Iterator[None]:
    register_blueprint("squash", models.Squash, "mlp")
    yield
    del BLUEPRINTS["mlp", "squash"]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, nn.Module, Tensor, list[Any]]]:
    """Everything, written, and run in one process that has no Esper."""
    made, todo = {}, []
    for name, case in CASES.items():
        folder = tmp_path_factory.mktemp("exports") / name
        net, x = case()
        x = x.double() if name == "float64" else x
        made[name] = folder, net, x, esper.export(net, folder, x[:2], ("safetensors", "torch")[: 1 + (name in PROGRAMS)])
        save_file({"x": x}, folder / "x")
        todo.append((str(folder), [("Speaker", (9, 8))] if name == "instance" else []))
    alike = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}  # bits depend on it
    subprocess.run([sys.executable, "-c", STRANGER, json.dumps(todo)], check=True, cwd=Path(__file__).parent.parent, env=alike)
    return made


@pytest.mark.parametrize("name", CASES)
def test_a_stranger_gets_the_same_bits(name: str, exported: dict[str, Any]) -> None:
    folder, net, x, files = exported[name]
    outputs, wanted = load_file(folder / "outputs"), net(x).detach()
    assert wanted.std() > 0.01
    assert torch.equal(outputs["model.py"], wanted)
    assert outputs.keys() == {written.file for written in files}
    assert all(written.any_batch for written in files)
    assert (files[0].difference, files[0].use) == (0.0, "load(model)" if name == "instance" else "load()")
    assert "bit for bit the network" in str(files[0])
    if name in PROGRAMS:
        torch.testing.assert_close(outputs["model.pt2"], wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["cnn", "gpt", "class"])
def test_the_file_holds_what_grew(name: str, exported: dict[str, Any]) -> None:
    """Other seeds give other outputs: the comparison can fail."""
    folder, net, x, _ = exported[name]
    load = runpy.run_path(str(folder / "model.py"))["load"]
    again = load()
    assert again.state_dict().keys() == net.state_dict().keys()
    assert name != "gpt" or again.head[1].weight is again.stages[0][0].token.weight, "tied"
    for key, value in again.state_dict().items():
        if key.endswith("alpha"):
            value.zero_()
    assert not torch.allclose(again(x), net(x), atol=1e-3)
    assert "esper" not in (folder / "model.py").read_text()


@pytest.mark.parametrize("kind", KINDS)
def test_every_blueprint_is_written_as_python(kind: str, tmp_path: Path) -> None:
    for name in Population(HOSTS[kind], 1).spec.blueprints[1:]:
        net, x = planted(kind, name)
        (written,) = esper.export(net, tmp_path / name, x, ("safetensors",))
        assert written.use == "load()"
        assert sorted(path.name for path in (tmp_path / name).iterdir()) == ["model.py", "weights.safetensors"]


@pytest.mark.skipif(importlib.util.find_spec("onnxruntime") is None, reason="onnxruntime is not installed")
@pytest.mark.parametrize("name", ["gpt", "instance"])
def test_onnx_agrees(name: str, exported: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    _, net, x, _ = exported[name]
    (written,) = esper.export(net, tmp_path, x[:2], ("onnx",))
    assert written.difference <= 1e-4
    assert written.any_batch
    import onnxruntime

    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    (out,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(out), net(x).detach(), rtol=1e-4, atol=1e-4)
    assert capfd.readouterr() == ("", "")


class Noisy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x)


class Branching(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if float(x.sum()) > 0 else x


def test_what_cannot_be_kept_is_refused_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    class Hidden(nn.Linear):
        pass

    def refused(net: Any, message: str, *formats: str, folder: Path = tmp_path / "new") -> None:
        with pytest.raises(EsperError, match=message) as told:
            esper.export(net, folder, X, formats or ("safetensors", "torch"))
        assert "\n" not in str(told.value)
        assert not folder.is_dir()

    net, _ = planted("mlp", "norm")
    refused(net, "no format 'pickle'; choose from safetensors, torch, onnx", "safetensors", "pickle")
    refused(Noisy(), "the safetensors format cannot hold this model .its Python gives other outputs.; nothing")
    refused(Noisy(), "model.pt2 differs from the network by .*nothing was written", "torch")
    refused(Branching(6, 6), "the torch format cannot hold this model", "torch")
    assert capfd.readouterr() == ("", "")
    hidden = grow_behind(models.Blocks(), {"blocks.0": Graft(Hidden(8, 8), Style.ADD, 1.0, False)})
    refused(hidden, "the class Hidden cannot be imported by others")
    refused(nn.Linear(5, 5), "the model does not run on the example")
    refused("a name", "export takes an nn.Module, not a str; grow")
    (tmp_path / "file").touch()
    refused(net, "cannot make the folder .*/file", folder=tmp_path / "file")
    model = models.Blocks()
    esper.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), example=X)
    refused(model, "export what deliver.. returns")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "onnxscript" else name)
    refused(net, r"onnx needs onnxscript: pip install 'esper-morph\[export\]'", "torch", "onnx")
    assert set(FORMATS) == {"safetensors", "torch", "onnx"}


def test_exporting_leaves_the_module_and_the_random_state_alone(tmp_path: Path) -> None:
    net = models.Blocks().train()
    before, drawn = {name: value.clone() for name, value in net.state_dict().items()}, torch.get_rng_state()
    esper.export(net, tmp_path, {"x": X}, ("safetensors",))
    assert net.training
    assert torch.equal(drawn, torch.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_the_command_writes_what_an_episode_delivered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    family = toy_family(Host("mlp", (64,), (8, 8)), kinds=(Kind("plain"),), horizons=(9,), task="digits", batch=400)
    env = MorphogeneticEnv(family, 3, spec=full_spec(family))
    keep, trial = seed_script(env.spec, 0, 1, "glu"), seed_script(env.spec, 1, 0, "mlp_small")[:2]
    episodes = play(env, Scripted([keep, [*keep, *trial], []]), family.scenarios(3))
    episodes.save(tmp_path / "round.safetensors")
    assert bool((env.population.life.alpha[1] > 0).all()), "the seed on trial has an effect"
    for row in (1, 2):
        assert main(["export", str(tmp_path / "round.safetensors"), "--row", str(row), "--out", str(tmp_path / f"{row}"),
                     "--formats", "safetensors"]) == 0
        assert capsys.readouterr().out == f"{tmp_path / str(row)}/model.py: bit for bit the network, any batch size; load()\n"
        net = runpy.run_path(str(tmp_path / str(row) / "model.py"))["load"]()
        x, y = next(env.validation())
        score = (net(x[:, row]).argmax(1) == y[:, row]).float().mean()
        assert float(score) == pytest.approx(float(episodes.delivered.score[row]), abs=1e-6)
    assert (tmp_path / "1" / "model.py").read_text().count(" Graft(\n") == 1
    assert main(["export", "nowhere", "--row", "1", "--out", "nowhere", "--formats", "pickle"]) == 2
    assert capsys.readouterr().err == "esper export: no format 'pickle'; choose from safetensors, torch, onnx\n"
    assert main(["export", str(tmp_path / "round.safetensors"), "--row", "5", "--out", str(tmp_path / "5")]) == 2
    assert capsys.readouterr().err == "esper export: --row 5 is outside 0..2\n"
