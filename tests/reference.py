"""The oracle: growing hosts as plain modules in a Python loop, with `torch.optim` and `clip_grad_norm_` per host and seed."""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from esper.kasmina import Host, Population
from esper.kasmina.blending import Graft
from esper.leyline import Contribution


def small_hosts() -> dict[str, dict[str, object]]:
    """Arguments of hosts that are quick in float64."""
    return {
        "mlp": {"inputs": (12,), "widths": (8, 8, 8)},
        "conv1d": {"inputs": (2, 16), "widths": (4, 8, 8)},
        "cnn": {"inputs": (3, 8, 8), "widths": (4, 8, 8)},
        "resnet": {"inputs": (3, 8, 8), "widths": (4, 8, 8), "depth": 1},
        "gpt": {"inputs": (5,), "widths": (8, 8, 8), "heads": 2, "tied": True},
    }


def samples(host: Host, *leading: int, generator: torch.Generator | None = None) -> Tensor:
    """float64 numbers, or tokens: [*leading, *inputs]."""
    if host.tokens:
        return torch.randint(host.classes, (*leading, *host.inputs), generator=generator)
    return torch.randn(*leading, *host.inputs, generator=generator, dtype=torch.float64)


def batch(population: Population, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    x = samples(population.host, size, population.rows, generator=generator)
    labels = x.shape if population.host.tokens else x.shape[:2]
    y = torch.randint(population.host.classes, labels, generator=generator)
    return x.to(population.device, population.dtype if x.is_floating_point() else x.dtype), y.to(population.device)


def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """Of samples [B, O], or of every token [B, T, O]."""
    return F.cross_entropy(logits.flatten(0, -2), y.flatten())


def wait(population: Population) -> Population:
    """The same population in an epoch in which nobody acts."""
    population.begin_epoch(torch.tensor([population.spec.action("WAIT")]).repeat(population.rows, 1))
    return population


def known_contributions(population: Population) -> Contribution:
    alpha = population.life.alpha
    return Contribution(torch.zeros_like(alpha), torch.zeros_like(alpha), torch.ones_like(alpha, dtype=torch.bool))


class PlainHost:
    """Row `row` of a population, trained on its own. Call `follow` after each `begin_epoch`."""

    def __init__(self, population: Population, row: int) -> None:
        self.population, self.row = population, row
        net = population.extract(row)
        self.stages, self.head = net.stages, net.head
        self.seeds: dict[int, Graft] = {}
        self.born: dict[int, int] = {}
        self.own = list(dict.fromkeys([*self.stages.parameters(), *self.head.parameters()]))  # some are shared
        self.optims: dict[int, torch.optim.Optimizer] = {-1: self._optim(self.own)}

    def _optim(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        c = self.population.optim
        if c.kind == "sgd":
            return torch.optim.SGD(parameters, c.lr, c.momentum, weight_decay=c.weight_decay)
        return torch.optim.AdamW(parameters, c.lr, c.betas, c.eps, c.weight_decay)

    def follow(self) -> None:
        """Take over births, deaths and alphas; weights are copied at birth only."""
        life = self.population.life
        for slot in range(life.stage.shape[1]):
            birth = int(life.germinations[self.row, slot])
            if not life.planted[self.row, slot]:
                self.seeds.pop(slot, None)
            elif slot not in self.seeds or self.born[slot] != birth:
                self.seeds[slot] = self.population.graft(self.row, slot).to(self.population.device)
                self.born[slot] = birth
                self.optims[slot] = self._optim(list(self.seeds[slot].parameters()) or [nn.Parameter(torch.zeros(1))])
            if slot in self.seeds:
                self.seeds[slot].alpha.fill_(float(life.alpha[self.row, slot]))

    def logits(self, x: Tensor, probe: int | None = None, ghosts: bool = False) -> Tensor:
        for slot, stage in enumerate(self.stages):
            x = self.join(slot, stage(x), probe, ghosts)
        out: Tensor = self.head(x)
        return out

    def join(self, slot: int, x: Tensor, probe: int | None, ghosts: bool) -> Tensor:
        """What the slot makes of x."""
        life, seed = self.population.life, self.seeds.get(slot)
        if seed is None:
            return x
        if life.incubating[self.row, slot]:
            target = float(life.target[self.row, slot])
            if slot == probe:
                return x + target * seed.delta(x)
            if ghosts:
                ghost = target * seed.delta(x.detach())
                return x + (ghost - ghost.detach())
            return x
        return seed(x) if seed.alpha > 0 else x

    def step(self, x: Tensor, y: Tensor) -> float:
        for optim in self.optims.values():
            optim.zero_grad()
        shadow = self.population.incubation == "shadow"
        loss = cross_entropy(self.logits(x, ghosts=not shadow), y)
        loss.backward()
        if shadow:
            for slot, seed in self.seeds.items():
                own = list(seed.parameters())
                if self.population.life.incubating[self.row, slot] and own:
                    grads = torch.autograd.grad(cross_entropy(self.logits(x, probe=slot), y), own, allow_unused=True)
                    for parameter, grad in zip(own, grads, strict=True):
                        parameter.grad = grad
        config = self.population.optim
        self._update(self.own, -1, config.host_clip)
        for slot, seed in self.seeds.items():
            self._update(list(seed.parameters()), slot, config.seed_clip)
        return float(loss.detach())

    def _update(self, parameters: list[nn.Parameter], place: int, clip: float) -> None:
        nn.utils.clip_grad_norm_([p for p in parameters if p.grad is not None], clip)
        self.optims[place].step()


class PlainForeign(PlainHost):
    """As `PlainHost`, for a module that a user brought: seeds join at forward hooks."""

    def __init__(self, population: Population, row: int) -> None:
        self.population, self.row = population, row
        self.net = population.extract(row).train()
        self.seeds, self.born = {}, {}
        self.own = [p for p in self.net.parameters() if p.requires_grad]
        self.optims = {-1: self._optim(self.own)}
        self.asked: tuple[int | None, bool] = None, False
        for slot, path in enumerate(population.host.slots.names):
            self.net.get_submodule(path).register_forward_hook(functools.partial(self._at, slot))

    def _at(self, slot: int, module: nn.Module, args: object, out: Tensor) -> Tensor:
        return self.join(slot, out, *self.asked)

    def logits(self, x: Tensor, probe: int | None = None, ghosts: bool = False) -> Tensor:
        """Probes leave running statistics alone."""
        self.asked = probe, ghosts
        buffers = {name: buffer.clone() for name, buffer in self.net.named_buffers() if probe is not None}
        out: Tensor = torch.func.functional_call(self.net, buffers, (x,))
        return out
