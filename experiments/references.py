"""Static hosts against plain PyTorch and published figures: the same recipe, batches and number of steps, in one run.

    python -m experiments.references diabetes fashion shakespeare cifar10 --text tinyshakespeare.txt
    python -m experiments.references cifar10-long shakespeare-long --text tinyshakespeare.txt --device cuda --workers 3

Hosts train as one population; plain modules are written here anew and train in a loop with `torch.optim`. Each has inits of
its own, so figures agree within their errors, not bit for bit. Test splits are opened once, at the end, and nothing is chosen
with them; Shakespeare's last tenth is the validation split of the published figure, which is the best loss that was seen on it. Of what
is `long`, plain modules run on a GPU, each in a process of its own where there are workers, and matrix products are of TF32. Writes
experiments/results/references-NAME.json for each.
"""

import math
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from esper.kasmina import Host, OptimConfig, Population
from esper.tolaria import ProofKey, TaskData, load_task, open_test
from experiments.shared import parser, write


class PlainAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.mix, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in self.mix(x).chunk(3, 2))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class PlainGPT(nn.Module):
    def __init__(self, vocabulary: int, length: int, width: int, blocks: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        nn.init.normal_(self.token.weight, std=0.02)
        nn.init.normal_(self.place.weight, std=0.02)
        self.dropout = nn.Dropout(dropout)
        self.attend = nn.ModuleList(nn.Sequential(nn.LayerNorm(width), PlainAttention(width, heads), nn.Dropout(dropout))
                                    for _ in range(blocks))
        self.think = nn.ModuleList(nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(),
                                                 nn.Linear(4 * width, width), nn.Dropout(dropout)) for _ in range(blocks))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        h = self.dropout(self.token(x) + self.place.weight)
        for attend, think in zip(self.attend, self.think, strict=True):
            h = h + attend(h)
            h = h + think(h)
        return self.head(h)


class PlainBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList(nn.GroupNorm(8, outputs) for _ in range(3))
        self.skip = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if stride > 1 else None

    def forward(self, x: Tensor) -> Tensor:
        h = self.norms[1](self.second(F.relu(self.norms[0](self.first(x)))))
        return F.relu(h + (x if self.skip is None else self.norms[2](self.skip(x))))


def plain_resnet(depth: int = 3) -> nn.Module:
    stages, before = [], 16
    for width in (16, 32, 64):
        stages.append(nn.Sequential(*(PlainBlock(width if block else before, width, 2 if width > before and not block else 1)
                                      for block in range(depth))))
        before = width
    return nn.Sequential(nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.GroupNorm(8, 16), nn.ReLU(), *stages,
                         nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def plain_cnn() -> nn.Module:
    stages = [layer for a, b in ((1, 16), (16, 32), (32, 64))
              for layer in (nn.Conv2d(a, b, 3, padding=1, bias=False), nn.GroupNorm(1, b), nn.ReLU(), nn.MaxPool2d(2))]
    return nn.Sequential(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def plain_mlp() -> nn.Module:
    stages = [layer for a, b in ((10, 16), (16, 16)) for layer in (nn.Linear(a, b), nn.LayerNorm(b), nn.ReLU())]
    return nn.Sequential(*stages, nn.Linear(16, 1))


@dataclass(frozen=True)
class Reference:
    """A host, the plain module beside it, a recipe, and what others report."""

    host: Callable[[], Host]
    plain: Callable[[], nn.Module]
    optim: OptimConfig
    batch: int
    epochs: int
    published: str
    most: int = 0
    """Steps in an epoch at the most; 0 is all samples."""
    augment: bool = False
    """Pictures are moved by up to four pixels and mirrored."""
    every: int = 16
    """Tokens between the windows of a text."""
    watched: bool = False
    """The validation split is looked at after every epoch; the best score is reported."""


def long_gpt() -> nn.Module:
    return PlainGPT(65, 256, 384, 6, 6, 0.2)


REFERENCES = {
    "diabetes": Reference(lambda: Host("mlp", (10,), (16, 16), 1), plain_mlp, OptimConfig(lr=3e-3, weight_decay=0.1), 26, 40,
                          "ridge on the same splits (below)"),
    "fashion": Reference(lambda: Host("cnn", (1, 28, 28), (16, 32, 64)), plain_cnn, OptimConfig(lr=5e-3), 100, 3,
                         "small CNNs 91 to 93 % (Xiao 2017), for more epochs"),
    "cifar10": Reference(lambda: Host("resnet"), plain_resnet, OptimConfig("sgd", lr=0.1, weight_decay=1e-4, host_clip=5.0), 128, 2,
                         "ResNet-20 91 to 92 % after 200 epochs with augmentation (He 2016)"),
    "cifar10-long": Reference(lambda: Host("resnet"), plain_resnet, OptimConfig("sgd", lr=0.1, weight_decay=1e-4, host_clip=5.0), 128, 100,
                              "ResNet-20 91 to 92 % after 200 epochs with augmentation (He 2016)", augment=True),
    "shakespeare": Reference(lambda: Host("gpt", (64,), (64, 64, 64), 65), lambda: PlainGPT(65, 64, 64, 3, 4),
                             OptimConfig(lr=2e-3, weight_decay=0.01), 32, 10, "nanoGPT, 10.7 M parameters: 1.47 nats", 400),
    "shakespeare-long": Reference(lambda: Host.of(long_gpt, ["think.5"], torch.zeros(1, 256, dtype=torch.int64)), long_gpt,
                                  OptimConfig(lr=1e-3, weight_decay=0.1, betas=(0.9, 0.99)), 64, 10,
                                  "nanoGPT, 10.7 M parameters: 1.47 nats", 250, every=4, watched=True),
}


def batches(reference: Reference, n: int) -> list[list[Tensor]]:
    """For every epoch, its batches of sample numbers: the same for everybody."""
    generator, steps = torch.Generator().manual_seed(0), n // reference.batch
    steps = min(steps, reference.most or steps)
    return [list(torch.randperm(n, generator=generator)[: steps * reference.batch].split(reference.batch))
            for _ in range(reference.epochs)]


def rate(reference: Reference, step: int, steps: int) -> float:
    """Up in the first twentieth, then down along a cosine."""
    return reference.optim.lr * min(20 * step / steps, (1 + math.cos(math.pi * step / steps)) / 2)


def moved(x: Tensor, step: int) -> Tensor:
    """Pictures [B, C, H, W], each shifted by up to four pixels, and every second one mirrored: the same for everybody."""
    draws, (n, _, height, width) = torch.Generator().manual_seed(step), x.shape
    down, right, mirror = (torch.randint(most, (n, 1), generator=draws) for most in (9, 9, 2))
    rows, columns = down + torch.arange(height), torch.arange(width)
    columns = right + torch.where(mirror.bool(), columns.flip(0), columns)
    samples, rows, columns = (part.to(x.device) for part in (torch.arange(n)[:, None, None], rows[:, :, None], columns[:, None, :]))
    return F.pad(x, (4, 4, 4, 4))[samples, :, rows, columns].permute(0, 3, 1, 2)


class Batches:
    """What every step of a recipe learns from, on the device."""

    def __init__(self, reference: Reference, data: TaskData, device: str) -> None:
        self.reference, self.plan = reference, batches(reference, len(data.x))
        self.x, self.y, self.steps, self.step = data.x.to(device), data.y.to(device), sum(map(len, self.plan)), 0

    def epoch(self, number: int) -> Iterator[tuple[float, Tensor, Tensor]]:
        """(learning rate, x, y)"""
        for chosen in self.plan[number]:
            self.step += 1
            some = chosen.to(self.x.device)
            x = moved(self.x[some], self.step) if self.reference.augment else self.x[some]
            yield rate(self.reference, self.step, self.steps), x, self.y[some]


Logits = Callable[[Tensor], Tensor]


def ours(reference: Reference, data: TaskData, inits: range, device: str) -> Iterator[Logits]:
    """Logits [inits, n, ...] of a population, after each epoch."""
    rows = len(inits)
    population = Population(reference.host(), rows, optim=reference.optim, device=device, seed=1,
                            objective=data.task.objective)
    told = Batches(reference, data, device)

    def wide(x: Tensor) -> Tensor:
        return x.unsqueeze(1).expand(-1, rows, *x.shape[1:]).contiguous()

    for epoch in range(reference.epochs):
        population.begin_epoch(torch.tensor([population.spec.action("WAIT")]).repeat(rows, 1))
        for lr, x, y in told.epoch(epoch):
            population.set_lr(torch.full_like(population.lr, lr))
            population.train_step(wide(x), wide(y))
        population.end_epoch()
        yield lambda x: population.forward(wide(x.to(device))).transpose(0, 1)


def theirs(reference: Reference, data: TaskData, inits: range, device: str) -> Iterator[Logits]:
    """The same of plain modules."""
    nets, optimizers, config = [], [], reference.optim
    for init in inits:
        torch.manual_seed(init)
        nets.append(net := reference.plain().to(device))
        optimizers.append(torch.optim.SGD(net.parameters(), config.lr, config.momentum, weight_decay=config.weight_decay)
                          if config.kind == "sgd" else
                          torch.optim.AdamW(net.parameters(), config.lr, config.betas, config.eps, config.weight_decay))
    told = Batches(reference, data, device)

    @torch.no_grad()
    def logits(x: Tensor) -> Tensor:
        return torch.stack([net.eval()(x.to(device)) for net in nets])

    for epoch in range(reference.epochs):
        for lr, x, y in told.epoch(epoch):
            for net, optim in zip(nets, optimizers, strict=True):
                for group in optim.param_groups:
                    group["lr"] = lr
                out = net.train()(x)
                optim.zero_grad()
                loss = F.mse_loss(out[:, 0], y) if y.is_floating_point() else F.cross_entropy(out.flatten(0, -2), y.flatten())
                loss.backward()
                nn.utils.clip_grad_norm_(net.parameters(), config.host_clip)
                optim.step()
        yield logits


def scores(logits: Logits, x: Tensor, y: Tensor) -> list[float]:
    """R2, accuracy, or loss in nats for tokens; one for each init."""
    total, count, size = torch.zeros(()), 0, 500 if y.dim() == 1 else 64
    for a, b in zip(x.split(size), y.split(size), strict=True):
        out = logits(a).cpu()
        if b.is_floating_point():
            each = 1 - (out[..., 0] - b).square()
        elif b.dim() > 1:
            each = F.cross_entropy(out.flatten(0, 2), b.repeat(len(out), 1).flatten(), reduction="none").view(len(out), -1)
        else:
            each = (out.argmax(2) == b).float()
        total, count = total + each.flatten(1).sum(1), count + each[0].numel()
    return (total / count).tolist()


def shakespeare(text: Path, length: int, every: int) -> TaskData:
    """The first nine tenths train, the last is held out."""
    raw = torch.tensor(list(text.read_bytes()))
    tokens = torch.unique(raw, return_inverse=True)[1]
    cut = len(tokens) * 9 // 10

    def windows(part: Tensor, step: int) -> tuple[Tensor, Tensor]:
        whole = part.unfold(0, length + 1, step)
        return whole[:, :-1].contiguous(), whole[:, 1:].contiguous()

    (x, y), (held_x, held_y) = windows(tokens[:cut], every), windows(tokens[cut:], length)
    task = replace(load_task("digits").task, name="shakespeare", objective="next_token", inputs=(length,),
                   classes=int(tokens.max()) + 1)
    return TaskData(task, x, y, held_x, held_y)


def ridge(data: TaskData, x: Tensor, y: Tensor) -> dict[str, float]:
    """Its penalty is chosen on the validation split."""
    from sklearn.linear_model import Ridge

    fits = [Ridge(alpha=10.0**power).fit(data.x.numpy(), data.y.numpy()) for power in range(-3, 4)]
    best = max(fits, key=lambda fit: fit.score(data.validation_x.numpy(), data.validation_y.numpy()))
    return {"alpha": best.alpha, "score": float(1 - ((best.predict(x.numpy()) - y.numpy()) ** 2).mean())}


WAYS = {"population": ours, "plain": theirs}


def play(name: str, way: str, inits: range, text: Path, device: str) -> dict[str, Any]:
    """What a way comes to, for each init, and the seconds that its training took."""
    reference = REFERENCES[name]
    torch.set_float32_matmul_precision("high" if "long" in name else "highest")
    data = data_of(name, text)
    begin, looks, curve = time.perf_counter(), 0.0, []
    for logits in WAYS[way](reference, data, inits, device):
        if reference.watched:
            paused = time.perf_counter()
            curve.append(scores(logits, data.validation_x, data.validation_y))
            looks += time.perf_counter() - paused
            print(name, way, len(curve), curve[-1], flush=True)
    if device != "cpu":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - begin - looks
    if reference.watched:
        return {"all": [min(each) for each in zip(*curve, strict=True)], "seconds": seconds, "curve": curve}
    x, y = (data.validation_x, data.validation_y) if name == "shakespeare" else open_test(
        data.task.name, ProofKey("reference figures of static hosts: no choice is made with it"))
    return {"all": scores(logits, x, y), "seconds": seconds}


def data_of(name: str, text: Path) -> TaskData:
    task, _, _ = name.partition("-")
    reference = REFERENCES[name]
    return shakespeare(text, reference.host().inputs[0], reference.every) if task == "shakespeare" else load_task(task)


def measure(name: str, inits: int, text: Path, device: str, workers: int) -> dict[str, object]:
    reference, data = REFERENCES[name], data_of(name, text)
    plain = [("plain", range(each, each + 1)) for each in range(inits)] if workers > 1 else [("plain", range(inits))]
    jobs = [("population", range(inits)), *plain]
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        done = list(pool.map(play, *zip(*((name, *job, text, device) for job in jobs), strict=True)))
    result: dict[str, Any] = {
        "parameters": reference.host().cost.params, "epochs": reference.epochs, "batch": reference.batch,
        "steps": sum(map(len, batches(reference, len(data.x)))), "published": reference.published,
        "plain_parameters": sum(p.numel() for p in reference.plain().parameters()), "processes": workers}
    for way in WAYS:
        parts = [each for each, job in zip(done, jobs, strict=True) if job[0] == way]
        values = [value for part in parts for value in part["all"]]
        error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
        result[f"{way}_seconds"] = round(sum(part["seconds"] for part in parts), 1)
        result[way] = {"mean": statistics.fmean(values), "error": error, "all": values}
        if reference.watched:
            result[way]["curves"] = [part["curve"] for part in parts]
    if name == "diabetes":
        x, y = open_test(name, ProofKey("reference figures of static hosts: no choice is made with it"))
        result["ridge"] = ridge(data, x, y)
    return result


def main() -> None:
    options = parser(__doc__)
    options.add_argument("names", nargs="+", choices=REFERENCES)
    options.add_argument("--inits", type=int, default=2)
    options.add_argument("--text", type=Path, default=Path("tinyshakespeare.txt"))
    options.add_argument("--workers", type=int, default=1)
    chosen = options.parse_args()
    for name in chosen.names:
        result = measure(name, chosen.inits, chosen.text, chosen.device, chosen.workers)
        print(name, result, flush=True)
        write(chosen, f"references-{name}", result)


if __name__ == "__main__":
    main()
