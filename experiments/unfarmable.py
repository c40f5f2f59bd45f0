"""Can a reward be farmed? Random legal decisions with seeds that compute nothing, then a hill-climb from the best.

    python -m experiments.unfarmable --rows 500 --rounds 20

Every sequence is one episode; the best return found must not be positive.
"""

import torch
from torch import Tensor

from esper.kasmina import Host
from esper.leyline import ActionSpec, Head, LifecycleOp, View
from esper.simic import REWARDS, RewardWorld
from esper.tamiyo import Random
from esper.tolaria import TASKS, Family, Kind, MorphogeneticEnv, TaskData, Twins
from experiments.shared import parser, write

HORIZON = 12
FAMILY = Family("null", "mnist1d", Host("mlp", widths=(8, 8)), (Kind("plain"),), prices=(0.0, 1e-4), flop_prices=(0.0, 0.01),
                horizons=(HORIZON,), batch=20)
NULL = ("noop", "norm")
"""Masks leave no noop to choose where there is another seed, so every choice is made a noop on its way."""


class Explored:
    """Random legal decisions; where a plan has one that is legal now, that one (the hill-climb's neighbours)."""

    def __init__(self, seed: int, plan: Tensor | None, changed: float) -> None:
        """`plan` [T, heads] in full actions; each epoch is redrawn with probability `changed`."""
        self.random, self.plan, self.changed = Random(seed), plan, changed
        self.generator = torch.Generator().manual_seed(seed)
        self.taken: list[Tensor] = []

    def __call__(self, view: View) -> Tensor:
        actions = self.random(view)
        if self.plan is not None:
            planned, every = self.plan[len(self.taken)].expand_as(actions), torch.arange(len(actions))
            op, slot, target = planned[:, Head.OP], planned[:, Head.SLOT], planned[:, Head.ALPHA_TARGET]
            same = planned[:, Head.STYLE] == view.seeds.style[every, slot]
            fits = (op != LifecycleOp.SET_ALPHA_TARGET) | (view.free_targets[every, slot, target] & same)
            keep = view.verdicts[every, slot, op] & fits & (torch.rand(len(every), generator=self.generator) >= self.changed)
            actions = torch.where(keep[:, None], planned, actions)
        grows = (actions[:, Head.OP] == LifecycleOp.GERMINATE)[:, None]
        actions = torch.where(grows & (torch.arange(len(Head)) == Head.BLUEPRINT), 0, actions)
        self.taken.append(actions)
        return actions


def data() -> TaskData:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(60, 1, 40, generator=generator), torch.randint(10, (60,), generator=generator)
    return TaskData(TASKS["mnist1d"], x[:40], y[:40], x[40:], y[40:])


def search(reward: str, rows: int, rounds: int) -> float:
    """The best return of rows x rounds sequences: the first half at random, the second around the best so far."""
    spec = ActionSpec.full(2, NULL)
    env, beside = (MorphogeneticEnv(FAMILY, rows, spec=spec, data=data()) for _ in range(2))
    made = RewardWorld(env, Twins(beside), reward)
    best, plan = -float("inf"), None
    for number in range(rounds):
        climbing = number >= rounds // 2
        explored = Explored(number, plan if climbing else None, changed=0.2)
        returns = made.play(explored, FAMILY.scenarios(rows)).returns
        acted = (torch.stack(explored.taken)[..., Head.OP] != LifecycleOp.WAIT).any(0)
        total = torch.where(acted, returns, -torch.inf)
        if float(total.max()) > best:
            best, plan = float(total.max()), torch.stack(explored.taken)[:, int(total.argmax())]
    return best


def main() -> None:
    options_of = parser(__doc__)
    options_of.add_argument("--rows", type=int, default=500)
    options_of.add_argument("--rounds", type=int, default=20)
    options = options_of.parse_args()
    result: dict[str, object] = {"sequences": options.rows * options.rounds}
    for reward in REWARDS:
        result[reward] = search(reward, options.rows, options.rounds)
        print(reward, result[reward], flush=True)
    write(options, "unfarmable", result)


if __name__ == "__main__":
    main()
