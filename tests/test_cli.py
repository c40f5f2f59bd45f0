"""The command as a user meets it."""

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import esper
from esper.cli import COMMANDS, demo, main, tasks
from esper.cli.train import PRESETS
from esper.leyline import EsperError
from esper.leyline.storage import locked
from esper.tolaria import FAMILIES


def test_the_demo_trains_compares_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                            monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"rows": 4, "scenarios": 4, "exam_rows": 2, "ppo": {"minibatches": 1}}
    monkeypatch.setitem(PRESETS, "quick", PRESETS["quick"] | small)
    monkeypatch.setattr(demo, "PICTURED", 4)
    short = replace(FAMILIES["mlp"], horizons=(8, 9), samples=200, validation=100)
    monkeypatch.setitem(FAMILIES, "mlp", short)
    out = tmp_path / "new"
    for seed in ("0", "1"):  # a second time in the same folder
        assert main(["demo", "--out", str(out), "--rounds", "3", "--hosts", "2", "--seed", seed]) == 0
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
    named = page.count("tamiyo-small</b>") + page.count("tamiyo-small</span>")
    assert named > 0, "beside the controls, under its own name"
    assert "A demonstration on validation scenarios" in page
    assert "Paired differences" not in page


@pytest.mark.parametrize("words", [
    ["demo", "--rounds", "0"], ["demo", "--out", __file__], ["fly"], ["bench"], ["tasks", "add-data", "cats", "."],
    ["train", "--preset", "huge", "--out", "nowhere"]])
def test_bad_arguments_exit_with_2_and_one_sentence(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith("esper")
    assert err.count("\n") == 1


def test_a_mistyped_command_is_met_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trian", "--out", "x"]) == 2
    assert capsys.readouterr().err == "esper: no command 'trian --out x'; did you mean esper train?\n"
    assert main(["\x1b[31mfly"]) == 2
    said = capsys.readouterr().err
    assert all(f" {verb}" in said for verb in COMMANDS), "nothing is near, so all of them are named"
    assert "\x1b" not in said, "and nothing reaches the terminal that colours it"


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    for word in ("--version", "-V"):
        assert main([word]) == 0
        assert capsys.readouterr().out == f"esper {esper.__version__}\n"


def test_ctrl_c_is_one_line_and_130(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(tasks, "run", interrupted)
    assert main(["tasks"]) == 130
    assert capsys.readouterr() == ("", "esper tasks: stopped\n")


@pytest.mark.parametrize("verb", COMMANDS)
def test_help_shows_an_example(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([*verb.split(), "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert f"Example: esper {verb}" in text
    assert max(map(len, text.splitlines())) <= 80


def test_the_command_works_without_a_terminal() -> None:
    for words, expected in (([], "esper demo"), (["tasks", "--json"], '"mnist1d"')):
        command = [sys.executable, "-m", "esper.cli", *words]
        done = subprocess.run(command, capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL)
        assert expected in done.stdout
    assert json.loads(done.stdout)["digits"]["data"] == "built in"


@pytest.mark.parametrize("words", [["tasks"], ["tasks", "--json"]])
def test_a_closed_pipe_is_no_traceback(words: list[str]) -> None:
    """As `esper tasks | head -0` leaves it."""
    unread, written = os.pipe()
    os.close(unread)
    command = [sys.executable, "-m", "esper.cli", *words]
    done = subprocess.run(command, stdout=written, stderr=subprocess.PIPE, text=True)
    os.close(written)
    assert done.stderr == ""
    assert done.returncode in (0, 1)


def test_two_processes_cannot_work_in_one_folder(tmp_path: Path) -> None:
    hold = "import pathlib, sys, time\nfrom esper.leyline.storage import locked\n" \
           "with locked(pathlib.Path(sys.argv[1])):\n    print('held', flush=True)\n    time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", hold, str(tmp_path)], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(EsperError, match="another esper process works in"), locked(tmp_path):
            raise AssertionError("both work in it")
        other.kill()
    with locked(tmp_path):  # however the other one ended
        pass


def test_kasmina_needs_torch_numpy_and_safetensors_alone() -> None:
    others = "{'tyro', 'rich', 'gymnasium', 'scipy', 'matplotlib'}"
    code = f"import sys, esper.kasmina; print({others} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
