"""The benchmarks run as commands, and compare what they say they compare."""

import json
import os
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from benchmarks import all as figures, env, population, rl, speed, vector
from benchmarks.population import PopulationBench, random_topology
from experiments import many_workers
from experiments.scaling import scaling_svg
from experiments.tables import speed_before_and_after

from common import Bench, Loop, asked, main
from esper.cli.train import PRESETS
from esper.kasmina import Host, OptimConfig, Population
from esper.kasmina.devices import check_device
from esper.leyline import EsperError
from esper.simic.config import TrainConfig
from esper.simic.ppo import PPOAgent
from esper.simic.workers import Workers
from esper.tolaria import MorphogeneticEnv, Twins, find_family
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


HERE = speed.Asked("cpu")


def test_speed_counts_hosts_whose_episode_runs() -> None:
    env_of = MorphogeneticEnv(find_family("mlp"), 3)
    running, seconds = zip(*speed.episode(env_of, 0, "cpu"), strict=True)
    assert sum(running) == int(env_of.scenarios.horizon.sum())
    assert len(running) == int(env_of.scenarios.horizon.max())
    assert min(seconds) > 0


def test_scaling_tells_every_size_and_is_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    found = speed.scaling(HERE, "mlp", (1, 2), 1)
    assert all(one["rate"] == pytest.approx(1 / one["seconds_per_host_epoch"]) for one in found.values())
    assert capsys.readouterr().out.count(speed.SIGN) == 2, "what is known is told, should it be cut short"
    stamp = {"hardware": "a <chip>", "date": "today", "commit": "abc"}
    known = {rows: one | {"reserved": 2**20, "busy": busy} for (rows, one), busy in zip(found.items(), (0.5, 0.9), strict=True)}
    drawn = scaling_svg(stamp | {"mlp": known | {"4": {"error": "no memory"}}})
    assert ElementTree.fromstring(drawn).tag.endswith("svg")
    assert drawn.count("<circle") == 4, "two sizes, two panels"
    assert drawn.count('fill="#4e79a7"') == 3, "the name, and a filled dot in each panel"


def test_speed_trains_by_the_preset(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {**PRESETS["gpu"], "env": {"device": "cpu"}}
    monkeypatch.setitem(PRESETS, "gpu", found)
    monkeypatch.setattr(PPOAgent, "update", PPOAgent.update)  # both are timed from now on
    monkeypatch.setattr(Twins, "_compute", Twins._compute)
    result = speed.training(HERE, "mlp", 8, 2)
    assert len(result["rounds_s"]) == 2
    assert result["round_s"] == result["rounds_s"][1] > result["play_s"] > result["update_s"] > 0
    assert result["rounds_s"][0] > result["twins_s"] > 0


def test_published_populations_can_be_measured_by_speed(capsys: pytest.CaptureFixture[str]) -> None:
    tiny = {"rows": 2, "loop_rows": 1, "batch": 2, "steps": 1, "rounds": 1, "warm_up": 1}
    for host, least, most in (("resnet", 265_000, 280_000), ("gpt", 90_000, 110_000)):
        result = speed.hosts(speed.Asked("cpu", sizes=tiny), host)
        assert least < result["parameters"] < most
        assert result["ratio"] > 0
        assert result["file"] == f"population-{host}-cpu-bfloat16"
    assert capsys.readouterr().out.count("round 1") == 2


def test_ways_to_work_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(many_workers.CONFIG, rows=4, scenarios=4, rounds=2, shards=2, threads=1)
    here = many_workers.measure(config, Workers())
    assert here["host-epochs/s"] > 0
    assert here["first round"] > 0
    assert here["seconds"] > here["computing"] > 0

    def measure(config: TrainConfig, workers: Workers) -> dict[str, Any]:
        return here | {"curve": ["as of", str(config.shards)], "seconds": float(config.shards)}

    monkeypatch.setattr(many_workers, "measure", measure)
    seen: list[int] = []
    result = many_workers.compared(config, told=lambda found: seen.append(len(found)))
    assert seen == list(range(1, 1 + len(result["ways"])))
    assert result["same curve"], "of those that play the same shards"
    assert result["two processes against the best of one"] == 0.5
    assert {"here", "1 processes", "2 processes", "4 processes"} < set(result["ways"])


def test_speed_keeps_what_processes_tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A figure that fails, one that is cut short and one without time left do not harm the others."""
    def run(command: list[str], env: dict[str, str], timeout: float, **options: object) -> subprocess.CompletedProcess[str]:
        name, before = command[command.index("--one") + 1], "--as-before" in command
        assert env["PYTHONPATH"].startswith("/early" if before else str(SCRIPTS.parent / "src"))
        assert command[command.index("--sizes") + 1 :] == (["rows=2", "rounds=1"] if before else ["rows=2"])
        if name == "env_mlp_192" and before:
            raise subprocess.TimeoutExpired(command, timeout, output=b"noise\nRESULT {\"rate\": 7}\n")
        result = {"captures": 20 if before else 1, "rate": 5, **({} if before else {"stamp": {"commit": command[command.index("--commit") + 1] or "abc", "hardware": "NVIDIA H200"}})}
        return subprocess.CompletedProcess(command, int(name.startswith("cnn")), "" if name.startswith("cnn") else f"RESULT {json.dumps(result)}", "broken")

    monkeypatch.setattr(subprocess, "run", run)
    names = ["env_mnist1d_192", "cnn_256x128_seeds", "env_mlp_192", "scaling_mlp"]
    words = ["--before", "/early", "--out", str(tmp_path), "--sizes", "rows=2", "--sizes-before", "rounds=1", "--commit-before", "old"]
    assert speed.main(["--only", *names, *words]) == 1
    assert "cnn_256x128_seeds after (0 s): failed: broken" in capsys.readouterr().out
    kept = {path.stem: json.loads(path.read_text()) for path in tmp_path.iterdir()}
    assert set(kept) == {"speed-h200", "scaling-h200"}
    told = kept["speed-h200"]
    assert told["captures"] == {"after": 1, "before": 20}
    assert (told["commit"], told["commit_before"], told["bench"]) == ("abc", "old", "speed")
    assert told["env_mlp_192"]["before"] == {"rate": 7, "cut short": "no end within 240 s"}
    assert kept["scaling-h200"]["mlp"]["rate"] == 5
    assert speed.main(["--only", "env_mlp_192", "--limit", "-1"]) == 0
    assert "env_mlp_192 after: left out, -1 s are over" in capsys.readouterr().out
    for commit, figures_kept in (("abc", {"env_mnist1d_192", "env_mlp_192", "env_mlp_1024"}), ("new", {"env_mlp_1024"})):
        assert speed.main(["--only", "env_mlp_1024", "--out", str(tmp_path), "--sizes", "rows=2", "--commit", commit]) == 0
        now = json.loads((tmp_path / "speed-h200.json").read_text())
        assert {name for name in now if name.startswith("env")} == figures_kept, "calls with one commit share a file"
    with pytest.raises(SystemExit):
        speed.main(["--only", "nonsense"])
    page = speed_before_and_after(told | {"date": "today"})
    assert "| `env_mnist1d_192` | 5 | 5 | 1.0 |" in page
    assert "20 before, 1 now" in page
    assert "cnn_256x128" not in page, "it failed"


def test_speed_needs_no_tyro(tmp_path: Path) -> None:
    (tmp_path / "tyro.py").write_text("raise ImportError('not here')")
    command = [sys.executable, str(SCRIPTS / "speed.py"), "--device", "cpu", "--only", "env_mlp_192", "--sizes", "rows=1", "rounds=1",
               "--out", str(tmp_path), "--commit", "abc"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(tmp_path)}, check=True)
    result = json.loads((tmp_path / "speed-cpu.json").read_text())
    assert result["commit"] == "abc"
    assert {"date", "hardware", "torch", "python"} <= set(result)
    assert result["env_mlp_192"]["after"]["rate"] > 0, done.stdout


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
    for rate, same, exit_code, said in ((1.1, True, 0, "x: as committed"), (0.5, True, 1, "a.speed: committed 0.5, now 1.2"),
                                        (1.1, False, 1, "a.same: committed False, now True")):
        (kept / "x.json").write_text(json.dumps({"a": {"speed": rate, "same": same}, "other": 3}))
        table = {"x": figures.Figure(f'python -c "{code}" {{out}}', ("x.json",), {"a.speed": 0.2, "*.same": 0.0}, kept=kept),
                 "y": figures.Figure("python -c 1", needs="nothing_like_it")}
        monkeypatch.setattr(figures, "FIGURES", table)
        assert figures.main(["--only", "x", "y", "--out", str(out)]) == exit_code
        told = capsys.readouterr().out
        assert said in told
        assert "y: left out, nothing_like_it is not installed" in told
