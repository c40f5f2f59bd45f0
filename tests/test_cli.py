"""The command as a user meets it."""

import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from esper.cli import COMMANDS, main


def test_bench_prints_a_table_and_one_json_line(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--rows", "4", "--batch", "5", "--steps", "2", "--rounds", "2", "--warm-up", "1"]
    assert main(["bench", "population", "--host", "mlp", *sizes, "--json"]) == 0
    lines = capsys.readouterr().out.strip().splitlines()
    result = json.loads(lines[-1])
    assert result["ratio"] > 0
    assert len(result["rounds_samples_per_second"]["loop"]) == 2
    assert any("population" in line and "│" in line for line in lines)
    assert max(map(len, lines[:-1])) <= 80


def test_the_demo_trains_compares_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new"
    for seed in ("0", "1"):  # a second time in the same folder
        assert main(["demo", "--out", str(out), "--rounds", "3", "--hosts", "4", "--seed", seed]) == 0
        text = capsys.readouterr().out
        assert "in its first third of rounds" in text
        for arm in ("no growth", "random", "heuristic", "best fixed", "tamiyo-small", "trained just now"):
            assert arm in text
    picture = ET.parse(out / "growth.svg").getroot()
    assert len(picture.findall("{http://www.w3.org/2000/svg}rect")) > 20
    (out / "run" / "of-a-demo").unlink()
    kept = (out / "run" / "run.db").read_bytes()
    assert main(["demo", "--out", str(out), "--rounds", "3", "--hosts", "4"]) == 2
    assert "holds a run that no demo made" in capsys.readouterr().err
    assert (out / "run" / "run.db").read_bytes() == kept
    page = (out / "report.html").read_text()
    assert page.count("tamiyo-small</b>") + page.count("tamiyo-small</span>") > 0, "beside the controls, under its own name"
    assert "A demonstration on validation scenarios" in page
    assert "Paired differences" not in page


@pytest.mark.parametrize("words", [["bench", "population", "--rows", "0"], ["bench", "population", "--dtype", "int8"],
                                   ["bench", "population", "--loop-rows", "65"], ["demo", "--rounds", "0"],
                                   ["bench", "population", "--host", "rnn"], ["fly"], ["bench"],
                                   ["bench", "population", "--device", "abacus"], ["demo", "--out", __file__]])
def test_bad_arguments_exit_with_2_and_one_sentence(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith("esper")
    assert err.count("\n") == 1


@pytest.mark.parametrize("verb", COMMANDS)
def test_help_shows_an_example(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([*verb.split(), "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert f"Example: esper {verb}" in text
    assert max(map(len, text.splitlines())) <= 80


def test_the_command_works_without_a_terminal() -> None:
    sizes = ["--rows", "2", "--batch", "3", "--steps", "2", "--rounds", "1", "--warm-up", "1"]
    for words, expected in (([], "esper demo"), (["bench", "--help"], "esper demo"), (["bench", "population", *sizes], "ratio")):
        command = [sys.executable, "-m", "esper.cli", *words]
        done = subprocess.run(command, capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL)
        assert expected in done.stdout


def test_kasmina_needs_torch_numpy_and_safetensors_alone() -> None:
    code = "import sys, esper.kasmina; print({'tyro', 'rich', 'gymnasium', 'scipy', 'matplotlib'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
