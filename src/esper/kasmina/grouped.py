"""The general path of an epoch: any host and any seed; seeds run in groups of one blueprint, slot and stage
of life, which are wired anew in every epoch.

Legend: W rows at work, R rows of a pass, S slots, B samples, O outputs.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from esper.kasmina.packing import Group, Pack, Pass, Prefix, as_inputs
from esper.kasmina.stepping import Stepper

if TYPE_CHECKING:
    from esper.kasmina.population import Population


class Grouped:
    """A pack of all that is alive, taken out of the banks, and the passes over it."""

    def __init__(self, population: "Population") -> None:
        self.population = p = population
        trainable = None if bool((p.trainable == 1).all()) else p.at_work(p.trainable)
        clips = (p.optim.host_clip, p.optim.seed_clip)
        self.pack = Pack(p.banks, p.at_work(torch.arange(p.rows)), p.host.layout, self._groups(), p.lr,
                         p.decay, clips, trainable, p.compute_dtype)
        self.stepper: Stepper | None = None
        self._live: Pass | None = None

    @property
    def _style(self) -> Tensor:
        return self.population.at_work(self.population.life.style)

    @property
    def _alpha(self) -> Tensor:
        return self.population.at_work(self.population.life.alpha)

    @property
    def untrained(self) -> bool:
        return self.stepper is None

    def _groups(self) -> list[Group]:
        groups, p = [], self.population
        parts = (p.life.incubating, p.life.planted, p.life.blueprint)
        incubating, planted, blueprint = map(p.at_work, parts)
        for slot, prototypes in enumerate(p.prototypes):
            for number, prototype in enumerate(prototypes):
                mine = planted[:, slot] & (blueprint[:, slot] == number)
                for young in (False, True):
                    rows = (mine & (incubating[:, slot] == young)).nonzero().flatten()
                    if len(rows) and prototype.layout.size:
                        groups.append(Group(slot, prototype, rows, self._style[rows, slot], young))
        return groups

    def train(self, x: Tensor, y: Tensor) -> Tensor:
        if self.stepper is None:
            p, life, shadows = self.population, self.population.life, self.population.incubation == "shadow"
            ghosts = None if shadows else p.at_work(torch.where(life.incubating, life.target, 0.0))
            main = Pass(p.host, self.pack, self._style, self._alpha, incubate=ghosts, compiled=p.compile,
                        keys=p.at_work(p.keys))
            self.stepper = Stepper(self.pack, main, self._shadow_pass() if shadows else None, p.optim,
                                   p.objective)
        return self.stepper(x, y)

    def shadow(self, x: Tensor, y: Tensor, prefix: Prefix | None) -> bool:
        """False if no seed is incubating."""
        if self.stepper is None:
            if (shadow := self._shadow_pass(prefix)) is None:
                return False
            self.stepper = Stepper(self.pack, None, shadow, self.population.optim, self.population.objective)
        self.stepper(x, y)
        return True

    def _shadow_pass(self, prefix: Prefix | None = None) -> Pass | None:
        """Rows in which one incubating seed each runs at its target alpha behind a stopped host."""
        groups = sorted((g for g in self.pack.groups if g.incubating), key=lambda group: group.slot)
        if not groups:
            return None
        p = self.population
        env = torch.cat([g.rows for g in groups])
        slot = torch.cat([torch.full_like(g.rows, g.slot) for g in groups])
        alpha, keys = self._alpha[env], p.at_work(p.keys)
        alpha[torch.arange(len(env)), slot] = p.at_work(p.life.target)[env, slot]
        if prefix is None:
            return Pass(p.host, self.pack, self._style, alpha, env, shadow=True, keys=keys)
        every, origin = torch.arange(len(prefix.rows)), prefix.of[env]
        return Pass(p.host, self.pack, self._style, torch.cat([self._alpha[prefix.rows], alpha]),
                    torch.cat([prefix.rows, env]), shadow=True, columns=(every, torch.cat([every, origin])),
                    branches=[origin[slot == s] for s in range(p.spec.slots)], keys=keys)

    def forward(self, x: Tensor, rows: Tensor | None, alpha: Tensor | None) -> Tensor:
        """[R, B, O]."""
        if rows is None and alpha is None:
            self._live = self._live or Pass(self.population.host, self.pack, self._style, self._alpha)
            return self._run(self._live, x)
        env = torch.arange(self.population.count) if rows is None else rows
        alphas = self._alpha[env] if alpha is None else alpha
        return self._run(Pass(self.population.host, self.pack, self._style, alphas, env), x)

    def probe(self, rows: Tensor, alpha: Tensor, prefix: Prefix | None) -> Callable[[Tensor], Tensor]:
        p, live = self.population, self._alpha
        base, of = (torch.arange(p.count),) * 2 if prefix is None else prefix
        differs = (alpha != live[rows]) & p.at_work(p.life.planted)[rows]
        first = torch.where(differs.any(1), differs.int().argmax(1), p.spec.slots - 1)
        order = first.argsort(stable=True)
        branches = [of[rows[order[first[order] == slot]]] for slot in range(p.spec.slots)]
        whole = Pass(p.host, self.pack, self._style, torch.cat([live[base], alpha[order]]),
                     torch.cat([base, rows[order]]), branches=branches)
        back = torch.cat([torch.arange(len(base)), len(base) + order.argsort()]).to(p.device)
        return lambda x: self._run(whole, x).index_select(0, back)

    def _run(self, chosen: Pass, x: Tensor) -> Tensor:
        self.pack.refresh()
        return chosen(as_inputs(x, self.population.compute_dtype))

    def set_lr(self, lr: Tensor) -> None:
        self.pack.set_lr(lr)

    def finish(self) -> None:
        """Write what was trained back to the banks, and note whose gradients were finite."""
        if (pack := self.pack).steps_taken:
            pack.write_back()
            seeds = (pack.places > 0) & pack.real
            self.population.life.record_gradients(pack.rows[seeds], pack.places[seeds] - 1,
                                                  pack.finite.cpu()[seeds])
