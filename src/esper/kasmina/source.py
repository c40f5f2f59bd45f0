"""Modules as Python that needs no Esper: expressions that build them, and the source of all that these use.

Whoever runs such a file compares what it gives: settings that a layer does not show are not written.
"""

import ast
import inspect
import re
import sys
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from esper.kasmina.foreign import Grafted, grow_behind
from esper.leyline import EsperError

WEIGHTS = "weights.safetensors"
_WIDTH = 100
_LOAD = f'''def load({{takes}}) -> nn.Module:
    """{{what}}"""
    net = {{net}}
    net.load_state_dict(load_file(Path(__file__).with_name("{WEIGHTS}")))
    return net.eval()'''


class _Source:
    """A Python file in the making: what it imports and defines for what is written into it."""

    def __init__(self) -> None:
        self.imports = {"import torch", "from torch import nn", "from pathlib import Path",
                        "from safetensors.torch import load_file"}
        self.parts: dict[str, str] = {}

    def use(self, name: str, value: Any) -> None:
        """The file refers to this: it is imported or, where it is Esper's, defined."""
        if inspect.ismodule(value):
            home, _, last = value.__name__.rpartition(".")
            whole = f"import {value.__name__}" + f" as {name}" * (last != name)
            self.imports.add(f"from {home} import {name}" if home and last == name else whole)
        elif not value.__module__.startswith("esper."):
            if value.__module__ == "__main__" or "." in getattr(value, "__qualname__", name):
                raise EsperError(f"the class {name} cannot be imported by others; give it a file of its own")
            self.imports.add(f"from {value.__module__} import {name}")
        elif name not in self.parts:
            source, world = inspect.getsource(value), vars(sys.modules[value.__module__])
            used = {node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)}
            for other in sorted(used & world.keys() - {name}):
                self.use(other, world[other])
            self.parts[name] = source.strip()

    def expression(self, value: Any, depth: int) -> str:
        """What builds a module, with fresh weights, or stands for another value; `depth` indents it."""
        kind, name = type(value), type(value).__name__
        if isinstance(value, Enum):
            self.use(name, kind)
            return f"{name}.{value.name}"
        if not isinstance(value, nn.Module):
            return repr(value.item() if isinstance(value, Tensor) else value)
        if getattr(nn, name, None) is not kind:
            self.use(name, kind)
            return _call(f"{name}(", [f"{key}={self.expression(getattr(value, key), depth + 1)}"
                                      for key, parameter in inspect.signature(kind).parameters.items()
                                      if "*" not in str(parameter)], ")", depth)
        inside = [self.expression(child, depth + 1) for child in value._modules.values()]
        ends = ("([", "])") if kind is nn.ModuleList else ("(", ")")
        return _call(f"nn.{name}{ends[0]}", inside or [value.extra_repr()], ends[1], depth)

    def text(self, about: str, *functions: str) -> str:
        imports = sorted(self.imports, key=lambda line: (line.startswith("from"), line))
        head = f'"""{about}"""\n\n' + "\n".join(imports)
        return "\n\n\n".join([head, *self.parts.values(), *functions]) + "\n"


def _call(head: str, parts: Sequence[str], tail: str, depth: int) -> str:
    """In one line if it fits, else a line for each part."""
    if len(line := head + ", ".join(parts) + tail) + 4 * depth < _WIDTH and "\n" not in line:
        return line
    pad = "    " * depth
    return f"{head}\n" + "".join(f"{pad}    {part},\n" for part in parts) + pad + tail


def _cast(net: nn.Module) -> str:
    kinds = {tensor.dtype for tensor in net.state_dict().values() if tensor.is_floating_point()}
    return f".to({kinds.pop()})" if len(kinds) == 1 and kinds != {torch.float32} else ""


def network_source(net: nn.Module) -> str:
    """A file whose `load()` gives the network; classes of users are imported and must show their settings."""
    source, first, ties = _Source(), dict[int, str](), ""
    built = source.expression(net, 1)
    for name, parameter in net.named_parameters(remove_duplicate=False):
        place = re.sub(r"\.(\d+)(?=\.)", r"[\1]", f"net.{name}")
        if place != first.setdefault(id(parameter), place):
            ties += f"    {place} = {first[id(parameter)]}\n"
    build = ('def build() -> nn.Module:\n    """The network with fresh weights."""\n'
             f"    net = {built}\n{ties}    return net")
    return source.text("A network that was grown. `load()` returns it with its weights.", build, _LOAD.format(
        takes="", what="The network with its weights.", net=f"build(){_cast(net)}"))


def seeds_source(bare: nn.Module, grafts: Mapping[str, nn.Module], built: bool) -> str:
    """A file whose `load(model)` puts back what `ungrown` took; `built`: it makes the model, too."""
    source, kind = _Source(), type(bare)
    source.use("grow_behind", grow_behind)
    if built:
        source.use(kind.__name__, kind)
    rows = "".join(f"        {path!r}: {source.expression(graft, 2)},\n" for path, graft in grafts.items())
    seeds = ('def seeds() -> dict[str, nn.Module]:\n    """What grew behind which submodule, with fresh '
             f'weights."""\n    return {{\n{rows}    }}')
    model = f"{kind.__name__}() if model is None else model" if built else "model"
    return source.text("What grew in a model. `load` puts it there, with all weights.", seeds, _LOAD.format(
        what=f"`model`: a {kind.__name__} that was built as the one that grew.",
        takes="model: nn.Module" + " | None = None" * built,
        net=f"grow_behind({model}, seeds()){_cast(bare)}"))


def ungrown(net: nn.Module) -> dict[str, nn.Module]:
    """Take out what grew: path of a submodule -> what was behind it, outer ones first."""
    grafts: dict[str, nn.Module] = {}
    for path, owner in net.named_modules():  # as it goes: what was taken out is not entered
        for name, child in owner._modules.items():
            at = f"{path}.{name}" if path else name
            while isinstance(child, Grafted):
                if child.graft not in grafts.values():  # it may have several names
                    grafts[at] = child.graft
                child, at = child.body, f"{at}.body"
            owner._modules[name] = child
    return grafts
