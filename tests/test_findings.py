"""Audits of an earlier system, turned into requirements: `docs/seed_findings.md` names the test that proves each.

The smaller ones, about how code is written rather than what it computes, are tested here.
"""

import ast
import collections
import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from experiments.toys import WorldCollector
from torch.utils._python_dispatch import TorchDispatchMode

import esper
from esper.leyline import EsperError, Head
from esper.simic import PerHead, PPOAgent, TamiyoRolloutBuffer
from esper.simic.buffer import Sequences
from esper.simic.ppo import RATIOS, Knobs
from tests.minds import SPEC, Chance, agent, filled, random_masks

ROOT = Path(__file__).parents[1]
SOURCES = Path(esper.__file__).parent
FINDINGS = """
A-2a A-2b A-5a A-3 A-4a A-4b A-5b A-6.1 A-6.2 A-7.1 A-7.2
P-1.1 P-1.2 P-1.3 P-2.1 P-2.2 P-3.1 P-3.2 P-4.1 P-4.2 P-4.3 P-5.1 P-5.2 P-5.3 P-5.4 P-6.1 P-6.2 P-6.3 P-8
B-A-1 B-A-2 B-P-1 X-1 B-P-2 B-P-3 B-P-4 B-P-5 B-P-6 B-P-7 B-P-8 B-P-9 X-2 B-R-1 B-R-2 B-R-3 B-R-4 B-R-5 R-6
B-T-1 B-T-2 B-C-1 B-C-2 B-S-1 X-3 X-4a X-4b X-4c B-alg BUG-003
R-1.1 R-1.2 R-6.3 R-1.3 R-2.1 R-2.2 R-3.1 R-3.2 R-4.1 R-4.2 R-4.3 R-5.1 R-5.2 R-5.3 R-5.4 R-6.1 R-6.2 R-6.4
R-7.1 R-7.2 R-7.3 R-7.4 R-7.5 R-app
N-1.1 N-1.2 N-1.3 N-2.1 N-2.2 N-2.3 N-3.1 N-3.2 N-3.3 N-4.1 N-4.2 N-4.3 N-5.1 N-5.2 N-5.3 N-6.1 N-6.2 N-6.3 N-6.4
"""


def rows() -> dict[str, list[str]]:
    """finding -> the tests that its row names."""
    found = {}
    for line in (ROOT / "docs" / "seed_findings.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| ") and re.match(r"[ABPRNX]-|BUG-", cells[0]):
            found |= {finding: re.findall(r"`(test_\w+)`", cells[-1]) for finding in re.split(r",\s*", cells[0])}
    return found


def test_every_finding_has_a_test_that_exists() -> None:
    named = rows()
    assert set(named) == set(FINDINGS.split())
    tests_of_ours = "\n".join(path.read_text() for path in (ROOT / "tests").glob("test_*.py"))
    defined = set(re.findall(r"^def (test_\w+)", tests_of_ours, re.M))
    for finding, tests in named.items():
        assert tests, f"{finding} names no test"
        assert set(tests) <= defined, f"{finding} names {set(tests) - defined}, which no file defines"


def trees(*rooms: str) -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text()) for room in rooms for path in sorted((SOURCES / room).glob("*.py"))}


def test_every_public_name_of_the_mind_and_the_learner_has_a_user() -> None:
    """In every room: outside its own definition, and outside the tests; what `import esper` offers is for users."""
    folders, used = (SOURCES, ROOT / "experiments", ROOT / "benchmarks"), {*esper.__all__, "setup_context"}  # torch calls it
    used |= {"compose", "on_key", "on_mount", "on_resize", "on_unmount"}  # Textual calls them
    used |= {"do_GET", "log_message", "verify_request"}  # http.server calls them
    used |= {name for name in dir(esper.Task) if name.startswith("from_")}  # users' ways in with their own data
    used |= set(dir(importlib.import_module("esper.door").Growing))  # what `attach` returns is for users
    for path in (path for folder in folders for path in folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            used |= {node.id} if isinstance(node, ast.Name) else {node.attr} if isinstance(node, ast.Attribute) else set()
            if isinstance(node, ast.Constant) and path.name != "__init__.py":
                used.add(node.value)  # commands name what they run; annotations may be strings
    for path, tree in trees("leyline", "kasmina", "tolaria", "tamiyo", "simic", "nissa", "karn", "cli", "door").items():
        for node in tree.body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
                assert node.name in used, f"{path.name}: nothing uses {node.name}"
            if isinstance(node, ast.ClassDef):
                methods = [f.name for f in node.body if isinstance(f, ast.FunctionDef) and not f.name.startswith("_")]
                assert set(methods) <= used, f"{path.name}: nothing uses {sorted(set(methods) - used)} of {node.name}"


def test_the_learner_is_typed_and_documented() -> None:
    """Every argument and result has a type, every public class and function says what it is."""
    rooms = {"simic": "buffer metrics ppo world", "tamiyo": "distributions network observing"}
    files = {SOURCES / room / f"{name}.py" for room, names in rooms.items() for name in names.split()}
    found = {path: tree for path, tree in trees(*rooms).items() if path in files}
    assert set(found) == files
    for path, tree in found.items():
        assert ast.get_docstring(tree), path
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                arguments = {a.arg: a.annotation for a in (*node.args.args, *node.args.kwonlyargs)}
                untyped = {name for name, kind in arguments.items() if kind is None} - {"self", "cls"}
                assert node.returns is not None, (path.name, node.name)
                assert not untyped, (path.name, node.name, untyped)
        for node in tree.body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
                assert ast.get_docstring(node), (path.name, node.name)


def test_contracts_name_their_types() -> None:
    for path, tree in trees("leyline").items():
        names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
        assert path.name in ("storage.py", "codec.py", "provenance.py") or "Any" not in names, path
    for path, tree in trees("leyline", "tolaria", "tamiyo", "simic").items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and any(getattr(base, "id", "") == "Protocol" for base in node.bases):
                defaults = [d for f in node.body if isinstance(f, ast.FunctionDef) for d in f.args.defaults]
                assert not any(isinstance(d, ast.Constant) and d.value is ... for d in defaults), (path, node.name)


def test_the_loss_makes_no_small_tensors_on_its_way() -> None:
    """A tensor made from Python numbers inside a step is an allocation and, on an accelerator, a wait."""
    for method in (PPOAgent._loss, PPOAgent._per_head, PPOAgent._gradient):
        assert not re.search(r"torch\.(tensor|zeros|ones|full|empty)\(", inspect.getsource(method)), method.__name__


class Calls(TorchDispatchMode):
    """Counts the operations of torch by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: collections.Counter = collections.Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names[function.overloadpacket.__name__] += 1
        return function(*args, **(kwargs or {}))


def test_advantages_loop_over_time_alone_and_copy_nothing() -> None:
    """As many operations for 2 rows as for 40, one product for each step, and no clone anywhere."""
    counts = {}
    for steps, of_rows in ((6, 2), (6, 40), (12, 2)):
        buffer, last = filled(agent(), rows=of_rows, steps=steps)
        with Calls() as calls:
            buffer.compute_advantages_and_returns(0.9, 0.9, last)
        counts[steps, of_rows] = calls.names
        assert calls.names["addcmul"] == steps
        assert not calls.names["clone"]
    assert counts[6, 2] == counts[6, 40]
    more = counts[12, 2] - counts[6, 2]
    assert {name: count / 6 for name, count in more.items()} == {"addcmul": 1, "copy_": 1, "select": 3}


@pytest.mark.parametrize("ends", [0.0, 0.2])
def test_a_step_reads_its_numbers_once(ends: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """On any device: one list of numbers for an optimiser step, one more where memories are emptied."""
    mind = agent()
    buffer, last = filled(mind, ends=ends, cuts=ends)
    buffer.compute_advantages_and_returns(1.0, 0.95, last)
    (batch,), knobs, reads = buffer.get_batched_sequences(), mind._knobs(), []
    for name in ("tolist", "item", "__bool__", "__float__", "__int__", "cpu", "numpy"):
        original = getattr(torch.Tensor, name)
        monkeypatch.setattr(torch.Tensor, name, lambda self, _name=name, _original=original, *args:
                            (reads.append(_name), _original(self, *args))[1])
    mind._gradient([batch], knobs)
    mind.optimizer.step()
    assert reads == ["tolist"] * (1 + (ends > 0))


def test_heads_can_be_neither_missing_nor_misspelt() -> None:
    with pytest.raises(TypeError, match="blueprnt"):
        PerHead(**{head.name.lower().replace("blueprint", "blueprnt"): torch.zeros(1, 1) for head in Head})
    with pytest.raises(TypeError, match="alpha_curve"):
        PerHead(*torch.zeros(7, 1, 1))
    masks = random_masks(SPEC, 2, torch.Generator().manual_seed(0))
    fewer = masks._replace(values={pair: mask for pair, mask in masks.values.items() if pair[1] is not Head.TEMPO})
    with pytest.raises(EsperError, match=r"there is no mask 'germinate.tempo'"):
        fewer.check(SPEC, (2,), torch.device("cpu"))


@pytest.mark.parametrize("ratio", RATIOS)
def test_an_update_leaves_the_advantages_as_they_are(ratio: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mind = agent(ratio=ratio, epochs=3)
    learn, seen = mind._learn, []

    def watched(buffers: list[TamiyoRolloutBuffer], knobs: Knobs) -> tuple[list[dict[str, float]], int, int]:
        (buffer,) = buffers
        before = buffer["advantage"].clone()
        learned = learn(buffers, knobs)
        seen.append((before, buffer["advantage"].clone()))
        return learned

    monkeypatch.setattr(mind, "_learn", watched)
    assert mind.update(*filled(mind)).steps == 3
    ((before, after),) = seen
    assert float(before.abs().max()) > 0
    assert torch.equal(before, after)


def test_the_worst_ratio_of_an_update_is_kept_and_nothing_piles_up(monkeypatch: pytest.MonkeyPatch) -> None:
    mind = agent(epochs=30, learning_rate=(2e-2, 2e-2), clip=1e9, max_grad_norm=1e9)
    gradient, steps = mind._gradient, []

    def kept(batch: Sequences, knobs: Knobs) -> dict[str, float]:
        steps.append(gradient(batch, knobs))
        return steps[-1]

    monkeypatch.setattr(mind, "_gradient", kept)
    for seed in range(3):
        steps.clear()
        metrics = mind.update(*filled(mind, rows=16, seed=seed))
        highest, lowest = max(s["ratio_max"] for s in steps), min(s["ratio_min"] for s in steps)
        assert (len(steps), metrics.ratio_max, metrics.ratio_min) == (30, highest, lowest)
        assert steps[0]["ratio_max"] == pytest.approx(1, abs=1e-3), "the worst is not the first"
        ratios = [anomaly for anomaly in metrics.anomalies if anomaly.kind.startswith("ratio")]
        assert [(*anomaly.key, anomaly.value) for anomaly in ratios] == [
            ("ratio_explosion", "ratio_max", highest), ("ratio_collapse", "ratio_min", lowest)]
        assert len(mind.detector.open) == len(metrics.anomalies) <= 3, "stale values at most beside them"


def test_storage_is_made_once_and_laid_out_by_time() -> None:
    mind = agent()
    buffer, _ = filled(mind, rows=4, steps=6)
    assert buffer["reward"].shape == (6, 4)
    places = {name: tensor.data_ptr() for name, tensor in buffer._all.items()}
    for seed in range(2):
        buffer.reset()
        mind.update(buffer, WorldCollector(mind, Chance(4, seed), 4).fill(buffer))
    assert {name: tensor.data_ptr() for name, tensor in buffer._all.items()} == places
