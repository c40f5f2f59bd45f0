"""`esper.attach`: a model grows while its own loop trains it, one decision per epoch.

Seeds live in forward hooks, so the model's `state_dict` keys never change, and a slot without a live seed
leaves its submodule's output alone: attached and waiting, Esper changes no bit of the training. The
lifecycle, the view and the policies are those of populations, with one row.
"""

import copy
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from esper.door.asked import Asked, Evaluate, gradients_kept, scored
from esper.door.evidence import Report, note
from esper.door.keeping import LastGood
from esper.door.places import SlotHook, bare, find_places, home, untouched
from esper.door.ranks import Ranks
from esper.kasmina.blending import Graft
from esper.kasmina.blueprints import find_blueprint, kind_of, names_for
from esper.kasmina.foreign import grow_behind
from esper.kasmina.lifecycle import Lifecycle, expand_actions
from esper.leyline import (
    ActionSpec,
    Contribution,
    EsperError,
    GateConfig,
    Head,
    LifecycleOp,
    SeedStage,
    Style,
)
from esper.leyline.keys import Purpose, mix
from esper.leyline.storage import decoding, read_state, write_state
from esper.leyline.views import SCORES, Facts, Seeds, View

CLIP = 1.0
"""Largest gradient norm of a seed."""
HIGHEST = 1e-2
"""Learning rate of AdamW behind the model at the most: a user's SGD has higher ones."""


def attach(model: nn.Module, optimizer: torch.optim.Optimizer, *, example: Any, **options: Any) -> "Growing":
    """Let a model grow in the loop that trains it; call `end_epoch(evaluate)` on what is returned after every
    epoch, and `deliver()` at the end.

    example: a batch that the model takes: a tensor, a tuple that begins with one, or a dict of keywords.
    slots: paths of submodules; "auto" (default) takes repeated blocks.
    controller: "heuristic" (default), "wait", "random", or any policy object.
    epochs: how long training will go on (30).
    budget: parameters that may be grown, as a number or a share like "+20%"; price: what one of them costs in
    units of the score.
    loss, data: `loss(model, batch)` and batches to iterate over again and again; with them a seed learns for
    `shadow_steps` (30) an epoch behind the stopped model before it joins. Without, it joins untrained, as the
    zero function.
    schedulers: of the learning rate, to be put back, too, when growth broke the training.
    layouts: "BCL" or "BTC" for slots with three dimensions; seed: of newborn weights.
    """
    try:
        asked = Asked(**options)
    except TypeError as error:
        raise EsperError(f"attach: {str(error).rpartition('()')[2].strip()}") from error
    return Growing(model, optimizer, example, asked)


class Growing:
    """A model that grows. Made by `attach`."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, example: Any,
                 asked: Asked) -> None:
        if not isinstance(model, nn.Module) or not isinstance(optimizer, torch.optim.Optimizer):
            raise EsperError("attach takes an nn.Module and the torch optimizer that trains it")
        if (name := type(optimizer).__name__) in ("LBFGS", "Muon", "SparseAdam"):
            raise EsperError(f"{name} cannot train what grows; attach the AdamW or SGD that trains the rest")
        self.model, self.optimizer, self.asked, self.host = model, optimizer, asked, bare(model)
        self.ranks = Ranks(model)
        if any(isinstance(hook, SlotHook) for m in self.host.modules() for hook in m._forward_hooks.values()):
            raise EsperError("this model is attached already; close() that first, or build the model anew")
        self.places, self.cost = find_places(self.host, asked.slots, example, asked.layouts)
        kinds = [kind_of(place.shape) for place in self.places]
        names = tuple(name for name in names_for(set(kinds)) if name != "mixer")  # it knows one length only
        self.spec = ActionSpec.decisive(len(self.places), names)
        if len(self.spec.blueprints) < 2:
            raise EsperError(f"nothing fits all of {', '.join(place.path for place in self.places)}; "
                             "choose slots of one kind")
        self.prototypes = [[find_blueprint(kind, name).prototype(place.shape)
                            for name in self.spec.blueprints]
                           for kind, place in zip(kinds, self.places, strict=True)]
        self.most, self.policy = asked.most(self.cost.params), asked.policy()
        self.life = Lifecycle(1, self.spec, GateConfig())
        self.life.begin_epoch(self._wait())
        self.grafts: dict[int, Graft] = {}
        """By slot: every seed that is alive."""
        self.joined: list[int] = []
        """Slots whose seeds the optimizer trains, in the order in which they joined."""
        self.history: list[Report] = []
        self._active: dict[int, Graft] = {}
        self._scores = torch.full((2, len(SCORES)), torch.nan)  # the epoch before, and the last
        self._gains, self._previews = self._unknown(), self._unknown()
        self._steps, self._spent, self._broke, self._closed, self._busy = 0, 0.0, False, False, False
        self._home = home(self.host)
        self._good: LastGood | None = LastGood(self)
        self._hooks: list[Any] = [
            self.host.get_submodule(place.path).register_forward_hook(SlotHook(self.host, self._active, slot))
            for slot, place in enumerate(self.places)]
        self._hooks += [optimizer.register_step_pre_hook(self._before_step),
                        optimizer.register_step_post_hook(self._after_step)]

    def _unknown(self) -> Contribution:
        nothing = torch.zeros(1, len(self.places))
        return Contribution(nothing, nothing.clone(), nothing > 0)

    def _wait(self) -> Tensor:
        return expand_actions(self.spec, torch.tensor([self.spec.action(LifecycleOp.WAIT)]))

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._busy:
            raise EsperError("the optimizer was asked to step inside evaluate() or loss(); leave it out")
        self._good = self._good or LastGood(self)  # of what was loaded
        scale = float(getattr(optimizer, "grad_scale", None) or 1.0)  # fused ones divide by it in their step
        for slot in self.joined:  # seeds have gradient norms of their own, as in a population
            nn.utils.clip_grad_norm_(self.grafts[slot].seed.parameters(), CLIP * scale)

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._steps += 1
        for slot in self.joined:
            self.grafts[slot].seed.zero_grad()  # `model.zero_grad()` does not know them

    @property
    def params(self) -> int:
        """Parameters of all live seeds."""
        return sum(p.numel() for graft in self.grafts.values() for p in graft.parameters())

    def end_epoch(self, evaluate: Evaluate) -> Report:
        """Call it after every epoch. `evaluate()` scores the model, higher is better: a number (best one from
        0 to 1, or minus a loss), or a number for each sample, in the same order each time. It is called for
        the model as it is and once for each seed; modes, buffers, gradients and random states are as before
        afterwards."""
        self._refuse_closed()
        if not self._steps:
            raise EsperError("the optimizer took no step in this epoch; is it the one that trains?")
        epoch, self._busy = self.life.epoch, True
        try:
            with untouched(self.host, self.asked.data), gradients_kept(self.host):
                self._incubate()
                score = self._measure(evaluate)
        finally:
            self._busy = False
        self._steps = 0
        gains = {self.places[slot].path: float(self._gains.value[0, slot])
                 for slot in self.grafts if bool(self._gains.known[0, slot])}
        finite = {slot: all(bool(p.isfinite().all()) for p in graft.parameters())
                  for slot, graft in self.grafts.items()}  # accuracies hide a NaN
        sound = self.ranks.all_true(not finite or (
            math.isfinite(score) and all(finite[slot] for slot in self._active)))
        decision = self._go_on(score, finite) if sound else self._go_back(score)
        self.history.append(Report(epoch, score, decision, gains, self.params))
        return self.history[-1]

    def _go_on(self, score: float, finite: dict[int, bool]) -> str:
        slots, sound = torch.tensor(list(finite), dtype=torch.int64), torch.tensor([*finite.values()]) > 0
        self.life.record_gradients(torch.zeros_like(slots), slots, sound)
        self.life.end_epoch(self._gains)
        error = 1 - score if 0 <= score <= 1 else -score
        self._scores = torch.stack([self._scores[1], torch.tensor([error, score, score, error])])
        try:
            self._sweep()
            self._broke, self._good = False, LastGood(self)
            return self._decide()
        finally:  # whoever catches what went wrong can go on
            if not self.life.open:
                self.life.begin_epoch(self._wait())
            self._sweep()
            self._wire()

    def _go_back(self, score: float) -> str:
        """Growth broke the training: the last good epoch again, without the seeds that were on trial."""
        if self._broke or self._good is None:
            raise EsperError(f"the score is {score} again, although the seeds on trial are gone; "
                             "the training itself diverges")
        self._good.put_back(self)
        self.life.open, self._broke = False, True
        self.life.epoch += 1
        self.life.begin_epoch(self._wait())
        self._wire()
        return f"ROLLBACK: the score was {score}" + ", a seed not finite" * math.isfinite(score)

    def _incubate(self) -> None:
        """Seeds in training learn behind the stopped model."""
        if self.asked.loss is None:
            return
        for slot in self.life.incubating[0].nonzero().flatten().tolist():
            seed = self.grafts[slot].seed
            own = list(seed.parameters())
            optim = torch.optim.AdamW(own, lr=min(self._group(slot)["lr"] or HIGHEST / 10, HIGHEST))
            with self._alone(slot), torch.enable_grad():
                for batch in self.asked.batches():
                    loss = self.asked.loss(self.model.eval(), batch)
                    if not isinstance(loss, Tensor) or loss.dim() or not loss.requires_grad:
                        raise EsperError("loss(model, batch) must return one number that has a gradient")
                    grads = torch.autograd.grad(loss, own, allow_unused=True)
                    for parameter, grad in zip(own, grads, strict=True):
                        parameter.grad = None if grad is None else self.ranks.mean(grad)
                    nn.utils.clip_grad_norm_(own, CLIP)
                    optim.step()
            seed.zero_grad()
            extra = 3 * self._kind(slot).cost.flops + 2 * self.cost.flops
            self._spent += extra / (3 * max(self.cost.flops, 1) * self.asked.epochs)

    def _kind(self, slot: int) -> Any:
        return self.prototypes[slot][int(self.life.blueprint[0, slot])]

    @contextmanager
    def _alone(self, slot: int) -> Iterator[None]:
        """The incubating seed of a slot runs at its target alpha, beside what is live."""
        graft = self.grafts[slot]
        graft.alpha.fill_(float(self.life.target[0, slot]))
        self._active[slot] = graft
        try:
            yield
        finally:
            graft.alpha.fill_(0.0)
            del self._active[slot]

    def _measure(self, evaluate: Evaluate) -> float:
        """The score, and what each seed is worth in it."""
        self._gains, self._previews = self._unknown(), self._unknown()
        with torch.no_grad():
            whole = scored(evaluate())
            for slot in list(self._active):
                graft = self._active.pop(slot)
                try:
                    note(self._gains, slot, whole - scored(evaluate(), len(whole)))
                finally:
                    self._active[slot] = graft
            for slot in self.life.incubating[0].nonzero().flatten().tolist():
                if self.asked.loss is not None:
                    with self._alone(slot):
                        note(self._previews, slot, scored(evaluate(), len(whole)) - whole)
        mean = whole.mean().reshape(1)
        self.ranks.agree([mean, *vars(self._gains).values(), *vars(self._previews).values()])
        return float(mean)

    def view(self) -> View:
        """What policies read: the same as in a population, of one row."""
        life, one, clock = self.life, torch.ones(1), torch.tensor([self.life.epoch])
        costs = torch.zeros(1, len(self.places), 2)
        for slot in self.grafts:
            costs[0, slot] = torch.tensor([self._kind(slot).cost.params, self._kind(slot).cost.flops])
        table = torch.tensor([[(p.cost.params, p.cost.flops) for p in row] for row in self.prototypes])
        told = torch.tensor([[p.descriptor for p in row] for row in self.prototypes])
        facts = Facts(self.cost, self._scores[1:], self._scores[:1], one * self._spent, costs, self._gains,
                      self._previews, told, table)
        return View(spec=self.spec, luck=mix(torch.tensor([self.asked.seed]), Purpose.LUCK),
                    price=one * self.asked.price, flop_price=one * 0,
                    horizon=torch.tensor([self.asked.epochs]), clock=clock, done=clock >= self.asked.epochs,
                    verdicts=life.verdicts(), free_targets=life.free_targets(), facts=facts,
                    seeds=Seeds(**{name: getattr(life, name).clone() for name in Seeds.__dataclass_fields__}),
                    settling=life.gates.min_training + life.gates.min_holding + 1)

    def _decide(self) -> str:
        """Ask the policy, then write what it wants into model and optimizer; says what was done."""
        if self.life.epoch >= self.asked.epochs:
            return LifecycleOp.WAIT.name
        with untouched(self.host):
            full = expand_actions(self.spec, self.policy(self.view()))
        self.life.check(full)
        op, slot = LifecycleOp(int(full[0, Head.OP])), int(full[0, Head.SLOT])
        path, told = self.places[slot].path, op.name
        if op is LifecycleOp.GERMINATE:
            kind = self.prototypes[slot][int(full[0, Head.BLUEPRINT])]
            told = f"GERMINATE {kind.blueprint.name} behind {path}"
            if self.params + kind.cost.params > self.most:
                op, full, told = LifecycleOp.WAIT, self._wait(), f"WAIT: {told} would exceed the budget"
        elif op is not LifecycleOp.WAIT:
            told = f"{op.name} what grew behind {path}"
        self.life.begin_epoch(full)
        if op is LifecycleOp.GERMINATE:
            key = mix(torch.tensor([self.asked.seed]), 1 + slot, self.life.germinations[:, slot])
            self._plant(slot, kind.fresh(key)[0])
        return told

    def _plant(self, slot: int, weights: Tensor) -> None:
        kind, place = self._kind(slot), self.places[slot]
        graft = Graft(kind.plain(weights), Style.ADD, 0.0, torch.zeros(kind.gate_size),
                      bool(place.shape.tokens))
        now = home(self.host)  # users move models after `attach`
        self.grafts[slot] = graft.to(*(place.device, place.dtype) if now in (None, self._home) else now)

    def _wire(self) -> None:
        """Alphas and hooks as the lifecycle has them; who blends in is trained by the user's optimizer."""
        self._active.clear()  # hooks hold it
        for slot, graft in self.grafts.items():
            graft.alpha.fill_(float(self.life.alpha[0, slot]))
            if self.life.alpha[0, slot] > 0:
                self._active[slot] = graft
                if slot not in self.joined:
                    self._join(slot)

    def _join(self, slot: int) -> None:
        self.joined.append(slot)
        self._group(slot)["params"].extend(self.grafts[slot].seed.parameters())
        self.ranks.reduce(self.grafts[slot].seed.parameters())

    def _group(self, slot: int) -> dict[str, Any]:
        """The optimizer's group that trains the submodule in front of a slot; the first, if none does."""
        own = {id(p) for p in self.host.get_submodule(self.places[slot].path).parameters()}
        groups: list[dict[str, Any]] = self.optimizer.param_groups
        return next((group for group in groups if own & {id(p) for p in group["params"]}), groups[0])

    def _sweep(self) -> None:
        self.drop([slot for slot in self.grafts if not bool(self.life.planted[0, slot])])

    def drop(self, slots: Iterable[int]) -> None:
        """Take seeds out of the model and out of the optimizer."""
        for slot in slots:
            gone = {id(parameter) for parameter in self.grafts.pop(slot).parameters()}
            self._active.pop(slot, None)
            if slot in self.joined:
                self.joined.remove(slot)
            for group in self.optimizer.param_groups:
                for parameter in [p for p in group["params"] if id(p) in gone]:
                    self.optimizer.state.pop(parameter, None)
                group["params"][:] = [p for p in group["params"] if id(p) not in gone]

    @property
    def kept(self) -> dict[str, Graft]:
        """Slot -> the seed that was kept there."""
        return {self.places[slot].path: graft for slot, graft in self.grafts.items()
                if int(self.life.stage[0, slot]) == SeedStage.FOSSILIZED}

    def deliver(self) -> nn.Module:
        """The grown model: a copy without hooks that holds what was kept; seeds still on trial are not in it.
        Model and optimizer are let go, without any seed."""
        self._refuse_closed()
        kept = self.kept
        plain = copy.deepcopy(self.host)  # if it can be copied
        for place, hook in zip(self.places, self._hooks, strict=False):
            del plain.get_submodule(place.path)._forward_hooks[hook.id]
        self.close()
        return grow_behind(plain, kept)

    def _refuse_closed(self) -> None:
        if self._closed:
            raise EsperError("this model was delivered; attach it again to let it grow on")

    def close(self) -> None:
        """Let model and optimizer go: hooks are removed, and seeds leave the optimizer."""
        for hook in self._hooks:
            hook.remove()
        self.drop(list(self.grafts))
        self._closed = True

    def save(self, path: str | Path) -> None:
        """What grew and how far it is, after `end_epoch`. Model and optimizer are the user's to save."""
        self._refuse_closed()
        write_state(path, "growing", *self.state())

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """(header, tensors): what grew, how far it is, and what the controller remembers."""
        header = {"epoch": self.life.epoch, "slots": [place.path for place in self.places],
                  "widths": [place.shape.channels for place in self.places],
                  "blueprints": list(self.spec.blueprints), "joined": self.joined, "spent": self._spent}
        tensors = {f"life.{name}": value for name, value in self.life.fields()} | {"scores": self._scores}
        remembered = getattr(self.policy, "memory", ())
        tensors |= {f"policy.{name}": getattr(self.policy, name) for name in remembered}
        for slot, graft in self.grafts.items():
            tensors[f"seed.{slot}"] = self._kind(slot).layout.flatten(graft.seed).cpu()
        return header, tensors

    def load(self, path: str | Path) -> None:
        """Grow again what `save` kept, right after `attach` with the same slots. Seeds join the optimizer in
        their old order: load the states of model and optimizer afterwards."""
        with decoding(path, "growing"):
            self.restore(*read_state(path, "growing"), str(path))

    def restore(self, header: dict[str, Any], tensors: dict[str, Tensor], path: str) -> None:
        """Of what `state` gave; `path` is where it comes from."""
        if self._closed or self.history or self.grafts:
            raise EsperError("load right after attach; this model was trained already")
        mine, _ = self.state()
        if any(header[key] != mine[key] for key in ("slots", "widths", "blueprints")):
            raise EsperError(f"{path} is of other slots, widths or blueprints; "
                             f"attach with slots={header['slots']}")
        for name, _ in self.life.fields():
            setattr(self.life, name, tensors[f"life.{name}"])
        for name in getattr(self.policy, "memory", ()):
            setattr(self.policy, name, tensors[f"policy.{name}"])
        self.life.epoch, self._spent = int(header["epoch"]), float(header["spent"])
        self._scores = tensors["scores"]
        for slot in self.life.planted[0].nonzero().flatten().tolist():
            self._plant(slot, tensors[f"seed.{slot}"])
        for slot in header["joined"]:
            self._join(slot)
        self._wire()
        self._good = None  # of the model that will be loaded, before its first step
