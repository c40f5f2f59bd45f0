"""The benchmarks run as commands, and compare what they say they compare."""

import json
import os
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from benchmarks import all as figures, env, population, rl, vector
from benchmarks.population import PopulationBench, random_topology

from common import Bench, Loop, asked, main
from esper.kasmina import Host, OptimConfig, Population
from esper.kasmina.devices import check_device
from esper.leyline import EsperError
from tests.reference import batch, small_hosts

SCRIPTS = Path(__file__).parent.parent / "benchmarks"
TINY = {
    "population": "--host mlp --rows 4 --batch 5 --steps 2 --rounds 2 --warm-up 1",
    "env": "--host mlp --rows 3 --samples 200 --rounds 1",
    "rl": "--rows 4 --steps 6 --episode 4 --minibatches 2 --hidden 8 --updates 1",
    "vector": "--rows 2 --steps 2 --rounds 1",
}
BENCHES = {"population": (population, PopulationBench), "env": (env, env.EnvBench), "rl": (rl, rl.RLBench),
           "vector": (vector, vector.VectorBench)}
EXPECTED = {"population": ("structural_seconds", "rounds_samples_per_second"),
            "env": ("tight_ratio", "counterfactuals", "peak_memory_bytes"), "rl": ("reference", "parameters"),
            "vector": ("same_step_ratio", "cpu_ratio", "twin_seconds_per_scenario")}


def told(name: str) -> str:
    """By a process of its own."""
    command = [sys.executable, "-W", "error", str(SCRIPTS / f"{name}.py"), *TINY[name].split(), "--json"]
    return subprocess.run(command, capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL).stdout


def told_here(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """By the same script in this process, which finds no more modules than one of its own would."""
    script = str(SCRIPTS / f"{name}.py")
    monkeypatch.setattr(sys, "argv", [script, *TINY[name].split(), "--json"])
    monkeypatch.setattr(sys, "path", [str(SCRIPTS), *(p for p in sys.path if Path(p).resolve() != SCRIPTS.parent)])
    for module in [m for m in sys.modules if m.partition(".")[0] in ("benchmarks", "common")]:
        monkeypatch.delitem(sys.modules, module)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(script, run_name="__main__")
    assert ended.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("name", TINY)
def test_every_benchmark_ends_with_one_json_object(name: str, monkeypatch: pytest.MonkeyPatch,
                                                   capsys: pytest.CaptureFixture[str]) -> None:
    said = told(name) if name == "population" else told_here(name, monkeypatch, capsys)
    *lines, last = said.strip().splitlines()
    result = json.loads(last)
    assert result["ratio"] > 0
    assert result["bench"] == name
    assert result["device"] == "cpu"
    assert set(EXPECTED[name]) | {"date", "commit", "hardware", "torch", "python"} <= set(result)
    assert any("│" in line for line in lines), "a table"
    assert max(map(len, lines)) <= 80


def test_published_figures_are_measured_and_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--write", "--out", str(tmp_path / "new"), "--commit", "abc"]
    monkeypatch.setattr(sys, "argv", ["population.py", *words])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    seen = []

    def measure(config: PopulationBench) -> dict[str, object]:
        seen.append(config.host)
        return {"ratio": 2.0} | config.sizes()

    assert main(PopulationBench, measure, lambda result: result["host"], population.PUBLISHED) == 0
    assert seen == ["conv1d", "mlp"]
    results = {path.name: json.loads(path.read_text()) for path in (tmp_path / "new").iterdir()}
    assert set(results) == {"population-conv1d-cpu-float32.json", "population-mlp-cpu-float32.json"}
    assert all(result["commit"] == "abc" and "out" not in result for result in results.values())


@pytest.mark.parametrize("name", BENCHES)
def test_every_committed_result_can_be_measured_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, kind = BENCHES[name]
    monkeypatch.setattr(module, "check_device", lambda device: None)
    names = [replace(kind(), **sizes).name for many in module.PUBLISHED.values() for sizes in many]
    assert len(set(names)) == len(names)
    committed = {path.stem for path in (SCRIPTS / "results").glob(f"{name}-*.json")}
    assert committed
    assert committed <= set(names)


@pytest.mark.parametrize(("name", "words", "message"), [
    ("population", "--rows 0", "--rows"),
    ("population", "--dtype int8", "no --dtype 'int8'; choose from"),
    ("population", "--loop-rows 65", "--loop-rows cannot exceed --rows"),
    ("population", "--host rnn", "'rnn'"),
    ("population", "--device abacus", "no device 'abacus' here"),
    ("population", "--rows 3 --write", "leave out all sizes"),
    ("env", "--host cnn", "no --host 'cnn'"),
    ("env", "--rows 0", "--rows"),
    ("env", "--samples 5", "--samples must be 100 to 3000"),
    ("env", "--rows 2 --loop-rows 3", "--loop-rows"),
    ("rl", "--episode -1", "--episode"),
    ("rl", "--rows 7", "--rows 7 cannot be cut into 4 equal minibatches"),
    ("rl", "--hidden 0", "--hidden"),
    ("vector", "--rows 0", "--rows"),
])
def test_bad_options_exit_with_2_and_one_sentence(name: str, words: str, message: str,
                                                  monkeypatch: pytest.MonkeyPatch,
                                                  capsys: pytest.CaptureFixture[str]) -> None:
    module, kind = BENCHES[name]
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *words.split()])
    assert main(kind, module.measure, module.show, module.PUBLISHED) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith(f"{name}.py: ")
    assert message in err
    assert err.count("\n") == 1


def test_without_write_the_command_line_is_measured() -> None:
    assert asked(Bench(), {}) == [{}]


@pytest.mark.parametrize("device", ["gpu", "cuda:7", "cuda", "cpu:0", "mps", "", "nonsense", None])
def test_a_device_that_is_not_there_is_one_sentence(device: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(EsperError) as caught:
        check_device(device)  # type: ignore[arg-type]
    assert str(caught.value) == f"no device {str(device)!r} here; choose from cpu"


def test_devices_that_are_there_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for device in ("cpu", "cuda", "cuda:0", "cuda:1", torch.device("cuda", 1)):
        check_device(device)
    with pytest.raises(EsperError, match=r"no device 'cuda:7' here; choose from cpu, cuda, cuda:0, cuda:1$"):
        check_device("cuda:7")


def test_the_loop_of_sequences_learns_the_same() -> None:
    """So the ratio compares two ways of the same update."""
    config = rl.RLBench(rows=6, steps=8, episode=5, minibatches=2, hidden=8)
    whole, pieces = rl.Learner(config), rl.Learner(config, pieces=3)
    before = whole.agent.network.op_head[0].weight.detach().clone()
    for learner in (whole, pieces):
        learner.seconds()
    expected = dict(pieces.agent.network.named_parameters())
    for name, parameter in whole.agent.network.named_parameters():
        torch.testing.assert_close(parameter, expected[name], rtol=0, atol=1e-5)
    assert float((whole.agent.network.op_head[0].weight.detach() - before).abs().max()) > 1e-3


def test_the_loop_trains_the_same_hosts_in_the_same_way() -> None:
    optim = OptimConfig(lr=0.02, weight_decay=0.1, host_clip=0.2, seed_clip=0.1)
    population = Population(Host("conv1d", **small_hosts()["conv1d"]), 6, dtype=torch.float64, optim=optim)
    generator = torch.Generator().manual_seed(0)
    random_topology(population, generator)
    loop = Loop(population, 4)
    for _ in range(3):
        x, y = batch(population, 5, generator)
        population.train_step(x, y)
        loop.step(x, y)
    for row, net in enumerate(loop.nets):
        mine = dict(population.extract(row).named_parameters())
        for name, parameter in net.named_parameters():
            torch.testing.assert_close(parameter, mine[name], rtol=0, atol=1e-8)


def test_every_round_redraws_its_topology(monkeypatch: pytest.MonkeyPatch) -> None:
    draws = []
    drawn = random_topology
    monkeypatch.setattr(population, "random_topology", lambda *args: (draws.append(1), drawn(*args)))
    population.measure(PopulationBench(host="mlp", rows=2, batch=3, steps=1, rounds=3, warm_up=2))
    assert len(draws) == 2 + 2 * 3  # warm-up, and once for each way in each round


def test_every_draw_fills_every_slot_anew() -> None:
    population = Population(Host("mlp"), 40)
    generator = torch.Generator().manual_seed(0)
    random_topology(population, generator)
    first = population.life.blueprint.clone()
    population.end_epoch()
    random_topology(population, generator)
    assert not torch.equal(first, population.life.blueprint)
    assert sorted(first.unique().tolist()) == [1, 2, 3, 4, 5]  # all but noop
    assert sorted(population.life.style.unique().tolist()) == [0, 1, 2]
    assert bool((population.life.alpha == 1).all())


def test_freed_memory_is_kept() -> None:
    code = """
import resource, sys, torch
from esper.cli.machine import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
def work():
    return [torch.ones(1_000_000) for _ in range(40)]
work(); work()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    work()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
    hand_back = os.environ | {"MALLOC_TRIM_THRESHOLD_": "131072", "MALLOC_MMAP_THRESHOLD_": "131072"}  # glibc's worst day
    faults = {}
    for how in ("keep", "plain"):
        command = [sys.executable, "-c", code, how]
        faults[how] = int(subprocess.run(command, capture_output=True, text=True, check=True, env=hand_back).stdout)
    assert faults["keep"] < faults["plain"] / 10, faults


def test_every_published_figure_can_be_listed_and_names_scripts_and_files_that_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert figures.main(["--list"]) == 0
    assert capsys.readouterr().out.count("\n") == len(figures.FIGURES) > 20
    for name, figure in figures.FIGURES.items():
        words = figure.command.split()
        script = words[1] if words[1].endswith(".py") else f"{words[2].replace('.', '/')}.py" if words[0] == "python" else ""
        assert (SCRIPTS.parent / script).exists(), name
        for pattern in figure.files:
            found = list(figure.kept.glob(pattern))
            assert found, f"{name}: no {pattern} is committed"
            keys = {key for path in found for key, _ in figures.leaves(json.loads(path.read_text()))}
            assert any(figures.fnmatch.filter(keys, near) for near in figure.near), f"{name} compares nothing"
    measured = {path.name for figure in figures.FIGURES.values() for pattern in figure.files for path in figure.kept.glob(pattern)}
    assert {path.name for path in figures.BENCH.glob("*.json")} <= measured, "each of these is measured again"
    assert figures.main(["--only", "nonsense"]) == 2


def test_a_figure_that_differs_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    kept, out = tmp_path / "kept", tmp_path / "out"
    kept.mkdir()
    code = "import json, sys; json.dump(dict(a=dict(speed=1.2, same=True), other=7), open(sys.argv[1] + '/x.json', 'w'))"
    for speed, same, exit_code, said in ((1.1, True, 0, "x: as committed"), (0.5, True, 1, "a.speed: committed 0.5, now 1.2"),
                                         (1.1, False, 1, "a.same: committed False, now True")):
        (kept / "x.json").write_text(json.dumps({"a": {"speed": speed, "same": same}, "other": 3}))
        table = {"x": figures.Figure(f'python -c "{code}" {{out}}', ("x.json",), {"a.speed": 0.2, "*.same": 0.0}, kept=kept),
                 "y": figures.Figure("python -c 1", needs="nothing_like_it")}
        monkeypatch.setattr(figures, "FIGURES", table)
        assert figures.main(["--only", "x", "y", "--out", str(out)]) == exit_code
        told = capsys.readouterr().out
        assert said in told
        assert "y: left out, nothing_like_it is not installed" in told
