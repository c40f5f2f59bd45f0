"""`esper.export`: files of a grown network that need no Esper, each compared with the network itself."""

import copy
import importlib.util
import io
import logging
import runpy
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from esper.door.places import Batch, SlotHook, arguments, bare, survey
from esper.kasmina.source import WEIGHTS, network_source, seeds_source, ungrown
from esper.leyline import EsperError
from esper.leyline.storage import atomic_write

Run = Callable[[Batch], Any]
Made = tuple[str, str, Run]  # file, how it is used, what it gives


class Written(NamedTuple):
    """A file that gives what the network gives."""

    file: str
    use: str
    difference: float
    """The largest in any output, as a share of the largest output, or of 1 if that is more."""
    any_batch: bool
    """Does it take batches of any size, or of the example's alone?"""

    def __str__(self) -> str:
        same = f"within {self.difference:.1e} of" if self.difference else "bit for bit"
        size = "any batch size" if self.any_batch else "one batch size"
        return f"{self.file}: {same} the network, {size}; {self.use}"


def export(module: nn.Module, folder: str | Path, example: Any,
           formats: Sequence[str] = ("safetensors", "torch")) -> list[Written]:
    """Write a grown network, as `deliver()`, `grow` and `Population.extract` give it, into files that need no
    Esper.

    example: a batch that the network takes: a tensor, a tuple that begins with one, or a dict of keywords.
    formats: "safetensors" is `weights.safetensors` and a readable `model.py`, whose `load()` gives the
    network bit for bit; where that holds classes of your own, `load(model)` takes a model that you built.
    "torch" is `model.pt2`, by torch.export; "onnx" is `model.onnx`. All are compared with the network, on the
    CPU and in evaluation mode; if one differs, none is written.
    """
    check_formats(formats)
    if not isinstance(module, nn.Module):
        raise EsperError(f"export takes an nn.Module, not a {type(module).__name__}; grow(...).module is one")
    if any(isinstance(hook, SlotHook) for m in module.modules() for hook in m._forward_hooks.values()):
        raise EsperError("this model is attached and may still grow; export what deliver() returns")
    net, batch = copy.deepcopy(bare(module)).cpu().eval(), tree_map(_two, arguments(example))
    survey(net, batch[1] or batch[0])  # does it run?
    with tempfile.TemporaryDirectory() as place, torch.random.fork_rng(devices=[]), _quietly():
        made = [_written(name, net, batch, Path(place)) for name in formats]
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise EsperError(f"cannot make the folder {folder}: {error.strerror}; choose another") from error
        for path in Path(place).iterdir():
            atomic_write(Path(folder) / path.name, path.read_bytes())
    return made


def check_formats(formats: Sequence[str]) -> None:
    """One sentence, if there is no such format or a package that it needs is missing."""
    for name in formats:
        if name not in FORMATS:
            raise EsperError(f"no format {name!r}; choose from {', '.join(FORMATS)}")
        if missing := [each for each in FORMATS[name][2] if importlib.util.find_spec(each) is None]:
            raise EsperError(f"{name} needs {', '.join(missing)}: pip install 'esper-morph[export]'")


def _written(name: str, net: nn.Module, batch: Batch, place: Path) -> Written:
    write, within, _ = FORMATS[name]
    try:
        file, use, run = write(net, batch, place)
        differences = [_difference(net, run, batch)]
        with suppress(Exception):  # the network itself may know one size only
            differences.append(_difference(net, run, tree_map(_one_more, batch)))
    except Exception as error:
        why = " ".join(str(error).split())[:160] or type(error).__name__
        raise EsperError(f"the {name} format cannot hold this model ({why}); nothing was written") from error
    if not all(difference <= within for difference in differences):
        raise EsperError(f"{file} differs from the network by {max(differences):.1e}, more than {within}; "
                         "nothing was written")
    return Written(file, use, max(differences), len(differences) > 1)


@contextmanager
def _quietly() -> Iterator[None]:
    """Exporters warn of themselves and of packages that nobody needs here."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _two(part: Any) -> Any:
    """On the CPU, two samples at least: exporters take a size of one for a constant."""
    if not isinstance(part, Tensor) or not part.dim():
        return part
    return torch.cat([part] * (1 + (len(part) == 1))).detach().cpu()


def _one_more(part: Any) -> Any:
    return torch.cat([part, part[:1]]) if isinstance(part, Tensor) and part.dim() else part


def _run(module: Any) -> Run:
    return lambda batch: module(*batch[0], **batch[1])


@torch.no_grad()
def _difference(net: nn.Module, run: Run, batch: Batch) -> float:
    wanted, got = ([part for part in tree_leaves(out) if isinstance(part, Tensor)]
                   for out in (_run(net)(batch), run(batch)))
    if not wanted:
        raise EsperError("it returns no tensors")
    shares = []
    for a, b in zip(wanted, got, strict=True):
        size = a.double().nan_to_num(0, 0, 0).abs().amax().clamp(min=1)
        shares.append(torch.where(a == b, 0.0, (a.double() - b.double()).abs() / size).amax())
    return float(torch.stack(shares).amax())


def _python(net: nn.Module, batch: Batch, place: Path) -> Made:
    """The first way that works: all of it, what grew in a model of the class, or in one that is given."""
    path, plain = place / "model.py", copy.deepcopy(net)
    save_file({name: t.clone().contiguous() for name, t in net.state_dict().items()}, place / WEIGHTS)
    grafts = ungrown(plain)
    for tensor in plain.state_dict().values():
        tensor.zero_()  # they must come from the file
    ways: list[tuple[Callable[[], str], tuple[nn.Module, ...]]] = [
        (lambda: network_source(net), ()), (lambda: seeds_source(plain, grafts, True), ()),
        (lambda: seeds_source(plain, grafts, False), (plain,))]
    why: Exception = EsperError("its Python gives other outputs")
    for write, given in ways:
        try:
            path.write_text(write())
            run = _run(runpy.run_path(str(path), run_name="model")["load"](*given))
            if _difference(net, run, batch) == 0:
                return path.name, "load(model)" if given else "load()", run
        except Exception as error:
            why = error
    raise why


def _program(net: nn.Module, batch: Batch) -> torch.export.ExportedProgram:
    def size(part: Any) -> Any:
        return {0: torch.export.Dim.AUTO} if isinstance(part, Tensor) and part.dim() else None

    args, kwargs = batch
    return torch.export.export(net, args, kwargs, dynamic_shapes=tree_map(size, kwargs or args))


def _torch(net: nn.Module, batch: Batch, place: Path) -> Made:
    torch.export.save(_program(net, batch), path := place / "model.pt2")
    return path.name, "torch.export.load(file).module()", _run(torch.export.load(path).module())


def _onnx(net: nn.Module, batch: Batch, place: Path) -> Made:
    torch.onnx.export(_program(net, batch), (), path := place / "model.onnx", dynamo=True, verbose=False,
                      external_data=False)
    runtime = importlib.import_module("onnxruntime")
    session = runtime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]

    def run(batch: Batch) -> list[Tensor]:
        parts = [part.numpy() for part in tree_leaves(batch) if isinstance(part, Tensor)]
        outputs = session.run(None, dict(zip(names, parts, strict=True)))
        return [torch.from_numpy(out) for out in outputs]

    return path.name, "onnxruntime.InferenceSession(file)", run


FORMATS: dict[str, tuple[Callable[[nn.Module, Batch, Path], Made], float, tuple[str, ...]]] = {
    "safetensors": (_python, 0.0, ()), "torch": (_torch, 1e-5, ()),
    "onnx": (_onnx, 1e-4, ("onnx", "onnxscript", "onnxruntime"))}
"""Name -> (how it is written, the largest difference, packages it needs)."""
