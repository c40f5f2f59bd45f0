"""Is damage always found? Random corruption of every kind of file that Esper reads, and headers that somebody crafted.

    python -m experiments.corruptions --count 500

A byte is changed, a bit flipped, a block zeroed or the end cut. Each file is then read as a command would: one sentence, or exactly
what was written. Anything else (other contents, a traceback) is counted as silent or broken; both must be zero.
"""

import json
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from esper.cli import main as esper
from esper.cli.runs import load_run
from esper.door import attach, grow
from esper.door.keeping import state
from esper.kasmina import Host, Population
from esper.leyline import EsperError
from esper.leyline.codec import to_dict
from esper.leyline.storage import read_json, read_state, write_json, write_state
from esper.nissa import TABLES, read, verify
from esper.simic.ppo import PPOAgent
from esper.simic.proof.baselines import Tuned
from esper.tamiyo import Random
from esper.tamiyo.minds import read_mind, shipped
from esper.tolaria import (
    Episodes,
    MorphogeneticEnv,
    Task,
    Twins,
    files,
    find_family,
    load_task,
    openings,
    play,
)
from experiments.shared import parser, write

Reader = Callable[[Path], Any]
LEDGER = import_module("esper.tolaria.openings")


def _bytes_of(load: Callable[[Path], Any]) -> Reader:
    """What an object that can be saved writes again."""
    def reader(path: Path) -> Any:
        again = path.with_name("again")
        load(path).save(again)
        return again.read_bytes()

    return reader


def _episodes(path: Path) -> Any:
    return {name: t.tolist() for name, t in read_state(path, "trace")[1].items()} | {"config": to_dict(Episodes.load(path)[0].config)}


def _store(path: Path) -> Any:
    verify(path)
    return {table: read(path, f"SELECT * FROM {table}") for table in TABLES}


def _twins(path: Path) -> Any:
    twins = Twins(MorphogeneticEnv(find_family("mlp"), 2))
    twins.load(path)
    return {name: scores.nan_to_num(-1).tolist() for name, scores in twins.known.items()}


def _mind(path: Path) -> Any:
    return [({k: t.tolist() for k, t in m.controller.tensors().items()}, m.controller.header(), m.about) for m in read_mind(path)]


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 2))


def _grow(folder: Path) -> Any:
    """One epoch, or none if the folder has it already: what was told, and the weights."""
    x = torch.linspace(-1, 1, 24).view(12, 2)
    batch = [(x, (x[:, 0] > 0).long())]
    grown = grow(_net(), batch, batch, lambda net, part: nn.functional.cross_entropy(net(part[0]), part[1]), epochs=1, slots="0", folder=folder)
    return [vars(report) for report in grown.history], [p.tolist() for p in grown.module.parameters()]


def _growing(path: Path) -> Any:
    net = _net()
    growing = attach(net, torch.optim.SGD(net.parameters(), 0.1), example=torch.zeros(2, 2), slots="0", controller="wait")
    if path.exists():
        growing.load(path)
    else:
        growing.save(path)
    header, tensors = state(growing)
    return header, {name: value.nan_to_num(-1).tolist() for name, value in tensors.items()}


def _own(path: Path) -> Any:
    return [a.tolist() for a in vars(load_task("corrupted")).values() if isinstance(a, torch.Tensor)]


READERS: dict[str, Reader] = {
    "grow.safetensors": lambda path: _grow(path.parent), "growing.safetensors": _growing, "corrupted.json": _own,
    "agent.safetensors": lambda path: (read_state(path, "agent"), _bytes_of(PPOAgent.load)(path))[1],
    "twins.safetensors": _twins, "run.db": _store, "trace.safetensors": _episodes,
    "run.json": lambda path: to_dict(_checked(load_run(path.parent))[0]),
    "population.safetensors": _bytes_of(Population.load), "mind.safetensors": _mind,
    "controls.json": lambda path: to_dict(Tuned.load(path)),
    "declaration.json": lambda path: read_json(path, "declaration"),
    "digits-train.safetensors": lambda path: [a.tolist() for a in files.read_cache(path, _recipe())],
    "folders.json": lambda path: files.registered_folders(), "openings.json": lambda path: openings("digits"),
}


def _checked(found: Any) -> Any:
    assert found is not None
    return found


def _recipe() -> str:
    from esper.tolaria.tasks import TASKS

    return f"train {TASKS['digits'].source.labels}"  # type: ignore[union-attr]


def make(folder: Path) -> dict[str, Path]:
    """One file of every kind, by name."""
    assert esper(["train", "--out", str(folder / "run"), "--rows", "4", "--rounds", "2", "--preset", "quick"]) == 0
    family = find_family("mlp")
    env = MorphogeneticEnv(family, 2)
    play(env, Random(), family.scenarios(2)).save(folder / "trace.safetensors")
    Population(Host("mlp"), 2).save(folder / "population.safetensors")
    shutil.copy(shipped()["tamiyo-small"], folder / "mind.safetensors")
    shutil.copy(Path(__file__).parent / "proof" / "mlp" / "controls.json", folder / "controls.json")
    write_json(folder / "declaration.json", "declaration", {"effect": 0.02, "scenarios": 256})
    _grow(folder)
    _growing(folder / "growing.safetensors")
    Task.from_arrays("corrupted", torch.randn(40, 3, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 2)
    files.register_folder("fashion", folder)
    LEDGER.log_opening("digits", "a rehearsal of the ledger")
    LEDGER.log_opening("digits", "another one")
    made = {name: folder / name for name in READERS if (folder / name).exists()}
    made |= {name: folder / "run" / name for name in READERS if (folder / "run" / name).exists()}
    made |= {name: files.data_directory() / name for name in ("folders.json", "digits-train.safetensors")}
    made["corrupted.json"] = files.data_directory() / "tasks" / "corrupted.json"
    return made | {"openings.json": LEDGER.ledger()}


def corrupt(data: bytes, draw: random.Random) -> bytes:
    where, kind = draw.randrange(len(data)), draw.choice(("byte", "bit", "zero", "cut"))
    if kind == "cut":
        return data[:where]
    if kind == "zero":
        return data[:where] + bytes(min(64, len(data) - where)) + data[where + 64 :]
    changed = data[where] ^ (1 << draw.randrange(8)) if kind == "bit" else draw.randrange(256)
    return data[:where] + bytes([changed]) + data[where + 1 :]


def outcome(reader: Reader, path: Path, expected: Any) -> str:
    try:
        found = reader(path)
    except EsperError:
        return "refused"
    except Exception as error:
        return f"broken: {type(error).__name__}: {error}"
    return "same" if found == expected else "silent"


def corruptions(folder: Path, count: int, seed: int = 0) -> Counter[tuple[str, str]]:
    """(kind of file, outcome) -> how often."""
    draw, made, found = random.Random(seed), make(folder), Counter[tuple[str, str]]()
    expected = {name: READERS[name](path) for name, path in made.items()}
    for number in range(count):
        name = list(made)[number % len(made)]
        path = made[name]
        whole = path.read_bytes()
        path.write_bytes(corrupt(whole, draw))
        found[name, outcome(READERS[name], path, expected[name])] += 1
        for extra in ("-wal", "-shm"):
            path.with_name(path.name + extra).unlink(missing_ok=True)
        path.write_bytes(whole)
    return found


AGENT_HEADERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no network": lambda h: h.pop("network"), "network is a list": lambda h: h.update(network=[1]),
    "network is null": lambda h: h.update(network=None), "huge": lambda h: h["network"].update(hidden=200_000),
    "hidden 0": lambda h: h["network"].update(hidden=0), "limit null": lambda h: h.update(limit=None),
    "updates text": lambda h: h.update(updates="two"), "updates a list": lambda h: h.update(updates=[]),
    "spec empty": lambda h: h.update(spec={}), "unknown op": lambda h: h["spec"].update(ops=["WAIT", "EXPLODE"]),
    "observation a number": lambda h: h.update(observation=3), "rate NaN": lambda h: h["config"].update(clip=float("nan")),
    "escape codes": lambda h: h["spec"].update(ops=["\x1b[31m"]), "anomalies null": lambda h: h.update(anomalies=None),
}
TRACE_HEADERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no env": lambda h: h.pop("env"), "env null": lambda h: h.update(env=None), "moves null": lambda h: h.update(moves=None),
    "markup": lambda h: h.update(torch="[/x]"), "no threads": lambda h: h.pop("threads"),
    "unknown family": lambda h: h["env"]["family"].update(task="wine"),
    "negative horizon": lambda h: h["env"]["family"].update(horizons=[-1]),
}
CONFIGS = ("seed = 1180591620717411303424", "[network]\nhidden = 0", "[ppo]\nlearning_rate = [nan, 1.0]", "rows = 1000000000",
           "[ppo]\nlearning_rate = [-1.0, 1.0]", "[ppo]\nclip = nan", "[ppo]\ntarget_kl = nan", "[ppo]\nentropy = [inf, 0.0]",
           "nonsense = 3", "[env]\ndevice = 'gpu'", "[env]\nfamily = 'wine'", "rows = 50", "[env.family]\nname = 'x'", "rows = 2.5")


def crafted(folder: Path, made: dict[str, Path]) -> dict[str, str]:
    """Headers with right digests and wrong contents, and configs: what the command says to each; broken ones raise."""
    said = {}
    for kind, name, cases, command in (("agent", "agent.safetensors", AGENT_HEADERS, None), ("trace", "trace.safetensors",
                                                                                            TRACE_HEADERS, "replay")):
        header, tensors = read_state(made[name], kind)
        for case, change in cases.items():
            body = json.loads(json.dumps({k: v for k, v in header.items() if k not in ("kind", "schema")}))
            change(body)
            path = folder / f"crafted.{kind}"
            write_state(path, kind, body, tensors)
            said[f"{kind}: {case}"] = _said(["replay", str(path)] if command else None, path)
    for text in CONFIGS:
        path = folder / "crafted.toml"
        path.write_text(text)
        code = esper(["train", "--config", str(path), "--out", str(folder / "crafted-run")])
        said[f"config: {text!r}"] = f"exit {code}"
        shutil.rmtree(folder / "crafted-run", ignore_errors=True)
    return said


def _said(command: list[str] | None, path: Path) -> str:
    if command is not None:
        return f"exit {esper(command)}"
    try:
        PPOAgent.load(path)
    except EsperError:
        return "exit 2"
    return "exit 0"


def main() -> None:
    options_of = parser(__doc__)
    options_of.add_argument("--count", type=int, default=500)
    options = options_of.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        import os

        os.environ["ESPER_DATA"] = f"{name}/data"
        folder = Path(name) / "files"
        folder.mkdir()
        found = corruptions(folder, options.count)
        said = crafted(folder, {n: folder / n if (folder / n).exists() else folder / "run" / n for n in
                                ("agent.safetensors", "trace.safetensors")})
    table: dict[str, dict[str, int]] = {}
    for (kind, what), times in sorted(found.items()):
        table.setdefault(kind, {})[what] = times
    for kind, row in table.items():
        print(f"{kind:28} {row}")
    for case, answer in said.items():
        print(f"{case:60} {answer}")
    bad = {what: times for (_, what), times in found.items() if what not in ("refused", "same")}
    print("silent or broken:", bad or "none")
    write(options, "corruptions", {"command": f"python -m experiments.corruptions --count {options.count}", "files": table,
                                   "crafted": said, "silent or broken": len(bad)})


if __name__ == "__main__":
    main()
