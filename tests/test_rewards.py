"""Rewards that cannot be farmed: one suite for all of them."""

import pytest
import torch
from experiments.unfarmable import search

from esper.kasmina import Host, blueprints_for
from esper.leyline import ActionSpec, EsperError, LifecycleOp, SeedStage
from esper.simic import PPOAgent, PPOConfig, RewardWorld
from esper.simic.rewards import REWARDS, Ledger
from esper.simic.world import PRIVILEGED
from esper.tamiyo import Controller, NetworkConfig, Random, Scripted, Wait, entry
from esper.tolaria import MorphogeneticEnv, PreviewConfig, Twins
from tests.workshop import toy_env, toy_family

HOST = Host("mlp", widths=(8, 8))
SPEC = ActionSpec.full(2, blueprints_for("mlp"))
WAIT, GERMINATE, RETARGET, PRUNE, KEEP, ADVANCE = LifecycleOp


def world(rows: int, reward: str = "utility", horizon: int = 8, prices: tuple[float, ...] = (1e-4,), score: str = "delivered",
          **options: object) -> RewardWorld:
    family = toy_family(HOST, horizons=(horizon,), prices=prices, flop_prices=(0.01,))
    return RewardWorld(toy_env(rows, family, **options), Twins(toy_env(rows, family)), reward, score)


def returns(made: RewardWorld, policy: object, start: int = 0) -> torch.Tensor:
    """[N] of one round."""
    return made.play(policy, made.env.family.scenarios(made.env.rows, start=start)).returns


def null_script(moves: tuple[str, ...]) -> list[tuple[int, ...]]:
    """A life of a noop seed in slot 0, or of several in a row."""
    lines = {"germinate": (GERMINATE, {"blueprint": "noop", "tempo": 3}), "advance": (ADVANCE, {}), "prune": (PRUNE, {}),
             "fade": (PRUNE, {"alpha_speed": 3}), "lower": (RETARGET, {"alpha_target": 0.5}),
             "raise": (RETARGET, {"alpha_target": 1.0}), "keep": (KEEP, {})}
    return [entry(SPEC, at, lines[move][0], slot=0, **lines[move][1]) for at, move in enumerate(moves)]


LOOPS = [("germinate", "prune"), ("germinate", "advance", "prune"), ("germinate", "advance", "fade"),
         ("germinate", "advance", "lower", "raise", "prune"), ("germinate", "advance", "lower", "prune"),
         ("germinate", "prune", "germinate", "prune"), ("germinate", "advance", "prune", "germinate", "advance", "fade"),
         ("germinate", "advance", "keep"), ("germinate",), ("germinate", "advance")]


@pytest.mark.parametrize("reward", REWARDS)
def test_lives_of_null_seeds_earn_nothing(reward: str) -> None:
    """Closed loops, commitments and idle holding with a seed that computes nothing; rent and compute make them a loss."""
    made = world(len(LOOPS), reward, horizon=16)
    earned = returns(made, Scripted([null_script(moves) for moves in LOOPS]))
    assert bool((earned <= 0).all()), dict(zip(LOOPS, earned.tolist(), strict=True))


@pytest.mark.parametrize("reward", REWARDS)
def test_no_search_finds_a_return_with_null_seeds(reward: str) -> None:
    """Random legal sequences, then a hill-climb from the best of them. 2,000 here; experiments/unfarmable.py tries 10,000."""
    assert search(reward, rows=250, rounds=8) <= 0


@pytest.mark.parametrize("reward", REWARDS)
def test_waiting_earns_exactly_nothing(reward: str) -> None:
    made = world(16, reward)
    assert bool((returns(made, Wait()) == 0).all())


@pytest.mark.parametrize(("score", "counts"), [("smooth", "smooth"), ("score", "score"), ("delivered", "score")])
def test_utility_telescopes_to_the_utility_of_what_is_delivered(score: str, counts: str) -> None:
    """The return, computed again from the network that is left: its score above its twin's, less its price and compute."""
    made = world(32, horizon=10, score=score)
    for seed in range(2):
        total = returns(made, Random(seed))
        env, twins = made.env, made.twins(made.env.scenarios)[:, -1, ("loss", "score", "smooth").index(counts)]
        assert env.measured is not None
        fossils = (env.population.costs()[0] * env.population.life.at(SeedStage.FOSSILIZED)).sum(1)
        grown = env.population.life.germinations.sum(1) > 0
        gain = torch.where(grown, getattr(env.measured.evidence.delivered, counts) - twins, 0.0)
        expected = gain - env.scenarios.price * fossils - env.scenarios.flop_price * env.measured.spent
        torch.testing.assert_close(total, expected.float(), atol=1e-6, rtol=0)
        assert int(grown.sum()) > 16
        assert bool((fossils > 0).any())


def test_terminal_pays_the_same_at_once() -> None:
    paid = {}
    for reward in ("utility", "terminal"):
        made = world(16, reward)
        played = made.play(Random(4), made.env.family.scenarios(16))
        paid[reward] = (played.reward[:-1].sum(0), played.returns)
    assert bool((paid["terminal"][0] == 0).all())
    torch.testing.assert_close(paid["terminal"][1], paid["utility"][1], atol=1e-6, rtol=0)


@pytest.mark.parametrize("score", ["smooth", "delivered"])
@pytest.mark.parametrize("reward", ["utility", "contribution", "shaped"])
def test_holding_for_ever_earns_less_than_committing(reward: str, score: str) -> None:
    """Two equal lives of a seed that helps; one is kept at last, the other is not."""
    life = [entry(SPEC, 0, GERMINATE, slot=0, blueprint="mlp_heavy", tempo=3), entry(SPEC, 1, ADVANCE, slot=0)]
    made = world(16, reward, horizon=12, prices=(0.0,), score=score)
    earned = returns(made, Scripted([life] * 8 + [[*life, entry(SPEC, 2, KEEP, slot=0)]] * 8))
    assert bool(made.env.population.life.at(SeedStage.FOSSILIZED)[8:, 0].all())
    assert float(earned[8:].mean()) > float(earned[:8].mean())
    luck = 1.5 / 120 if score == "delivered" else 0.0  # a host that lost its seed may be right about one sample more
    assert float(earned[:8].max()) <= luck, "what is not committed is worth nothing"


def test_shaping_changes_no_return() -> None:
    totals = [returns(world(24, reward), Random(2)) for reward in ("contribution", "shaped")]
    torch.testing.assert_close(*totals, atol=1e-6, rtol=0)
    made = world(24, "shaped")
    played = made.play(Random(2), made.env.family.scenarios(24))
    assert bool((played.reward[0] > 0).any()), "a life that moves on is paid for it, and pays it back"


def bounds(env: MorphogeneticEnv) -> tuple[torch.Tensor, torch.Tensor]:
    """(least, most) [N] that `utility` can return: all or nothing in score, at the highest cost there is."""
    costs = torch.tensor([[(p.cost.params + p.gate_size, p.cost.flops + 2 * p.gate_size) for p in slot]
                          for slot in env.population.prototypes])  # [S, K, 2]
    most, host = costs.amax(1).sum(0), env.family.host.cost.flops
    spent = (3 * most[1] + 2 * host * env.spec.slots) / (3 * host)
    previews = 0.0
    if env.previews is not None:
        share = env.previews.steps / env.feed.steps / env.previews.every
        previews = float((costs[..., 1] * 3 + 2 * host).sum() / (3 * host)) * share
    cost = env.scenarios.price * most[0] + env.scenarios.flop_price * (spent + previews)
    return -1 - cost, torch.ones_like(cost)


@pytest.mark.parametrize("previews", [None, PreviewConfig(every=2, steps=2)])
def test_returns_stay_in_their_bound(previews: PreviewConfig | None) -> None:
    made = world(50, "utility", horizon=8, prices=(0.0, 1e-3), previews=previews)
    for start in range(0, 200 if previews is None else 50, 50):
        total = returns(made, Random(start), start)
        least, most = bounds(made.env)
        assert bool(((total >= least) & (total <= most)).all())


def test_terms_sum_to_the_reward_and_ended_rows_are_paid_nothing() -> None:
    family = toy_family(HOST, horizons=(7, 9), prices=(1e-4,))
    made = RewardWorld(toy_env(16, family), Twins(toy_env(16, family)))
    played = made.play(Random(1), family.scenarios(16))
    short = played.episodes.scenarios.horizon == 7
    assert 0 < int(short.sum()) < 16
    assert played.reward.shape == (9, 16)
    torch.testing.assert_close(torch.stack(list(played.terms.values())).sum(0), played.reward)
    assert bool((played.reward[7:, short] == 0).all())
    assert bool((played.reward[:7, short] != 0).any())
    torch.testing.assert_close(played.returns, played.reward.sum(0))
    assert len(played.inputs) == 9
    assert bool(played.episodes.measured["done"][-1].all())


def twins_of(rows: int, horizon: int) -> torch.Tensor:
    """[N, epochs, 3] that nobody could mistake for another row's or epoch's."""
    return (torch.arange(rows)[:, None, None] * 100 + torch.arange(horizon)[None, :, None] * 3 + torch.arange(3)) / 1000


def test_a_row_is_paid_above_its_twin_of_the_same_epoch() -> None:
    """In mid-episode as at its end; a row that never germinated is its own twin."""
    family = toy_family(HOST, horizons=(4, 7), prices=(0.0,))
    made = RewardWorld(toy_env(6, family), lambda scenarios: twins_of(6, 7))  # type: ignore[arg-type]
    grow = [entry(SPEC, 1, GERMINATE, slot=0, blueprint="mlp_small")]
    played = made.play(Scripted([[], grow, [], grow, grow, grow]), family.scenarios(6))
    measured, horizon, twin = played.episodes.measured, played.episodes.scenarios.horizon.tolist(), twins_of(6, 7)
    assert set(horizon[3:]) == {4, 7}
    for row, last in enumerate(horizon):
        for epoch in range(last):
            now, over = played.inputs[epoch], epoch == last - 1
            mine = measured["delivered.score" if over else "all_on.smooth"][epoch, row]
            grown = row in (1, 3, 4, 5) and epoch >= 1
            beside = twin[row, epoch, 1 if over else 2] if grown else mine
            torch.testing.assert_close(now.score[row], mine, atol=0, rtol=0)
            torch.testing.assert_close(now.twin[row], beside, atol=0, rtol=0)
        total = played.terms["gain"][:, row].sum()
        torch.testing.assert_close(total, (now.score[row] - now.twin[row]), atol=1e-6, rtol=0)


def test_the_critic_is_told_the_twin_of_now_and_of_the_end() -> None:
    family = toy_family(HOST, horizons=(4, 7), prices=(1e-4,), flop_prices=(0.01,))
    made = RewardWorld(toy_env(6, family), lambda scenarios: twins_of(6, 7))  # type: ignore[arg-type]
    agent = PPOAgent(Controller.fresh(SPEC, NetworkConfig(16, 8, 6, 12, privileged=len(PRIVILEGED))), PPOConfig(minibatches=1))
    buffer = agent.buffer(made.steps, 6)
    scenarios = family.scenarios(6)
    played = made.collect(agent, scenarios, buffer, seed=(0,))
    told = dict(zip(PRIVILEGED, buffer["privileged"].unbind(2), strict=True))  # [T, N] each
    twin, rows, end = twins_of(6, 7), torch.arange(6), scenarios.horizon - 1
    assert set(end.tolist()) == {3, 6}
    paid = torch.cat([torch.zeros(1, 6), played.reward.cumsum(0)[:-1]])
    for epoch in range(7):
        live = rows[end >= epoch]
        mine, last = twin[live, max(epoch - 1, 0)], twin[live, end[live]]  # of epochs that are over
        expected = {"twin_now": 5 * (mine[:, 2] - 0.5), "twin_score": 5 * (last[:, 1] - 0.5),
                    "twin_smooth": 5 * (last[:, 2] - 0.5), "paid": 10 * paid[epoch, live]}
        for name, values in expected.items():
            torch.testing.assert_close(told[name][epoch, live], values, atol=1e-5, rtol=0, msg=name)
    torch.testing.assert_close(buffer["reward"], played.reward)
    assert torch.equal(buffer["done"], played.episodes.measured["done"])


def test_unknown_names_are_refused() -> None:
    with pytest.raises(EsperError, match="no reward 'fame'; choose from utility, terminal, contribution, shaped"):
        Ledger("fame", 1)
    with pytest.raises(EsperError, match="no score 'fame'; choose from score, smooth, delivered"):
        returns(world(1, score="fame"), Wait())


def test_replay_is_exact_beside_half_precision_hosts(device: str) -> None:
    """The hosts compute in bfloat16; the controller stays in float32 and its ratios at 1."""
    family = toy_family(HOST, horizons=(8,))
    env, beside = (toy_env(16, family, device=device, compute_dtype=torch.bfloat16) for _ in range(2))
    made = RewardWorld(env, Twins(beside))
    agent = PPOAgent(Controller.fresh(SPEC, device=device), PPOConfig(epochs=1, minibatches=1, explore=(0.05, 0.0)))
    buffer = agent.buffer(made.steps, 16)
    made.collect(agent, family.scenarios(16), buffer, seed=(0,), privileged=False)
    metrics = agent.update(buffer, torch.zeros(16, device=device))
    assert next(agent.network.parameters()).dtype == torch.float32
    assert metrics.replay_error < 1e-5
    assert metrics.ratio_max == pytest.approx(1, abs=1e-5)
    assert metrics.ratio_min == pytest.approx(1, abs=1e-5)
