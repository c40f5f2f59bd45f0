"""Which rows a pass of the engine has: training with its shadow rows, and evaluation with its counterfactuals."""

from typing import NamedTuple

import torch
from torch import Tensor

from esper.kasmina.lifecycle import Lifecycle
from esper.kasmina.packing import Prefix


class Rows(NamedTuple):
    """The rows of a pass, on the CPU: [R] and [R, S]."""

    env: Tensor  # whose weights it runs with
    start: Tensor  # the slot at which it begins, -1 is the input
    origin: Tensor  # the row of the pass whose values it begins with
    column: Tensor  # of the samples, for rows that begin at the input
    kind: Tensor  # [R, S] -1 is none
    alpha: Tensor  # [R, S]
    live: Tensor  # bool [R, 1 + S]: which weights learn in it, the host's and each slot's


def kinds_of(life: Lifecycle, kinds: Tensor) -> Tensor:
    """[N, S]: the kind of every seed by a table [S, blueprints, styles] of them; -1 where there is none."""
    kind = kinds[torch.arange(life.spec.slots), life.blueprint.clamp(min=0), life.style]
    return torch.where(life.planted, kind, -1)


def _rows(life: Lifecycle, kinds: Tensor, base: Tensor, env: Tensor, start: Tensor, origin: Tensor, alpha: Tensor,
          live: Tensor) -> Rows:
    """Rows of `base` that begin at the input, then others that begin at a slot."""
    every = torch.arange(len(base))
    whole, alphas = torch.cat([base, env]), torch.cat([life.alpha[base], alpha])
    kind = torch.where(alphas > 0, kinds_of(life, kinds)[whole], -1)
    return Rows(whole, torch.cat([torch.full_like(base, -1), start]), torch.cat([every, origin]),
                torch.cat([every, origin]), kind, alphas, live & torch.cat([live[:, :1], kind >= 0], 1))


def training_rows(life: Lifecycle, kinds: Tensor, prefix: Prefix | None = None, hosts: bool = True) -> Rows:
    """All rows, then one for every incubating seed: it runs at its target alpha behind a stopped host.

    `kinds` [S, blueprints, styles] as in `kinds_of`. Without `hosts` only incubating seeds learn.
    """
    base, of = (torch.arange(life.rows),) * 2 if prefix is None else prefix
    slot, env = life.incubating.t().nonzero().unbind(1)
    alpha = life.alpha[env]
    alpha[torch.arange(len(env)), slot] = life.target[env, slot]
    live = torch.full((len(base) + len(env), 1 + life.spec.slots), hosts)
    live[len(base) :] = torch.arange(1 + life.spec.slots) == 1 + slot[:, None]
    return _rows(life, kinds, base, env, slot, of[env], alpha, live)


def probe_rows(life: Lifecycle, kinds: Tensor, env: Tensor, alpha: Tensor, prefix: Prefix | None) -> Rows:
    """All rows (or those of a prefix), then rows at alphas of their own, from where those first differ."""
    base, of = (torch.arange(life.rows),) * 2 if prefix is None else prefix
    differs = (alpha != life.alpha[env]) & life.planted[env]
    first = torch.where(differs.any(1), differs.int().argmax(1), life.spec.slots - 1)
    live = torch.zeros(len(base) + len(env), 1 + life.spec.slots, dtype=torch.bool)
    return _rows(life, kinds, base, env, first, of[env], alpha, live)
