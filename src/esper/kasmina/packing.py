"""Storage and wiring: banks of rows, the flat pack that an epoch trains, and the passes that run over it.

Legend: N rows, S slots, R rows of a pass, G rows of one group, P parameters, T elements of the pack, K segments.
A *bank* keeps the weights and moments of one place (the host, or one slot) for all rows, [N, P]. A *pack* holds what is
alive as one flat vector: all hosts, then the seeds grouped by slot, blueprint and incubation. A *pass* says which rows
run with which seeds at which alpha; its seeds are wired to the pack once and used for many steps.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from esper.kasmina.blending import Blend, Gather, SlotRows, StraightThrough
from esper.kasmina.blueprints import Prototype
from esper.kasmina.hosts import Host
from esper.kasmina.optim import Segments
from esper.leyline import Style


class Bank:
    """Weights, moments and step counts of one place for all N rows. Freed rows are zero: a stale NaN would spread."""

    def __init__(self, rows: int, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.weights, self.first, self.second = (torch.zeros(rows, size, dtype=dtype, device=device) for _ in range(3))
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
    rows: Tensor  # [G] rows of the population, CPU
    style: Tensor  # [G] CPU
    incubating: bool

    @property
    def size(self) -> int:
        """Parameters per row: the module's, and behind them the gate's where any row of the group has one."""
        return self.prototype.layout.size + self.prototype.gate_size * bool((self.style == Style.GATE).any())


class Pack:
    """Everything alive as one flat vector with its moments, copied out of the banks and written back to them."""

    def __init__(self, banks: list[Bank], groups: list[Group], lr: Tensor, decay: Tensor, clips: tuple[float, float],
                 trainable: Tensor | None) -> None:
        self.banks, self.groups = banks, groups
        self.device, dtype = banks[0].weights.device, banks[0].weights.dtype
        rows = len(banks[0].weights)
        self._parts = [(banks[0], torch.arange(rows), banks[0].weights.shape[1])]
        self._parts += [(banks[1 + g.slot], g.rows, g.size) for g in groups]
        self._device_rows = [r.to(self.device) for _, r, _ in self._parts]
        self.rows = torch.cat([rows for _, rows, _ in self._parts])  # [K] population row of each segment
        counts = torch.tensor([len(rows) for _, rows, _ in self._parts])
        self.places = torch.tensor([0, *(1 + g.slot for g in groups)]).repeat_interleave(counts)  # [K] 0 is the host
        theta, first, second = (
            torch.cat([t[:, :size].flatten() for t, (_, _, size) in zip(self._take(name), self._parts, strict=True)])
            for name in ("weights", "first", "second"))
        clip = torch.tensor(clips, dtype=dtype)[self.places.clamp(max=1)]
        self.segments = Segments(
            [(len(rows), size) for _, rows, size in self._parts], theta, first, second, torch.cat(self._take("steps")),
            lr[self.rows, self.places].to(self.device, dtype), decay[self.rows, self.places].to(self.device, dtype),
            clip.to(self.device), bool((decay != 0).any()), trainable)
        self.theta, self.views = self.segments.theta, self.segments.views
        self.finite = torch.ones(len(self.rows), dtype=torch.bool, device=self.device)
        self.steps_taken = 0

    def _take(self, name: str) -> list[Tensor]:
        return [bank.tensors()[name][rows] for (bank, _, _), rows in zip(self._parts, self._device_rows, strict=True)]

    def set_lr(self, lr: Tensor) -> None:
        self.segments.lr.copy_(lr[self.rows, self.places])

    def write_back(self) -> None:
        seg = self.segments
        steps = seg.columns(seg.steps)
        flats = (("weights", self.views(seg.theta)), ("first", self.views(seg.first)), ("second", self.views(seg.second)))
        for number, ((bank, _, size), rows) in enumerate(zip(self._parts, self._device_rows, strict=True)):
            for name, views in flats:
                bank.tensors()[name][rows, :size] = views[number]
            bank.steps[rows] = steps[number].flatten()

    def locate(self, slots: int) -> tuple[Tensor, Tensor]:
        """(group [N, S], index in it [N, S]) of every seed in the pack, -1 where there is none."""
        group_of = torch.full((len(self.banks[0].weights), slots), -1)
        index_of = group_of.clone()
        for number, group in enumerate(self.groups):
            group_of[group.rows, group.slot] = number
            index_of[group.rows, group.slot] = torch.arange(len(group.rows))
        return group_of, index_of


@dataclass
class Use:
    """One group's part in a pass: its seeds `pick` (None is all, in order) serve the pass rows `rows`."""

    group: int
    prototype: Prototype
    rows: Tensor  # [G] rows of the pass
    pick: Tensor | None
    live: bool
    gated: Tensor  # [g] positions in this use whose style is GATE

    def weights(self, flats: list[Tensor]) -> Tensor:
        flat = flats[1 + self.group]
        flat = flat if self.pick is None else flat.index_select(0, self.pick)
        return flat if self.live else flat.detach()


class SlotWiring:
    """One slot of a pass: which seeds run for which rows, and how they join."""

    def __init__(self, uses: list[Use], alpha: Tensor, style: Tensor, device: torch.device, dtype: torch.dtype) -> None:
        self.uses = uses
        self.alpha = alpha.to(device, dtype)
        rows = torch.cat([use.rows for use in uses]) if uses else torch.empty(0, dtype=torch.int64)
        gates = torch.cat([use.rows[use.gated] for use in uses]) if uses else rows
        # A new shape costs cuDNN a new plan, tens of milliseconds; sizes in steps of eight recur soon.
        self.padding = [-len(use.rows) % 8 if device.type == "cuda" else 0 for use in uses]
        products = rows[style[rows] == Style.MULTIPLY]
        self.rows = SlotRows([use.rows.to(device) for use in uses], self.padding, torch.cat([products, gates]).to(device),
                             len(products), len(alpha))
        for use in uses:
            use.pick = None if use.pick is None else use.pick.to(device)
            use.gated = use.gated.to(device)

    def __call__(self, h: Tensor, flats: list[Tensor]) -> Tensor:
        if not self.uses:
            return h
        flat = [F.pad(use.weights(flats), (0, 0, 0, extra)) if extra else use.weights(flats)
                for use, extra in zip(self.uses, self.padding, strict=True)]
        weights, tails = zip(*(use.prototype.layout.split(w) for use, w in zip(self.uses, flat, strict=True)), strict=True)
        inputs = Gather.apply(h, self.rows)
        outputs = [use.prototype(w, x) for use, w, x in zip(self.uses, weights, inputs, strict=True)]
        gates = [tail.index_select(0, use.gated) for use, tail in zip(self.uses, tails, strict=True) if len(use.gated)]
        gate_weights = torch.cat(gates) if gates else h.new_empty(0, self.uses[0].prototype.gate_size)
        blended: Tensor = Blend.apply(h, self.alpha, self.rows, gate_weights, *outputs)
        return blended


class Pass:
    """A list of rows to run: live rows with their own weights, or extra rows with an alpha of their own."""

    def __init__(self, host: Host, pack: Pack, style: Tensor, alpha: Tensor, env: Tensor | None = None,
                 dtype: torch.dtype | None = None, shadow: bool = False, incubate: Tensor | None = None,
                 compiled: bool = False) -> None:
        """`alpha` [R, S]; `env` [R] maps pass rows to population rows (None is every row, in order).

        `shadow` lets gradients reach incubating groups alone. `incubate` [R, S] is the alpha of the ghosts that learn
        straight through; None wires no ghosts. `compiled` runs the host's stages through `torch.compile`.
        """
        self.host, self.pack, self.shadow, self.compiled = host, pack, shadow, compiled
        self.env = None if env is None else env.to(pack.device)
        rows = torch.arange(len(pack.banks[0].weights)) if env is None else env
        dtype = dtype or pack.theta.dtype
        location = pack.locate(style.shape[1])
        self.slots = [self._wire(s, alpha, rows, style, location, dtype) for s in range(style.shape[1])]
        self.ghosts = [None if incubate is None else self._wire(s, incubate, rows, style, location, dtype)
                       for s in range(style.shape[1])]

    def _wire(self, slot: int, alpha: Tensor, rows: Tensor, style: Tensor, location: tuple[Tensor, Tensor],
              dtype: torch.dtype) -> SlotWiring:
        group_of, index_of = (where[rows, slot] for where in location)
        uses = []
        for number, group in enumerate(self.pack.groups):
            mine = ((group_of == number) & (alpha[:, slot] > 0)).nonzero().flatten()
            if group.slot != slot or not len(mine):
                continue
            pick = index_of[mine]
            whole = len(pick) == len(group.rows) and bool((pick == torch.arange(len(pick))).all())
            live = group.incubating or not self.shadow
            gated = (style[rows[mine], slot] == Style.GATE).nonzero().flatten()
            uses.append(Use(number, group.prototype, mine, None if whole else pick, live, gated))
        return SlotWiring(uses, alpha[:, slot], style[rows, slot], self.pack.device, dtype)

    def __call__(self, flats: list[Tensor], x: Tensor) -> Tensor:
        """Logits [R, B, classes] from the pack's views and samples [B, R, *inputs]."""
        hosts = flats[0] if self.env is None else flats[0].index_select(0, self.env)
        weights, _ = self.host.layout.split(hosts.detach() if self.shadow else hosts)
        h = self.host.enter(x)
        for index, (slot, ghost) in enumerate(zip(self.slots, self.ghosts, strict=True)):
            h = slot(self.host.stage(index, weights, h, self.compiled), flats)
            if ghost is not None and ghost.uses:
                h = StraightThrough.apply(h, ghost(h.detach(), flats))
        return self.host.head(weights, h)
