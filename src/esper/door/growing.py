"""`esper.attach`: a model grows while its own loop trains it, one decision per epoch.

Seeds live in forward hooks, so the model's `state_dict` keys never change, and a slot without a live seed
leaves its submodule's output alone: attached and waiting, Esper changes no bit of the training. The
lifecycle, the view and the policies are those of populations, with one row.
"""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from esper.door.asked import Asked, Evaluate, gradients_kept, refuse_vanishing, share
from esper.door.behind import CLIP, Compute, alone, incubate, preview
from esper.door.copies import Copied, Repeat, delivered, offered
from esper.door.evidence import SCORE, SMOOTH, Report, by_sample, note, seen, settled
from esper.door.keeping import LastGood, restore, state
from esper.door.places import Batch, SlotHook, arguments, bare, find_places, home, untouched
from esper.door.ranks import Ranks
from esper.kasmina.blending import Graft
from esper.kasmina.blueprints import Prototype
from esper.kasmina.lifecycle import Lifecycle, expand_actions
from esper.kasmina.objectives import find_objective
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
from esper.leyline.keys import mix
from esper.leyline.storage import decoding, read_state, write_state
from esper.leyline.views import SCORES
from esper.tamiyo import Learned


def attach(model: nn.Module, optimizer: torch.optim.Optimizer, *, example: Any, **options: Any) -> "Growing":
    """Let a model grow in the loop that trains it; call `end_epoch(evaluate)` on what is returned after every
    epoch, and `deliver()` at the end.

    example: a batch that the model takes: a tensor, a tuple that begins with one, or a dict of keywords.
    slots: paths of submodules; "auto" (default) takes repeated blocks; for copies, blocks in lists of blocks.
    controller: "heuristic" (default), "wait", "random", a shipped mind such as "tamiyo-small", the
    agent.safetensors of a run, a plan {slot: blueprint}, or any policy object.
    blueprints: what may grow (default: all built-in ones that fit); "copy": another block like the front one.
    epochs: how long training will go on (30).
    budget: parameters that may be grown, as a number or a share like "+20%"; flops: extra training FLOPs, as
    a share of the model's own training; price: what a parameter costs in units of the score.
    targets: labels that all epochs show; nothing grows that would leave fewer than 20 for each parameter.
    loss, data: `loss(model, batch)` and batches to iterate over again and again; with them a seed learns for
    `shadow_steps` (30) an epoch behind the stopped model before it joins. Without, it joins untrained, as the
    zero function.
    objective: "classification", "regression" or "next-token": `evaluate` then returns (outputs, labels).
    Minds need it, with loss and data.
    previews: epochs between trials of every blueprint in every empty slot (default: none, or as a mind's).
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
        if (kind := type(optimizer).__name__) in ("LBFGS", "Muon", "SparseAdam"):
            raise EsperError(f"{kind} cannot train what grows; attach the AdamW or SGD that trains the rest")
        refuse_vanishing(optimizer)
        self.model, self.optimizer, self.asked, self.host = model, optimizer, asked, bare(model)
        self._batch: Batch = tree_map(lambda part: part.clone() if isinstance(part, Tensor) else part,
                                      arguments(example))
        self.ranks = Ranks(model)
        if any(isinstance(hook, SlotHook) for m in self.host.modules() for hook in m._forward_hooks.values()):
            raise EsperError("this model is attached already; close() that first, or build the model anew")
        self.places, self.cost = find_places(self.host, asked, example)
        self.places, self.prototypes = offered(self.host, self.places, asked, example)
        self.spec = ActionSpec.decisive(len(self.places), [p.blueprint.name for p in self.prototypes[0]])
        paths = [place.path for place in self.places]
        self.most = asked.most(self.cost.params)
        with untouched(self.host):  # networks are born with random weights, then loaded
            self.policy, self.every = asked.policy(self.spec, paths), asked.preview_every(self.spec)
        self.compute = Compute(self.cost.flops, asked.epochs, share(asked.flops, 1.0, "trainings"))
        name = asked.objective
        self.objective = None if name is None else find_objective(str(name).replace("-", "_"))
        self.outputs = 2  # of the model, until evaluate() shows them
        self._learned = isinstance(self.policy, Learned)
        if self._learned and (asked.loss is None or self.objective is None):
            raise EsperError("a learned controller reads losses: pass loss=, data= and objective=, "
                             "and let evaluate() return (outputs, labels)")
        self.life = Lifecycle(1, self.spec, GateConfig())
        if not self._learned:  # which decides before the first step, too
            self.life.begin_epoch(self._wait())
        self.grafts: dict[int, Graft] = {}
        """By slot: every seed that is alive."""
        self.joined: list[int] = []
        """Slots whose seeds the optimizer trains, in the order in which they joined."""
        self.history: list[Report] = []
        self.active: dict[int, Graft] = {}
        self.scores = torch.full((2, len(SCORES)), torch.nan)  # the epoch before, and the last
        self.gains, self.previews, self.candidates = self.unknown(), self.unknown(), self.unknown(
            len(self.spec.blueprints))
        self._evaluate: Evaluate = float  # of the epoch that ends
        self._steps, self._broke, self.closed, self._busy, self._first = 0, False, False, False, ""
        self._home = home(self.host)
        self.good: LastGood | None = None  # of the first step, which users may load weights before
        self._hooks: list[Any] = [
            self.host.get_submodule(place.path).register_forward_hook(
                SlotHook(self.host, self.active, slot, place), with_kwargs=True)
            for slot, place in enumerate(self.places)]
        self._hooks += [optimizer.register_step_pre_hook(self._before_step),
                        optimizer.register_step_post_hook(self._after_step)]

    def unknown(self, *more: int) -> Contribution:
        nothing = torch.zeros(1, len(self.places), *more)
        return Contribution(nothing, nothing.clone(), nothing > 0)

    def _wait(self) -> Tensor:
        return expand_actions(self.spec, torch.tensor([self.spec.action(LifecycleOp.WAIT)]))

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        if self._busy:
            raise EsperError("the optimizer was asked to step inside evaluate() or loss(); leave it out")
        self.good = self.good or LastGood(self)
        if not self.life.open:
            told = self._decide()
            self._first = f"{told}; " * (told != LifecycleOp.WAIT.name)
        closure = kwargs.get("closure") or next(iter(args[1:]), None)
        if closure is None:
            return self._clip()

        def clipped() -> Any:
            loss = closure()
            self._clip()
            return loss

        return args[:1], kwargs | {"closure": clipped}

    def _clip(self) -> None:
        """Seeds have gradient norms of their own, as in a population."""
        scale = float(getattr(self.optimizer, "grad_scale", None) or 1.0)  # fused ones divide by it later
        for slot in self.joined:
            nn.utils.clip_grad_norm_(self.grafts[slot].seed.parameters(), CLIP * scale)

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._steps += 1
        for slot in self.joined:
            self.grafts[slot].seed.zero_grad()  # `model.zero_grad()` does not know them

    @property
    def params(self) -> int:
        """Parameters of all live seeds."""
        return sum(p.numel() for graft in self.grafts.values() for p in graft.parameters() if p.requires_grad)

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
            whole = nn.ModuleList([self.host, *self.grafts.values()])
            with untouched(whole, self.asked.data), gradients_kept(whole):
                self._evaluate = evaluate
                score = self._measure()
        finally:
            self._busy = False
        self.compute.spent += self._share(1)
        self._steps = 0
        gains = {self.places[slot].path: float(self.gains.value[0, slot])
                 for slot in sorted(self.grafts) if bool(self.gains.known[0, slot])}
        finite = {slot: all(bool(p.isfinite().all()) for p in graft.parameters())
                  for slot, graft in self.grafts.items()}  # accuracies hide a NaN
        sound = self.ranks.all_true(not finite or (
            bool(self._means[:3].isfinite().all()) and all(finite[slot] for slot in self.active)))
        decision, self._first = self._first + (self._go_on(finite) if sound else self._go_back(score)), ""
        self.history.append(Report(epoch, score, decision, gains, self.params, self.compute.spent))
        return self.history[-1]

    def _go_on(self, finite: dict[int, bool]) -> str:
        slots, sound = torch.tensor(list(finite), dtype=torch.int64), torch.tensor([*finite.values()]) > 0
        self.life.record_gradients(torch.zeros_like(slots), slots, sound)
        self.life.end_epoch(self.gains)
        self.scores = torch.stack([self.scores[1], self._means.float()])
        try:
            self._sweep()
            self._broke, self.good = False, LastGood(self)
            return self._decide()
        finally:  # whoever catches what went wrong can go on
            if not self.life.open:
                self.life.begin_epoch(self._wait())
            self._sweep()
            self.wire()

    def _go_back(self, score: float) -> str:
        """Growth broke the training: the last good epoch again, without the seeds that were on trial."""
        assert self.good is not None
        if self._broke:
            raise EsperError(f"the score is {score} again, although the seeds on trial are gone; "
                             "the training itself diverges")
        self.good.put_back(self)
        self.life.open, self._broke = False, True
        self.life.epoch += 1
        self.life.begin_epoch(self._wait())
        self.wire()
        return f"ROLLBACK: the score was {score}" + ", a seed or the loss not finite" * math.isfinite(score)

    def kind(self, slot: int) -> Any:
        return self.prototypes[slot][int(self.life.blueprint[0, slot])]

    @property
    def incubating(self) -> list[int]:
        """Slots whose seeds learn behind the model."""
        return [int(slot) for slot in self.life.incubating[0].nonzero()]

    @property
    def promised(self) -> float:
        """Compute of all live seeds until the end."""
        return self._share(max(0, self.asked.epochs - self.life.epoch))

    def _share(self, epochs: int) -> float:
        return self.compute.share(sum(self.kind(slot).cost.flops for slot in self.grafts), epochs)

    def judged(self, samples: int | None = None) -> Tensor:
        """[3, n] of the model with what is active now; evaluations draw alike, whoever is in it."""
        with untouched(self.host):
            returned: Any = self._evaluate()
        values = by_sample(returned, self.objective, samples)
        if self.objective is not None:
            self.outputs = int(returned[0].shape[-1])
        return values

    def _measure(self) -> float:
        """The scores, what each seed is worth in them, and what could grow."""
        self.gains, self.previews = self.unknown(), self.unknown()
        epoch = self.asked.shadow_steps / self._steps
        incubate(self, epoch)
        with torch.no_grad():
            whole = self.judged()
            for slot in list(self.active):
                graft = self.active.pop(slot)
                try:
                    note(self.gains, (slot,), (whole - self.judged(len(whole[0])))[SMOOTH])
                finally:
                    self.active[slot] = graft
            for slot in self.incubating if self.asked.loss is not None else ():
                with alone(self, slot, self.grafts[slot], float(self.life.target[0, slot])):
                    note(self.previews, (slot,), (self.judged(len(whole[0])) - whole)[SMOOTH])
        clock, gates = self.life.epoch + 1, self.life.gates
        if self.every and clock % self.every == 1 % self.every and (
                self.asked.epochs - clock > gates.min_training + gates.min_holding + 1):
            self.candidates = preview(self, whole, epoch) or self.candidates
        means = torch.cat([settled(whole, self.objective), self._train_loss(whole)])
        found = (self.gains, self.previews, self.candidates)
        self.ranks.agree([means, *(tensor for each in found for tensor in vars(each).values())])
        self._means = means
        return float(means[SCORE])

    def _train_loss(self, whole: Tensor) -> Tensor:
        """[1] on as many batches as a seed learns from; only minds look at it."""
        if not self._learned or self.asked.loss is None:
            return settled(whole, self.objective)[:1]
        with torch.no_grad():
            losses = [self.asked.loss(self.model.train(), batch) for batch in self.asked.batches()]
        return torch.stack(losses).double().mean().reshape(1).cpu()

    def _decide(self) -> str:
        """Ask the policy, then write what it wants into model and optimizer; says what was done."""
        if self.life.epoch >= self.asked.epochs:
            return LifecycleOp.WAIT.name
        with untouched(self.host):
            full = expand_actions(self.spec, self.policy(seen(self)))
        self.life.check(full)
        op, slot = LifecycleOp(int(full[0, Head.OP])), int(full[0, Head.SLOT])
        path, told = self.places[slot].path, op.name
        if op is LifecycleOp.GERMINATE:
            kind = self.prototypes[slot][int(full[0, Head.BLUEPRINT])]
            told = f"GERMINATE {kind.blueprint.name} behind {path}"
            compute, left = self.compute, self.asked.epochs - self.life.epoch
            needed = self.promised + compute.share(kind.cost.flops, left)
            if self.params + kind.cost.params > self.most or compute.spent + needed > compute.most:
                op, full, told = LifecycleOp.WAIT, self._wait(), f"WAIT: {told} would exceed the budget"
        elif op is not LifecycleOp.WAIT:
            told = f"{op.name} what grew behind {path}"
        self.life.begin_epoch(full)
        if op is LifecycleOp.GERMINATE:
            key = mix(torch.tensor([self.asked.seed]), 1 + slot, self.life.germinations[:, slot])
            self.plant(slot, kind.fresh(key)[0])
        return told

    def plant(self, slot: int, weights: Tensor) -> None:
        self.grafts[slot] = self.graft(slot, self.kind(slot), weights)

    def graft(self, slot: int, kind: Prototype, weights: Tensor) -> Graft:
        """A seed for a slot, where the model is now."""
        place = self.places[slot]
        now = home(self.host)  # users move models after `attach`
        device, dtype = (place.device, place.dtype) if now in (None, self._home) else now
        if isinstance(kind, Copied):
            return kind.graft(device)
        return Graft(kind.plain(weights), Style.ADD, 0.0, bool(place.shape.tokens)).to(device, dtype)

    def wire(self) -> None:
        """Alphas and hooks as the lifecycle has them; who blends in is trained by the user's optimizer."""
        self.active.clear()  # hooks hold it
        for slot, graft in sorted(self.grafts.items()):  # as after `load`
            graft.alpha.fill_(float(self.life.alpha[0, slot]))
            if self.life.alpha[0, slot] > 0:
                self.active[slot] = graft
                if slot not in self.joined:
                    self.join(slot)

    def join(self, slot: int) -> None:
        self.joined.append(slot)
        graft, front = self.grafts[slot], self.host.get_submodule(self.places[slot].path)
        learned = [p for p in graft.seed.parameters() if p.requires_grad]
        self.ranks.reduce(learned)
        if not isinstance(graft, Repeat):
            self.group(slot)["params"].extend(learned)
            return
        like = dict(zip(map(id, graft.seed.parameters()), map(id, front.parameters()), strict=True))
        for group in self.optimizer.param_groups:  # copied ones go where those that they are like are trained
            trained = {id(p) for p in group["params"]}
            group["params"].extend(p for p in learned if like[id(p)] in trained)

    def group(self, slot: int) -> dict[str, Any]:
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
            self.active.pop(slot, None)
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
        self.drop([slot for slot in self.grafts if self.places[slot].path not in kept])
        hooks = {place.path: hook.id for place, hook in zip(self.places, self._hooks, strict=False)}
        better = delivered(self.host, hooks, kept, self._batch)
        self.close()
        return better

    def _refuse_closed(self) -> None:
        if self.closed:
            raise EsperError("this model was delivered; attach it again to let it grow on")

    def close(self) -> None:
        """Let model and optimizer go: hooks are removed, and seeds leave the optimizer."""
        for hook in self._hooks:
            hook.remove()
        self.drop(list(self.grafts))
        self.closed = True

    def save(self, path: str | Path) -> None:
        """What grew and how far it is, after `end_epoch`. Model and optimizer are the user's to save."""
        self._refuse_closed()
        write_state(path, "growing", *state(self))

    def load(self, path: str | Path) -> None:
        """Grow again what `save` kept, right after `attach` with the same slots. Seeds join the optimizer in
        their old order: load the states of model and optimizer afterwards."""
        with decoding(path, "growing"):
            restore(self, *read_state(path, "growing"), str(path))
