"""Families of ordinary hosts on any task, by name, by kind of host, and from files."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import esper
from esper import cli
from esper.leyline import EsperError
from esper.tolaria.families import FLOP_PRICES, POINTS, family_on, find_family


@pytest.fixture(autouse=True)
def own_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ESPER_DATA", str(tmp_path / "data"))


def made(shape: tuple[int, ...], n: int = 60) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(0)
    y = np.arange(n) % 3
    return draw.normal(size=(n, *shape)) + y.reshape(-1, *[1] * len(shape)), y


@pytest.mark.parametrize(("shape", "kind"), [((5,), "mlp"), ((2, 9), "conv1d"), ((1, 5), "conv1d"), ((3, 6, 9), "cnn"),
                                             ((1, 16, 16), "cnn"), ((3, 6, 9), "resnet"), ((1, 16, 16), "resnet")])
def test_samples_of_any_size_get_hosts_that_grow(shape: tuple[int, ...], kind: str) -> None:
    esper.Task.from_arrays("mine", *made(shape))
    family = find_family("mine" if kind != "resnet" else "mine/resnet")
    assert (family.host.kind, family.host.inputs, family.host.classes) == (kind, shape, 3)
    assert family.name == ("mine-resnet" if kind == "resnet" else "mine")
    env = esper.MorphogeneticEnv(family, rows=3)
    grown = esper.play(env, esper.Random(seed=1), family.scenarios(3))
    assert bool(grown.delivered.score.isfinite().all())
    assert bool((grown.spent > 0).any()), "somebody grew"


def test_compute_has_a_price_that_is_relative_to_the_host() -> None:
    family = family_on("digits")
    assert [round(price * family.host.cost.params, 9) for price in family.prices] == list(POINTS)
    assert family.flop_prices == FLOP_PRICES
    assert min(family.prices) > 0
    assert min(FLOP_PRICES) > 0
    assert not any(kind.frozen or kind.width or kind.one_tap for kind in family.kinds), "all hosts are healthy"


def test_a_text_is_a_family_of_transformers() -> None:
    task = esper.Task.from_text("poem", "the cat sat on the mat and the rat sat on the cat. " * 40, context=16)
    family = find_family("poem")
    assert family.host.kind == "gpt"
    assert (family.host.inputs, family.host.classes) == ((16,), len(task.names))
    env = esper.MorphogeneticEnv(family, rows=2)
    score = esper.play(env, esper.Wait(), family.scenarios(2)).delivered.score
    assert float(score.max()) > 0.5, "a text that repeats itself is easy to explain"


TOML = """
name = "few"
task = "digits"
horizons = [3]
samples = 100
batch = 50
[host]
kind = "mlp"
inputs = [64]
widths = [6, 6]
[[kinds]]
name = "plain"
"""


def test_a_family_from_a_file_is_known_to_commands_and_to_what_they_store(tmp_path: Path) -> None:
    path = tmp_path / "few.toml"
    path.write_text(TOML)
    family = find_family(str(path))
    assert (family.name, family.host.widths, family.horizons) == ("few", (6, 6), (3,))
    out = tmp_path / "run"
    command = ["train", "--family", str(path), "--rounds", "1", "--rows", "4", "--out", str(out)]
    assert cli.main(command) == 0
    path.unlink()  # the run says what it is about
    assert cli.main(["train", "--resume", "--more", "1", "--out", str(out)]) == 0


@pytest.mark.parametrize(("name", "content", "sentence"), [
    ("none.toml", None, "cannot read the family"),
    ("bad.toml", "name = ", "cannot read the family"),
    ("odd.toml", TOML + "colour = 3", "colour"),
    ("task.toml", TOML.replace("digits", "nothing"), "no task 'nothing'"),
    ("nobody", None, "no family 'nobody'; choose from .*FAMILY.toml.*digits"),
    ("digits/cnn", None, "a cnn host does not take the samples of digits"),
    ("digits/gpt", None, "a gpt host does not take"),
    ("digits/huge", None, "a huge host does not take"),
])
def test_families_that_cannot_be_are_one_sentence(name: str, content: str | None, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    with pytest.raises(EsperError, match=sentence):
        find_family(str(path) if name.endswith(".toml") else name)


def test_regression_beats_the_mean_on_real_numbers() -> None:
    family = family_on("diabetes")
    env = esper.MorphogeneticEnv(family, rows=6)
    scenarios = family.scenarios(6)
    scenarios.kind[:] = 0  # all samples
    done = esper.play(env, esper.Wait(), scenarios)
    assert float(done.delivered.score.min()) > 0.3, "ridge explains 40 to 50 %"


OUTSIDE = """
import sys, numpy, torch
net, data = torch.export.load(sys.argv[1]).module(), numpy.load(sys.argv[2])
out = net(torch.from_numpy(data["x"]))
print(float(eval(sys.argv[3])))
assert not any(name.partition(".")[0] == "esper" for name in sys.modules)
"""


def outside(net: torch.nn.Module, data: esper.TaskData, score: str, tmp_path: Path) -> float:
    """What a delivered network scores in a process that never imports Esper."""
    net, x = net.eval(), data.validation_x
    shapes = ({0: torch.export.Dim("batch")},)
    torch.export.save(torch.export.export(net, (x[:4],), dynamic_shapes=shapes), tmp_path / "net.pt2")
    np.savez(tmp_path / "data.npz", x=x.numpy(), y=data.validation_y.numpy())
    done = subprocess.run([sys.executable, "-c", OUTSIDE, tmp_path / "net.pt2", tmp_path / "data.npz", score],
                          capture_output=True, text=True, check=True)
    return float(done.stdout)


def csv_with_a_number(tmp_path: Path) -> esper.Family:
    x, y = made((3,), 80)
    rows = "\n".join(",".join(map(str, (*sample, 2.5 * label + sample[0]))) for sample, label in zip(x, y, strict=True))
    (tmp_path / "house.csv").write_text(f"rooms,size,age,price\n{rows}\n")
    assert cli.main(["tasks", "add", "house", str(tmp_path / "house.csv"), "--target", "price"]) == 0
    return find_family("house")


def a_text_file(tmp_path: Path) -> esper.Family:
    (tmp_path / "poem.txt").write_text("to be or not to be, that is the question. " * 40)
    assert cli.main(["tasks", "add", "poem", str(tmp_path / "poem.txt"), "--context", "12"]) == 0
    return find_family("poem")


def a_folder_of_pictures(tmp_path: Path) -> esper.Family:
    x, y = made((8, 8), 60)
    for number, (pixels, label) in enumerate(zip(x, y, strict=True)):
        folder = tmp_path / "pictures" / f"class {label}"
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray((40 * pixels + 100).clip(0, 255).astype(np.uint8)).save(folder / f"{number}.png")
    assert cli.main(["tasks", "add", "pictures", str(tmp_path / "pictures")]) == 0
    return find_family("pictures")


def own_arrays(tmp_path: Path) -> esper.Family:
    esper.Task.from_arrays("series", *made((1, 12)))
    return find_family("series")


ACCURACY = "(out.argmax(1).numpy() == data['y']).mean()"
EXPLAINED = "1 - ((out[:, 0].detach().numpy() - data['y']) ** 2).mean()"
LOSS = "torch.nn.functional.cross_entropy(out.flatten(0, 1), torch.from_numpy(data['y']).flatten())"


@pytest.mark.parametrize(("build", "score", "name"), [
    (own_arrays, ACCURACY, "score"), (a_folder_of_pictures, ACCURACY, "score"), (csv_with_a_number, EXPLAINED, "score"), (a_text_file, LOSS, "loss")])
def test_own_data_grows_a_network_that_scores_the_same_elsewhere(
        build: Callable[[Path], esper.Family], score: str, name: str, tmp_path: Path) -> None:
    family = build(tmp_path)
    env = esper.MorphogeneticEnv(family, rows=2)
    scenarios = family.scenarios(2)
    scenarios.kind[:] = 0
    env.reset(scenarios)
    spec, slots = env.spec, family.host.stages
    env.install(torch.full((2, slots), len(spec.blueprints) - 1))  # fossils from the first epoch on
    for _ in range(4):
        now = env.step(torch.tensor([spec.action("WAIT")]).repeat(2, 1))
    data = esper.load_task(family.task)
    wanted = float(getattr(now.evidence.delivered, name)[0])
    net = env.population.extract(0)
    assert sum(p.numel() for p in net.parameters()) > family.host.cost.params, "it grew"
    assert outside(net, data, score, tmp_path) == pytest.approx(wanted, abs=1e-5)
