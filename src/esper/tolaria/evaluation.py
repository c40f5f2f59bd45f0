"""Evidence: what every row scores, and what each of its seeds is worth, as paired differences on the same
samples.

Legend: N rows, S slots, E extra rows, B samples of a chunk. Scores are the objective's (loss, score, smooth).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from esper.kasmina import Objective, Population
from esper.leyline import Contribution, SeedStage

LOSS, SMOOTH = 0, 2  # scores by their place


@dataclass
class Scores:
    """What N networks score on the validation slice, each [N] on the CPU."""

    loss: Tensor
    score: Tensor  # in [0, 1]: accuracy, for classification
    smooth: Tensor  # the score without its steps: mean probability of the right class, for classification


@dataclass
class Evidence:
    """One evaluation of a population. What was not measured is masked, never a number."""

    all_on: Scores
    all_off: Scores  # the host alone
    delivered: Scores  # host and fossils: what the episode would deliver now
    contribution: Contribution  # gain in smooth score by each blended seed, found by leaving it out
    preview: Contribution  # and by each incubating seed, if it ran at its target alpha


@dataclass
class _Plan:
    """The extra rows of an evaluation, and where each result is: all [E], or an index into N + E rows."""

    env: Tensor
    alpha: Tensor  # [E, S]
    without: Tensor  # [N, S] row without this seed, or -1
    previewed: Tensor  # [N, S] row with this incubating seed switched on, or -1
    all_off: Tensor  # [N]
    delivered: Tensor  # [N]


def plan(population: Population) -> _Plan:
    """As few extra rows as answer every question: equal networks are run once. N are the rows at work."""
    life = population.life
    live, targets, incubating = map(population.at_work, (life.alpha, life.target, life.incubating))
    rows, slots = live.shape
    every = torch.arange(rows)
    on = (live > 0) & population.at_work(life.planted)
    fossil = on & population.at_work(life.at(SeedStage.FOSSILIZED))
    envs, alphas, count = [], [], rows
    without, previewed = torch.full((rows, slots), -1), torch.full((rows, slots), -1)

    def add(which: Tensor, alpha: Tensor) -> Tensor:
        """Extra rows for `which` [k] with alpha [k, S]; their numbers."""
        nonlocal count
        envs.append(which)
        alphas.append(alpha)
        count += len(which)
        return torch.arange(count - len(which), count)

    for slot in range(slots):
        for table, mask, value in ((without, on[:, slot], torch.zeros(rows)),
                                   (previewed, incubating[:, slot], targets[:, slot])):
            mine = mask.nonzero().flatten()
            alpha = live[mine]
            alpha[:, slot] = value[mine]
            table[mine, slot] = add(mine, alpha)
    seeds, kept = on.sum(1), fossil.sum(1)
    lone = torch.where(on, without, 0).amax(1)  # with one seed, all off is that seed off
    all_off = torch.where(seeds == 0, every, lone)
    several = (seeds > 1).nonzero().flatten()
    all_off[several] = add(several, torch.zeros(len(several), slots))
    delivered = torch.where(kept == seeds, every, all_off)
    some = ((kept > 0) & (kept < seeds)).nonzero().flatten()
    delivered[some] = add(some, torch.where(fossil, live, 0.0)[some])
    return _Plan(torch.cat(envs), torch.cat(alphas), without, previewed, all_off, delivered)


@torch.no_grad()
def evaluate(population: Population, chunks: Iterable[tuple[Tensor, Tensor]]) -> Evidence:
    """Measure every row and its counterfactuals on chunks (x [B, N, *inputs], y [B, N]). Rows at rest are not
    in the chunks, and nothing is known of them."""
    todo, count = plan(population), population.count
    outputs_of = population.probe(todo.env, todo.alpha) if len(todo.env) else population.forward
    means, gains, errors = measure(population.objective, outputs_of, todo.env.to(population.device),
                                   count, chunks, SMOOTH)

    def paired(where: Tensor, sign: int) -> Contribution:
        """Gain in smooth score: of the live row over an extra one, or the other way round."""
        known = where >= 0
        extra = (where - count).clamp(min=0)
        value = error = torch.zeros(where.shape)
        if len(todo.env):
            value, error = sign * gains[extra], errors[extra]
        known = known & value.isfinite() & error.isfinite()
        value, error = (torch.where(known, t, 0.0) for t in (value, error))
        return Contribution(*(population.of_all(t, 0) for t in (value, error, known)))

    on, off, delivered = (Scores(*(population.of_all(score, torch.nan) for score in means[:, where]))
                          for where in (torch.arange(count), todo.all_off, todo.delivered))
    return Evidence(on, off, delivered, paired(todo.without, 1), paired(todo.previewed, -1))


def measure(objective: Objective, outputs_of: Callable[[Tensor], Tensor], env: Tensor, rows: int,
            chunks: Iterable[tuple[Tensor, Tensor]], score: int) -> tuple[Tensor, Tensor, Tensor]:
    """Means of the scores [3, N + E]; of one `score`, live less extra rows by sample: means, errors [E]."""
    sums, count = torch.zeros(()), 0
    for x, y in chunks:
        outputs = outputs_of(x).to(torch.float32)
        scores = objective.samples(outputs, torch.cat([y, y.index_select(1, env)], 1))  # [3, B, N + E]
        more = scores[score].index_select(1, env) - scores[score, :, rows:]
        each = torch.cat([t.sum(-2, dtype=torch.float64).flatten() for t in (scores, more, more.square())])
        sums = sums.to(each) + each
        count += len(x)
    every, extra = rows + len(env), len(env)
    means, mean, square = (sums.cpu() / count).split([3 * every, extra, extra])
    error = ((square - mean * mean).clamp(min=0) / max(count - 1, 1)).sqrt()
    return objective.settle(means.view(3, every).float()), mean.float(), error.float()
