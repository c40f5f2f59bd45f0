"""What is the door worth on a residual net for CIFAR-10 and on a GPT of a million parameters? Beside static nets.

    python -m experiments.door_real cifar10 text --text tinyshakespeare.txt --seeds 5

Every arm has the same data, batches, optimizer and schedule. Grown arms: the heuristic, a shipped mind, random growth, and the
best of a few fixed plans (one blueprint in every slot), chosen on validation samples with a seed of its own. Static arms: the
net itself; a wider one with at least as many parameters as the heuristic delivered on average; the net itself, trained for as
many more epochs as the dearest grown arm spent FLOPs. Decisions use validation samples. The test samples (CIFAR-10's test
split; the last twentieth of the text) are opened once, at the end, and choose nothing. Runs are kept in --cache as they end, so
that a killed command goes on. Writes experiments/results/door_real-NAME.json.
"""

import copy
import json
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import esper
from esper.leyline.storage import atomic_write
from esper.tolaria import ProofKey, load_task, open_test
from experiments.references import PlainGPT
from experiments.shared import parser, write


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(outputs) for _ in range(2))
        self.skip = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norms[1](self.second(F.relu(self.norms[0](self.first(x))))) + self.skip(x))


def resnet(width: int) -> nn.Module:
    """Twenty layers, of a quarter of the usual parameters where the width is 8."""
    stages, before = [], width
    for stage in range(3):
        after = width << stage
        stages.append(nn.Sequential(*(Block(before if not block else after, after, 2 if stage and not block else 1) for block in range(3))))
        before = after
    stem = nn.Sequential(nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
    return nn.Sequential(stem, *stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 10))


def gpt(width: int) -> nn.Module:
    return PlainGPT(65, LENGTH, width, 5, 4)


LENGTH = 64


@dataclass
class Case:
    """A task as a user has it."""

    build: Callable[[int], nn.Module]
    width: int
    widths: range
    slots: list[str]
    plans: tuple[str, ...]
    objective: str
    epochs: int
    batch: int
    rate: float
    shadow: int
    train: tuple[Tensor, Tensor]
    validation: tuple[Tensor, Tensor]
    test: Callable[[], tuple[Tensor, Tensor]]


def cifar10(options: Any) -> Case:
    data = load_task("cifar10")
    return Case(resnet, 8, range(9, 24), ["1", "2", "3"], ("depthwise", "conv_small", "conv_heavy"), "classification", 10, 64, 5e-3, 12,
                (data.x[:2500], data.y[:2500]), (data.validation_x[:600], data.validation_y[:600]),
                lambda: open_test("cifar10", ProofKey("the door on a residual net: no choice is made with it")))


def text(options: Any) -> Case:
    raw = options.text.read_text()
    letters = {letter: number for number, letter in enumerate(sorted(set(raw)))}
    tokens = torch.tensor([letters[letter] for letter in raw])
    pieces = tokens[: (len(tokens) - 1) // LENGTH * LENGTH].view(-1, LENGTH), tokens[1 : (len(tokens) - 1) // LENGTH * LENGTH + 1].view(-1, LENGTH)
    count = len(pieces[0])

    def part(first: float, last: float, most: int) -> tuple[Tensor, Tensor]:
        chosen = slice(int(first * count), min(int(last * count), int(first * count) + most))
        return pieces[0][chosen], pieces[1][chosen]

    return Case(gpt, 128, range(132, 200, 4), [f"think.{n}" for n in range(5)], ("mlp_small", "mlp_heavy", "norm"), "next-token", 10, 16, 2e-3, 8,
                part(0, 0.9, 400), part(0.9, 0.95, 100), lambda: part(0.95, 1, 400))


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, -2), batch[1].flatten())


def score(case: Case, model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Accuracy in percent, or minus the loss in hundredths of a nat: points, higher is better."""
    model.eval()
    with torch.no_grad():
        parts = [model(piece) for piece in x.split(200)]
    outputs = torch.cat(parts)
    if case.objective == "classification":
        return 100 * float((outputs.argmax(1) == y).double().mean())
    return -100 * float(F.cross_entropy(outputs.flatten(0, -2), y.flatten()))


def train(case: Case, seed: int, width: int, controller: Any, epochs: float) -> dict[str, Any]:
    torch.manual_seed(seed)
    model, (x, y) = case.build(width), case.train
    optimizer = torch.optim.AdamW(model.parameters(), lr=case.rate, weight_decay=0.02)
    per_epoch, total = len(x) // case.batch, round(epochs * (len(x) // case.batch))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / 40, 0.5 + 0.5 * math.cos(math.pi * min(step / total, 1))))
    batches = list(zip(x.split(case.batch), y.split(case.batch), strict=True))[:per_epoch]
    growing = None if controller is None else esper.attach(
        model, optimizer, example=x[:4], slots=case.slots, controller=controller, epochs=case.epochs, schedulers=[schedule], loss=loss_of,
        data=batches, objective=case.objective, shadow_steps=case.shadow)

    def evaluate() -> tuple[Tensor, Tensor]:
        model.eval()
        with torch.no_grad():
            return torch.cat([model(piece) for piece in case.validation[0].split(200)]), case.validation[1]

    begin, step = time.perf_counter(), 0
    while step < total:
        model.train()
        for chosen in torch.randperm(len(x)).split(case.batch)[:per_epoch]:
            if step == total:
                break
            optimizer.zero_grad()
            loss_of(model, (x[chosen], y[chosen])).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            step += 1
        if growing is not None:
            growing.end_epoch(evaluate)
    seconds, spent = time.perf_counter() - begin, 0.0 if growing is None else growing.compute.spent
    grew = [] if growing is None else [f"{r.epoch} {r.decision}" for r in growing.history if r.decision != "WAIT"]
    made = model if growing is None else growing.deliver()
    return {"module": made, "seconds": seconds, "spent": spent, "grew": grew, "parameters": sum(p.numel() for p in made.parameters()),
            "validation": score(case, made, *case.validation)}


def run(case: Case, name: str, options: Any) -> dict[str, Any]:
    options.cache.mkdir(parents=True, exist_ok=True)

    def done(arm: str, seed: int, width: int, controller: Any, epochs: float) -> dict[str, Any]:
        path = options.cache / f"{name}-{arm.replace(' ', '_')}-{seed}.json"
        weights = path.with_suffix(".pt")
        if path.exists():
            return json.loads(path.read_text()) | {"module": torch.load(weights, weights_only=False)}
        result = train(case, seed, width, copy.deepcopy(controller), epochs)
        torch.save(result["module"], weights)
        kept = {key: value for key, value in result.items() if key != "module"}
        atomic_write(path, json.dumps(kept))
        print(f"{arm} {seed}: {kept}", flush=True)
        return result

    everywhere = {plan: dict.fromkeys(case.slots, plan) for plan in case.plans}
    tuned = {plan: done(f"plan {plan}", 1000, case.width, seeds, case.epochs)["validation"] for plan, seeds in everywhere.items()}
    best = max(tuned, key=lambda plan: tuned[plan])
    seeds = range(options.seeds)
    arms = {arm: [done(arm, seed, case.width, controller, case.epochs) for seed in seeds] for arm, controller in (
        ("static", None), ("heuristic", "heuristic"), ("tamiyo-small", "tamiyo-small"), ("random", "random"), ("best plan", everywhere[best]))}
    size = statistics.fmean(each["parameters"] for each in arms["heuristic"])
    wide = next(w for w in case.widths if sum(p.numel() for p in case.build(w).parameters()) >= size)
    arms["wider"] = [done("wider", seed, wide, None, case.epochs) for seed in seeds]
    dearest = max(statistics.fmean(each["spent"] for each in arms[arm]) for arm in ("heuristic", "tamiyo-small", "best plan"))
    arms["longer"] = [done("longer", seed, case.width, None, case.epochs * (1 + dearest)) for seed in seeds]
    x, y = case.test()
    found = {arm: [score(case, each["module"], x, y) for each in made] for arm, made in arms.items()}
    result: dict[str, Any] = {"seeds": options.seeds, "epochs": case.epochs, "samples": len(case.train[0]), "width": case.width, "wider width": wide,
                              "longer by": dearest, "plans on validation": tuned, "best plan": best}
    for arm, made in arms.items():
        gains = [a - b for a, b in zip(found[arm], found["static"], strict=True)]
        error = statistics.stdev(gains) / math.sqrt(len(gains)) if arm != "static" and len(gains) > 1 else 0.0
        mean = {key: statistics.fmean(each[key] for each in made) for key in ("parameters", "spent", "seconds")}
        result[f"arm {arm}"] = {"score": statistics.fmean(found[arm]), "gain": statistics.fmean(gains), "error": error, "all": found[arm], **mean}
        print(arm, {key: value for key, value in result[f"arm {arm}"].items() if key != "all"})
    return result


def main() -> None:
    options = parser(__doc__)
    options.add_argument("names", nargs="+", choices=list(CASES))
    options.add_argument("--seeds", type=int, default=5)
    options.add_argument("--text", type=Path)
    options.add_argument("--cache", type=Path, default=Path("door_real"))
    chosen = options.parse_args()
    torch.set_num_threads(1)
    for name in chosen.names:
        write(chosen, f"door_real-{name}", run(CASES[name](chosen), name, chosen))


CASES: dict[str, Callable[[Any], Case]] = {"cifar10": cifar10, "text": text}

if __name__ == "__main__":
    main()
