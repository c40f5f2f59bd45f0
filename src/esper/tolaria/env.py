"""The environment: many host trainings at once, one decision per row and epoch.

Legend: N rows, S slots.
"""

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from esper.kasmina import Population, PopulationConfig, blueprints_for
from esper.kasmina.lifecycle import Lifecycle, expand_actions
from esper.leyline import Contribution, EsperError, GateConfig, Rollback, SeedStage
from esper.leyline.actions import TEMPOS, ActionSpec, Head, LifecycleOp
from esper.leyline.keys import Purpose, mix
from esper.leyline.views import SCORES, About, Facts, Seeds, View
from esper.tolaria.evaluation import Evidence, Scores, evaluate
from esper.tolaria.feed import Feed
from esper.tolaria.governor import RULES, Governor, GovernorConfig
from esper.tolaria.previews import PreviewConfig, preview_candidates, scratch_for
from esper.tolaria.scenarios import Family, Scenarios
from esper.tolaria.tasks import TaskData, find_task, load_task

MOST_AT_ONCE = {"cpu": 600_000, "cuda": 40_000_000}
"""Numbers behind a stage that an evaluation computes at once: what caches hold, what keeps a device busy."""


@dataclass(frozen=True)
class EnvConfig:
    """Everything that an environment is made of, but for its number of rows."""

    family: Family
    spec: ActionSpec = field(default=None)  # type: ignore[assignment]
    """What an action consists of; `ActionSpec.decisive` by default."""
    gates: GateConfig = field(default_factory=GateConfig)
    governor: GovernorConfig = field(default_factory=GovernorConfig)
    previews: PreviewConfig | None = None
    """None: candidates are never previewed."""
    incubation: str = "shadow"
    device: str = "cpu"
    dtype: str = "float32"
    compute_dtype: str = ""
    """bfloat16 for faster products; empty is as `dtype`."""
    compile: bool = False
    """Run the hosts' stages through torch.compile."""

    def __post_init__(self) -> None:
        if not isinstance(self.family, Family):
            raise EsperError(f"an environment needs a Family, not a {type(self.family).__name__}")
        host = self.family.host
        decisive = self.spec or ActionSpec.decisive(len(host.slots), blueprints_for(host))
        object.__setattr__(self, "spec", decisive)
        for name in ("device", "dtype", "compute_dtype"):  # as the population understood them
            object.__setattr__(self, name, getattr(self.population, name))

    @property
    def population(self) -> PopulationConfig:
        family, task = self.family, find_task(self.family.task)
        return PopulationConfig(family.host, self.spec, self.gates, family.optim, task.objective,
                                task.entropy, self.incubation, self.device, self.dtype, self.compute_dtype,
                                self.compile)


MakeEnv = Callable[["EnvConfig", int], "MorphogeneticEnv"]
"""The seam for another environment: what makes one from its config and rows."""
SLOT_STATE = ("stage", "blueprint", "alpha", "germinations")  # what a measurement keeps of the lifecycle
_KEPT = ("clock", "spent", "rolled_back", "done", *SLOT_STATE, "seed_params")  # true whatever was measured


@dataclass
class Measurement:
    """What is known after an epoch. Every tensor [N] or [N, S], on the CPU."""

    clock: Tensor  # epochs of the episode that are over
    train_loss: Tensor  # mean over the epoch's steps
    params: Tensor  # of live seeds
    spent: Tensor  # extra training FLOPs so far, in trainings of the bare host for the episode
    rolled_back: Tensor
    done: Tensor
    stage: Tensor  # [N, S], as those that follow
    blueprint: Tensor
    alpha: Tensor
    germinations: Tensor
    seed_params: Tensor
    evidence: Evidence

    def tensors(self) -> dict[str, Tensor]:
        """Every number under a flat name: for stores, traces and comparisons."""
        flat = {name: value for name, value in vars(self).items() if name != "evidence"}
        for group, part in vars(self.evidence).items():
            flat |= {f"{group}.{name}": value for name, value in vars(part).items()}
        return flat


class MorphogeneticEnv:
    """N episodes of one family. `reset` gives rows their scenarios, `step` plays one epoch of every row; one
    that is done waits (only WAIT is allowed there) until it is reset."""

    def __init__(self, config: EnvConfig | Family, rows: int, data: TaskData | None = None,
                 **changes: Any) -> None:
        """`changes` are fields of `EnvConfig`; a bare family takes its defaults for the others."""
        config = replace(config, **changes) if isinstance(config, EnvConfig) else EnvConfig(config, **changes)
        family = config.family
        self.config, self.family, self.rows, self.previews = config, family, rows, config.previews
        self.population = Population(config.population, rows)
        self.feed = Feed(family, data or load_task(family.task), rows, self.population.device)
        self.scenarios = family.draw(torch.zeros(rows, dtype=torch.int64))
        self.clock = torch.zeros(rows, dtype=torch.int64)
        self.done = torch.ones(rows, dtype=torch.bool)
        self.spent = torch.zeros(rows, dtype=torch.float64)
        self.governor = Governor(self.population, config.governor)
        self.rollbacks: list[Rollback] = []
        self.measured: Measurement | None = None
        self.scores, self.before = (torch.full((rows, len(SCORES)), torch.nan) for _ in range(2))
        unknown = torch.zeros(rows, self.spec.slots, len(self.spec.blueprints))
        self.candidates = Contribution(unknown, unknown.clone(), unknown.bool())
        prototypes = self.population.prototypes
        self._descriptors = torch.tensor([[p.descriptor for p in slot] for slot in prototypes])
        objective, first = self.population.objective, family.host.slots.shapes[0]
        self._about = About((*objective.chance(family.host.classes),), family.host.classes,
                            max(1, math.prod(first.extent) * (first.tokens or 1)))
        self._prices = torch.tensor([[(p.cost.params, p.cost.flops) for p in slot] for slot in prototypes])

    @property
    def spec(self) -> ActionSpec:
        return self.population.spec

    def reset(self, scenarios: Scenarios, rows: Tensor | None = None) -> None:
        """Begin a new episode in these rows (None is all of them)."""
        rows = torch.arange(self.rows) if rows is None else rows.cpu()
        if not isinstance(scenarios, Scenarios):
            raise EsperError(f"reset takes Scenarios, not a {type(scenarios).__name__}; "
                             "draw some with family.scenarios(n)")
        if len(scenarios) != len(rows):
            raise EsperError(f"{len(scenarios)} scenarios for {len(rows)} rows; give one to each")
        self.scenarios.put(rows, scenarios)
        harm = scenarios.impairments(self.family.host.stages)
        self.population.reset(rows, mix(scenarios.key, Purpose.WEIGHTS), harm)
        self.feed.reset(rows, scenarios)
        self.clock[rows], self.done[rows], self.spent[rows] = 0, False, 0
        self.governor.reset(rows)
        self.scores[rows], self.before[rows], self.candidates.known[rows] = torch.nan, torch.nan, False
        if self.measured is not None:
            self.measured = _replaced(self.measured, rows, None)

    def _settled(self, now: Measurement, back: Tensor) -> Measurement:
        """Rows that were put back report what was measured before; in its first epoch a row has learned
        nothing yet, and scores what chance does: rewards must be numbers."""
        bare = self.population.objective.chance(self.family.host.classes)
        chance = bare._asdict() | {"train_loss": bare.loss}
        flat = _replaced(now, back, self.measured).tensors()
        for name in filter(_is_score, flat):
            value = chance[name.rpartition(".")[2]]
            flat[name][back] = torch.where(flat[name][back].isnan(), value, flat[name][back])
        return _measurement(flat)

    def install(self, blueprint: Tensor) -> None:
        """Begin with fossils [N, S] (-1 is none), as untrained as their hosts; every row was just reset."""
        every = torch.arange(self.rows)
        self.population.install(every, blueprint, torch.full_like(blueprint, self.spec.defaults[Head.STYLE]),
                                torch.ones(blueprint.shape), SeedStage.FOSSILIZED)
        self.governor.reset(every)

    def view(self) -> View:
        """What policies read."""
        life, told = self.population.life, ("luck", "price", "flop_price", "horizon")
        return View(spec=self.spec, **{name: getattr(self.scenarios, name).clone() for name in told},
                    clock=self.clock.clone(), done=self.done.clone(), verdicts=life.verdicts(),
                    free_targets=life.free_targets(), seeds=seeds_of(life), facts=self._facts(),
                    settling=self.settling)

    def _facts(self) -> Facts:
        life, unknown = self.population.life, torch.zeros(self.rows, self.spec.slots)
        nothing = Contribution(unknown, unknown, unknown > 0)
        evidence = None if self.measured is None else self.measured.evidence
        gain = nothing if evidence is None else evidence.contribution
        preview = nothing if evidence is None else evidence.preview
        candidates, old = None, self.candidates
        if self.previews is not None:
            known = old.known & life.at(SeedStage.DORMANT)[:, :, None]
            candidates = Contribution(old.value * known, old.standard_error * known, known)
        return Facts(self.family.host.cost, self.scores.clone(), self.before.clone(), self.spent.float(),
                     torch.stack(self.population.costs(), 2), gain, preview, self._descriptors, self._prices,
                     candidates, replace(self._about, samples=self.feed.count.cpu().clone()))

    def step(self, actions: Tensor) -> Measurement:
        """Act, train one epoch, measure, and let the governor settle. Measured after the action."""
        full = expand_actions(self.spec, actions)
        if self.measured is None and bool(self.done.all()):
            raise EsperError("no episode has begun; call reset before step")
        idle = self.done & (full[:, Head.OP] != LifecycleOp.WAIT)
        if bool(idle.any()):
            raise EsperError(f"row {int(idle.nonzero()[0])} is done; reset it or let it WAIT")
        rate = self.scenarios.lr * self.family.rate(self.clock, self.scenarios.horizon)
        self.population.set_lr(rate[:, None].repeat(1, 1 + self.spec.slots))
        alpha = self.population.life.alpha
        self.population.begin_epoch(actions, self._resting())
        self.governor.forget((self.population.life.alpha < alpha).any(1).nonzero().flatten())
        train_loss = self.train()
        evidence = self.evaluate(self.validation())
        flops, life = self.population.costs()[1], self.population.life
        self.charge(flops, life.incubating & (flops > 0) & (self.population.incubation == "shadow"))
        self.population.end_epoch(evidence.contribution)
        self.clock += ~self.done
        self._settle(train_loss, evidence, full)
        self._preview()
        assert self.measured is not None
        return self.measured

    @property
    def settling(self) -> int:
        """Epochs that a seed needs to be kept, beside its first ramp."""
        gates = self.population.life.gates
        return gates.min_training + gates.min_holding + 1

    @property
    def shortest_ramp(self) -> int:
        """Epochs in which a seed can reach its first target."""
        free = Head.TEMPO in self.spec.heads or LifecycleOp.SET_ALPHA_TARGET in self.spec.ops
        return 1 if free else TEMPOS[self.spec.defaults[Head.TEMPO]]

    def train(self) -> Tensor:
        """One epoch of every row; mean losses [N], NaN of rows at rest."""
        self.feed.begin_epoch(self.clock)
        losses = [self.population.train_step(*self._at_work(self.feed.train(step)))
                  for step in range(self.feed.steps)]
        return self.population.of_all(torch.stack(losses).mean(0).cpu().float(), torch.nan)

    def _resting(self) -> Tensor:
        """bool [N]: rows whose episode had its last epoch, unless all had. By the clock alone: an episode
        that the governor ended trains on, so that what befalls a row changes no bit of its neighbours."""
        resting = self.clock >= self.scenarios.horizon
        return resting & ~resting.all()

    def _at_work(self, samples: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, y = samples
        return self.population.at_work(x, 1), self.population.at_work(y, 1)

    def evaluate(self, samples: Iterator[tuple[Tensor, Tensor]]) -> Evidence:
        """What every row is worth on these samples, and each of its seeds."""
        return evaluate(self.population, samples)

    def _preview(self) -> None:
        if self.previews is None:
            return
        in_time = self.scenarios.horizon - self.clock >= self.settling + self.shortest_ramp
        due = ~self.done & in_time & (self.clock % self.previews.every == 1 % self.previews.every)
        fresh = preview_candidates(self, self.previews.steps, due.nonzero().flatten())
        for name, tensor in vars(fresh).items():
            getattr(self.candidates, name)[due] = tensor[due]

    def validation(self, first: int = 0, last: int | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """The validation slice, or its samples first..last, in chunks that fit."""
        end = len(self.feed.validation_x) if last is None else last
        return self._chunks(self.feed.validation, first, end)

    def held_out(self, x: Tensor, y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Other samples than any that train or validate, in chunks that fit; rows meet them as their own."""
        read = functools.partial(self.feed.held, *self.feed.hold(x, y, 0, "held-out"), 2)
        return self._chunks(read, 0, len(x))

    def _chunks(self, read: Callable[[int, int], tuple[Tensor, Tensor]], first: int,
                last: int) -> Iterator[tuple[Tensor, Tensor]]:
        chunk = max(50, self.at_once(self.rows))
        return (self._at_work(read(start, min(start + chunk, last))) for start in range(first, last, chunk))

    def at_once(self, rows: int) -> int:
        """Samples that an evaluation of so many rows should run at once."""
        return max(1, MOST_AT_ONCE[self.population.device.type] // (rows * self.widest))

    @property
    def widest(self) -> int:
        """Numbers of a sample behind a stage, at most."""
        return max(math.prod(shape.sample) for shape in self.family.host.slots.shapes)

    @functools.cached_property
    def scratch(self) -> Population:
        """Where previews train; kept, as the programs are that were captured for it."""
        return scratch_for(self)

    def charge(self, flops: Tensor, shadow: Tensor, epochs: float = 1.0) -> None:
        """Let rows pay for training seeds of these forward FLOPs [N, ...] for so many epochs: three times the
        forward; a seed in a `shadow` row (bool [N, ...]) also runs its host forward and backward again."""
        host = self.family.host.cost.flops
        each = (3 * flops + 2 * host * shadow).flatten(1).sum(1).double()
        self.spent += torch.where(self.done, 0.0, each / (3 * host * self.scenarios.horizon) * epochs)

    def _settle(self, train_loss: Tensor, evidence: Evidence, actions: Tensor) -> None:
        over = self.done.clone()
        verdict = self.governor.verdicts(evidence.all_on.loss, train_loss)
        verdict[over] = 0
        ended = self.governor.settle(verdict, over, train_loss, self.clock)
        for row in (verdict > 0).nonzero().flatten().tolist():
            key, clock, rule = int(self.scenarios.key[row]), int(self.clock[row]), RULES[int(verdict[row])]
            self.rollbacks.append(Rollback(key, clock, rule, tuple(actions[row].tolist()), bool(ended[row])))
        self.done = self.done | ended | (self.clock >= self.scenarios.horizon)
        params, life = self.population.costs()[0], self.population.life
        now = Measurement(clock=self.clock.clone(), train_loss=train_loss, evidence=evidence,
                          params=params.sum(1), spent=self.spent.float(), rolled_back=verdict > 0,
                          done=self.done.clone(), seed_params=params,
                          **{name: getattr(life, name).clone() for name in SLOT_STATE})
        back = ((verdict > 0) | over).nonzero().flatten()
        self.measured = self._settled(now, back) if len(back) else now
        running, on = ~over[:, None], self.measured.evidence.all_on
        latest = torch.stack([on.loss, on.score, on.smooth, self.measured.train_loss], 1)
        self.before = torch.where(running, self.scores, self.before)
        self.scores = torch.where(running, latest, self.scores)


def seeds_of(life: Lifecycle) -> Seeds:
    """A copy of what policies may know of every slot."""
    return Seeds(**{name: getattr(life, name).clone() for name in Seeds.__dataclass_fields__})


def _is_score(name: str) -> bool:
    return name == "train_loss" or name.startswith(("all_", "delivered"))


def _replaced(now: Measurement, rows: Tensor, before: Measurement | None) -> Measurement:
    """The same, but these rows report what was measured before, or NaN scores and unknown evidence."""
    flat = {name: tensor.clone() for name, tensor in now.tensors().items()}
    old = None if before is None else before.tensors()
    for name, tensor in flat.items():
        if name not in _KEPT:
            empty = torch.nan if _is_score(name) else 0
            tensor[rows] = torch.full_like(tensor[rows], empty) if old is None else old[name][rows]
    return _measurement(flat)


def _measurement(flat: dict[str, Tensor]) -> Measurement:
    groups: dict[str, dict[str, Tensor]] = {}
    for name, value in flat.items():
        groups.setdefault(name.rpartition(".")[0], {})[name.rpartition(".")[2]] = value
    on, off, delivered = (Scores(**groups[name]) for name in ("all_on", "all_off", "delivered"))
    gain, preview = (Contribution(**groups[name]) for name in ("contribution", "preview"))
    return Measurement(**groups[""], evidence=Evidence(on, off, delivered, gain, preview))
