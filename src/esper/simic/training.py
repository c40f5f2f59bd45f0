"""The training loop: a round of episodes, an update, a checkpoint; facts go to a sink.

Legend: N rows.
"""

import functools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from esper.leyline import EsperError, Head, LifecycleOp
from esper.leyline.telemetry import Nowhere, Sink
from esper.simic.collecting import Collector, Outcome, World
from esper.simic.growth import TOLD, Growth
from esper.simic.metrics import PPOUpdateMetrics
from esper.simic.ppo import PPOAgent, PPOConfig
from esper.simic.rewards import REWARDS, SCORES_OF
from esper.tamiyo import Controller, Learned, NetworkConfig, PolicyBundle
from esper.tamiyo.controller import Glimpse
from esper.tolaria import Family, MorphogeneticEnv, PreviewConfig, Twins

CHECKPOINT, TWINS = "agent.safetensors", "twins.safetensors"


@dataclass(frozen=True)
class TrainConfig:
    """Everything that decides a run, but for its family."""

    rounds: int = 60
    """Updates of the run; each follows one episode in every row."""
    rows: int = 64
    """Episodes that run together."""
    scenarios: int = 0
    """Training scenarios, in whole rounds, that are met again and again with twins computed once; 0 draws ever new ones."""
    reward: str = "utility"
    score: str = "delivered"
    """What a network is scored by: accuracy, the smoother mean probability of the right class, or delivered (probability while
    it grows, accuracy once it is delivered)."""
    preview_every: int = 3
    """Epochs between candidate previews; 0 takes none."""
    preview_steps: int = 20
    """Shadow steps of each candidate."""
    exam_every: int = 20
    """Rounds between examinations on fixed validation scenarios; 0 takes none."""
    exam_rows: int = 64
    """Scenarios of an examination."""
    tell: bool = True
    """The critic, and nothing else, is told each row's hidden kind, what its twin will score and what was paid so far."""
    seed: int = 0
    device: str = "cpu"
    network: NetworkConfig = field(default_factory=NetworkConfig)
    ppo: PPOConfig = field(default_factory=PPOConfig)

    def __post_init__(self) -> None:
        if min(self.rounds, self.rows, self.preview_steps, self.exam_rows) < 1 or min(
                self.preview_every, self.exam_every, self.scenarios) < 0:
            raise EsperError("rounds, rows, preview_steps and exam_rows must be at least 1, the others at least 0")
        if self.reward not in REWARDS or self.score not in SCORES_OF:
            raise EsperError(f"choose a reward from {', '.join(REWARDS)} and a score from {', '.join(SCORES_OF)}")
        if self.network.told:
            raise EsperError("network.told follows from tell; leave it out")

    @property
    def pool(self) -> int:
        """Rounds after which scenarios come again; 0 is never."""
        return max(1, self.scenarios // self.rows) if self.scenarios else 0

    def environment(self, family: Family, rows: int, previews: bool = True) -> MorphogeneticEnv:
        wanted = PreviewConfig(self.preview_every, self.preview_steps) if previews and self.preview_every else None
        return MorphogeneticEnv(family, rows, device=self.device, previews=wanted)

    def agent(self, family: Family) -> PPOAgent:
        """An agent that knows nothing yet."""
        torch.manual_seed(self.seed)
        network = replace(self.network, told=len(TOLD) if self.tell else 0)
        controller = Controller.fresh(self.environment(family, 1).spec, network, device=self.device)
        return PPOAgent(controller, replace(self.ppo, updates=self.rounds), seed=self.seed)


def learn(agent: PPOAgent, world: World, rows: int, steps: int, begin: Callable[[int], object],
          after: Callable[[int, PPOUpdateMetrics], object], stop: Callable[[], bool] = lambda: False) -> None:
    """Rounds of `steps` steps until the agent's declared run is over, or someone asks to stop.

    `begin` and `after` are told the number of the round; what is complete when `after` returns is never done again.
    """
    collector, buffer = Collector(agent, world, rows), agent.buffer(steps, rows)
    while agent.updates < agent.config.updates and not stop():
        number = agent.updates
        begin(number)
        after(number, agent.update(buffer, collector.fill(buffer)))


class Recorded:
    """A world whose every step is written to a sink."""

    def __init__(self, world: Growth, sink: Sink, rounds: int = 0) -> None:
        """The scenarios of so many rounds are met again and again; 0 is ever new ones."""
        self.world, self.sink, self.rounds, self.round, self.epoch = world, sink, rounds, 0, 0

    def begin(self, number: int) -> None:
        """The next episodes of the training split."""
        self.round, self.epoch = number, 0
        env, place = self.world.env, number % self.rounds if self.rounds else number
        env.population.life.drain_transitions()
        if not self.rounds:
            self.world.twins.known.clear()  # they will not be met again
        self.world.begin(env.family.scenarios(env.rows, "train", start=place * env.rows))

    def look(self) -> Glimpse:
        return self.world.look()

    def step(self, actions: Tensor) -> Outcome:
        running = ~self.world.env.done
        outcome = self.world.step(actions)
        self.epoch += 1
        self._write(actions.cpu(), outcome, running)
        return outcome

    def _write(self, actions: Tensor, outcome: Outcome, running: Tensor) -> None:
        env, measured, now, spec = self.world.env, self.world.measured, self.world.standing, self.world.env.spec
        assert measured is not None
        assert now is not None
        chosen = dict(zip(spec.heads, actions[running].unbind(1), strict=True))
        ops = [spec.ops[op] for op in chosen[Head.OP].tolist()]
        grows = [op is LifecycleOp.GERMINATE for op in ops]
        blueprints = chosen[Head.BLUEPRINT].tolist() if Head.BLUEPRINT in chosen else [0] * len(ops)
        on = measured.evidence.all_on
        self.sink.write("step", {
            "round": self.round, "epoch": self.epoch, "row": running.nonzero().flatten(), "scenario": env.scenarios.key[running],
            "op": [op.name for op in ops], "slot": [None if op is LifecycleOp.WAIT else slot for op, slot in
                                                    zip(ops, chosen[Head.SLOT].tolist(), strict=True)],
            "blueprint": [spec.blueprints[b] if g else None for g, b in zip(grows, blueprints, strict=True)],
            "reward": outcome.reward.cpu()[running], **{f"reward_{k}": v[running] for k, v in self.world.paid.items()},
            "score": now.score[running], "twin": now.twin[running], "loss": on.loss[running], "accuracy": on.accuracy[running],
            "train_loss": measured.train_loss[running], "params": now.params.sum(1)[running], "spent": measured.spent[running],
            "rolled_back": measured.rolled_back[running], "done": measured.done[running]})
        moves = env.population.life.drain_transitions()
        if moves:
            self.sink.write("move", {"round": self.round, "epoch": self.epoch, "row": [m.row for m in moves],
                                     "slot": [m.slot for m in moves], "source": [m.source.name for m in moves],
                                     "target": [m.target.name for m in moves]})
        self.sink.commit()


class Training:
    """One run: train, record, examine, checkpoint after every round. Bit for bit the same if it is stopped and continued."""

    def __init__(self, family: Family, config: TrainConfig, folder: Path, sink: Sink | None = None) -> None:
        """Continues from the folder's checkpoint if it holds one."""
        self.family, self.config, self.folder, self.sink = family, config, folder, sink or Nowhere()
        path = folder / CHECKPOINT
        self.agent = PPOAgent.load(path, config.device) if path.exists() else config.agent(family)
        self.agent.config = replace(self.agent.config, updates=config.rounds)  # more, if the run was made longer
        env = config.environment(family, config.rows)
        twins = Twins(config.environment(family, config.rows, previews=False))
        self.world = Growth(env, twins, config.reward, config.score, config.seed, self.agent.device, config.tell)
        self.recorded, self.clock = Recorded(self.world, self.sink, config.pool), time.perf_counter()
        self.twin_epochs = 0
        if (folder / TWINS).exists():
            twins.load(folder / TWINS)

    def run(self, stop: Callable[[], bool] = lambda: False, watch: Callable[[int], object] = lambda number: None) -> None:
        """`watch` is told the rounds that are done, after each."""
        def after(number: int, metrics: PPOUpdateMetrics) -> None:
            fresh = self.world.twins.epochs > self.twin_epochs
            self._report(number, metrics)
            if self.config.exam_every and (number + 1) % self.config.exam_every == 0:
                self.examine("learned", Learned(self.agent.controller, greedy=True), number + 1)
            self.sink.commit()
            self._checkpoint(fresh)
            watch(number + 1)

        learn(self.agent, self.recorded, self.config.rows, self.world.steps, self.recorded.begin, after, stop)

    def _checkpoint(self, fresh: bool) -> None:
        """The agent, and the twins that will be met again if some are `fresh`."""
        try:
            if fresh and self.config.pool:
                self.world.twins.save(self.folder / TWINS)
            self.agent.save(self.folder / CHECKPOINT)
        except EsperError as error:
            raise EsperError(f"{error}, then resume the run: what it saved before is kept") from error

    def _report(self, number: int, metrics: PPOUpdateMetrics) -> None:
        now, total = time.perf_counter(), self.world.total
        plain = {name: getattr(metrics, name) for name in (
            "policy_loss", "value_loss", "entropy", "kl", "clip_fraction", "ratio_max", "ratio_min", "grad_norm", "value_error",
            "replay_error", "advantage_mean", "advantage_std", "explained_variance", "steps", "skipped", "stopped_early",
            "learning_rate")}
        epochs = int(self.world.env.clock.sum()) + self.world.twins.epochs - self.twin_epochs
        self.twin_epochs = self.world.twins.epochs
        self.sink.write("round", {"round": number, "seconds": now - self.clock, "host_epochs": epochs, "episodes": len(total),
                                  "utility": float(total.mean()), "utility_error": float(total.std()) / math.sqrt(len(total)),
                                  **plain})
        by_head = {"entropy": metrics.head_entropy, "grad_norm": metrics.head_grad_norm, "learnable": metrics.head_learnable}
        self.sink.write("head", {"round": number, "head": list(metrics.head_entropy),
                                 **{name: list(values.values()) for name, values in by_head.items()}})
        for anomaly in metrics.anomalies:
            self.sink.write("anomaly", {"round": number, "kind": anomaly.kind, "place": anomaly.where, "value": anomaly.value})
        self.clock = now

    def examine(self, name: str, policy: PolicyBundle, number: int) -> Tensor:
        """Utilities [exam_rows] of a policy on the first scenarios of the validation split."""
        exam, rows = self.exam, self.config.exam_rows
        exam.begin(self.family.scenarios(rows, "validation"))
        while not bool(exam.env.done.all()):
            exam.step(policy(exam.env.view()))
        assert exam.standing is not None
        self.sink.write("exam", {"round": number, "policy": name, "scenario": torch.arange(rows), "utility": exam.total,
                                 "score": exam.standing.score, "params": exam.standing.params.sum(1),
                                 "spent": exam.standing.spent})
        return exam.total

    @functools.cached_property
    def exam(self) -> Growth:
        """Scored by accuracy, as the proof is; its twins are computed once."""
        env, beside = (self.config.environment(self.family, self.config.exam_rows, previews) for previews in (True, False))
        return Growth(env, Twins(beside), "utility", "accuracy", self.config.seed, self.agent.device)
