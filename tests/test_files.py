"""The codec, the files, and what happens to both when somebody else writes into them."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from experiments.corruptions import AGENT_HEADERS, CONFIGS, READERS, corruptions, crafted

from esper.kasmina import Host
from esper.leyline import ActionSpec, EsperError, Head, LifecycleOp, StateFormatError
from esper.leyline.codec import from_dict, override, to_dict
from esper.leyline.storage import (
    atomic_write,
    decoding,
    locked,
    read_json,
    read_state,
    write_json,
    write_state,
)
from esper.simic.training import TrainConfig
from esper.tolaria import EnvConfig, PreviewConfig, find_family
from tests.test_training import shorten


@dataclass(frozen=True)
class Inner:
    size: int = 3
    pair: tuple[float, float] = (0.0, 1.0)


@dataclass(frozen=True)
class Outer:
    name: str
    inner: Inner = field(default_factory=Inner)
    maybe: Inner | None = None
    ops: tuple[LifecycleOp, ...] = (LifecycleOp.WAIT,)
    counts: dict[Head, int] = field(default_factory=dict)


def test_every_config_survives_a_round_trip_through_json() -> None:
    for value in (Outer("x", maybe=Inner(5), counts={Head.SLOT: 2}), TrainConfig(), EnvConfig(find_family("fashion")),
                  ActionSpec.compact(2, ("noop", "norm")), Host("cnn", halvings=2)):
        plain = json.loads(json.dumps(to_dict(value)))
        assert from_dict(type(value), plain, "it") == value


@pytest.mark.parametrize(("change", "message"), [
    ({"inner": {"size": 2.5, "pair": [0, 1]}}, "it: inner: size is 2.5; expected a whole number"),
    ({"inner": {"size": True, "pair": [0, 1]}}, "size is True; expected a whole number"),
    ({"inner": {"size": 2**70, "pair": [0, 1]}}, "at most 63 bits"),
    ({"inner": {"size": 1, "pair": [0]}}, "expected 2 values"),
    ({"inner": {"size": 1, "pair": [0, float("nan")]}}, "expected a finite number"),
    ({"inner": 3}, "it: inner is 3; expected a table of keys"),
    ({"ops": ["EXPLODE"]}, "expected one of WAIT"),
    ({"nonsense": 1}, "it has no use for nonsense; there are name"),
])
def test_wrong_plain_data_is_one_sentence_that_names_the_place(change: dict, message: str) -> None:
    with pytest.raises(EsperError, match=message):
        from_dict(Outer, to_dict(Outer("x")) | change, "it")


def test_a_key_that_is_missing_is_told() -> None:
    with pytest.raises(EsperError, match="it lacks inner, maybe, ops, counts; it is not complete"):
        from_dict(Outer, {"name": "x"}, "it")
    assert from_dict(Outer, {"name": "x"}, "it", complete=False) == Outer("x")


def test_settings_change_what_they_name_and_nothing_else() -> None:
    config = TrainConfig()
    changed = override(config, {"rows": 32, "env": {"previews": {"every": 7}}, "ppo": {"clip": 0.1}}, "it")
    assert changed.env.previews == PreviewConfig(7, config.env.previews.steps)
    assert (changed.rows, changed.ppo.clip, changed.ppo.gamma) == (32, 0.1, config.ppo.gamma)
    assert override(config, {"env": {"previews": False}}, "it").env.previews is None
    assert override(override(config, {"env": {"previews": False}}, "it"), {"env": {"previews": {"every": 2}}},
                    "it").env.previews == PreviewConfig(2)


def test_a_file_is_whole_or_not_there_and_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "file"
    atomic_write(path, "first")
    (tmp_path / f".file.{2**22 + 1}.writing").write_text("of a writer that was killed")
    (tmp_path / f".file.{os.getpid()}.writing").symlink_to(tmp_path / "elsewhere")
    atomic_write(path, "second")
    assert path.read_text() == "second"
    assert os.listdir(tmp_path) == ["file"], "what killed writers left is gone, and no link was followed"
    assert path.stat().st_mode & 0o777 == 0o666 & ~_umask()
    with pytest.raises(EsperError, match="its folder does not exist"):
        atomic_write(tmp_path / "no" / "file", "x")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_a_digest_covers_header_and_tensors(tmp_path: Path) -> None:
    path = tmp_path / "state"
    write_state(path, "thing", {"n": 1}, {"a": torch.arange(3.0), "b": torch.tensor(True)})
    header, tensors = read_state(path, "thing")
    assert header["n"] == 1
    assert tensors["a"].tolist() == [0, 1, 2]
    for old, new in ((b'n\\": 1', b'n\\": 2'), (torch.arange(3.0).numpy().tobytes(), torch.ones(3).numpy().tobytes())):
        content = path.read_bytes()
        assert content.count(old) == 1
        path.write_bytes(content.replace(old, new))
        with pytest.raises(StateFormatError, match="does not match its checksum"):
            read_state(path, "thing")
        path.write_bytes(content)
    with pytest.raises(StateFormatError, match="is a thing of schema 2; expected a other of schema 2"):
        read_state(path, "other")


def test_json_that_was_edited_is_refused_and_a_pipe_does_not_hang(tmp_path: Path) -> None:
    path = tmp_path / "it.json"
    write_json(path, "set", {"episodes": 5})
    assert read_json(path, "set")["episodes"] == 5
    path.write_text(path.read_text().replace("5", "10000000"))
    with pytest.raises(StateFormatError, match="does not match its checksum"):
        read_json(path, "set")
    path.write_text("[" * 100_000)
    with pytest.raises(StateFormatError, match="cannot read a set"):
        read_json(path, "set")
    os.mkfifo(tmp_path / "pipe")
    for reader in (read_json, read_state):
        with pytest.raises(StateFormatError, match="it is not a file"):
            reader(tmp_path / "pipe", "set")


def test_a_malformed_header_is_a_sentence() -> None:
    with pytest.raises(StateFormatError, match="x does not describe a thing: 'gone'"), decoding("x", "thing"):
        {}["gone"]


def test_two_processes_cannot_work_in_one_folder(tmp_path: Path) -> None:
    code = ("import sys; from pathlib import Path; from esper.leyline.storage import locked\n"
            "with locked(Path(sys.argv[1])): pass")
    with locked(tmp_path):
        other = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert "another esper process works in" in other.stderr
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)]).returncode == 0, "the lock went with its holder"


def test_damage_is_found_in_every_kind_of_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ESPER_DATA", str(tmp_path / "data"))
    shorten(monkeypatch)
    folder = tmp_path / "files"
    folder.mkdir()
    found = corruptions(folder, 8 * len(READERS), seed=1)
    assert {name for name, _ in found} == set(READERS)
    assert {what for _, what in found} <= {"refused", "same"}, found
    made = {"agent.safetensors": folder / "run" / "agent.safetensors", "trace.safetensors": folder / "trace.safetensors"}
    said = crafted(folder, made)
    assert {case: answer for case, answer in said.items() if answer != "exit 2"} == {
        "trace: markup": "exit 0", "trace: no threads": "exit 0"}, "these two change nothing that is played"
    assert len(said) >= len(AGENT_HEADERS) + len(CONFIGS)
