"""Plans side by side: train several and keep the best, or train fewer and fewer of them within a budget.

Legend: N scenarios, R rows (a scenario at a pair of prices), P plans, C candidates of a row in order, T
epochs. FLOPs are in trainings of the bare host. Plans do not meet, so their runs are played in full and read
afterwards: halving pays for the epochs that it would have trained, and what comes after them decides nothing.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from esper.leyline import EsperError, LifecycleOp
from esper.simic.proof.evaluator import Evaluator, widened
from esper.simic.proof.plans import Plan, Survey, Watch, played
from esper.simic.proof.sweep import conditions, halves, prices_of
from esper.tamiyo import Wait
from esper.tolaria import Episodes, MorphogeneticEnv, Scenarios, Scores

MOST = 4  # plans side by side
BUDGETS = (0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 3.0)  # extra FLOPs that halving is tuned for
RUNGS = (0.25, 0.5)  # shares of the horizon at which halving may look first
STATIC = (1.0, 1.25, 1.5, 2.0, 3.0)  # widths of static hosts that are halved
START, FOLDS = 1 << 20, 2  # the first init: none that a search saw


@dataclass(frozen=True, eq=False)
class Table:
    """What plans did; one column each."""

    told: np.ndarray  # [R] what a policy is told, as a number
    init: np.ndarray  # [R]
    price: np.ndarray  # [R]
    flop_price: np.ndarray  # [R]
    horizon: np.ndarray  # [R]
    score: np.ndarray  # [R, P, 2] of what was delivered, on both halves of the validation slice
    params: np.ndarray  # [R, P] of fossils
    shown: np.ndarray  # [R, P, T] score on the validation slice with all seeds on, also those that incubate
    spent: np.ndarray  # [R, P, T] extra FLOPs until then

    @staticmethod
    def joined(tables: Sequence["Table"]) -> "Table":
        """Of the same plans; the last epoch of shorter runs stands for those that they lack."""
        longest = max(table.spent.shape[2] for table in tables)

        def long(values: np.ndarray) -> np.ndarray:
            more = ((0, 0),) * 2 + ((0, longest - values.shape[2]),)
            return np.pad(values, more, "edge")

        parts = [replace(table, shown=long(table.shown), spent=long(table.spent)) for table in tables]
        return Table(*(np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(Table)))

    def take(self, rows: np.ndarray, plans: Sequence[int] | None = None) -> "Table":
        columns = {f.name: getattr(self, f.name)[rows] for f in fields(self)}
        some = slice(None) if plans is None else list(plans)
        return Table(**{name: c[:, some] if c.ndim > 1 else c for name, c in columns.items()})

    @property
    def worth(self) -> np.ndarray:
        """[R, P, 2]: utility by either half, before compute."""
        return np.asarray(self.score - (self.price[:, None] * self.params)[..., None])


class Bracket(NamedTuple):
    """Plans that halving begins with, and the share of the horizon at which it looks first."""

    plans: list[Plan]
    first: float


@dataclass(frozen=True)
class Portfolio:
    """What was tuned: the plans that are trained side by side."""

    sets: list[list[Plan]]  # by what a policy is told: of best of K
    budgets: list[float]
    brackets: list[list[Bracket]]  # by budget, and by what a policy is told
    episodes: int


def play_table(evaluators: Sequence[Evaluator], plans: Sequence[Plan], episodes: int, rows: int,
               watch: Watch) -> tuple[Table, Sequence[Plan], int]:
    """(every plan on every kind, horizon and some inits of all evaluators together, the plans, episodes): at
    least so many."""
    each = math.ceil(episodes / len(evaluators))
    tables, used = zip(*(_play_family(evaluator, plans, each, rows, watch) for evaluator in evaluators),
                       strict=True)
    return Table.joined(tables), plans, sum(used)


def _play_family(evaluator: Evaluator, plans: Sequence[Plan], episodes: int, rows: int,
                 watch: Watch) -> tuple[Table, int]:
    family, survey = evaluator.family, Survey(evaluator, rows, watch)
    cells = len(plans) * len(family.kinds) * len(set(family.horizons))
    drawn, init = survey.scenarios(START, max(2 * FOLDS, math.ceil(episodes / cells)))
    jobs = torch.cartesian_prod(torch.arange(len(plans)), torch.arange(len(drawn)))
    ends = evaluator.play_jobs(
        jobs, drawn, rows, lambda done: watch("plans side by side", done, len(jobs)),
        lambda numbers: played([plans[number] for number in numbers], survey.spec),
        read=functools.partial(_read, epochs=max(family.horizons)))
    values = ends.view(len(plans), len(drawn), -1).transpose(0, 1)
    priced = [replace(drawn, price=torch.full_like(drawn.price, price),
                      flop_price=torch.full_like(drawn.flop_price, flop_price))
              for price, flop_price in prices_of(family)]
    return Table.joined([_table(evaluator, each, init, values) for each in priced]), len(jobs)


def _read(env: MorphogeneticEnv, done: Episodes, epochs: int) -> Tensor:
    """[N, 3 + 2 T]: scores on both halves, parameters, what was shown and spent after each epoch."""
    seen = done.measured
    hoped = (seen["preview.value"] * seen["preview.known"]).sum(2)
    curves = torch.stack([seen["all_on.score"] + hoped, seen["spent"].float()])  # [2, T, N]
    curves = torch.cat([curves, curves[:, -1:].expand(-1, epochs - curves.shape[1], -1)], 1)
    return torch.cat([torch.stack([*halves(env), done.params.float()]), curves.flatten(0, 1)]).T


def _table(evaluator: Evaluator, drawn: Scenarios, init: Tensor, values: Tensor) -> Table:
    """Of values [R, P, 3 + 2 T]."""
    told = conditions(evaluator.family, drawn)
    score, params, curves = values.double().split([2, 1, values.shape[2] - 3], 2)
    columns = (told, init, drawn.price.double(), drawn.flop_price.double(), drawn.horizon, score,
               params[..., 0], *curves.chunk(2, 2))
    return Table(*(column.numpy() for column in columns))


def keep_best(table: Table, usable: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """([R, 2] the best of the usable [R, C] by either half, [R] extra FLOPs of training them all)."""
    worth = np.where(usable[..., None], table.worth, -np.inf)  # what it took is paid for whichever is kept
    return worth.argmax(1), ((1 + table.spent[..., -1]) * usable).sum(1) - 1


def best_of_worth(table: Table) -> np.ndarray:
    """[R]: utility of keeping the best, chosen on one half and scored on the other."""
    choice, paid = keep_best(table, np.ones(table.params.shape, bool))
    rows = np.arange(len(choice))
    crossed = (table.worth[rows, choice[:, 0], 1] + table.worth[rows, choice[:, 1], 0]) / 2
    return np.asarray(crossed - table.flop_price * paid)


def halve(table: Table, usable: np.ndarray, first: np.ndarray,
          budget: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """([R] the last of the usable [R, C], [R] extra FLOPs): as many of the first as the budget [R] pays for
    even if the dearest of them stay longest. -1, for nothing: it pays for none, which leaves no growth."""
    epochs, limit = 1 + np.arange(table.spent.shape[2]), 1 + budget
    cost = np.minimum(epochs / table.horizon[:, None], 1)[:, None] + table.spent  # [R, C, T]
    can = usable & (cost[..., -1] <= limit[:, None])
    order, choice, paid = can.cumsum(1), np.full(len(can), -1), np.ones(len(can))
    for count in range(1, int(order[:, -1].max()) + 1):
        last, used, most = _bracket(table, cost, can & (order <= count), count, first)
        fits = (order[:, -1] >= count) & (most <= limit)
        choice, paid = np.where(fits, last, choice), np.where(fits, used, paid)
    return choice, paid - 1


def _bracket(table: Table, cost: np.ndarray, alive: np.ndarray, count: int,
             first: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """([R] who is left of so many alive [R, C], [R] FLOPs, [R] FLOPs at the most)."""
    sizes = [count]
    while sizes[-1] > 1:
        sizes.append(math.ceil(sizes[-1] / 2))
    shown = table.shown - (table.price[:, None] * table.params)[..., None]
    looks = np.maximum(1, np.round(table.horizon * first).astype(int))
    began, before, paid, most = alive, cost[..., 0] * 0, looks * 0.0, looks * 0.0
    for rung, size in enumerate(sizes):
        end = table.horizon if size == 1 else np.minimum(looks * 2**rung, table.horizon)
        until = np.take_along_axis(cost, (end - 1)[:, None, None], 2)[..., 0]
        step = (until - before) * began
        paid, most, before = paid + (step * alive).sum(1), most + (-np.sort(-step, 1))[:, :size].sum(1), until
        now = np.take_along_axis(shown, (end - 1)[:, None, None], 2)[..., 0]
        place = np.argsort(np.argsort(-np.where(alive, now, -np.inf), 1, kind="stable"), 1)
        alive = alive & (place < math.ceil(size / 2))
    return alive.argmax(1), paid, most


def halved_worth(table: Table, first: float, budget: float) -> np.ndarray:
    """[R]: utility of halving all but the last plan, which is no growth."""
    usable, rows = np.ones(table.params.shape, bool), np.arange(len(table.told))
    usable[:, -1] = False
    choice, paid = halve(table, usable, np.full(len(rows), first), np.full(len(rows), budget))
    return np.asarray(table.worth.mean(2)[rows, choice] - table.flop_price * paid)


def forward(worth: Callable[[tuple[int, ...]], np.ndarray], plans: int,
            init: np.ndarray) -> tuple[tuple[int, ...], float]:
    """(plans, each the best in addition to those before it, and then in its place given the others; mean
    worth on other inits [R] than they were chosen with). There are as many as other inits confirm."""
    worth, every = functools.cache(worth), init >= 0

    def better(order: tuple[int, ...], place: int, rows: np.ndarray) -> tuple[int, ...]:
        """With the best plan at this place."""
        free = [plan for plan in range(plans) if plan not in (*order[:place], *order[place + 1 :])]
        tried = [(*order[:place], plan, *order[place + 1 :]) for plan in free]
        return tried[int(np.argmax([worth(each)[rows].mean() for each in tried]))]

    def orders(rows: np.ndarray) -> list[tuple[int, ...]]:
        """The best of every size."""
        found, order = [], ()  # type: list[tuple[int, ...]], tuple[int, ...]
        for size in range(min(MOST, plans)):
            for place in (size, *range(size)):
                order = better(order, place, rows)
            found.append(order)
        return found

    folds = [init % FOLDS == fold for fold in range(FOLDS)]
    confirmed = np.array([[worth(order)[held].sum() for order in orders(~held)] for held in folds]).sum(0)
    best = int(confirmed.argmax())
    return orders(every)[best], float(confirmed[best] / len(init))


def _best_set(table: Table) -> tuple[int, ...]:
    rows, plans = np.arange(len(table.told)), table.params.shape[1]
    return forward(lambda few: best_of_worth(table.take(rows, few)), plans, table.init)[0]


def _best_bracket(table: Table, budget: float) -> tuple[tuple[int, ...], float]:
    rows, plans = np.arange(len(table.told)), table.params.shape[1]

    def tuned(first: float) -> tuple[tuple[int, ...], float]:
        return forward(lambda few: halved_worth(table.take(rows, (*few, 0)), first, budget), plans,
                       table.init)

    tried = {first: tuned(first) for first in RUNGS}
    first = max(tried, key=lambda share: tried[share][1])
    return tried[first][0], first


def choose_plans(table: Table, plans: Sequence[Plan], episodes: int) -> Portfolio:
    """For everything that a policy may be told; the first plan is no growth."""
    parts = [table.take(table.told == told) for told in range(int(table.told.max()) + 1)]
    sets = [[plans[at] for at in _best_set(part)] for part in parts]
    found = [[_best_bracket(part, budget) for part in parts] for budget in BUDGETS]
    brackets = [[Bracket([plans[at] for at in order], first) for order, first in row] for row in found]
    return Portfolio(sets, list(BUDGETS), brackets, episodes)


def _side_by_side(evaluator: Evaluator, lists: Sequence[list[Plan]],
                  drawn: Scenarios) -> tuple[list[Episodes], Table, np.ndarray]:
    """(episodes of the first, second ... plan of every scenario's list, their table, which there are)."""
    nothing, count = Plan((None,) * evaluator.config.spec.slots), max(map(len, lists))
    parts, values = [], []
    for place in range(count):
        plans = [plans[place] if place < len(plans) else nothing for plans in lists]
        parts.append(evaluator.play(played(plans, evaluator.config.spec), drawn))
        values.append(_read(evaluator.environment(len(drawn)), parts[-1], int(drawn.horizon.max())))
    usable = np.array([[place < len(plans) for place in range(count)] for plans in lists])
    return parts, _table(evaluator, drawn, torch.arange(len(drawn)), torch.stack(values, 1)), usable


def picked(parts: Sequence[Episodes], choice: np.ndarray) -> Episodes:
    """In every row the episode of one of the parts [N]; what was measured on the way is left out."""
    which, row = torch.from_numpy(choice), torch.arange(len(choice))

    def take(of: Callable[[Episodes], Tensor]) -> Tensor:
        return torch.stack([of(part) for part in parts])[which, row]

    wait = parts[0].config.spec.ops.index(LifecycleOp.WAIT)
    actions = pad_sequence([part.actions for part in parts], padding_value=wait)[:, which, row]
    delivered = Scores(take(lambda part: part.delivered.loss), take(lambda part: part.delivered.score),
                       take(lambda part: part.delivered.smooth))
    return replace(parts[0], actions=actions, measured={}, moves=(), delivered=delivered,
                   blueprint=take(lambda part: part.blueprint), params=take(lambda part: part.params),
                   flops=take(lambda part: part.flops), spent=take(lambda part: part.spent))


def play_best_of(evaluator: Evaluator, found: Portfolio | None, drawn: Scenarios) -> Episodes:
    """Chosen on the first half of the validation slice. Where that slice also scores, each half scores what
    the other one chose: neither flatters the choice, and together they are what scores everybody else."""
    if found is None:
        raise EsperError("these controls have no plans side by side; tune them again")
    sets = [found.sets[told] for told in conditions(evaluator.family, drawn).tolist()]
    parts, table, usable = _side_by_side(evaluator, sets, drawn)
    choice, paid = keep_best(table, usable)
    first, second = (picked(parts, each) for each in choice.T)
    done, rows = replace(first, spent=torch.from_numpy(paid).float()), np.arange(len(drawn))
    if evaluator.held is not None:
        return done
    score = (table.score[rows, choice[:, 0], 1] + table.score[rows, choice[:, 1], 0]) / 2
    return replace(done, params=(first.params + second.params) / 2,
                   delivered=replace(done.delivered, score=torch.from_numpy(score).float()))


def play_halving(evaluator: Evaluator, found: Portfolio | None, budget: Tensor, drawn: Scenarios) -> Episodes:
    """Within extra FLOPs [N]. It reads the scores that every policy is shown."""
    if found is None:
        raise EsperError("these controls have no plans side by side; tune them again")
    levels = np.searchsorted(found.budgets, budget.numpy(), "right") - 1
    told = conditions(evaluator.family, drawn).tolist()
    mine = [found.brackets[level][each] for level, each in zip(levels, told, strict=True)]
    parts, table, usable = _side_by_side(evaluator, [bracket.plans for bracket in mine], drawn)
    first = np.array([bracket.first for bracket in mine])
    choice, paid = halve(table, usable, first, budget.double().numpy())
    parts.append(evaluator.play(Wait(), drawn))
    return replace(picked(parts, np.where(choice < 0, len(parts) - 1, choice)),
                   spent=torch.from_numpy(paid).float())


def play_widths(evaluator: Evaluator, budget: Tensor, drawn: Scenarios) -> Episodes:
    """Static hosts of several widths, halved within extra FLOPs [N]: what people do who do not grow. They are
    charged for parameters beyond the host's."""
    base, rows = evaluator.family.host, len(drawn)
    hosts = [widened(base, share) for share in STATIC]
    parts = [replace(each, params=torch.full((rows,), host.cost.params - base.cost.params))
             for host, each in ((host, evaluator.static(host, drawn)) for host in hosts)]
    clock = torch.arange(1, int(drawn.horizon.max()) + 1).expand(rows, len(hosts), -1)
    dearer = torch.tensor([host.cost.flops / base.cost.flops - 1 for host in hosts])[:, None]
    spent = dearer * (clock / drawn.horizon[:, None, None]).clamp(max=1)
    shown = torch.stack([part.measured["all_on.score"].T for part in parts], 1)
    params = torch.stack([part.params for part in parts], 1)
    columns = (torch.zeros(rows), torch.arange(rows), drawn.price, drawn.flop_price, drawn.horizon,
               torch.zeros(rows, len(hosts), 2), params, shown, spent)
    table = Table(*(column.numpy() for column in columns))
    choice, paid = halve(table, np.ones((rows, len(hosts)), bool), np.full(rows, RUNGS[0]),
                         budget.double().numpy())
    return replace(picked(parts, choice), spent=torch.from_numpy(paid).float())
