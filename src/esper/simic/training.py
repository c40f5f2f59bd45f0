"""The training loop: a round of episodes, an update, a checkpoint; facts go to a sink."""

import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from esper.leyline import ActionSpec, EsperError, Head, LifecycleOp, SeedStage
from esper.leyline.codec import to_dict
from esper.leyline.storage import atomic_write, read_state
from esper.leyline.telemetry import Nowhere, Sink
from esper.simic.buffer import TamiyoRolloutBuffer
from esper.simic.config import TrainConfig
from esper.simic.metrics import PPOUpdateMetrics
from esper.simic.ppo import PPOAgent
from esper.simic.shards import KnownTwins, Rounds, Shard, make_world
from esper.simic.workers import Workers
from esper.simic.world import RewardWorld, Round
from esper.tamiyo import Learned, PolicyBundle
from esper.tolaria import MakeEnv, MorphogeneticEnv, Scenarios

CHECKPOINT, PREVIOUS, TWINS = "agent.safetensors", "agent.previous.safetensors", "twins.safetensors"


class Training:
    """One run: train, record, examine, checkpoint every round. Stopping it does not change a bit."""

    def __init__(self, config: TrainConfig, folder: Path, sink: Sink | None = None,
                 make: MakeEnv = MorphogeneticEnv, workers: Workers | None = None) -> None:
        """Continues from the folder's checkpoint if it holds one; `make` makes environments. The workers play
        rounds; by default this process does."""
        self.config, self.folder, self.sink, self.make = config, folder, sink or Nowhere(), make
        path = folder / CHECKPOINT
        if path.exists() and read_state(path, "agent")[0].get("run") != config.identity:
            raise EsperError(f"{path} belongs to another run than the run.json beside it; put back its own")
        self.agent = PPOAgent.load(path, config.env.device) if path.exists() else config.agent()
        self.agent.config = replace(self.agent.config, updates=config.rounds)  # more, if it was made longer
        self.rounds, self.twins = Rounds(config, make, workers or Workers()), KnownTwins()
        self.clock = time.perf_counter()
        if (folder / TWINS).exists():
            self.twins.of(config.env.family).load(folder / TWINS)

    def run(self, stop: Callable[[], bool] = lambda: False,
            watch: Callable[[int], object] = lambda number: None) -> None:
        """Rounds until all are done or `stop` asks for it; `watch` is told after each how many are."""
        config, agent = self.config, self.agent
        while agent.updates < config.rounds and not stop():
            number = agent.updates
            shards, fresh = self._play(number)
            for shard in shards:
                for counted in zip(*(part.to(agent.device) for part in shard.played.counted), strict=True):
                    agent.controller.normaliser.fold(counted)
            buffers = self._joined(shards)
            nothing = [torch.zeros(each.spec.rows, device=agent.device) for each in buffers]  # all have ended
            metrics = agent.update(buffers, nothing)
            played = [shard.played for shard in shards]
            for place, shard in enumerate(shards):
                self._record(number, shard, place * config.rows // config.shards)
            self._report(number, played, metrics)
            if config.exam_every and (number + 1) % config.exam_every == 0:
                self.examine("learned", self.learned, number + 1)
            self.sink.commit()
            self._checkpoint(fresh)
            watch(number + 1)

    def _joined(self, shards: Sequence[Shard]) -> list[TamiyoRolloutBuffer]:
        """One rollout for all hosts with the same slots and blueprints."""
        groups: dict[tuple[int, tuple[str, ...]], list[Shard]] = {}
        for shard in shards:
            spec = shard.played.episodes.config.spec
            groups.setdefault((spec.slots, spec.blueprints), []).append(shard)
        buffers = []
        for mine in groups.values():
            spec = mine[0].played.episodes.config.spec
            steps = max(max(shard.played.episodes.config.family.horizons) for shard in mine)
            rows = sum(len(shard.played.episodes) for shard in mine)
            buffers.append(self.agent.bound_to(spec).buffer(steps, rows, self.config.ppo.chunk))
            buffers[-1].join([shard.rollout for shard in mine])
        return buffers

    def _play(self, number: int) -> tuple[list[Shard], bool]:
        """(a round of the training split, in order of its scenarios; were some twins not known before?)"""
        if not self.config.pool:
            self.twins.forget()  # they will not be met again
        known, shards = self.twins.count, []
        for done in self.rounds.submit(number, self.agent.controller.tensors(), self.twins):
            shard: Shard = done.value
            shards.append(shard)
            played = shard.played.episodes
            self.twins.of(played.config.family).put(played.scenarios, shard.twin)
            epochs = int(shard.played.episodes.measured["clock"][-1].sum())
            self.sink.write("worker", {"round": number, "shard": len(shards) - 1, "worker": done.worker,
                                       "seconds": done.seconds, "host_epochs": epochs, "tries": done.tries,
                                       "log": done.log})
        return shards, self.twins.count > known

    def _checkpoint(self, fresh: bool) -> None:
        """The agent, and twins that will be met again if some are `fresh`. The agent before it is kept."""
        path = self.folder / CHECKPOINT
        try:
            if fresh and self.config.pool and self.config.universe is None:  # others are computed again
                self.twins.of(self.config.env.family).save(self.folder / TWINS)
            if path.exists():
                atomic_write(self.folder / PREVIOUS, path.read_bytes())
            self.agent.save(path, run=self.config.identity, env=to_dict(self.config.env))
        except EsperError as error:
            raise EsperError(f"{error}, then resume the run: what it saved before is kept") from error

    def _record(self, number: int, shard: Shard, first: int) -> None:
        """Every step of a shard, whose rows begin with the first."""
        played, episodes, measured = shard.played, shard.played.episodes, shard.played.episodes.measured
        spec, wait, grow = episodes.config.spec, LifecycleOp.WAIT, LifecycleOp.GERMINATE
        told = _told(shard.rollout, spec)
        for epoch, actions in enumerate(episodes.actions):
            running = ~measured["done"][epoch - 1] if epoch else torch.ones_like(measured["done"][0])
            now = played.inputs[epoch]
            chosen = dict(zip(spec.heads, actions[running].unbind(1), strict=True))
            ops, slots = [spec.ops[op] for op in chosen[Head.OP].tolist()], chosen[Head.SLOT].tolist()
            blueprints = chosen[Head.BLUEPRINT].tolist() if Head.BLUEPRINT in chosen else [0] * len(ops)
            columns: dict[str, Any] = {
                "round": number, "epoch": epoch + 1, "row": first + running.nonzero().flatten(),
                "op": [op.name for op in ops],
                "slot": [None if op is wait else slot for op, slot in zip(ops, slots, strict=True)],
                "blueprint": [spec.blueprints[b] if op is grow else None
                              for op, b in zip(ops, blueprints, strict=True)]}
            plain = ("train_loss", "spent", "rolled_back", "done")
            tensors = {"scenario": episodes.scenarios.key, "reward": played.reward[epoch], "score": now.score,
                       "twin": now.twin, "params": now.params.sum(1),
                       **{name: measured[f"all_on.{name}"][epoch] for name in ("loss", "smooth")},
                       **{f"reward_{name}": term[epoch] for name, term in played.terms.items()},
                       **{name: measured[name][epoch] for name in plain},
                       **{name: each[epoch] for name, each in told.items()}}
            self.sink.write("step", columns | {name: tensor[running] for name, tensor in tensors.items()})
            now_measured = {name: each[epoch] for name, each in measured.items()}
            self._seeds(number, epoch, first, running, now_measured, spec)
        if episodes.moves:
            moves = ((epoch, first + row, *rest) for epoch, row, *rest in episodes.moves)
            names = ("epoch", "row", "slot", "source", "target")
            listed = zip(names, map(list, zip(*moves, strict=True)), strict=True)
            self.sink.write("move", {"round": number, **dict(listed)})

    def _seeds(self, number: int, epoch: int, first: int, running: Tensor, now: dict[str, Tensor],
               spec: ActionSpec) -> None:
        """Every slot of running rows [N] that is not empty, as measured [N, S] after an epoch."""
        row, slot = (running[:, None] & (now["stage"] != SeedStage.DORMANT)).nonzero().unbind(1)
        if not len(row):
            return
        known = {name: now[f"{name}.known"][row, slot] for name in ("contribution", "preview")}
        values = {name: torch.where(each, now[f"{name}.value"][row, slot], torch.nan)
                  for name, each in known.items()}
        errors = [torch.where(each, now[f"{name}.standard_error"][row, slot], torch.nan)
                  for name, each in known.items()]
        self.sink.write("seed", {
            "round": number, "epoch": epoch + 1, "row": first + row, "slot": slot,
            "stage": [SeedStage(stage).name for stage in now["stage"][row, slot].tolist()],
            "blueprint": [spec.blueprints[b] if b >= 0 else None
                          for b in now["blueprint"][row, slot].tolist()],
            "alpha": now["alpha"][row, slot], **values,
            "error": torch.where(known["contribution"], *errors)})

    def _report(self, number: int, played: list[Round], metrics: PPOUpdateMetrics) -> None:
        now, total = time.perf_counter(), torch.cat([each.returns for each in played])
        epochs = sum(int(each.episodes.measured["clock"][-1].sum()) for each in played)
        if not self.config.pool or number < self.config.pool:  # twins of scenarios that were not met before
            epochs += sum(int(each.episodes.scenarios.horizon.sum()) for each in played)
        self.sink.write("round", {
            "round": number, "seconds": now - self.clock, "ended": time.time(), "host_epochs": epochs,
            "episodes": len(total),
            "utility": float(total.mean()), "utility_error": float(total.std()) / math.sqrt(len(total)),
            **metrics.single()})
        self.sink.write("head", {"round": number, **metrics.by_head()})
        alarms = [(a.kind, a.where, a.value) for a in metrics.anomalies]
        if back := sum(int(each.episodes.measured["rolled_back"].sum()) for each in played):
            alarms.append(("rollback", "hosts", back))
        if metrics.kl > self.config.ppo.kl_stop * self.config.ppo.target_kl:
            alarms.append(("large_kl", "kl", metrics.kl))
        for kind, place, value in alarms:
            self.sink.write("anomaly", {"round": number, "kind": kind, "place": place, "value": value})
        self.clock = now

    def examine(self, name: str, policy: Callable[[ActionSpec], PolicyBundle], number: int) -> Tensor:
        """Utilities above the twin of a policy on fixed scenarios of the validation split; `policy` is asked
        for one for hosts with a spec."""
        total = []
        for place, (world, scenarios) in enumerate(self.exam):
            played, first = world.play(policy(world.env.spec), scenarios), place * len(scenarios)
            last = played.inputs[-1]
            self.sink.write("exam", {
                "round": number, "policy": name, "scenario": first + torch.arange(len(scenarios)),
                "utility": played.returns, "score": last.score, "params": last.params.sum(1),
                "spent": last.spent})
            total.append(played.returns)
        return torch.cat(total)

    def learned(self, spec: ActionSpec) -> Learned:
        """The controller as it is, for hosts with this spec."""
        return Learned(self.agent.bound_to(spec).controller, greedy=True)

    @functools.cached_property
    def exam(self) -> list[tuple[RewardWorld, Scenarios]]:
        """Scored as the proof is; twins are computed once."""
        return [(make_world(self.config.env_of(family), len(drawn), "utility", "score", self.make), drawn)
                for family, drawn in self.config.exam]


def _told(rollout: Mapping[str, Tensor], spec: ActionSpec) -> dict[str, Tensor]:
    """[T, N]: how likely each decision was, and the return that was expected; NaN: a head had no choice."""
    told = {"chance": rollout["log_prob"].exp(), "value": rollout["value"]}
    for place, head in enumerate(spec.heads):
        if head in (Head.OP, Head.SLOT, Head.BLUEPRINT):
            chance, free = rollout["head_log_probs"][..., place].exp(), rollout["relevant"][..., place]
            told[f"chance_{head.name.lower()}"] = torch.where(free, chance, torch.nan)
    return told
