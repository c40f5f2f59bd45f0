"""Small worlds with known answers, for a learner that claims to learn. Each runs N episodes side by side.

Legend: N rows, S slots, K blueprints, T epochs.
"""

import itertools
import math
from typing import Protocol

import torch
from torch import Tensor

from esper.leyline import ActionSpec, Field, LifecycleOp, Observation, ObservationSpec
from esper.simic import Collector, Outcome, PPOAgent, TamiyoRolloutBuffer
from esper.tamiyo import ActionMasks
from esper.tamiyo.controller import PolicyInput


class World(Protocol):
    """N episodes side by side; a row that ended begins anew by itself, and its next input asks for an empty memory."""

    def look(self) -> PolicyInput: ...

    def step(self, actions: Tensor) -> Outcome: ...


class WorldCollector:
    """Plays a world with an agent's controller, across rollouts."""

    def __init__(self, agent: PPOAgent, world: World, rows: int) -> None:
        self.agent, self.world = agent, world
        self.hidden = agent.network.get_initial_hidden(rows)

    def fill(self, buffer: TamiyoRolloutBuffer) -> Tensor:
        """Play as many steps as the rollout holds; the value [N] of what follows the last."""
        collector = Collector(self.agent, buffer.spec.rows, buffer)
        collector.hidden = self.hidden
        for _ in range(buffer.spec.steps - buffer.filled):
            collector.add(self.world.step(collector.act(self.world.look())))
        self.hidden = collector.hidden
        return collector.value(self.world.look())


SWITCH = ActionSpec(1, ("none",), heads=ActionSpec.full(1, ("none",)).heads[:1],
                    ops=(LifecycleOp.WAIT, LifecycleOp.ADVANCE))
"""Two choices and nothing else."""


def blank(rows: int, spec: ActionSpec, slot: int = 1, candidate: int = 1) -> tuple[Tensor, Tensor]:
    return torch.zeros(rows, spec.slots, slot), torch.zeros(rows, spec.slots, len(spec.blueprints), candidate)


def everything(rows: int, spec: ActionSpec) -> ActionMasks:
    """All ops, slots and values are possible; WAIT names no slot."""
    slot = torch.ones(rows, len(spec.ops), spec.slots, dtype=torch.bool)
    slot[:, spec.ops.index(LifecycleOp.WAIT), 1:] = False
    values = {p: torch.ones(rows, spec.slots, spec.head_sizes[p[1]], dtype=torch.bool) for p in spec.pairs}
    return ActionMasks(slot.any(2), slot, values)


class Bandit:
    """One step: GERMINATE the right blueprint in the right slot is worth 1, anything else nothing."""

    observation = ObservationSpec((Field("constant"),), (Field("which", 3),), (Field("which", 4),))
    spec = ActionSpec.decisive(3, ("a", "b", "c", "d"))

    def __init__(self, rows: int, seed: int) -> None:
        self.rows, self.generator = rows, torch.Generator().manual_seed(seed)
        self.right = int(torch.randint(3, (), generator=self.generator)), int(torch.randint(4, (), generator=self.generator))

    def look(self) -> PolicyInput:
        slot, candidate = torch.eye(3).repeat(self.rows, 1, 1), torch.eye(4).repeat(self.rows, 3, 1, 1)
        seen = Observation(torch.ones(self.rows, 1), slot, candidate)
        u = torch.rand(self.rows, len(self.spec.heads), generator=self.generator)
        return PolicyInput(seen, everything(self.rows, self.spec), torch.ones(self.rows, dtype=torch.bool), u)

    def step(self, actions: Tensor) -> Outcome:
        germinate = actions[:, 0] == self.spec.ops.index(LifecycleOp.GERMINATE)
        reward = (germinate & (actions[:, 1] == self.right[0]) & (actions[:, 2] == self.right[1])).float()
        over = torch.ones(self.rows, dtype=torch.bool)
        return Outcome(reward, over, ~over)


class Lottery(Bandit):
    """A bandit whose rewards are mostly luck: every row draws a hidden number that is worth far more than the right action."""

    def __init__(self, rows: int, seed: int, tell: bool, stake: float = 20.0) -> None:
        """With `tell` the critic knows what was drawn."""
        super().__init__(rows, seed)
        self.tell, self.stake = tell, stake
        self._draw()

    def _draw(self) -> None:
        self.luck = torch.randn(self.rows, generator=self.generator)

    def look(self) -> PolicyInput:
        return super().look()._replace(privileged=self.luck[:, None] if self.tell else None)

    def step(self, actions: Tensor) -> Outcome:
        outcome, luck = super().step(actions), self.stake * self.luck
        self._draw()
        return outcome._replace(reward=outcome.reward + luck)


class CartPole:
    """Balance a pole on a cart, seeing positions only: without memory the velocities are unknown.

    Constants and limits are those of the classic task; an episode is cut after 500 steps.
    """

    observation = ObservationSpec((Field("place", scaled=True), Field("angle", scaled=True)), (Field("none"),), (Field("none"),))
    spec = SWITCH
    gravity, cart, pole, half, force, tick, limit = 9.8, 1.0, 0.1, 0.5, 10.0, 0.02, 500

    def __init__(self, rows: int, seed: int) -> None:
        self.rows, self.generator = rows, torch.Generator().manual_seed(seed)
        self.state, self.age = self._born(rows), torch.zeros(rows, dtype=torch.int64)
        self.masks, self.blank = everything(rows, self.spec), blank(rows, self.spec)
        self.returns: list[float] = []

    def _born(self, count: int) -> Tensor:
        return 0.1 * torch.rand(count, 4, generator=self.generator) - 0.05

    def _seen(self) -> Observation:
        return Observation(self.state[:, ::2].clone(), *self.blank)

    def look(self) -> PolicyInput:
        u = torch.rand(self.rows, 1, generator=self.generator)
        return PolicyInput(self._seen(), self.masks, self.age == 0, u)

    def step(self, actions: Tensor) -> Outcome:
        place, speed, angle, turn = self.state.unbind(1)
        push = torch.where(actions[:, 0] == 1, self.force, -self.force)
        mass, moment = self.cart + self.pole, self.pole * self.half
        sine, cosine = angle.sin(), angle.cos()
        shared = (push + moment * turn**2 * sine) / mass
        spin = (self.gravity * sine - cosine * shared) / (self.half * (4 / 3 - self.pole * cosine**2 / mass))
        pull = shared - moment * spin * cosine / mass
        self.state = torch.stack([place + self.tick * speed, speed + self.tick * pull, angle + self.tick * turn,
                                  turn + self.tick * spin], 1)
        self.age += 1
        done = (self.state[:, 0].abs() > 2.4) | (self.state[:, 2].abs() > 12 * 2 * math.pi / 360)
        truncated = ~done & (self.age >= self.limit)
        final = self._seen() if bool(truncated.any()) else None
        over = done | truncated
        self.returns += self.age[over].tolist()
        self.state = torch.where(over[:, None], self._born(self.rows), self.state)
        self.age = torch.where(over, 0, self.age)
        return Outcome(torch.ones(self.rows), done, truncated, final)


EMPTY, YOUNG, GROWN, KEPT = range(4)


class Garden:
    """A lifecycle small enough to solve exactly: seeds ripen in two epochs, cost rent while they live, and pay at the
    end of the episode if they were kept.

    What a kind is worth depends on the slot and on the price, which is seen. Each episode draws a price. A seed that is
    not kept at the end pays nothing; a pruned one frees its slot.
    """

    horizon, prices, kinds = 6, (0.0, 0.15), 3
    worth = ((0.3, 0.6, 1.0), (0.8, 0.5, 0.9))  # [slot][kind]
    sizes = (0.5, 1.0, 2.5)
    observation = ObservationSpec(
        (Field("progress"), Field("price")),
        (Field("empty"), Field("young"), Field("grown"), Field("kept"), Field("position"), Field("kind", 3)),
        (Field("kind", 3),))
    spec = ActionSpec(2, ("a", "b", "c"), heads=ActionSpec.decisive(2, ("a",)).heads,
                      ops=(LifecycleOp.WAIT, LifecycleOp.GERMINATE, LifecycleOp.PRUNE, LifecycleOp.FOSSILIZE), auto_advance=True)

    def __init__(self, rows: int, seed: int, unit: float = 1.0) -> None:
        self.rows, self.unit, self.generator = rows, unit, torch.Generator().manual_seed(seed)
        self.clock = torch.zeros(rows, dtype=torch.int64)
        self.stage, self.kind = torch.zeros(rows, 2, dtype=torch.int64), torch.zeros(rows, 2, dtype=torch.int64)
        self.price = self._draw()
        self.returns: list[tuple[int, float]] = []
        self.total = torch.zeros(rows)

    def _draw(self) -> Tensor:
        return torch.randint(len(self.prices), (self.rows,), generator=self.generator)

    def look(self) -> PolicyInput:
        one_hot = torch.nn.functional.one_hot
        kind = one_hot(self.kind, 3) * (self.stage > EMPTY)[..., None]
        position = torch.arange(2).expand(self.rows, 2)[..., None]
        slot = torch.cat([one_hot(self.stage, 4), position, kind], 2).float()
        row = torch.stack([self.clock / self.horizon, torch.tensor(self.prices)[self.price]], 1)
        candidate = torch.eye(3).expand(self.rows, 2, 3, 3).clone()
        allowed = torch.stack([torch.arange(2).expand(self.rows, 2) == 0, self.stage == EMPTY,
                               (self.stage == YOUNG) | (self.stage == GROWN), self.stage == GROWN], 1)
        masks = ActionMasks(allowed.any(2), allowed, everything(self.rows, self.spec).values)
        u = torch.rand(self.rows, 3, generator=self.generator)
        return PolicyInput(Observation(row, slot, candidate), masks, self.clock == 0, u)

    def step(self, actions: Tensor) -> Outcome:
        every = torch.arange(self.rows)
        op, slot, kind = actions.unbind(1)
        self.stage = torch.where(self.stage == YOUNG, GROWN, self.stage)
        for number, (stage, of_kind) in enumerate(((None, None), (YOUNG, kind), (EMPTY, None), (KEPT, None))):
            mine = op == number
            if stage is not None:
                self.stage[every[mine], slot[mine]] = stage
            if of_kind is not None:
                self.kind[every[mine], slot[mine]] = of_kind[mine]
        sizes = torch.tensor(self.sizes)[self.kind] * (self.stage > EMPTY)
        reward = -torch.tensor(self.prices)[self.price] * sizes.sum(1) / self.horizon
        self.clock += 1
        done = self.clock >= self.horizon
        worth = torch.tensor(self.worth)[torch.arange(2), self.kind] * (self.stage == KEPT)
        reward = reward + torch.where(done, worth.sum(1), 0.0)
        self.total += reward
        self.returns += zip(self.price[done].tolist(), self.total[done].tolist(), strict=True)
        self.total = torch.where(done, 0.0, self.total)
        self.clock = torch.where(done, 0, self.clock)
        self.stage = torch.where(done[:, None], EMPTY, self.stage)
        self.price = torch.where(done, self._draw(), self.price)
        return Outcome(self.unit * reward, done, torch.zeros_like(done))

    @classmethod
    def optimum(cls, price: int) -> float:
        """By dynamic programming over (clock, stages, kinds)."""
        best: dict[tuple[int, int, int, int], float] = {}
        for clock in reversed(range(cls.horizon)):
            for state in itertools.product(range(4), range(3), range(4), range(3)):
                best[clock, *state] = max(cls._after(best, clock, state, price))
        return best[0, 0, 0, 0, 0]

    @classmethod
    def _after(cls, best: dict, clock: int, state: tuple[int, ...], price: int) -> list[float]:
        """The value of every move: (slot, its new stage, its new kind), or nothing."""
        stages, kinds = state[::2], state[1::2]
        moves: list[tuple[int, int, int] | None] = [None]
        for slot in range(2):
            moves += [(slot, YOUNG, kind) for kind in range(3) if stages[slot] == EMPTY]
            moves += [(slot, EMPTY, kinds[slot])] * (stages[slot] in (YOUNG, GROWN))
            moves += [(slot, KEPT, kinds[slot])] * (stages[slot] == GROWN)
        values = []
        for move in moves:
            after, kind = [GROWN if stage == YOUNG else stage for stage in stages], list(kinds)
            if move is not None:
                after[move[0]], kind[move[0]] = move[1:]
            rent = sum(cls.sizes[k] for s, k in zip(after, kind, strict=True) if s > EMPTY)
            paid = sum(cls.worth[slot][k] for slot, (s, k) in enumerate(zip(after, kind, strict=True)) if s == KEPT)
            later = paid if clock + 1 == cls.horizon else best[clock + 1, after[0], kind[0], after[1], kind[1]]
            values.append(later - cls.prices[price] * rent / cls.horizon)
        return values
