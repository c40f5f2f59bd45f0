"""Packages that bring things of their own: installed as users install them, found wherever names are."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import esper
from esper.cli import main
from esper.leyline import plugins
from esper.leyline.storage import read_json
from esper.tamiyo import named_policies

SAMPLE = Path(__file__).parent / "sample_package"
TINY = "rows = 4\nexam_every = 0\nexam_rows = 2\n[env]\npreviews = false\n[ppo]\nminibatches = 2\n"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which the sample package is installed, with data of its own."""
    target, source = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("source")
    for file in SAMPLE.glob("*.*"):
        (source / file.name).write_bytes(file.read_bytes())
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index",
                    "--disable-pip-version-check", "--target", str(target), str(source)], check=True)
    paths = os.pathsep.join(filter(None, (str(target), os.environ.get("PYTHONPATH"))))
    return os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "ESPER_DATA": str(tmp_path_factory.mktemp("data"))}


def esper_says(env: dict[str, str], *words: str) -> str:
    done = subprocess.run([sys.executable, "-m", "esper.cli", *words], env=env, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


IN_PYTHON = """
import sys, torch
from torch import nn
from esper.kasmina import Host, find_objective, find_blueprint
assert "orchard" not in sys.modules, "not before it is asked for"
outputs, labels = torch.zeros(1, 3, 2), torch.tensor([[0], [1], [0]])
assert find_objective("squared").losses(outputs, labels).item() == 0.5, "Brier's score of a coin"
assert find_blueprint("mlp", "cutting").name == "cutting"
assert Host("trellis", classes=2).module()[0].in_features == 2

import esper
from functools import partial
from esper.cli.prove import load_candidates
from esper.simic.workers import Processes

def asked():
    return esper.find_family("allotment").host.kind

if __name__ == "__main__":
    env = esper.MorphogeneticEnv(esper.find_family("allotment"), rows=2)
    grown = esper.play(env, esper.Random(), env.family.scenarios(2))
    assert type(env.population.objective).__name__ == "Squared" and "cutting" in env.spec.blueprints
    (court,) = load_candidates("grafter", "cpu")
    with Processes(1) as workers:
        told = {done.name: done.value for done in workers.run({"family": asked, "arm": partial(court.make, env.spec)})}
    assert (told["family"], type(told["arm"]).__name__) == ("trellis", "Grafter"), "a worker that imported nothing else"
    model = nn.Sequential(nn.Linear(2, 8), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    growing = esper.attach(model, optimizer, example=torch.zeros(4, 2), slots=["0"], controller="grafter", epochs=8)
    model(torch.ones(4, 2)).sum().backward()
    optimizer.step()
    assert "cutting" in growing.end_epoch(lambda: torch.zeros(8)).decision
"""


def test_python_and_its_workers_find_what_a_package_brings(installed: dict[str, str], tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(IN_PYTHON)
    subprocess.run([sys.executable, "-W", "error", str(script)], env=installed, check=True)


def test_commands_find_what_a_package_brings(installed: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(TINY)
    out = tmp_path / "run"
    esper_says(installed, "train", "--family", "allotment", "--reward", "harvest", "--config", str(tmp_path / "tiny.toml"),
               "--rounds", "1", "--out", str(out))
    config = read_json(out / "run.json", "run")["config"]
    assert (config["reward"], config["env"]["family"]["host"]["kind"]) == ("harvest", "trellis")
    assert "cutting" in config["env"]["spec"]["blueprints"]
    said = esper_says(installed, "doctor")
    assert "orchard of the package orchard" in said
    assert "plot" in said


@pytest.fixture
def bring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(plugins, "_progress", [])
    monkeypatch.setattr(plugins, "_brought", {})
    yield
    for path in tmp_path.glob("*.py"):
        sys.modules.pop(path.stem, None)


WRONG = {
    "import nothing_of_this_name": "ModuleNotFoundError: No module named 'nothing_of_this_name'",
    "import sys; sys.exit(3)": "SystemExit: 3",
    "1 / 0": "ZeroDivisionError: division by zero",
    "import esper; esper.register_reward('utility', print)": "the reward 'utility' exists already; give yours another name",
    "import esper; esper.register_policy('wait', print)": "the policy 'wait' exists already",
    "import esper; esper.register_task('digits', print)": "digits is a built-in task; choose another name",
    "import esper; esper.register_objective('regression', esper.Objective())": "the objective 'regression' exists already",
    "import esper; esper.register_objective('other', print)": "the objective 'other' must be a Objective, not <built-in",
    "import esper; esper.register_reward('other', 3)": "the reward 'other' must be a Callable, not 3",
    "import esper, torch; esper.Host.of(torch.nn.Linear(2, 2), [''], torch.zeros(1, 2), name='mlp')": "'mlp' is the name of a built-in",
}


@pytest.mark.parametrize("code", WRONG)
@pytest.mark.usefixtures("bring")
def test_a_plugin_that_fails_is_one_sentence_with_its_package(code: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    about = tmp_path / "weeds-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: weeds\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[esper.plugins]\ndock = weeds_module\n")
    (tmp_path / "weeds_module.py").write_text(code)
    for _ in range(2):  # not only the first time
        with pytest.raises(esper.EsperError) as caught:
            named_policies()
        assert "the plugin dock of the package weeds cannot be used: " in str(caught.value)
        assert WRONG[code] in str(caught.value)
        assert "\n" not in str(caught.value)
    assert esper.find_family("mlp").name == "mlp", "what is built in is not looked for in packages"
    assert main(["sweep", "--family", "nobody's"]) == 2
    assert "package weeds" in capsys.readouterr().err
    assert main(["doctor"]) == 1
    assert "something fails" in capsys.readouterr().out
