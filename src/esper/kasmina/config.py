"""What every row of a population has in common."""

from dataclasses import dataclass, field

import torch

from esper.kasmina.blueprints import blueprints_for
from esper.kasmina.devices import check_device
from esper.kasmina.hosts import Host
from esper.kasmina.objectives import find_objective
from esper.kasmina.optim import OptimConfig
from esper.leyline import ActionSpec, EsperError
from esper.leyline.stages import GateConfig

INCUBATION = ("shadow", "straight_through")
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class PopulationConfig:
    """What every row of a population has in common."""

    host: Host
    spec: ActionSpec = field(default=None)  # type: ignore[assignment]
    """What an action consists of; by default every op and head, and every blueprint that fits the host."""
    gates: GateConfig = field(default_factory=GateConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    objective: str = ""
    """A name of `OBJECTIVES`; empty is classification, or next_token for hosts of tokens."""
    entropy: float = 0.0
    """Of the labels' distribution in nats, where the objective asks for it: next_token."""
    incubation: str = "shadow"
    """shadow or straight_through: how a seed learns before it is blended in."""
    device: str = "cpu"
    dtype: str = "float32"
    """Of weights and moments: float32 or float64."""
    compute_dtype: str = ""
    """Of passes: as `dtype` if empty, or bfloat16."""
    compile: bool = False
    """Run the host's stages through torch.compile, where the engine does not run them."""

    def __post_init__(self) -> None:
        if not isinstance(self.host, Host):
            raise EsperError(f"a population needs a Host, not a {type(self.host).__name__}; try Host('mlp')")
        if not isinstance(self.optim, OptimConfig):
            raise EsperError(f"optim is a {type(self.optim).__name__}; "
                             "expected an OptimConfig: rows have optimisers of their own")
        usual = "next_token" if self.host.tokens else "classification"
        object.__setattr__(self, "objective", self.objective or usual)
        slots = len(self.host.slots)
        if self.spec is None:
            object.__setattr__(self, "spec", ActionSpec.full(slots, blueprints_for(self.host)))
        for name in ("device", "dtype", "compute_dtype"):  # PyTorch's own objects are welcome
            object.__setattr__(self, name, str(getattr(self, name) or "").removeprefix("torch."))
        object.__setattr__(self, "compute_dtype", self.compute_dtype or self.dtype)
        if self.incubation not in INCUBATION:
            raise EsperError(f"no incubation {self.incubation!r}; choose from {', '.join(INCUBATION)}")
        if self.dtype not in ("float32", "float64") or self.compute_dtype not in DTYPES:
            raise EsperError(f"weights are float32 or float64, not {self.dtype}; "
                             "only compute_dtype may be bfloat16")
        if self.spec.slots != slots:
            raise EsperError(f"the action spec has {self.spec.slots} slots, but this host has {slots}")
        if find_objective(self.objective).tokens != self.host.tokens:
            raise EsperError(f"{self.host.kind} hosts take {'tokens' if self.host.tokens else 'numbers'}: "
                             f"they cannot be trained for {self.objective}")
        if self.compute_dtype == "bfloat16" and self.host.layout.size > self.host.layout.params:
            raise EsperError("hosts with running statistics or frozen weights compute in float32; "
                             "leave compute_dtype empty")
        if self.compile and self.host.foreign is not None:
            raise EsperError("compile is for the built-in hosts; run your own module without it")
        check_device(self.device)
