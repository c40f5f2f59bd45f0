"""Static hosts against plain PyTorch and published figures: the same recipe, batches and number of steps, in one run.

    python -m experiments.references diabetes fashion shakespeare cifar10 --text tinyshakespeare.txt

Hosts train as one population; plain modules are written here anew and train in a loop with `torch.optim`. Each has inits of
its own, so figures agree within their errors, not bit for bit. Test splits are opened once, at the end, and nothing is chosen
with them; Shakespeare's last tenth is the validation split of the published figure. Writes
experiments/results/references-NAME.json for each.
"""

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

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
    def __init__(self, vocabulary: int, length: int, width: int, blocks: int, heads: int) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        nn.init.normal_(self.token.weight, std=0.02)
        nn.init.normal_(self.place.weight, std=0.02)
        self.attend = nn.ModuleList(nn.Sequential(nn.LayerNorm(width), PlainAttention(width, heads)) for _ in range(blocks))
        self.think = nn.ModuleList(nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(),
                                                 nn.Linear(4 * width, width)) for _ in range(blocks))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        h = self.token(x) + self.place.weight
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


def plain_resnet() -> nn.Module:
    blocks, before = [], 16
    for width in (16, 32, 64):
        for block in range(3):
            blocks.append(PlainBlock(before, width, 2 if width > 16 and not block else 1))
            before = width
    return nn.Sequential(nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.GroupNorm(8, 16), nn.ReLU(), *blocks,
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

    host: Host
    plain: Callable[[], nn.Module]
    optim: OptimConfig
    batch: int
    epochs: int
    published: str
    most: int = 0
    """Steps in an epoch at the most; 0 is all samples."""


REFERENCES = {
    "diabetes": Reference(Host("mlp", (10,), (16, 16), 1), plain_mlp, OptimConfig(lr=3e-3, weight_decay=0.1), 26, 40,
                          "ridge on the same splits (below)"),
    "fashion": Reference(Host("cnn", (1, 28, 28), (16, 32, 64)), plain_cnn, OptimConfig(lr=5e-3), 100, 3,
                         "small CNNs 91 to 93 % (Xiao 2017), for more epochs"),
    "cifar10": Reference(Host("resnet"), plain_resnet, OptimConfig("sgd", lr=0.1, weight_decay=1e-4, host_clip=5.0), 128, 2,
                         "ResNet-20 91 to 92 % after 200 epochs with augmentation (He 2016)"),
    "shakespeare": Reference(Host("gpt", (64,), (64, 64, 64), 65), lambda: PlainGPT(65, 64, 64, 3, 4),
                             OptimConfig(lr=2e-3, weight_decay=0.01), 32, 10, "nanoGPT, 10.7 M parameters: 1.47 nats", 400),
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


def ours(reference: Reference, data: TaskData, inits: int, device: str) -> Callable[[Tensor], Tensor]:
    """Logits [inits, n, ...] of a trained population."""
    population = Population(reference.host, inits, optim=reference.optim, device=device, seed=1,
                            objective=data.task.objective)
    plan, done = batches(reference, len(data.x)), 0
    steps = sum(map(len, plan))
    for epoch in plan:
        population.begin_epoch(torch.tensor([population.spec.action("WAIT")]).repeat(inits, 1))
        for chosen in epoch:
            done += 1
            population.set_lr(torch.full_like(population.lr, rate(reference, done, steps)))
            x, y = (part[chosen].to(device).unsqueeze(1) for part in (data.x, data.y))
            population.train_step(x.expand(-1, inits, *x.shape[2:]).contiguous(),
                                  y.expand(-1, inits, *y.shape[2:]).contiguous())
        population.end_epoch()

    def logits(x: Tensor) -> Tensor:
        wide = x.to(device).unsqueeze(1)
        return population.forward(wide.expand(-1, inits, *wide.shape[2:]).contiguous()).transpose(0, 1).cpu()

    return logits


def theirs(reference: Reference, data: TaskData, inits: int, device: str) -> Callable[[Tensor], Tensor]:
    """The same from plain modules, one after the other."""
    config, nets = reference.optim, []
    for init in range(inits):
        torch.manual_seed(init)
        net = reference.plain().to(device)
        optim = (torch.optim.SGD(net.parameters(), config.lr, config.momentum, weight_decay=config.weight_decay)
                 if config.kind == "sgd" else torch.optim.AdamW(net.parameters(), config.lr, config.betas, config.eps,
                                                                config.weight_decay))
        plan = [chosen for epoch in batches(reference, len(data.x)) for chosen in epoch]
        for done, chosen in enumerate(plan, start=1):
            for group in optim.param_groups:
                group["lr"] = rate(reference, done, len(plan))
            out, y = net(data.x[chosen].to(device)), data.y[chosen].to(device)
            optim.zero_grad()
            loss = F.mse_loss(out[:, 0], y) if y.is_floating_point() else F.cross_entropy(out.flatten(0, -2), y.flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), config.host_clip)
            optim.step()
        nets.append(net.eval())

    @torch.no_grad()
    def logits(x: Tensor) -> Tensor:
        return torch.stack([net(x.to(device)).cpu() for net in nets])

    return logits


def scores(logits: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> list[float]:
    """R2, accuracy, or loss in nats for tokens; one for each init."""
    total, count = torch.zeros(()), 0
    for a, b in zip(x.split(500), y.split(500), strict=True):
        out = logits(a)
        if b.is_floating_point():
            each = 1 - (out[..., 0] - b).square()
        elif b.dim() > 1:
            each = F.cross_entropy(out.flatten(0, 2), b.repeat(len(out), 1).flatten(), reduction="none").view(len(out), -1)
        else:
            each = (out.argmax(2) == b).float()
        total, count = total + each.flatten(1).sum(1), count + each[0].numel()
    return (total / count).tolist()


def shakespeare(text: Path, length: int) -> TaskData:
    """The first nine tenths train, the last is held out; windows begin at any byte that is a multiple of 16."""
    raw = torch.tensor(list(text.read_bytes()))
    tokens = torch.unique(raw, return_inverse=True)[1]
    cut = len(tokens) * 9 // 10

    def windows(part: Tensor, step: int) -> tuple[Tensor, Tensor]:
        whole = part.unfold(0, length + 1, step)
        return whole[:, :-1].contiguous(), whole[:, 1:].contiguous()

    (x, y), (held_x, held_y) = windows(tokens[:cut], 16), windows(tokens[cut:], length)
    task = replace(load_task("digits").task, name="shakespeare", objective="next_token", inputs=(length,),
                   classes=int(tokens.max()) + 1)
    return TaskData(task, x, y, held_x, held_y)


def ridge(data: TaskData, x: Tensor, y: Tensor) -> dict[str, float]:
    """Its penalty is chosen on the validation split."""
    from sklearn.linear_model import Ridge

    fits = [Ridge(alpha=10.0**power).fit(data.x.numpy(), data.y.numpy()) for power in range(-3, 4)]
    best = max(fits, key=lambda fit: fit.score(data.validation_x.numpy(), data.validation_y.numpy()))
    return {"alpha": best.alpha, "score": float(1 - ((best.predict(x.numpy()) - y.numpy()) ** 2).mean())}


def measure(name: str, inits: int, text: Path, device: str) -> dict[str, object]:
    reference = REFERENCES[name]
    data = shakespeare(text, reference.host.inputs[0]) if name == "shakespeare" else load_task(name)
    result: dict[str, object] = {"parameters": reference.host.cost.params, "epochs": reference.epochs, "batch": reference.batch,
                                 "steps": sum(map(len, batches(reference, len(data.x)))), "published": reference.published,
                                 "plain_parameters": sum(p.numel() for p in reference.plain().parameters())}
    trained = {}
    for way, train in (("population", ours), ("plain", theirs)):
        begin = time.perf_counter()
        trained[way] = train(reference, data, inits, device)
        result[f"{way}_seconds"] = round(time.perf_counter() - begin, 1)
    x, y = (data.validation_x, data.validation_y) if name == "shakespeare" else open_test(
        name, ProofKey("reference figures of static hosts: no choice is made with it"))
    for way, logits in trained.items():
        values = scores(logits, x, y)
        error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
        result[way] = {"mean": statistics.fmean(values), "error": error, "all": values}
    if name == "diabetes":
        result["ridge"] = ridge(data, x, y)
    return result


def main() -> None:
    options = parser(__doc__)
    options.add_argument("names", nargs="+", choices=REFERENCES)
    options.add_argument("--inits", type=int, default=2)
    options.add_argument("--text", type=Path, default=Path("tinyshakespeare.txt"))
    chosen = options.parse_args()
    for name in chosen.names:
        result = measure(name, chosen.inits, chosen.text, chosen.device)
        print(name, result, flush=True)
        write(chosen, f"references-{name}", result)


if __name__ == "__main__":
    main()
