"""What is the door worth on an ordinary model? A small convolutional net on MNIST-1D, attached, beside static ones.

    python -m experiments.door_worth --seeds 8

Every arm trains for the same epochs with the same optimizer, schedule and batches. Decisions and evidence use the validation
split; the test split is opened once, at the end, and chooses nothing. "wider" is a static net with at least as many
parameters as the heuristic delivered on average. Writes experiments/results/door_worth.json.
"""

import math
import statistics
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import esper
from esper.tolaria import ProofKey, load_task, open_test
from experiments.shared import parser, write

EPOCHS, BATCH, RATE = 24, 100, 1e-2


def net(*widths: int) -> nn.Module:
    stages = [nn.Sequential(nn.Conv1d(a, b, 3, padding=1), nn.BatchNorm1d(b), nn.ReLU(), nn.MaxPool1d(2))
              for a, b in zip((1, *widths), widths, strict=False)]
    return nn.Sequential(*stages, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(widths[-1], 10))


class All:
    """The simplest thing that might do as well: `conv_heavy` in every slot, one after the other, and keep it."""

    def __call__(self, view: Any) -> Tensor:
        spec, ops = view.spec, esper.LifecycleOp
        for slot in range(spec.slots):
            if bool(view.verdicts[0, slot, ops.FOSSILIZE]):
                return torch.tensor([spec.action("FOSSILIZE", slot=slot)])
        for slot in range(spec.slots):
            if bool(view.verdicts[0, slot, ops.GERMINATE]) and int(view.clock) < EPOCHS - 8:
                return torch.tensor([spec.action("GERMINATE", slot=slot, blueprint="conv_heavy")])
        return torch.tensor([spec.action("WAIT")])


def train(data: Any, seed: int, widths: tuple[int, ...], controller: Any) -> tuple[nn.Module, float]:
    torch.manual_seed(seed)
    model = net(*widths)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    steps = len(data.x) // BATCH
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * steps, eta_min=RATE / 20)
    batches = [(data.x[i : i + BATCH], data.y[i : i + BATCH]) for i in range(0, steps * BATCH, BATCH)]
    growing = None if controller is None else esper.attach(
        model, optimizer, example=data.x[:4], slots=["0", "1", "2"], controller=controller, epochs=EPOCHS, schedulers=[schedule],
        loss=lambda m, batch: F.cross_entropy(m(batch[0]), batch[1]), data=batches)

    def evaluate() -> Tensor:
        model.eval()
        with torch.no_grad():
            return (model(data.validation_x).argmax(1) == data.validation_y).double()

    begin = time.perf_counter()
    for _ in range(EPOCHS):
        model.train()
        for chosen in torch.randperm(len(data.x)).split(BATCH)[:steps]:
            optimizer.zero_grad()
            F.cross_entropy(model(data.x[chosen]), data.y[chosen]).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
        if growing is not None:
            growing.end_epoch(evaluate)
    return (model if growing is None else growing.deliver()).eval(), time.perf_counter() - begin


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--seeds", type=int, default=8)
    chosen = options.parse_args()
    torch.set_num_threads(1)
    data, widths = load_task("mnist1d"), (8, 12, 12)
    arms: dict[str, list[tuple[nn.Module, float]]] = {}
    for name, controller in (("static", None), ("heuristic", "heuristic"), ("random", "random"), ("all slots", All())):
        arms[name] = [train(data, seed, widths, controller) for seed in range(chosen.seeds)]
        print(name, flush=True)
    size = statistics.fmean(sum(p.numel() for p in model.parameters()) for model, _ in arms["heuristic"])
    factor = 1.0
    while sum(p.numel() for p in net(*(math.ceil(factor * w) for w in widths)).parameters()) < size:
        factor += 0.02
    wide = tuple(math.ceil(factor * w) for w in widths)
    arms["wider"] = [train(data, seed, wide, None) for seed in range(chosen.seeds)]
    x, y = open_test("mnist1d", ProofKey("the door on an ordinary model: no choice is made with it"))
    result: dict[str, Any] = {"seeds": chosen.seeds, "epochs": EPOCHS, "widths": widths, "wider": wide}
    with torch.no_grad():
        accuracy = {name: [float((model(x).argmax(1) == y).double().mean()) for model, _ in made] for name, made in arms.items()}
    for name, made in arms.items():
        gains = [a - b for a, b in zip(accuracy[name], accuracy["static"], strict=True)]
        error = statistics.stdev(gains) / math.sqrt(len(gains)) if name != "static" else 0.0
        result[name if name != "wider" else "wider net"] = {
            "accuracy": statistics.fmean(accuracy[name]), "gain": statistics.fmean(gains), "error": error, "all": accuracy[name],
            "parameters": statistics.fmean(sum(p.numel() for p in model.parameters()) for model, _ in made),
            "seconds": statistics.fmean(seconds for _, seconds in made)}
        print(name, {k: v for k, v in result[name if name != "wider" else "wider net"].items() if k != "all"})
    write(chosen, "door_worth", result)


if __name__ == "__main__":
    main()
