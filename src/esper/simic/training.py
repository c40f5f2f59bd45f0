"""The training loop: a round of episodes, an update, a checkpoint; facts go to a sink."""

import functools
import hashlib
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from esper.leyline import ActionSpec, EsperError, Head, LifecycleOp, SeedStage
from esper.leyline.codec import to_dict
from esper.leyline.storage import atomic_write, read_state
from esper.leyline.telemetry import Nowhere, Sink
from esper.simic.buffer import TamiyoRolloutBuffer
from esper.simic.metrics import PPOUpdateMetrics
from esper.simic.ppo import PPOAgent, PPOConfig
from esper.simic.rewards import REWARDS, SCORES_OF
from esper.simic.world import PRIVILEGED, RewardWorld, Round
from esper.tamiyo import Controller, Learned, NetworkConfig, PolicyBundle
from esper.tolaria import EnvConfig, MakeEnv, MorphogeneticEnv, PreviewConfig, Scenarios, Twins, find_family

CHECKPOINT, PREVIOUS, TWINS = "agent.safetensors", "agent.previous.safetensors", "twins.safetensors"
MOST_ROWS, MOST_ROUNDS = 65_536, 10_000_000
_LOOKS = PreviewConfig(every=3, steps=20)


@dataclass(frozen=True)
class TrainConfig:
    """Everything that decides a run."""

    env: EnvConfig = field(default_factory=lambda: EnvConfig(find_family("mlp"), previews=_LOOKS))
    """Family, action space, previews, device and precision."""
    rounds: int = 60
    """Updates of the run; each follows one episode in every row."""
    rows: int = 64
    """Episodes that run together."""
    scenarios: int = 0
    """Training scenarios, in whole rounds, met again and again with the same twins; 0 draws ever new ones."""
    reward: str = "utility"
    score: str = "delivered"
    """What a network is scored by: score (accuracy, for classification), smooth (the probability of the right
    class), or delivered (smooth while it grows, score once it is delivered)."""
    exam_every: int = 20
    """Rounds between examinations on fixed validation scenarios; 0 takes none."""
    exam_rows: int = 64
    """Scenarios of an examination."""
    privileged: bool = True
    """The critic alone sees each row's hidden kind, what its twin will score and what was paid so far."""
    seed: int = 0
    network: NetworkConfig = field(default_factory=NetworkConfig)
    ppo: PPOConfig = field(default_factory=PPOConfig)

    def __post_init__(self) -> None:
        parts = self.ppo.minibatches * self.ppo.accumulate
        if min(self.rounds, self.rows, self.exam_rows) < 1 or min(self.exam_every, self.scenarios) < 0:
            raise EsperError("rounds, rows and exam_rows must be at least 1, "
                             "exam_every and scenarios at least 0")
        if max(self.rows, self.exam_rows) > MOST_ROWS or max(self.rounds, self.scenarios) > MOST_ROUNDS:
            raise EsperError(f"rows and exam_rows can be {MOST_ROWS:,} at most, "
                             f"rounds and scenarios {MOST_ROUNDS:,}")
        if self.rows % parts:
            raise EsperError(f"rows {self.rows} cannot be cut into {parts} equal minibatches; "
                             "change rows or ppo.minibatches")
        if self.reward not in REWARDS or self.score not in SCORES_OF:
            raise EsperError(f"choose a reward from {', '.join(REWARDS)} "
                             f"and a score from {', '.join(SCORES_OF)}")
        if self.network.privileged:
            raise EsperError("network.privileged follows from privileged; leave it out")

    @property
    def pool(self) -> int:
        """Rounds after which scenarios come again; 0 is never."""
        return max(1, self.scenarios // self.rows) if self.scenarios else 0

    def agent(self) -> PPOAgent:
        """An agent that knows nothing yet."""
        network = replace(self.network, privileged=len(PRIVILEGED) if self.privileged else 0)
        with torch.random.fork_rng():
            torch.manual_seed(self.seed)
            controller = Controller.fresh(self.env.spec, network, device=self.env.device)
        return PPOAgent(controller, replace(self.ppo, updates=self.rounds), seed=self.seed)

    @property
    def identity(self) -> str:
        """A digest of what makes a run this run; it may be made longer."""
        return self._digest(rounds=0)

    def facts(self) -> dict[str, Any]:
        """What viewers of a run must know; `group` is the same for runs that differ in seed alone."""
        host, spec = self.env.family.host, self.env.spec
        return {"family": self.env.family.name, "task": self.env.family.task, "seed": self.seed,
                "rounds": self.rounds, "rows": self.rows, "slots": list(host.slots.names),
                "blueprints": list(spec.blueprints), "heads": [head.name.lower() for head in spec.heads],
                "identity": self.identity, "group": self._digest(rounds=0, seed=0), "config": to_dict(self)}

    def _digest(self, **fixed: int) -> str:
        plain = to_dict(self) | fixed
        return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:32]


class Training:
    """One run: train, record, examine, checkpoint every round. Stopping it does not change a bit."""

    def __init__(self, config: TrainConfig, folder: Path, sink: Sink | None = None,
                 make: MakeEnv = MorphogeneticEnv) -> None:
        """Continues from the folder's checkpoint if it holds one; `make` makes environments."""
        self.config, self.folder, self.sink, self.make = config, folder, sink or Nowhere(), make
        path = folder / CHECKPOINT
        if path.exists() and read_state(path, "agent")[0].get("run") != config.identity:
            raise EsperError(f"{path} belongs to another run than the run.json beside it; put back its own")
        self.agent = PPOAgent.load(path, config.env.device) if path.exists() else config.agent()
        self.agent.config = replace(self.agent.config, updates=config.rounds)  # more, if it was made longer
        self.world = self._world(config.rows, config.reward, config.score)
        self.clock = time.perf_counter()
        if (folder / TWINS).exists():
            self.world.twins.load(folder / TWINS)

    def run(self, stop: Callable[[], bool] = lambda: False,
            watch: Callable[[int], object] = lambda number: None) -> None:
        """Rounds until all are done or `stop` asks for it; `watch` is told after each how many are."""
        config, agent = self.config, self.agent
        buffer = agent.buffer(self.world.steps, config.rows, config.ppo.chunk)
        nothing = torch.zeros(config.rows, device=agent.device)  # every episode ends within its round
        while agent.updates < config.rounds and not stop():
            number, known = agent.updates, len(self.world.twins.known)
            played = self.world.collect(agent, self._scenarios(number), buffer, (config.seed, number),
                                        config.privileged)
            told = _told(buffer, config.env.spec)
            metrics = agent.update(buffer, nothing)
            fresh = len(self.world.twins.known) > known
            self._record(number, played, told)
            self._report(number, played, metrics)
            if config.exam_every and (number + 1) % config.exam_every == 0:
                self.examine("learned", Learned(agent.controller, greedy=True), number + 1)
            self.sink.commit()
            self._checkpoint(fresh)
            watch(number + 1)

    def _scenarios(self, number: int) -> Scenarios:
        """The next episodes of the training split."""
        pool, rows = self.config.pool, self.config.rows
        if not pool:
            self.world.twins.forget()  # they will not be met again
        return self.config.env.family.scenarios(rows, "train", (number % pool if pool else number) * rows)

    def _checkpoint(self, fresh: bool) -> None:
        """The agent, and twins that will be met again if some are `fresh`. The agent before it is kept."""
        path = self.folder / CHECKPOINT
        try:
            if fresh and self.config.pool:
                self.world.twins.save(self.folder / TWINS)
            if path.exists():
                atomic_write(self.folder / PREVIOUS, path.read_bytes())
            self.agent.save(path, run=self.config.identity, env=to_dict(self.config.env))
        except EsperError as error:
            raise EsperError(f"{error}, then resume the run: what it saved before is kept") from error

    def _record(self, number: int, played: Round, told: dict[str, Tensor]) -> None:
        """Every step of a round; `told` [T, N] is what its controller thought."""
        episodes, measured, spec = played.episodes, played.episodes.measured, self.config.env.spec
        wait, grow = LifecycleOp.WAIT, LifecycleOp.GERMINATE
        for epoch, actions in enumerate(episodes.actions):
            running = ~measured["done"][epoch - 1] if epoch else torch.ones_like(measured["done"][0])
            now = played.inputs[epoch]
            chosen = dict(zip(spec.heads, actions[running].unbind(1), strict=True))
            ops, slots = [spec.ops[op] for op in chosen[Head.OP].tolist()], chosen[Head.SLOT].tolist()
            blueprints = chosen[Head.BLUEPRINT].tolist() if Head.BLUEPRINT in chosen else [0] * len(ops)
            columns: dict[str, Any] = {
                "round": number, "epoch": epoch + 1, "row": running.nonzero().flatten(),
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
            self._seeds(number, epoch, running, {name: each[epoch] for name, each in measured.items()})
        if episodes.moves:
            moves = map(list, zip(*episodes.moves, strict=True))
            names = ("epoch", "row", "slot", "source", "target")
            self.sink.write("move", {"round": number, **dict(zip(names, moves, strict=True))})

    def _seeds(self, number: int, epoch: int, running: Tensor, now: dict[str, Tensor]) -> None:
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
            "round": number, "epoch": epoch + 1, "row": row, "slot": slot,
            "stage": [SeedStage(stage).name for stage in now["stage"][row, slot].tolist()],
            "blueprint": [self.config.env.spec.blueprints[b] if b >= 0 else None
                          for b in now["blueprint"][row, slot].tolist()],
            "alpha": now["alpha"][row, slot], **values,
            "error": torch.where(known["contribution"], *errors)})

    def _report(self, number: int, played: Round, metrics: PPOUpdateMetrics) -> None:
        now, total = time.perf_counter(), played.returns
        epochs = int(played.episodes.measured["clock"][-1].sum())
        if not self.config.pool or number < self.config.pool:  # twins of scenarios that were not met before
            epochs += int(played.episodes.scenarios.horizon.sum())
        self.sink.write("round", {
            "round": number, "seconds": now - self.clock, "ended": time.time(), "host_epochs": epochs,
            "episodes": len(total),
            "utility": float(total.mean()), "utility_error": float(total.std()) / math.sqrt(len(total)),
            **metrics.single()})
        self.sink.write("head", {"round": number, **metrics.by_head()})
        alarms = [(a.kind, a.where, a.value) for a in metrics.anomalies]
        if back := int(played.episodes.measured["rolled_back"].sum()):
            alarms.append(("rollback", "hosts", back))
        if metrics.kl > self.config.ppo.kl_stop * self.config.ppo.target_kl:
            alarms.append(("large_kl", "kl", metrics.kl))
        for kind, place, value in alarms:
            self.sink.write("anomaly", {"round": number, "kind": kind, "place": place, "value": value})
        self.clock = now

    def examine(self, name: str, policy: PolicyBundle, number: int) -> Tensor:
        """Utilities above the twin [exam_rows] of a policy on the first scenarios of the validation split."""
        rows = self.config.exam_rows
        played = self.exam.play(policy, self.config.env.family.scenarios(rows, "validation"))
        last = played.inputs[-1]
        self.sink.write("exam", {
            "round": number, "policy": name, "scenario": torch.arange(rows), "utility": played.returns,
            "score": last.score, "params": last.params.sum(1), "spent": last.spent})
        return played.returns

    @functools.cached_property
    def exam(self) -> RewardWorld:
        """Scored as the proof is; its twins are computed once."""
        return self._world(self.config.exam_rows, "utility", "score")

    def _world(self, rows: int, reward: str, score: str) -> RewardWorld:
        twins = Twins(self.make(replace(self.config.env, previews=None), rows))
        return RewardWorld(self.make(self.config.env, rows), twins, reward, score)


def _told(buffer: TamiyoRolloutBuffer, spec: ActionSpec) -> dict[str, Tensor]:
    """[T, N]: how likely each decision was, and the return that was expected; NaN: a head had no choice."""
    told = {"chance": buffer["log_prob"].exp(), "value": buffer["value"].clone()}
    for place, head in enumerate(spec.heads):
        if head in (Head.OP, Head.SLOT, Head.BLUEPRINT):
            chance, free = buffer["head_log_probs"][..., place].exp(), buffer["relevant"][..., place]
            told[f"chance_{head.name.lower()}"] = torch.where(free, chance, torch.nan)
    return {name: each.cpu() for name, each in told.items()}
