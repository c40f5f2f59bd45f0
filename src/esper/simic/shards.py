"""A round of training in shards: (weights, scenarios) -> episodes and a rollout, wherever it is computed.

Legend: T steps, N rows of a shard. A parcel is what travels: a text of JSON and NumPy arrays by name.
"""

import functools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from esper.leyline import EsperError
from esper.leyline.codec import from_dict, to_dict
from esper.simic.config import TrainConfig
from esper.simic.rewards import RewardInputs
from esper.simic.workers import Done, Workers
from esper.simic.world import RewardWorld, Round
from esper.tamiyo.controller import inside
from esper.tolaria import EnvConfig, Episodes, Family, MakeEnv, MorphogeneticEnv, Scenarios, Twins
from esper.tolaria.episodes import TwinScores

Parcel = tuple[str, dict[str, np.ndarray]]
_INPUTS = [f.name for f in fields(RewardInputs)]


def make_world(env: EnvConfig, rows: int, reward: str, score: str, make: MakeEnv) -> RewardWorld:
    return RewardWorld(make(env, rows), Twins(make(replace(env, previews=None), rows)), reward, score)


def _packed(about: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Parcel:
    return json.dumps(about), {name: tensor.detach().cpu().numpy() for name, tensor in tensors.items()}


def _unpacked(parcel: Parcel) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Copies: a cluster's arrays may not be written."""
    return json.loads(parcel[0]), {name: torch.from_numpy(np.array(each)) for name, each in parcel[1].items()}


@dataclass(frozen=True)
class Shard:
    """What came of a shard: a round of its rows, what learning needs of it, and what its twins scored."""

    number: int  # of its round
    played: Round
    rollout: dict[str, Tensor]
    twin: Tensor  # [N, epochs, 3]

    def pack(self) -> Parcel:
        played = self.played
        groups: dict[str, Mapping[str, Tensor]] = {
            "episodes": played.episodes.tensors(), "terms": played.terms, "rollout": self.rollout,
            "inputs": {n: torch.stack([getattr(each, n) for each in played.inputs]) for n in _INPUTS},
            "counted": {str(place): part for place, part in enumerate(played.counted)},
            "": {"reward": played.reward, "returns": played.returns, "twin": self.twin}}
        tensors = {f"{group}.{name}": t for group, part in groups.items() for name, t in part.items()}
        return _packed({"number": self.number, "moves": played.episodes.moves}, tensors)

    @classmethod
    def unpack(cls, config: EnvConfig, parcel: Parcel) -> "Shard":
        about, tensors = _unpacked(parcel)
        groups = ("episodes", "terms", "rollout", "inputs", "counted", "")
        episodes, terms, rollout, inputs, counted, single = (inside(tensors, f"{g}.") for g in groups)
        steps = zip(*(inputs[name] for name in _INPUTS), strict=True)
        played = Round(Episodes.of(config, episodes, about["moves"]), terms, single["reward"],
                       single["returns"], [RewardInputs(*step) for step in steps], tuple(counted.values()))
        return cls(about["number"], played, rollout, single["twin"])

    def check(self, number: int, scenarios: Scenarios) -> None:
        """It must be what was asked for; what is in a rollout, the update checks."""
        mine, valid = self.played.episodes.scenarios, self.rollout["valid"]
        same = all(torch.equal(column, getattr(mine, name)) for name, column in scenarios.columns().items())
        problems = {"another round": self.number != number, "other scenarios": not same,
                    "another number of rows": any(t.shape[1] != len(scenarios) for t in (
                        *self.rollout.values(), self.played.reward)),
                    "an empty rollout": not len(valid),
                    "statistics that are no numbers": not all(bool(t.isfinite().all())
                                                              for t in self.played.counted)}
        if found := [what for what, wrong in problems.items() if wrong]:
            raise EsperError(f"what came back for round {number} has {' and '.join(found)}; "
                             "nothing was learned from it")


class Player:
    """Owns environments, and plays shards in them with weights that it is given."""

    def __init__(self, config: TrainConfig, make: MakeEnv = MorphogeneticEnv) -> None:
        self.config, self.make, self.rows = config, make, config.rows // config.shards
        self.agent = config.agent()
        self.worlds: dict[str, RewardWorld] = {}  # by the family's name

    def world(self, family: Family) -> RewardWorld:
        """Made when it is first met."""
        if family.name not in self.worlds:
            env, config = self.config.env_of(family), self.config
            self.worlds[family.name] = make_world(env, self.rows, config.reward, config.score, self.make)
        return self.worlds[family.name]

    def play(self, number: int, weights: Mapping[str, Tensor], family: Family, scenarios: Scenarios,
             twin: Tensor | None) -> Shard:
        """Scenarios of a round; `twin` is what is known of all their twins."""
        world, threads = self.world(family), torch.get_num_threads()
        agent, twins = self.agent.bound_to(world.env.spec), world.twins
        agent.network.load_state_dict(inside(weights, "network."))
        agent.controller.normaliser.load(inside(weights, "normaliser."))
        agent.updates = number  # decides how much is explored
        twins.forget()
        if twin is not None:
            twins.put(scenarios, twin)
        buffer = agent.buffer(world.steps, self.rows, self.config.ppo.chunk)
        torch.set_num_threads(self.config.threads_of_a_shard)
        try:
            played = world.collect(agent, scenarios, buffer, (self.config.seed, number),
                                   self.config.privileged)
        finally:
            torch.set_num_threads(threads)
        rollout = {name: part.cpu() for name, part in buffer.steps().items()}
        return Shard(number, played, rollout, world.twin)


@functools.lru_cache(maxsize=1)
def _player(config: str, make: MakeEnv) -> Player:
    """Of this worker, kept from round to round."""
    return Player(from_dict(TrainConfig, json.loads(config), "the config"), make)


def _play(config: str, make: MakeEnv, parcel: Parcel | None) -> Parcel | None:
    """In a worker; without a parcel it only prepares."""
    player = _player(config, make)
    if parcel is None:
        for family in player.config.families:
            player.world(family)
        return None
    about, tensors = _unpacked(parcel)
    family, _ = player.config.shards_of(about["number"])[about["shard"]]
    scenarios = Scenarios(**inside(tensors, "scenarios."), kinds=family.kinds)
    weights = inside(tensors, "weights.")
    return player.play(about["number"], weights, family, scenarios, tensors.get("twin")).pack()


class Rounds:
    """Rounds of a run, played by workers."""

    def __init__(self, config: TrainConfig, make: MakeEnv, workers: Workers) -> None:
        self.config, self.make, self.workers, self.here = config, make, workers, workers.here
        self._text = json.dumps(to_dict(config))
        if self.here:
            self.player = Player(config, make)
            for family in config.families:  # data that is missing is found now
                self.player.world(family)
        else:  # whatever an environment lacks is one sentence before the first round
            list(workers.run({"the environment": functools.partial(_play, self._text, make, None)}))

    def submit(self, number: int, weights: Mapping[str, Tensor], twins: "KnownTwins") -> Iterator[Done]:
        """Every shard of a round, checked, in order; its value is a `Shard`."""
        parts = self.config.shards_of(number)
        calls = {f"shard {place} of round {number}": self._call(number, place, weights, *part, twins)
                 for place, part in enumerate(parts)}
        found = {done.name: done for done in self.workers.run(calls)}
        for name, (family, scenarios) in zip(calls, parts, strict=True):
            done = found[name]
            shard = done.value if self.here else Shard.unpack(self.config.env_of(family), done.value)
            shard.check(number, scenarios)
            yield done._replace(value=shard)

    def _call(self, number: int, place: int, weights: Mapping[str, Tensor], family: Family,
              scenarios: Scenarios, twins: "KnownTwins") -> Any:
        known = twins.of(family)
        twin = None if len(known.missing(scenarios)) else known(scenarios)
        if self.here:
            return functools.partial(self.player.play, number, weights, family, scenarios, twin)
        tensors = {f"weights.{name}": t for name, t in weights.items()}
        tensors |= {f"scenarios.{name}": t for name, t in scenarios.columns().items()}
        tensors |= {} if twin is None else {"twin": twin}
        about = {"number": number, "shard": place}
        return functools.partial(_play, self._text, self.make, _packed(about, tensors))


class KnownTwins:
    """What is known of the twins of a run, by family."""

    def __init__(self) -> None:
        self.families: dict[str, TwinScores] = {}

    def of(self, family: Family) -> TwinScores:
        return self.families.setdefault(family.name, TwinScores(family))

    @property
    def count(self) -> int:
        return sum(len(each.known) for each in self.families.values())

    def forget(self) -> None:
        """Scenarios that will not be met again."""
        self.families.clear()
