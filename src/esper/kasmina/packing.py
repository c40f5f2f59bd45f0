"""Storage and wiring: banks of rows, the flat pack that an epoch trains, and the passes that run over it.

Legend: N rows, S slots, R rows of a pass, G rows of a group, P parameters, T elements of a pack, K segments.
A *bank* keeps the weights and moments of one place (the host, or one slot) for all rows, [N, P]. A *pack* is
what is alive as one flat vector: all hosts, then the seeds by slot, blueprint and incubation. A *pass* says
which rows run with which seeds at which alpha; its seeds are wired to the pack once, for many steps.
"""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from esper.kasmina import series
from esper.kasmina.blending import Blend, Gather, GatherAll, SlotRows, StraightThrough
from esper.kasmina.blueprints import Prototype
from esper.kasmina.hosts import Host
from esper.kasmina.lift import Layout, Weights, row_dim
from esper.kasmina.optim import Segments
from esper.leyline import Style
from esper.leyline.keys import Purpose, mix

MULTIPLE = {"cpu": 1, "cuda": 8}
"""A group runs with a multiple of so many rows. On CUDA a new shape costs cuDNN a new plan, tens of
milliseconds, and sizes in steps of eight recur soon."""


def as_inputs(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Samples in the numbers that a pass computes in; tokens stay whole."""
    return x.to(dtype) if x.is_floating_point() else x


class Bank:
    """Weights, moments and step counts of one place, all rows. Freed rows are zero: a stale NaN spreads."""

    def __init__(self, rows: int, size: int, dtype: torch.dtype, device: torch.device) -> None:
        empty = torch.zeros(rows, size, dtype=dtype, device=device)
        self.weights, self.first, self.second = empty, empty.clone(), empty.clone()
        self.steps = torch.zeros(rows, dtype=torch.int64, device=device)

    def tensors(self) -> dict[str, Tensor]:
        return {"weights": self.weights, "first": self.first, "second": self.second, "steps": self.steps}

    def write(self, rows: Tensor, fresh: Tensor | None = None) -> None:
        """Free these rows, or give them fresh weights [R, P] with a fresh optimiser."""
        for tensor in self.tensors().values():
            tensor[rows] = 0
        if fresh is not None:
            self.weights[rows, : fresh.shape[1]] = fresh.to(self.weights)


@dataclass
class Group:
    """Seeds of one blueprint in one slot that share a stage of life: blended, or incubating."""

    slot: int
    prototype: Prototype
    rows: Tensor  # [G] rows of the pack, CPU
    style: Tensor  # [G] CPU
    incubating: bool

    @property
    def size(self) -> int:
        """Parameters per row: the module's, and behind them the gate's where any row of the group has one."""
        return self.prototype.layout.size + self.prototype.gate_size * bool((self.style == Style.GATE).any())


class _Part(NamedTuple):
    """Rows of a bank that a pack holds, with `extra` rows of padding behind them."""

    bank: Bank
    rows: Tensor  # CPU
    there: Tensor  # the same on the bank's device
    size: int
    extra: int

    def take(self, name: str) -> Tensor:
        taken = self.bank.tensors()[name][self.there]
        return torch.cat([taken, taken.new_zeros(self.extra, *taken.shape[1:])]) if self.extra else taken


class Pack:
    """Everything alive as one flat vector with its moments, copied out of the banks and written back. Groups
    are padded to a `MULTIPLE` of rows: nothing depends on the padding, nothing of it is written back."""

    def __init__(self, banks: list[Bank], hosts: Tensor, layout: Layout, groups: list[Group], lr: Tensor,
                 decay: Tensor, clips: tuple[float, float], trainable: Tensor | None,
                 dtype: torch.dtype) -> None:
        """`hosts` [W] are the population's rows that it holds, in this order: its own row w is hosts[w].
        `layout` is the hosts'; `dtype` is what passes compute in."""
        self.hosts, self.groups, self.dtype = hosts, groups, dtype
        self.device, exact = banks[0].weights.device, banks[0].weights.dtype
        self.padding = [-len(g.rows) % MULTIPLE[self.device.type] for g in groups]
        self._parts = [_Part(banks[0], hosts, hosts.to(self.device), banks[0].weights.shape[1], 0)]
        self._parts += [_Part(banks[1 + g.slot], hosts[g.rows], hosts[g.rows].to(self.device), g.size, extra)
                        for g, extra in zip(groups, self.padding, strict=True)]
        counts = [len(part.rows) + part.extra for part in self._parts]
        self.rows = torch.cat([torch.cat([part.rows, part.rows[:1].expand(part.extra)])
                               for part in self._parts])  # [K] population row of each segment
        self.real = torch.cat([torch.arange(n) < n - part.extra
                               for n, part in zip(counts, self._parts, strict=True)])
        places = torch.tensor([0, *(1 + g.slot for g in groups)])
        self.places = places.repeat_interleave(torch.tensor(counts))  # [K] 0 is the host
        theta, first, second = (torch.cat([part.take(name)[:, : part.size].flatten() for part in self._parts])
                                for name in ("weights", "first", "second"))
        clip = torch.tensor(clips, dtype=exact)[self.places.clamp(max=1)]
        rates, decays = (t[self.rows, self.places].to(self.device, exact) for t in (lr, decay))
        shapes = [(n, part.size) for n, part in zip(counts, self._parts, strict=True)]
        steps = torch.cat([part.take("steps") for part in self._parts])
        self.segments = Segments(shapes, theta, first, second, steps, rates, decays, clip.to(self.device),
                                 bool((decay != 0).any()), trainable)
        self.theta, self.views = theta, self.segments.views
        self.finite = torch.ones(len(self.rows), dtype=torch.bool, device=self.device)
        self.steps_taken = 0
        self._computed = theta if dtype == exact else torch.empty_like(theta, dtype=dtype)
        self._grad = torch.zeros_like(theta)
        layouts = [layout, *(g.prototype.layout for g in groups)]
        weights, grads = ([of.split(view) for of, view in zip(layouts, self.views(flat), strict=True)]
                          for flat in (self._computed, self._grad))
        self.weights = [_leaves(each) for each in weights]
        self._grads = [t for each in grads for t in _flat(each)]

    def refresh(self) -> None:
        """Bring the weights that passes read up to date, where they compute in another precision."""
        if self._computed is not self.theta:
            self._computed.copy_(self.theta)

    def renew_leaves(self) -> None:
        """The same weights as new variables. A variable's autograd node belongs to the stream it was made on,
        and lives on while a module keeps a tensor of its last pass, as weight norm does."""
        self.weights = [_leaves(each) for each in self.weights]

    def gradient(self, loss: Tensor) -> Tensor:
        """d loss / d theta [T], in a buffer that is used again. What no pass reads has none."""
        leaves = [leaf for weights in self.weights for leaf in _flat(weights)]
        grads = torch.autograd.grad(loss, leaves, allow_unused=True)
        reached = [(place, grad) for place, grad in zip(self._grads, grads, strict=True) if grad is not None]
        torch._foreach_copy_([place for place, _ in reached], [grad for _, grad in reached])
        return self._grad

    @torch.no_grad()
    def keep(self, statistics: Weights) -> None:
        """Running statistics that a pass over the hosts returned."""
        for name, value in statistics.items():
            self.weights[0][0][name].copy_(value)

    def set_lr(self, lr: Tensor) -> None:
        self.segments.lr.copy_(lr[self.rows, self.places])

    def write_back(self) -> None:
        seg = self.segments
        trained = [*map(self.views, (seg.theta, seg.first, seg.second)), seg.columns(seg.steps)]
        for (bank, _, rows, size, _), *views, steps in zip(self._parts, *trained, strict=True):
            for tensor, view in zip((bank.weights, bank.first, bank.second), views, strict=True):
                tensor[rows, :size] = view[: len(rows)]
            bank.steps[rows] = steps.flatten()[: len(rows)]

    def locate(self, slots: int) -> tuple[Tensor, Tensor]:
        """(group [W, S], index in it [W, S]) of every seed in the pack, -1 where there is none."""
        group_of = torch.full((len(self.hosts), slots), -1)
        index_of = group_of.clone()
        for number, group in enumerate(self.groups):
            group_of[group.rows, group.slot] = number
            index_of[group.rows, group.slot] = torch.arange(len(group.rows))
        return group_of, index_of


def _leaves(weights: tuple[Weights, Tensor]) -> tuple[Weights, Tensor]:
    """The same memory as variables that gradients end at."""
    named, rest = weights
    return {name: w.detach().requires_grad_() for name, w in named.items()}, rest.detach().requires_grad_()


def _flat(weights: tuple[Weights, Tensor]) -> list[Tensor]:
    return [*weights[0].values(), weights[1]]


@dataclass
class Use:
    """One group's part in a pass: its seeds `pick` (None is all, in order) serve the pass rows `rows`."""

    group: int
    prototype: Prototype
    rows: Tensor  # [G] rows of the pass
    pick: Tensor | None
    padding: int
    live: bool
    gated: Tensor  # [g] positions in this use whose style is GATE

    def weights(self, pack: Pack) -> tuple[Weights, Tensor]:
        """(the module's weights, the gates') of its seeds and its padding."""
        named, rest = pack.weights[1 + self.group]
        return {name: self._chosen(w) for name, w in named.items()}, self._chosen(rest)

    def _chosen(self, weight: Tensor) -> Tensor:
        weight = weight if self.live else weight.detach()
        if self.pick is None:
            return weight
        chosen = weight.index_select(0, self.pick)
        return F.pad(chosen, [0, 0] * (chosen.dim() - 1) + [0, self.padding]) if self.padding else chosen


class SlotWiring:
    """One slot of a pass: which seeds run for which rows, and how they join."""

    def __init__(self, uses: list[Use], alpha: Tensor, style: Tensor, pack: Pack) -> None:
        self.alpha, device = alpha.to(pack.device, pack.dtype), pack.device
        openings = [use.prototype.opening for use in uses if use.prototype.opening is not None]
        contiguous = device.type == "cpu" or not (uses and uses[0].prototype.shape.extent)  # are rows of h?
        self.opening = openings[0] if openings and contiguous else None
        self.uses = uses = sorted(uses, key=lambda use: use.prototype.opening != self.opening)
        self.sharing = openings.count(self.opening) if self.opening else 0  # groups, the first ones
        rows = torch.cat([use.rows for use in uses]) if uses else torch.empty(0, dtype=torch.int64)
        gates = torch.cat([use.rows[use.gated] for use in uses]) if uses else rows
        products = rows[style[rows] == Style.MULTIPLY]
        self.rows = SlotRows([use.rows.to(device) for use in uses], [use.padding for use in uses],
                             torch.cat([products, gates]).to(device), len(products), len(alpha))
        extents = len(uses[0].prototype.shape.extent) if uses else 0
        plain = device.type == "cpu" and extents < 2 and not len(self.rows.special)  # rows are contiguous
        spread = (-1, *[1] * (2 + extents))
        self.strengths = [self.alpha[use.rows].view(spread) for use in uses] if plain else None
        for use in uses:
            use.pick = None if use.pick is None else use.pick.to(device)
            use.gated = use.gated.to(device)

    def _inputs(self, h: Tensor) -> list[tuple[Tensor, bool]]:
        """What each group gets of h, and whether it went through the group's opening already."""
        if self.opening is None:
            return [(x, False) for x in ([h] if self.rows.whole else Gather.apply(h, self.rows))]
        shape, eps = self.opening
        sizes, count = self.rows.sizes, self.sharing
        gathered = h if self.rows.whole else GatherAll.apply(h, self.rows)
        shared, rest = gathered.split([sum(sizes[:count]), sum(sizes[count:])])
        normed = F.layer_norm(shared, shape, eps=eps) if shape else series.Normalised.apply(shared, 1, eps)
        return [*((x, True) for x in normed.split(sizes[:count])),
                *((x, False) for x in rest.split(sizes[count:]))]

    def __call__(self, h: Tensor, pack: Pack) -> Tensor:
        if not self.uses:
            return h
        weights, tails = zip(*(use.weights(pack) for use in self.uses), strict=True)
        outputs = [use.prototype(w, x, opened=opened)
                   for use, w, (x, opened) in zip(self.uses, weights, self._inputs(h), strict=True)]
        if self.strengths is not None and not torch.is_grad_enabled():
            for rows, strength, output in zip(self.rows.groups, self.strengths, outputs, strict=True):
                blended = torch.addcmul(h.index_select(0, rows), output, strength)
                h.index_copy_(0, rows, blended)  # h is a stage's own output
            return h
        gates = [tail.index_select(0, use.gated)
                 for use, tail in zip(self.uses, tails, strict=True) if len(use.gated)]
        gate_weights = torch.cat(gates) if gates else h.new_empty(0, self.uses[0].prototype.gate_size)
        joined: Tensor = Blend.apply(h, self.alpha, self.rows, gate_weights, *outputs)
        return joined


class Prefix(NamedTuple):
    """Rows of a population that are copies of each other: the host in front of a seed runs once for all."""

    rows: Tensor  # [D] one of each kind
    of: Tensor  # [N] which of those each row is a copy of


class Pass:
    """A list of rows to run: live rows with their own weights, or extra rows with an alpha of their own."""

    def __init__(self, host: Host, pack: Pack, style: Tensor, alpha: Tensor, env: Tensor | None = None,
                 shadow: bool = False, incubate: Tensor | None = None, compiled: bool = False,
                 branches: list[Tensor] | None = None, columns: tuple[Tensor, Tensor] | None = None,
                 keys: Tensor | None = None) -> None:
        """`alpha` [R, S]; `env` [R] maps pass rows to rows of the pack (None is every row, in order).

        `shadow` lets gradients reach incubating groups alone. `incubate` [R, S] is the alpha of ghosts that
        learn straight through; None wires none. `compiled` runs the host's stages through `torch.compile`.
        `branches` names for each slot the pass rows that later rows copy in front of it: those start there,
        not at the input. `columns` names the samples of the rows that start at the input, and the labels of
        all rows (None is `env`). With the rows' `keys` [W] hosts train, with noise; else they evaluate.
        """
        self.host, self.pack, self.shadow, self.compiled, slots = host, pack, shadow, compiled, style.shape[1]
        self.env = None if env is None else env.to(pack.device)
        self.columns = (self.env, self.env) if columns is None else tuple(c.to(pack.device) for c in columns)
        rows = torch.arange(len(pack.hosts)) if env is None else env
        wire = functools.partial(self._wire, style, pack.locate(slots))
        empty = torch.empty(0, dtype=torch.int64)
        self.statistics: Weights = {}
        self.origins: Tensor | None = None
        self.keys = None if keys is None or host.foreign is None else keys.to(pack.device)
        branches = branches or [empty] * slots
        begin = len(alpha) - sum(len(b) for b in branches)
        if host.foreign is not None and begin < len(alpha):  # it has no parts to begin at: rows run it whole
            self.origins = torch.cat([torch.arange(begin), *branches]).to(pack.device)
            begin, branches = len(alpha), [empty] * slots
        ends = [begin + sum(len(b) for b in branches[: s + 1]) for s in range(slots)]
        self.branches = [torch.cat([torch.arange(end - len(b)), b]).to(pack.device) if len(b) else None
                         for end, b in zip(ends, branches, strict=True)]
        self.slots = [wire(s, alpha[:end], rows[:end]) for s, end in enumerate(ends)]
        self.ghosts = [None if incubate is None else wire(s, incubate, rows) for s in range(slots)]

    def _wire(self, style: Tensor, location: tuple[Tensor, Tensor], slot: int, alpha: Tensor,
              rows: Tensor) -> SlotWiring:
        group_of, index_of = (where[rows, slot] for where in location)
        uses = []
        for number, group in enumerate(self.pack.groups):
            mine = ((group_of == number) & (alpha[:, slot] > 0)).nonzero().flatten()
            if group.slot != slot or not len(mine):
                continue
            pick = index_of[mine]
            whole = len(pick) == len(group.rows) and bool((pick == torch.arange(len(pick))).all())
            padding = self.pack.padding[number] if whole else -len(pick) % MULTIPLE[self.pack.device.type]
            live = group.incubating or not self.shadow
            gated = (style[rows[mine], slot] == Style.GATE).nonzero().flatten()
            uses.append(Use(number, group.prototype, mine, None if whole else pick, padding, live, gated))
        return SlotWiring(uses, alpha[:, slot], style[rows, slot], self.pack)

    def __call__(self, x: Tensor) -> Tensor:
        """Logits [R, B, classes] of samples [B, R, *inputs]; of tokens, [R, B * T, classes]."""
        hosts, _ = self.pack.weights[0]
        if self.shadow:
            hosts = {name: w.detach() for name, w in hosts.items()}
        x = x if self.origins is None else x.index_select(1, self.origins)
        noise = None
        if self.keys is not None:
            steps = self.pack.segments.steps[: len(self.keys)]
            noise = mix(self.keys, Purpose.DROPOUT, steps)
            noise = noise if self.env is None else noise[self.env]
        weights = functools.partial(self._of, hosts)
        out, self.statistics = self.host.run(x, weights, self._at_slot, self.compiled, noise)
        return out

    def _at_slot(self, index: int, h: Tensor) -> Tensor:
        """What the slot behind part `index` of the host makes of h; rows that begin there join."""
        if (copies := self.branches[index]) is not None:
            h = h.index_select(row_dim(h), copies)
        h, ghost = self.slots[index](h, self.pack), self.ghosts[index]
        if ghost is not None and ghost.uses and torch.is_grad_enabled():  # they change gradients alone
            h = StraightThrough.apply(h, ghost(h.detach(), self.pack))
        return h

    def _of(self, hosts: Weights, prefix: str, count: int) -> Weights:
        """The weights of one part of the host, for the first rows of the pass."""
        shared = self.host.layout.shared
        mine = {name: hosts[shared.get(name, name)] for name in (*hosts, *shared) if name.startswith(prefix)}
        if self.env is None:
            return mine
        rows = self.env[:count]
        return {name: w.index_select(0, rows) for name, w in mine.items()}
