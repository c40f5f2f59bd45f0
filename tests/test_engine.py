"""The engine computes what the general path does. Without a GPU its kernels run in Triton's interpreter."""

import copy
import os
import re
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

from esper.kasmina import Host, Impairments, OptimConfig, Population, engine, register_blueprint
from esper.kasmina.blueprints import BLUEPRINTS
from esper.kasmina.engine import engine as engine_module
from esper.kasmina.engine.epoch import EngineEpoch
from esper.kasmina.layers import Modulate
from esper.kasmina.packing import Prefix
from esper.leyline import ActionSpec, LifecycleOp, SeedStage, Style
from esper.leyline.keys import mix
from esper.tolaria import preview_candidates
from tests.reference import batch, small_hosts, wait
from tests.workshop import toy_env, toy_family

pytest.importorskip("triton")
Pair = tuple[Population, Population]


@pytest.fixture(autouse=True)
def _on_every_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "usable", lambda device: True)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def pair(kind: str, rows: int, device: str, **config: object) -> Pair:
    """The same population by the engine and by the general path."""
    ours, general = (Population(Host(kind, **small_hosts()[kind]), rows, device=device, **config) for _ in range(2))
    assert ours.by_engine
    general._engines = None
    return ours, general


def both(populations: Pair, work: Callable[[Population], object]) -> None:
    for population in populations:
        work(population)


def plant(population: Population, blueprint: torch.Tensor, style: torch.Tensor, stage: SeedStage = SeedStage.HOLDING) -> None:
    """Seeds that do something, at alpha 0.7."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.arange(len(blueprint))
    population.install(rows, blueprint, style, torch.full(blueprint.shape, 0.7), stage)
    for bank in population.banks[1:]:
        noise = 0.2 * torch.randn(bank.weights.shape, generator=generator).to(bank.weights)
        bank.weights += noise * (bank.weights.abs().sum(1, keepdim=True) > 0)
    for bank in population.banks[:1]:
        bank.weights += 0.2 * torch.randn(bank.weights.shape, generator=generator).to(bank.weights)


def alike(populations: Pair, tolerance: float = 1e-5) -> None:
    both(populations, Population._flush)
    for mine, theirs in zip(*(p.banks for p in populations), strict=True):
        torch.testing.assert_close(mine.weights, theirs.weights, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(mine.first, theirs.first, rtol=tolerance, atol=tolerance)
        assert torch.equal(mine.steps, theirs.steps)
    assert all(torch.equal(mine, dict(populations[1].life.fields())[name]) for name, mine in populations[0].life.fields())


def trained(populations: Pair, steps: int, size: int, count: int, tolerance: float = 1e-5) -> None:
    """Some steps by both, and the same losses."""
    losses = []
    for population in populations:
        generator = torch.Generator().manual_seed(2)
        for _ in range(steps):
            x, y = batch(population, size, generator)
            losses.append(population.train_step(x[:, :count], y[:, :count]))
    torch.testing.assert_close(torch.stack(losses[:steps]), torch.stack(losses[steps:]), rtol=tolerance, atol=tolerance)
    assert isinstance(populations[0]._run, EngineEpoch)
    assert not isinstance(populations[1]._run, EngineEpoch)


@pytest.mark.parametrize("kind", ["mlp", "conv1d", "cnn"])
def test_every_blueprint_and_style(kind: str, device: str) -> None:
    """Blended and incubating seeds, an empty slot, training, evaluation with counterfactual rows."""
    populations = pair(kind, 4, device, optim=OptimConfig("sgd", lr=0.1))
    kinds = len(populations[0].spec.blueprints)
    blueprint = (torch.arange(12).view(4, 3) + torch.arange(3)) % kinds
    blueprint[0, 1] = -1
    both(populations, lambda p: plant(p, blueprint, torch.arange(12).view(4, 3) % len(Style)))
    young = torch.tensor([[0, 0, 0], [0, 1, 0], [1, 0, 0], [0, 1, 1]], dtype=torch.bool) & (blueprint > 0)

    def incubate(population: Population) -> None:
        life = population.life
        life.stage[young], life.target[young], life.alpha[young] = SeedStage.TRAINING, 0.5, 0.0
        wait(population)

    both(populations, incubate)
    trained(populations, 1 if device == "cpu" else 3, 3, 4)  # on CUDA the second step is a replayed graph
    x, _ = batch(populations[0], 5, torch.Generator().manual_seed(3))
    env, alpha = torch.tensor([3, 1, 1]), torch.tensor([[0.7, 0.0, 0.7], [0.0, 0.0, 0.0], [0.7, 0.5, 0.7]])
    mine, theirs = (p.probe(env, alpha)(x) for p in populations)
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
    assert float((mine[:, 4:] - mine[:, env]).abs().amax((0, 2)).min()) > 1e-3, "counterfactual rows differ"
    torch.testing.assert_close(populations[0].forward(x), mine[:, :4], rtol=0, atol=0)
    chosen = [p.forward(x[:, :3], env, alpha) for p in populations]
    torch.testing.assert_close(*chosen, rtol=1e-5, atol=1e-5)
    alike(populations)


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.0, 0.0)])
def test_adamw_with_decay_clipping_and_frozen_weights(betas: tuple[float, float], device: str) -> None:
    optim = OptimConfig(lr=0.05, weight_decay=0.1, host_clip=0.3, seed_clip=0.2, eps=1e-3, betas=betas)
    populations = pair("mlp", 3, device, optim=optim)
    frozen = torch.tensor([[True, False, False], [False, False, False], [False, True, True]])
    narrow = torch.ones(3, 3)

    def prepare(population: Population) -> None:
        population.reset(torch.arange(3), torch.arange(3), Impairments(torch.zeros_like(frozen), narrow, frozen))
        plant(population, torch.tensor([[1, 2, 3], [4, 5, -1], [-1, -1, -1]]), torch.zeros(3, 3, dtype=torch.int64))
        wait(population)

    both(populations, prepare)
    before = populations[0].banks[0].weights.clone()
    trained(populations, 2, 4, 3)
    both(populations, lambda p: p.set_lr(torch.full((3, 4), 0.01)))
    trained(populations, 1, 4, 3)
    alike(populations)
    still = populations[0].trainable == 0
    assert torch.equal(populations[0].banks[0].weights[still], before[still])
    assert not torch.equal(populations[0].banks[0].weights, before)


def test_rows_at_rest_and_labels_that_are_numbers(device: str) -> None:
    host = Host("mlp", (4,), (5, 5), 1)
    ours, general = (Population(host, 4, device=device, objective="regression", optim=OptimConfig("sgd")) for _ in range(2))
    general._engines = None
    resting = torch.tensor([False, True, False, True])
    for population in (ours, general):
        plant(population, torch.tensor([[1, 2], [2, 1], [3, -1], [-1, 4]]), torch.zeros(4, 2, dtype=torch.int64))
        waiting = torch.tensor([population.spec.action(LifecycleOp.WAIT)]).repeat(4, 1)
        population.begin_epoch(waiting, resting)
    before = ours.banks[0].weights.clone()
    x, y = torch.randn(6, 2, 4, device=device), torch.randn(6, 2, device=device)
    torch.testing.assert_close(ours.train_step(x, y), general.train_step(x, y), rtol=1e-5, atol=1e-5)
    probes = [p.probe(torch.tensor([1]), torch.tensor([[0.0, 0.7]]))(x) for p in (ours, general)]
    torch.testing.assert_close(*probes, rtol=1e-5, atol=1e-5)
    alike((ours, general))
    assert torch.equal(ours.banks[0].weights[resting], before[resting])


def test_shadow_steps_behind_shared_hosts(device: str) -> None:
    populations = pair("conv1d", 4, device, optim=OptimConfig("sgd", lr=0.1))

    def incubate(population: Population) -> None:
        population.reset(torch.arange(4), mix(torch.tensor([0, 0, 1, 1]), 5))
        spec = population.spec
        population.begin_epoch(torch.tensor([
            spec.action(LifecycleOp.GERMINATE, slot=row % 3, blueprint=spec.blueprints[1 + 2 * row]) for row in range(4)]))

    both(populations, incubate)
    prefix = Prefix(torch.tensor([0, 2]), torch.tensor([0, 0, 1, 1]))
    hosts = populations[0].banks[0].weights.clone()
    x, y = (t[:, :2] for t in batch(populations[0], 4, torch.Generator().manual_seed(1)))
    for population in populations:
        population.shadow_step(x, y, prefix)
        population.shadow_step(x, y, prefix)
    every, alpha = torch.arange(4), torch.eye(4)[:, [0, 1, 2]] + torch.eye(4)[:, [3, 3, 3]] * torch.tensor([1.0, 0, 0])
    torch.testing.assert_close(*(p.probe(every, alpha, prefix)(x) for p in populations), rtol=1e-5, atol=1e-5)
    both(populations, Population._flush)
    for mine, theirs in zip(populations[0].banks[1:], populations[1].banks[1:], strict=True):
        torch.testing.assert_close(mine.weights, theirs.weights, rtol=1e-5, atol=1e-5)
        assert bool(mine.first.abs().sum(1).bool().any()), "seeds learned"
    assert torch.equal(populations[0].banks[0].weights, hosts)


def test_one_row_without_a_seed_and_batches_of_two_sizes(device: str) -> None:
    populations = pair("mlp", 1, device, optim=OptimConfig("sgd"))
    both(populations, wait)
    for size in (4, 3, 2, 4):  # more than engines are kept for
        trained(populations, 1, size, 1)
    alike(populations)
    assert len(populations[0]._engines._made) == 2
    both(populations, lambda p: p.set_lr(torch.zeros(1, 4)))
    before = populations[0].banks[0].weights.clone()
    twin = copy.deepcopy(populations[0])
    twin.set_lr(torch.full((1, 4), 0.1))
    twin.train_step(*batch(twin, 4, torch.Generator().manual_seed(5)))
    assert torch.equal(populations[0].banks[0].weights, before), "a copy trains itself alone"
    assert not torch.equal(twin.banks[0].weights, before)


def test_a_broken_row_stays_alone(device: str) -> None:
    """Bit for bit; and its seed is not healthy."""
    def run(poison: bool) -> Population:
        population, _ = pair("mlp", 3, device)
        plant(population, torch.tensor([[1, 2, 3]] * 3), torch.zeros(3, 3, dtype=torch.int64))
        wait(population)
        if poison:
            population.banks[0].weights[1, 0] = population.banks[2].weights[1, 0] = float("nan")
        generator = torch.Generator().manual_seed(0)
        for _ in range(2):
            population.train_step(*batch(population, 4, generator))
        population.end_epoch()
        return population

    sick, well = run(True), run(False)
    for bank, other in zip(sick.banks, well.banks, strict=True):
        assert torch.equal(bank.weights[[0, 2]], other.weights[[0, 2]])
    assert bool(well.life.healthy.all())
    assert not bool(sick.life.healthy[1].any())
    assert bool(sick.life.healthy[[0, 2]].all())


def test_bfloat16_stays_near(device: str) -> None:
    if device == "cpu":
        pytest.skip("the interpreter multiplies bfloat16 as whole numbers")
    populations = pair("cnn", 2, device, compute_dtype="bfloat16", optim=OptimConfig("sgd"))
    exact, _ = pair("cnn", 2, device, optim=OptimConfig("sgd"))
    both((*populations, exact), lambda p: plant(p, torch.tensor([[2, 3, 1], [5, 6, 4]]), torch.zeros(2, 3, dtype=torch.int64)))  # type: ignore[arg-type]
    both((*populations, exact), wait)  # type: ignore[arg-type]
    x, y = batch(exact, 3, torch.Generator().manual_seed(1))
    losses = [p.train_step(x, y) for p in (populations[0], exact)]
    torch.testing.assert_close(*losses, rtol=1e-2, atol=1e-2)
    populations[1].train_step(x, y)
    both((*populations, exact), Population._flush)  # type: ignore[arg-type]
    for ours, general, fine in zip(*(p.banks for p in (*populations, exact)), strict=True):
        ours_off, general_off = ((bank.first - fine.first).norm() / fine.first.norm() for bank in (ours, general))
        assert float(ours_off) < 1.5 * float(general_off) + 1e-2


def test_more_rows_leave_the_sums_of_others_as_they_were(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """Buffers grow with seeds that incubate; the parts in which a host's gradient is added up do not."""
    monkeypatch.setattr(engine_module, "PROGRAMS", 128)
    weights = []
    for seeded in (False, True):
        spec = ActionSpec.decisive(3, ("noop", "norm"))
        population = Population(Host("mlp", **small_hosts()["mlp"]), 17, spec=spec, device=device)
        actions = torch.tensor([population.spec.action("WAIT")]).repeat(17, 1)
        if seeded:
            blueprint = torch.ones(17, 3, dtype=torch.int64)
            population.install(torch.arange(17), blueprint, torch.zeros_like(blueprint), torch.full((17, 3), 0.5), SeedStage.TRAINING)
            population.life.alpha[:] = 0.0
        population.begin_epoch(actions)
        population.train_step(*batch(population, 16, torch.Generator().manual_seed(0)))
        assert (population._run.rows.env.numel() > 64) == seeded
        weights.append(population.banks[0].weights)
    assert torch.equal(*weights)


def test_what_has_no_op_runs_by_the_general_path() -> None:
    def by_engine(kind: str, **config: object) -> bool:
        return Population(Host(kind, **small_hosts()[kind]), 2, **config).by_engine

    assert by_engine("mlp")
    assert not by_engine("mlp", dtype="float64")
    assert not by_engine("mlp", incubation="straight_through")
    assert by_engine("mlp", compute_dtype="bfloat16")
    assert not Population(Host("cnn", (3, 32, 32), (64, 16)), 1).by_engine, "no kernel has room for such samples"
    assert not by_engine("gpt")
    assert not by_engine("resnet")
    for body in (lambda channels: torch.nn.Softmax(1), lambda channels: Modulate(torch.nn.Tanh())):
        register_blueprint("theirs", body, ("mlp",))
        try:
            assert not by_engine("mlp")
        finally:
            del BLUEPRINTS["mlp", "theirs"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="captures are made on CUDA")
def test_one_capture_of_each_kind_serves_any_topology() -> None:
    population, _ = pair("conv1d", 16, "cuda")
    generator = torch.Generator().manual_seed(0)
    for _ in range(6):
        rows, shape = torch.arange(16), (16, 3)
        population.reset(rows, torch.randint(2**60, (16,), generator=generator))
        plant(population, torch.randint(-1, len(population.spec.blueprints), shape, generator=generator),
              torch.randint(len(Style), shape, generator=generator))
        wait(population)
        for _ in range(3):
            x, y = batch(population, 8, generator)
            population.train_step(x, y)
        population.probe(rows, torch.rand(shape, generator=generator))(x)
        population.end_epoch()
    assert sum(made.captures for made in population._engines._made.values()) == 2


def test_an_environment_measures_the_same(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """Episodes of two lengths, so that a row comes to rest; previews in a population of their own."""
    def play(on: bool) -> list[dict[str, torch.Tensor]]:
        monkeypatch.setattr(engine, "usable", lambda device: on)
        family = toy_family(horizons=(2, 3), samples=16, validation=8, batch=8)
        env = toy_env(2, family, spec=None, device=device)
        env.reset(env.family.scenarios(2))
        assert env.population.by_engine == on
        actions = [[env.spec.action(LifecycleOp.GERMINATE, slot=row, blueprint=env.spec.blueprints[2 + row]) for row in range(2)],
                   [env.spec.action(LifecycleOp.WAIT)] * 2]
        measured = []
        for number in range(3):
            measured.append(env.step(torch.tensor(actions[number > 0])).tensors())
            if number == 0:
                measured[-1] |= {f"preview.{n}": t for n, t in vars(preview_candidates(env, 2)).items()}
        return measured

    for ours, general in zip(play(True), play(False), strict=True):
        for name, tensor in ours.items():
            torch.testing.assert_close(tensor, general[name], rtol=1e-3, atol=1e-3, equal_nan=True, msg=name)


UPDATE_FOR_HOPPER = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from esper.kasmina.engine.update import update

constants = dict(CLIP=1.0, BETA1=0.9, BETA2=0.999, LOG1=-0.1, LOG2=-0.001, EPS=1e-8, SGD=False, FROZEN=True, BLOCK=512)
types = dict(steps="*i64", sizes="*i32", kinds="*i32", flags="*i32", finite="*i8", stride="i32", rows="i32", width="i32", chunks="i32")
names = update.arg_names
signature = {name: "constexpr" if name in constants else types.get(name, "*fp32") for name in names}
values = {(names.index(name),): value for name, value in constants.items()}
source = ASTSource(update, signature, values)
print(triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4}).asm["ptx"])
"""


def test_every_warp_reads_the_count_of_steps_before_it_is_written() -> None:
    """On a shared device warps drift apart: one that read late corrected its bias for a step too many."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    made = subprocess.run([sys.executable, "-c", UPDATE_FOR_HOPPER], env=environment, capture_output=True, text=True, timeout=120)
    assert made.returncode == 0, made.stderr
    order = re.findall(r"ld\.global\.b64|bar\.sync|st\.global\.b64", made.stdout)
    assert order.count("st.global.b64") == 1  # whole numbers of 64 bits are counts
    assert order[order.index("ld.global.b64") :] == ["ld.global.b64", "bar.sync", "st.global.b64"]
