"""PPO for a recurrent controller with factored, masked actions.

Legend: L steps of a sequence, B sequences, H heads of the spec.
"""

import copy
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from esper.leyline import ActionSpec, EsperError, Head
from esper.leyline.codec import from_dict, to_dict
from esper.leyline.storage import decoding, read_state, write_state
from esper.simic.buffer import RolloutSpec, Sequences, TamiyoRolloutBuffer, mean_of, moments, parts_of
from esper.simic.causal import compute_per_head_advantages
from esper.simic.metrics import AnomalyDetector, PPOUpdateMetrics, Thresholds, reduced
from esper.tamiyo import ActionDistribution, Controller, FactoredRecurrentActorCritic
from esper.tamiyo.controller import check_tensors
from esper.tamiyo.network import exact

RATIOS = ("joint", "per_head")
LARGEST = 1e6  # a larger reward, weight or moment is taken for a mistake: one would spoil every later update
RANGES = {
    "updates": (1, 10**9), "learning_rate": (0, 1), "entropy": (0, 100), "entropy_weights": (0, 100),
    "explore": (0, 0.99), "gamma": (0, 1), "gae_lambda": (0, 1), "epochs": (1, 10**6),
    "minibatches": (1, 10**6), "accumulate": (1, 10**6), "clip": (1e-6, 1e9), "value_clip": (1e-6, 1e9),
    "scale_memory": (0, 0.9999), "value_weight": (0, 1000), "target_kl": (1e-9, 1e9), "kl_stop": (1e-3, 1000),
    "max_grad_norm": (1e-6, 1e9), "critic_decay": (0, 1), "adam_eps": (1e-12, 1),
    "replay_tolerance": (1e-9, 1000), "chunk": (0, 10**6)}
"""number of `PPOConfig` -> (least, most), each of them in a pair or a tuple"""


@dataclass(frozen=True)
class PPOConfig:
    """Pairs are values at the start and at the end of the declared run; between them they move in a line."""

    updates: int = 200
    """Of the declared run."""
    learning_rate: tuple[float, float] = (1e-3, 1e-4)
    entropy: tuple[float, float] = (0.05, 0.001)
    """Weight of the bonus: the op's entropy and, for every other head, that of what it would do if asked."""
    entropy_weights: tuple[float, ...] = (1.0,) * len(Head)
    """Weight of each head in the bonus, in the order of `Head`."""
    explore: tuple[float, float] = (0.02, 0.0)
    """Share of the uniform distribution in every choice."""
    gamma: float = 1.0
    gae_lambda: float = 0.95
    epochs: int = 4
    minibatches: int = 4
    accumulate: int = 1
    """Pieces of a minibatch whose gradients are summed up; the step is the same, memory is less."""
    ratio: str = "joint"
    """joint: one ratio of whole actions. per_head: one for each head that mattered, clipped by itself."""
    clip: float = 0.2
    value_clip: float = 2.0
    """Range in which the value may move in one update, in units of its scale."""
    scale_memory: float = 0.95
    """The value's scale is the spread of returns, averaged over updates with this weight on the past."""
    value_weight: float = 0.5
    target_kl: float = 0.03
    kl_stop: float = 1.5
    """The update stops when the joint KL passes so many times its target."""
    max_grad_norm: float = 0.5
    critic_decay: float = 1e-4
    """Weight decay of the value head; nothing else decays."""
    adam_eps: float = 1e-5
    replay_tolerance: float = 1e-3
    """Largest difference that a replayed log-probability or value may have from the stored one."""
    chunk: int = 0
    """Steps of a sequence, each replayed from the memory it began with; 0 is whole rollouts."""
    compile: bool = False
    """Compile the encoder and the loss."""

    def __post_init__(self) -> None:
        if self.ratio not in RATIOS:
            raise EsperError(f"no ratio {self.ratio!r}; choose from {', '.join(RATIOS)}")
        for name, (least, most) in RANGES.items():  # as many numbers as its default has, of its kind
            value, default = getattr(self, name), type(self).__dataclass_fields__[name].default
            given, known = (v if isinstance(v, (tuple, list)) else (v,) for v in (value, default))
            whole = isinstance(known[0], int)
            kinds = (int,) if whole else (int, float)
            fits = all(type(v) in kinds and least <= v <= most for v in given)  # NaN fits in no range
            if len(given) != len(known) or not fits:
                what = f"{len(known)} {'whole ' if whole else ''}number{'s' if len(known) > 1 else ''}"
                raise EsperError(f"{name} is {value!r}; expected {what} from {least:g} to {most:g}")


class Knobs(NamedTuple):
    """Numbers that change from update to update, as tensors: a compiled program must not depend on them."""

    explore: Tensor
    entropy: Tensor  # [H]
    clip: Tensor
    value_clip: Tensor


SUMS = ("policy_loss", "value_loss", "entropy", "kl", "clip_fraction", "value_error")
EXTREMES = ("ratio_max", "ratio_min")
_PLACES = [key for ratio in EXTREMES for key in (ratio, (ratio, "step"), (ratio, "op"), (ratio, "head"))]


class PPOAgent:
    """Learns a controller from rollouts."""

    def __init__(self, controller: Controller, config: PPOConfig | None = None,
                 thresholds: Thresholds | None = None, seed: int = 0, compile: bool = False) -> None:
        self.controller, self.network, self.device = controller, controller.network, controller.device
        self.config = config or PPOConfig()
        self.detector = AnomalyDetector(thresholds or Thresholds())
        self.updates = 0
        self.generator = torch.Generator().manual_seed(seed)
        decays = {False: 0.0, True: self.config.critic_decay}  # the value head alone decays
        groups = [{"params": [p for name, p in self.network.named_parameters()
                              if name.startswith("value_head.") == critic],
                   "weight_decay": decay} for critic, decay in decays.items()]
        fused = self.device.type in ("cpu", "cuda")  # other devices have no fused step
        self.optimizer = torch.optim.AdamW(groups, lr=self.config.learning_rate[0], eps=self.config.adam_eps,
                                           fused=fused, foreach=not fused)
        self._parameters, spec = list(self.network.parameters()), self.network.spec
        self._heads = [head.name.lower() for head in spec.heads]
        self._ops = torch.tensor([int(op) for op in spec.ops], device=self.device)  # of LifecycleOp
        self._encode, self._losses = self.network.encode, self._loss
        if compile or self.config.compile:
            self._encode, self._losses = map(_compiled, (self.network.encode, self._loss))

    def bound_to(self, spec: ActionSpec) -> "PPOAgent":
        """The same agent, to act in hosts with other slots or blueprints; what it learns, both know."""
        if spec == self.network.spec:
            return self
        bound = copy.copy(self)
        bound.controller = self.controller.bound_to(spec)
        bound.network = bound.controller.network
        return bound

    def buffer(self, steps: int, rows: int, chunk: int = 0) -> TamiyoRolloutBuffer:
        """A rollout that fits this agent."""
        return TamiyoRolloutBuffer(RolloutSpec.of(self.network, steps, rows, chunk), self.device)

    def scheduled(self, pair: tuple[float, float]) -> float:
        """Where a pair of start and end stands now."""
        return pair[0] + (pair[1] - pair[0]) * min(1.0, self.updates / self.config.updates)

    @property
    def explore(self) -> float:
        """What acting must use for its log-probabilities to be those that learning replays."""
        return self.scheduled(self.config.explore)

    @exact()
    def update(self, buffer: TamiyoRolloutBuffer | Sequence[TamiyoRolloutBuffer],
               last_value: Tensor | Sequence[Tensor]) -> PPOUpdateMetrics:
        """Learn from a full rollout, then forget it; or from several at once, of hosts with other slots or
        blueprints. `last_value` [N] is of what follows its last step."""
        buffers = [buffer] if isinstance(buffer, TamiyoRolloutBuffer) else list(buffer)
        values = [last_value] if isinstance(last_value, Tensor) else list(last_value)
        for each, value in zip(buffers, values, strict=True):
            self._check(each, self.network if each is buffer else self.network.bound_to(each.spec.spec))
            each.compute_advantages_and_returns(self.config.gamma, self.config.gae_lambda, value)
            each.check_numbers(LARGEST)
        errors, heads_of = zip(*map(self._replay, buffers), strict=True)
        spreads, summaries = zip(*map(self._summarise, buffers), strict=True)
        advantages = [torch.stack(each.normalize_advantages()) for each in buffers]
        error, (mean, std) = max(errors), torch.stack(advantages).mean(0)
        spread, summary, entropies = (torch.stack(each).mean(0) for each in (spreads, summaries, heads_of))
        self._rescale(spread)
        lr = self.scheduled(self.config.learning_rate)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        log, stopped, skipped = self._learn(buffers, self._knobs())
        self.updates += 1
        heads, before = self._heads, torch.cat([torch.stack([mean, std]), summary, entropies]).tolist()
        by_head: dict[str, Any] = {
            "head_learnable": dict(zip(heads, before[3:], strict=False)),
            "head_grad_norm": {h: reduced("head_grad_norm", [step[h] for step in log]) for h in heads},
            "head_entropy": dict(zip(heads, before[3 + len(heads) :], strict=True))}
        numbers: dict[str, Any] = {name: reduced(name, [step[name] for step in log])
                                   for name in (*SUMS, *EXTREMES, "grad_norm")}
        numbers |= {"replay_error": error, "explained_variance": before[2]}
        for each in buffers:
            each.reset()
        return PPOUpdateMetrics(
            **numbers, **by_head, advantage_mean=before[0], advantage_std=before[1], learning_rate=lr,
            steps=len(log) - skipped - stopped, skipped=skipped, stopped_early=bool(stopped),
            anomalies=self.detector(numbers, by_head, self._places(log)))

    def _places(self, log: list[dict[Any, float]]) -> dict[str, str]:
        """The most extreme ratios of an update -> step of the episode, op, and head that moved most."""
        found = {}
        for name, worst in zip(EXTREMES, (max, min), strict=True):
            entry = worst(log, key=lambda entry: entry[name])
            step, op, head = (int(entry[name, part]) for part in ("step", "op", "head"))
            found[name] = f"step {step}, {self.network.spec.ops[op].name}, {self._heads[head]}"
        return found

    def _check(self, buffer: TamiyoRolloutBuffer, network: FactoredRecurrentActorCritic) -> None:
        made = buffer.spec
        mine = RolloutSpec.of(network, made.steps, made.rows, made.chunk)
        different = [f.name for f in fields(RolloutSpec) if getattr(mine, f.name) != getattr(made, f.name)]
        if different or buffer.device.type != self.device.type:
            what = ", ".join(different) or "device"
            raise EsperError(f"this rollout was not made for this agent: {what} differ")

    @torch.no_grad()
    def _summarise(self, buffer: TamiyoRolloutBuffer) -> tuple[Tensor, Tensor]:
        """(spread of returns, [explained variance, how often each head could learn]) on the device."""
        valid, target = buffer["valid"], buffer["target"]
        *_, total = moments(target, valid)
        *_, missed = moments(target - buffer["value"], valid)
        learnable = (buffer["relevant"] & valid[..., None]).sum((0, 1)) / valid.sum().clamp(min=1)
        return total.sqrt(), torch.cat([(1 - missed / total.clamp(min=1e-12))[None], learnable])

    def _rescale(self, spread: Tensor) -> None:
        """Bring the value's scale nearer to the spread of returns; equal returns say nothing about it."""
        old, past = self.network.value_scale, self.config.scale_memory if self.updates else 0.0
        told = torch.where(spread > 1e-3 * old, spread, old)
        self.network.rescale_value((past * old.square() + (1 - past) * told.square()).sqrt())

    def _knobs(self) -> Knobs:
        bonus = self.scheduled(self.config.entropy)
        weights = [bonus * self.config.entropy_weights[head] for head in self.network.spec.heads]
        values = torch.tensor([self.explore, self.config.clip, *weights], device=self.device)
        return Knobs(values[0], values[2:], values[1], self.config.value_clip * self.network.value_scale)

    def _learn(self, buffers: Sequence[TamiyoRolloutBuffer],
               knobs: Knobs) -> tuple[list[dict[Any, float]], int, int]:
        """(numbers of every optimiser step, was it stopped, how many steps were skipped)."""
        log: list[dict[Any, float]] = []
        skipped = 0
        for _ in range(self.config.epochs):
            drawn = [each.get_batched_sequences(self.config.minibatches, self.generator) for each in buffers]
            for batches in zip(*drawn, strict=True):
                log.append(self._gradient(batches, knobs))
                if not math.isfinite(log[-1]["grad_norm"]):
                    skipped += 1
                elif log[-1]["kl"] > self.config.kl_stop * self.config.target_kl:
                    return log, 1, skipped
                else:
                    self.optimizer.step()
        return log, 0, skipped

    @torch.no_grad()
    def _replay(self, buffer: TamiyoRolloutBuffer) -> tuple[float, Tensor]:
        """(largest difference from what acting stored, [H] the heads' conditional entropies then)."""
        (full,) = buffer.get_batched_sequences()
        again = self.network.bound_to(buffer.spec.spec).evaluate_actions(
            full.seen, full.masks, full.actions, full.hidden, full.reset, self.explore, validate=False,
            privileged=full.privileged)
        moved = (again.scored.joint - full.log_prob).abs()
        drift = (again.value - full.value).abs() / (1 + full.value.abs())
        error = float(torch.where(full.valid, torch.maximum(moved, drift), 0.0).amax())
        if not error <= self.config.replay_tolerance:  # nor if it is no number
            raise EsperError(f"replaying the rollout gives log-probabilities or values that differ by "
                             f"{error:.2g} from the stored ones; acting and learning must see the same "
                             "observations, masks, memory and exploration")
        share, asked = again.distribution.head_entropies()
        asked = torch.where(full.valid[..., None], asked, 0.0)
        return error, (share * asked).sum((0, 1)) / asked.sum((0, 1)).clamp(min=1e-30)

    def _gradient(self, batches: Sequence[Sequences], knobs: Knobs) -> dict[Any, float]:
        """Gradients of one minibatch, clipped; its numbers, the heads' norms among them, in one transfer."""
        self.optimizer.zero_grad()
        chosen = sum(batch.chosen.sum() for batch in batches).clamp(min=1)  # type: ignore[union-attr]
        valid = sum(batch.valid.sum() for batch in batches).clamp(min=1)  # type: ignore[union-attr]
        told, net, pieces = [], self.network, self.config.accumulate
        cut = [parts_of(batch, pieces) if pieces > 1 else [batch] for batch in batches]
        for piece in itertools.chain(*cut):
            features, slot, candidate = self._encode(piece.seen)
            memory, _ = net.remember(features, piece.hidden, piece.reset)
            loss, numbers = self._losses(memory, slot, candidate, piece, knobs, chosen, valid)
            loss.backward()
            told.append(numbers)
        sums, highs, lows = torch.stack(told).split([len(SUMS), 4, 4], 1)  # [pieces, ...] each
        high = highs.index_select(0, highs[:, :1].argmax(0))[0]
        low = lows.index_select(0, lows[:, :1].argmin(0))[0]
        last: dict[str, Any] = {"op": net.op_head[-1], "slot": net.slot_pointer, **dict(net.heads.items())}
        raw = torch.stack([last[head].weight.grad.norm() for head in self._heads])
        norm = nn.utils.clip_grad_norm_(self._parameters, self.config.max_grad_norm, foreach=True)
        listed = torch.cat([sums.sum(0), norm[None], raw, high, low]).tolist()
        return dict(zip((*SUMS, "grad_norm", *self._heads, *_PLACES), listed, strict=True))

    def _loss(self, memory: Tensor, slot: Tensor, candidate: Tensor, batch: Sequences, knobs: Knobs,
              chosen: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        """(loss, [SUMS, then _PLACES]) of sequences: their share of a minibatch with so many `chosen` and
        `valid` steps."""
        network, config = self.network, self.config
        logits, value = network.decide(memory, slot, candidate, batch.privileged)
        distribution = ActionDistribution(network.spec, logits, batch.masks, knobs.explore, validate=False)
        scored = distribution.score(batch.actions)
        moved = torch.where(batch.valid, scored.joint - batch.log_prob, 0.0)
        ratio, acting = moved.exp(), batch.chosen
        by_head = scored.heads - batch.head_log_probs
        surrogate = (_clipped(ratio, batch.advantage, knobs.clip) if config.ratio == "joint" else
                     self._per_head(by_head, batch, knobs.clip))
        policy = -mean_of(surrogate, acting, chosen)
        near = batch.value + (value - batch.value).clamp(-knobs.value_clip, knobs.value_clip)
        squared = torch.maximum((value - batch.target).square(), (near - batch.target).square())
        critic = 0.5 * mean_of(squared, batch.valid, valid * network.value_scale.square())
        bonus = (knobs.entropy * distribution.conditional_entropies()).sum(-1)
        loss = policy + config.value_weight * critic - mean_of(bonus, batch.valid, valid)
        with torch.no_grad():
            entropy = mean_of(distribution.entropy(), batch.valid, valid)
            kl = mean_of(ratio - 1 - moved, acting, chosen)
            clipped = mean_of((ratio - 1).abs() > knobs.clip, acting, chosen)
            error = mean_of((value - batch.target).abs(), batch.valid, valid * network.value_scale)
            op = batch.actions[..., network.spec.heads.index(Head.OP)]
            told = torch.stack([ratio, batch.clock, op], -1)
            high, low = _place(ratio.argmax(), told, by_head), _place(ratio.argmin(), told, -by_head)
            return loss, torch.cat([torch.stack([policy, critic, entropy, kl, clipped, error]), high, low])

    def _per_head(self, moved: Tensor, batch: Sequences, clip: Tensor) -> Tensor:
        """[L, B]: a clipped surrogate for each head that mattered and had a choice, over one denominator."""
        heads = self.network.spec.heads
        ops = self._ops[batch.actions[..., heads.index(Head.OP)]]
        advantages = compute_per_head_advantages(batch.advantage, ops)
        each = torch.stack([advantages[int(head)] for head in heads], -1)
        surrogate = _clipped(torch.where(batch.relevant, moved, 0.0).exp(), each, clip)
        return torch.where(batch.relevant, surrogate, 0.0).sum(-1)

    def save(self, path: str | Path, **about: Any) -> None:
        """Everything that the next update depends on, in one file; `about` is plain data for its header."""
        state = self.optimizer.state_dict()["state"]
        moments = {f"optimizer.{index}.{name}": t.detach().cpu()
                   for index, part in state.items() for name, t in part.items()}
        self._check_weights(path, moments)
        configs = {"config": to_dict(self.config), "thresholds": to_dict(self.detector.thresholds)}
        header = {**self.controller.header(), **configs, "updates": self.updates,
                  "anomalies": self.detector.state(), **about}
        tensors = self.controller.tensors() | moments | {"generator": self.generator.get_state()}
        write_state(path, "agent", header, tensors)

    def _check_weights(self, path: str | Path, moments: dict[str, Tensor]) -> None:
        """Raise before a checkpoint is replaced by one that nothing can go on from."""
        limited = {name for name, _ in self.network.named_parameters()} | {*moments}
        stats = {f"normaliser.{name}": stat for name, stat in self.controller.normaliser.tensors().items()}
        for name, tensor in (self.network.state_dict() | moments | stats).items():
            size = float(tensor.abs().max()) if tensor.numel() else 0.0
            limit = LARGEST if name in limited and not name.endswith(".step") else math.inf
            if not math.isfinite(size) or size > limit:
                raise EsperError(f"{name!r} has grown to {size:g}, beyond {LARGEST:g}, and {path} was not "
                                 f"written; lower the learning rate and go on from the last checkpoint")

    @classmethod
    def load(cls, path: str | Path, device: torch.device | str = "cpu", compile: bool = False) -> "PPOAgent":
        """An agent that goes on where the saved one stopped."""
        header, tensors = read_state(path, "agent")
        controller = Controller.decode(header, tensors, device, str(path))
        with decoding(path, "whole agent"):
            config = from_dict(PPOConfig, header["config"], f"{path}: config")
            limits = from_dict(Thresholds, header["thresholds"], f"{path}: thresholds")
            agent = cls(controller, config, limits, compile=compile)
            agent.updates = int(header["updates"])
            agent.detector.restore(header["anomalies"])
            agent.generator.set_state(tensors["generator"])
            agent._restore_moments({name: t for name, t in tensors.items() if name.startswith("optimizer.")})
        return agent

    def _restore_moments(self, tensors: dict[str, Tensor]) -> None:
        """Of every weight, or of none if nothing was learned yet."""
        if tensors:
            ordered = (p for group in self.optimizer.param_groups for p in group["params"])
            expected = {f"optimizer.{i}.{part}": p for i, p in enumerate(ordered)
                        for part in ("exp_avg", "exp_avg_sq")}
            check_tensors("moments", expected, {n: t for n, t in tensors.items() if not n.endswith(".step")})
        moments: dict[int, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            _, index, part = name.split(".")
            moments.setdefault(int(index), {})[part] = tensor
        self.optimizer.load_state_dict(self.optimizer.state_dict() | {"state": moments})


def _clipped(ratio: Tensor, advantage: Tensor, clip: Tensor) -> Tensor:
    return torch.minimum(ratio * advantage, torch.clamp(ratio, 1 - clip, 1 + clip) * advantage)


def _place(at: Tensor, told: Tensor, moved: Tensor) -> Tensor:
    """[4]: what is `told` [L, B, 3] at a place of the flattened batch, and the head that `moved` most."""
    told, moved = (part.flatten(0, 1).index_select(0, at[None]) for part in (told, moved))
    return torch.cat([told[0], moved.argmax(-1)])


def _compiled(function: Any) -> Any:
    """Static shapes, one graph: a graph break is an error, not a slow path."""
    return torch.compile(function, fullgraph=True, dynamic=False)
