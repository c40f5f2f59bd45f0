"""Everything that decides a run of training, as plain data."""

import hashlib
import json
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from esper.leyline import EsperError
from esper.leyline.codec import to_dict
from esper.simic.ppo import PPOAgent, PPOConfig
from esper.simic.rewards import REWARDS, SCORES_OF
from esper.simic.world import PRIVILEGED
from esper.tamiyo import EYES, Controller, NetworkConfig
from esper.tolaria import EnvConfig, Family, PreviewConfig, Scenarios, Universe, find_family

MOST_ROWS, MOST_ROUNDS = 65_536, 10_000_000
LATER: dict[str, Any] = {"shards": 1, "threads": 0, "universe": None, "eyes": "family"}
"""Keys that older runs lack, and what these did; a run that does so is the same run with and without them."""
_LOOKS = PreviewConfig(every=3, steps=20)


@dataclass(frozen=True)
class TrainConfig:
    """Everything that decides a run."""

    env: EnvConfig = field(default_factory=lambda: EnvConfig(find_family("mlp"), previews=_LOOKS))
    """Family, action space, previews, device and precision."""
    universe: Universe | None = None
    """Rounds are drawn from its families, one for each shard, instead of from the one above; an action spec
    follows from each host then. Examinations are on its validation families."""
    eyes: str = "family"
    """What the controller sees: `family`, scaled by what hosts of one family show; or `universal`."""
    rounds: int = 60
    """Updates of the run; each follows one episode in every row."""
    rows: int = 64
    """Episodes of a round."""
    shards: int = 1
    """Parts of equal size that a round is played in, by one worker each. Numbers depend on it, never on how
    many workers there are: each shard scales what it sees by the statistics of the round's beginning and its
    own."""
    threads: int = 0
    """Threads that a shard is computed with; 0 is one, or all of this process where a round is one shard."""
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
        if not 1 <= self.shards <= self.rows or self.rows % self.shards or not 0 <= self.threads <= 1024:
            raise EsperError(f"rows {self.rows} cannot be played in {self.shards} shards of equal size by "
                             f"{self.threads} threads each; change rows, shards or threads")
        if self.reward not in REWARDS or self.score not in SCORES_OF:
            raise EsperError(f"choose a reward from {', '.join(REWARDS)} "
                             f"and a score from {', '.join(SCORES_OF)}")
        if self.eyes not in EYES:
            raise EsperError(f"no eyes {self.eyes!r}; choose from {', '.join(EYES)}")
        if self.universe and (self.rows // self.shards) % parts:
            raise EsperError(f"shards of {self.rows // self.shards} rows, each of one family, cannot be cut "
                             f"into {parts} equal minibatches; change rows, shards or ppo.minibatches")
        if self.network.privileged:
            raise EsperError("network.privileged follows from privileged; leave it out")

    @property
    def pool(self) -> int:
        """Rounds after which scenarios come again; 0 is never."""
        return max(1, self.scenarios // self.rows) if self.scenarios else 0

    @property
    def threads_of_a_shard(self) -> int:
        return self.threads or (1 if self.shards > 1 else torch.get_num_threads())

    def env_of(self, family: Family) -> EnvConfig:
        """An environment as the run has them, for one family."""
        same = family == self.env.family
        return self.env if same else replace(self.env, family=family, spec=None)  # type: ignore[arg-type]

    @property
    def families(self) -> tuple[Family, ...]:
        """That training meets."""
        return self.universe.training if self.universe else (self.env.family,)

    def shards_of(self, number: int) -> list[tuple[Family, Scenarios]]:
        """What is played in each shard of a round: a family and scenarios of its training split."""
        rows, pool = self.rows // self.shards, self.pool
        number = number % pool if pool else number
        first = number * self.rows
        if self.universe is None:
            drawn = self.env.family.scenarios(self.rows, "train", first)
            return [(self.env.family, drawn.take(part)) for part in torch.arange(self.rows).split(rows)]
        families = self.universe.pick(number, self.shards)
        return [(family, family.scenarios(rows, "train", first + place * rows))
                for place, family in enumerate(families)]

    @property
    def exam(self) -> list[tuple[Family, Scenarios]]:
        """What examinations are on: fixed scenarios of the validation split, as many of each family."""
        families = self.universe.validation if self.universe else (self.env.family,)
        count = -(-self.exam_rows // len(families))
        return [(family, family.scenarios(count, "validation", place * count))
                for place, family in enumerate(families)]

    def agent(self) -> PPOAgent:
        """An agent that knows nothing yet."""
        network = replace(self.network, privileged=len(PRIVILEGED) if self.privileged else 0)
        with torch.random.fork_rng():
            torch.manual_seed(self.seed)
            controller = Controller.fresh(self.env.spec, network, EYES[self.eyes].spec, self.env.device)
        return PPOAgent(controller, replace(self.ppo, updates=self.rounds), seed=self.seed)

    @property
    def identity(self) -> str:
        """A digest of what makes a run this run; it may be made longer."""
        return self._digest(rounds=0)

    def facts(self) -> dict[str, Any]:
        """What viewers of a run must know; `group` is the same for runs that differ in seed alone."""
        host, spec, universe = self.env.family.host, self.env.spec, self.universe
        every = (name for family in self.families for name in self.env_of(family).spec.blueprints)
        return {"family": universe.name if universe else self.env.family.name,
                "task": self.env.family.task, "seed": self.seed,
                "rounds": self.rounds, "rows": self.rows, "slots": list(host.slots.names),
                "blueprints": list(dict.fromkeys(every)), "heads": [head.name.lower() for head in spec.heads],
                "identity": self.identity, "group": self._digest(rounds=0, seed=0), "config": to_dict(self)}

    def _digest(self, **fixed: int) -> str:
        plain = {name: value for name, value in to_dict(self).items() if value != LATER.get(name)} | fixed
        return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:32]
