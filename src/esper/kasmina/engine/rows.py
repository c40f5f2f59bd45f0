"""Which rows a pass of the engine has: training with its shadow rows, evaluation with its counterfactuals.

Legend: N rows of the population, W rows at work, R rows of a pass, S slots.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from esper.kasmina.lifecycle import Lifecycle
from esper.kasmina.packing import Prefix


class Rows(NamedTuple):
    """The rows of a pass, on the CPU: [R] and [R, S]."""

    env: Tensor  # whose weights it runs with
    start: Tensor  # the slot at which it begins, -1 is the input
    origin: Tensor  # the row of the pass whose values it begins with, or whose samples it reads
    kind: Tensor  # [R, S] -1 is none
    alpha: Tensor  # [R, S]
    live: Tensor  # bool [R, 1 + S]: which weights learn in it, the host's and each slot's


def kinds_of(life: Lifecycle, kinds: Tensor) -> Tensor:
    """[N, S]: the kind of every seed by a table [S, blueprints, styles] of them; -1 where there is none."""
    kind = kinds[torch.arange(life.spec.slots), life.blueprint.clamp(min=0), life.style]
    return torch.where(life.planted, kind, -1)


def training_rows(life: Lifecycle, kinds: Tensor, working: Tensor, prefix: Prefix | None,
                  hosts: bool) -> Rows:
    """The rows at work [W] (or those of a prefix among them), then one for every incubating seed: it runs at
    its target alpha behind a stopped host. Without `hosts` only incubating seeds learn.

    `kinds` [S, blueprints, styles] as in `kinds_of`.
    """
    slot, env = life.incubating[working].t().nonzero().unbind(1)
    alpha = life.alpha[working[env]]
    alpha[torch.arange(len(env)), slot] = life.target[working[env], slot]
    seeds = torch.arange(1 + life.spec.slots) == 1 + slot[:, None]
    return _rows(life, kinds, working, prefix, env, slot, alpha, hosts, seeds)


def probe_rows(life: Lifecycle, kinds: Tensor, working: Tensor, env: Tensor, alpha: Tensor,
               prefix: Prefix | None) -> Rows:
    """The rows at work (or those of a prefix), then rows [R], counted among these, at alphas of their own:
    from where those first differ."""
    mine = working[env]
    differs = (alpha != life.alpha[mine]) & life.planted[mine]
    start = torch.where(differs.any(1), differs.int().argmax(1), life.spec.slots - 1)
    nothing = torch.zeros(len(env), 1 + life.spec.slots, dtype=torch.bool)
    return _rows(life, kinds, working, prefix, env, start, alpha, False, nothing)


def _rows(life: Lifecycle, kinds: Tensor, working: Tensor, prefix: Prefix | None, env: Tensor, start: Tensor,
          alpha: Tensor, hosts: bool, live: Tensor) -> Rows:
    base, of = (torch.arange(len(working)),) * 2 if prefix is None else prefix
    whole, alphas = working[torch.cat([base, env])], torch.cat([life.alpha[working[base]], alpha])
    kind = torch.where(alphas > 0, kinds_of(life, kinds)[whole], -1)
    learns = torch.cat([torch.full((len(base), live.shape[1]), hosts), live])
    learns[:, 1:] &= kind >= 0
    starts, origins = torch.full_like(base, -1), torch.arange(len(base))
    return Rows(whole, torch.cat([starts, start]), torch.cat([origins, of[env]]), kind, alphas, learns)
