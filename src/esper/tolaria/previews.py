"""Candidate previews: what would each blueprint do in each empty slot? A few shadow steps on a frozen host
tell.

Legend: N rows, S slots, K blueprints, R candidates.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from esper.kasmina import Population
from esper.kasmina.packing import Prefix
from esper.leyline import ActionSpec, Contribution, EsperError, Head, LifecycleOp, SeedStage
from esper.tolaria.evaluation import LOSS, measure

if TYPE_CHECKING:
    from esper.tolaria.env import MorphogeneticEnv


@dataclass(frozen=True)
class PreviewConfig:
    """When an environment previews candidates by itself, for its policies to see."""

    every: int = 3
    """Epochs from one preview to the next; the first follows the first epoch, when there is most to gain."""
    steps: int = 30
    """Shadow steps of each candidate."""

    def __post_init__(self) -> None:
        if min(self.every, self.steps) < 1:
            raise EsperError("previews need every and steps of at least 1; "
                             f"got {self.every} and {self.steps}")


MOST, BYTES = 2048, 1000
"""Candidates that are trained at once, and what a number of a batch behind their stages takes on a device."""


def scratch_for(env: "MorphogeneticEnv") -> Population:
    """Where candidates are trained, as many rows as at once. It lasts as long as its environment."""
    slots, blueprints = env.spec.slots, env.spec.blueprints
    heads = tuple(head for head in Head if head is not Head.STYLE or head in env.spec.heads)
    everything = replace(ActionSpec.full(slots, blueprints), heads=heads)
    config = replace(env.population.config, spec=everything, incubation="shadow", compile=False)
    rows, device = min(MOST, env.rows * slots * len(blueprints)), env.population.device
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
        rows = min(rows, max(1, memory // (BYTES * env.feed.batch * env.widest)))
    return Population(config, rows)


def preview_candidates(env: "MorphogeneticEnv", steps: int = 30, rows: Tensor | None = None) -> Contribution:
    """Loss drops [N, S, K] on the validation slice, unknown where a slot is taken: every blueprint in every
    empty slot of these rows (None is all) is trained behind a copy of its stopped host. Nothing of the
    environment changes but what the rows have spent: a preview is paid for like any training."""
    population, spec = env.population, env.spec
    shape = (env.rows, spec.slots, len(spec.blueprints))
    chosen = torch.zeros(env.rows, dtype=torch.bool)
    chosen[torch.arange(env.rows) if rows is None else rows.cpu()] = True
    empty = population.life.at(SeedStage.DORMANT) & (chosen & ~env.done)[:, None]
    real = torch.tensor([prototype.layout.size > 0 for prototype in population.prototypes[0]])
    known = empty[:, :, None] & real
    previews = Contribution(torch.zeros(shape), torch.zeros(shape), known.clone())
    for part in known.nonzero().split(env.scratch.rows) if bool(known.any()) else ():
        value, error = _train(env, part, steps)
        sound, where = value.isfinite() & error.isfinite(), tuple(part.t())
        previews.value[where] = torch.where(sound, value, 0)
        previews.standard_error[where] = torch.where(sound, error, 0)
        previews.known[where] = sound
    flops = torch.tensor([[p.cost.flops for p in slot] for slot in population.prototypes])
    env.charge(flops * known, known, steps / env.feed.steps)
    return previews


def _train(env: "MorphogeneticEnv", candidates: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """(loss drop, its error) of candidates [R, 3]: row, slot, blueprint."""
    population, (row, slot, blueprint) = env.population, candidates.t()
    scratch, every = env.scratch, torch.arange(len(row))
    scratch.restore(every, population.snapshot(row))
    spec = scratch.spec
    full = torch.tensor([spec.action(LifecycleOp.WAIT)]).repeat(scratch.rows, 1)
    full[every] = torch.tensor(spec.action(LifecycleOp.GERMINATE))
    full[every, Head.SLOT], full[every, Head.BLUEPRINT] = slot, blueprint
    rate = env.scenarios.lr * env.family.rate(env.clock, env.scenarios.horizon)
    rates = torch.zeros(scratch.rows, 1 + spec.slots, dtype=torch.float64)
    rates[every, 1 + slot] = rate[row]
    scratch.set_lr(rates)
    scratch.begin_epoch(full, torch.arange(scratch.rows) >= len(row))
    try:
        env.feed.begin_epoch(env.clock)
        hosts, of = row.unique(return_inverse=True)
        prefix = Prefix(torch.searchsorted(of, torch.arange(len(hosts))), of)  # candidates come row by row
        where = hosts.to(population.device)
        for step in range(steps):
            x, y = env.feed.train(step % env.feed.steps)
            scratch.shadow_step(x.index_select(1, where), y.index_select(1, where), prefix)
        alpha = scratch.life.alpha[every]
        alpha[every, slot] = scratch.life.target[every, slot]
        piece = env.at_once(len(row))
        chunks = ((a.index_select(1, where), b.index_select(1, where))
                  for x, y in env.validation() for a, b in zip(x.split(piece), y.split(piece), strict=True))
        probe = scratch.probe(every, alpha, prefix)
        return measure(population.objective, probe, of.to(population.device), len(hosts), chunks, LOSS)[1:]
    finally:  # it is used again
        scratch.end_epoch()
        scratch.life.drain_transitions()
