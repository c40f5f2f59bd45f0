"""Attached and waiting, `esper.attach` changes no bit: models that are not ours, three optimizers, four schedulers.

    pip install transformers      # not among Esper's requirements
    python -m experiments.do_no_harm --steps 200

Every model is trained twice from the same state, plainly and attached with a controller that waits, and compared bit by bit:
weights, buffers, optimizer states, random states. Then it grows by a fixed plan, and what is delivered is compared with the
grown model. Writes experiments/results/do_no_harm.json.
"""

import itertools
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import esper
from esper.leyline import View
from experiments.shared import parser, write

BATCH = 8
IDS, PIXELS, LABELS = torch.randint(50, (64, 16)), torch.randn(64, 3, 32, 32), torch.randint(4, (64,))


class Skips(nn.Module):
    """Two branches and a skip over both."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.left, self.right = nn.Linear(3072, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.norm, self.drop, self.head = nn.BatchNorm1d(16), nn.Dropout(0.1), nn.Linear(16, 4)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Any:
        h = F.relu(self.inner(pixel_values.flatten(1)))
        logits = self.head(self.drop(self.norm(h + F.relu(self.left(h)) * self.right(h))))
        return type("Output", (), {"loss": F.cross_entropy(logits, labels), "logits": logits})


def models() -> dict[str, tuple[Callable[[], nn.Module], str]]:
    """name -> (how to make it, what it reads)."""
    import transformers as hf

    gpt = {"vocab_size": 50, "n_positions": 16, "n_embd": 16, "n_layer": 3, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
    vit = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32, "image_size": 32, "patch_size": 8}
    res = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [2, 2], "layer_type": "basic"}
    nxt = {"hidden_sizes": [8, 16], "depths": [2, 2], "num_stages": 2}
    return {"gpt2": (lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**gpt)), "input_ids"),
            "resnet": (lambda: hf.ResNetForImageClassification(hf.ResNetConfig(num_labels=4, **res)), "pixel_values"),
            "vit": (lambda: hf.ViTForImageClassification(hf.ViTConfig(num_labels=4, **vit)), "pixel_values"),
            "convnext": (lambda: hf.ConvNextForImageClassification(hf.ConvNextConfig(num_labels=4, **nxt)), "pixel_values"),
            "skips": (Skips, "pixel_values")}


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3), "fused adamw": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9)}
SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 500),
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 1e-2, total_steps=1000),
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.999**step),
    "plateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=3)}


def batch(reads: str, chosen: slice) -> dict[str, Tensor]:
    return {"input_ids": IDS[chosen], "labels": IDS[chosen]} if reads == "input_ids" else {
        "pixel_values": PIXELS[chosen], "labels": LABELS[chosen]}


class Keep:
    """Germinate in the middle slot, and keep it as soon as that is allowed."""

    def __call__(self, view: View) -> Tensor:
        slot, kind = view.spec.slots // 2, view.spec.blueprints[3]
        if int(view.clock) == 1:
            return torch.tensor([view.spec.action("GERMINATE", slot=slot, blueprint=kind)])
        keep = bool(view.verdicts[0, slot, esper.LifecycleOp.FOSSILIZE])
        return torch.tensor([view.spec.action("FOSSILIZE" if keep else "WAIT", slot=slot)])


def train(name: str, optimizer: str, scheduler: str, controller: Any, steps: int) -> tuple[nn.Module, Any, Any]:
    """(model, optimizer, what attach returned) after so many steps in epochs of eight."""
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(0)
    make, reads = models()[name]
    model = make()
    optim = OPTIMIZERS[optimizer](model.parameters())
    turn, growing = SCHEDULERS[scheduler](optim), None
    if controller is not None:
        options = {"slots": ["left", "right"]} if name == "skips" else {}
        growing = esper.attach(model, optim, example=batch(reads, slice(0, 4)), controller=controller, epochs=10**6, schedulers=[turn],
                               loss=lambda net, data: net(**data).loss, data=[batch(reads, slice(0, 16))], shadow_steps=4, **options)

    def evaluate() -> float:
        with torch.no_grad():
            return -float(model.eval()(**batch(reads, slice(0, 64))).loss)

    for step in range(steps):
        model.train()
        optim.zero_grad()
        loss = model(**batch(reads, slice(step % 8 * BATCH, (step % 8 + 1) * BATCH))).loss
        loss.backward()
        optim.step()
        turn.step(float(loss)) if scheduler == "plateau" else turn.step()
        if growing is not None and step % 8 == 7:
            growing.end_epoch(evaluate)
    return model, optim, growing


def facts(model: nn.Module, optim: torch.optim.Optimizer) -> list[Tensor]:
    states = [value for each in optim.state_dict()["state"].values() for value in each.values() if isinstance(value, Tensor)]
    return [*model.state_dict().values(), *states, torch.get_rng_state(), torch.tensor([random.random(), np.random.rand()])]


def grown(name: str) -> dict[str, float]:
    """A seed is trained, blended in and kept; how far is what is delivered from the grown model?"""
    model, _, growing = train(name, "adamw", "one cycle", Keep(), 96)
    reads = models()[name][1]
    with torch.no_grad():
        wanted = model.eval()(**batch(reads, slice(0, 8))).logits
        kept, net = growing.params, growing.deliver().eval()
        return {"parameters": kept, "difference": float((net(**batch(reads, slice(0, 8))).logits - wanted).abs().max())}


def overhead(name: str, pairs: int = 20) -> float:
    """Attached and dormant, time of 8 steps over that of the plain loop: the median of pairs."""
    made = [train(name, "adamw", "cosine", controller, 8) for controller in (None, "wait")]
    reads, ratios = models()[name][1], []
    for _ in range(pairs):
        seconds = []
        for model, optim, _ in made:
            begin = time.perf_counter()
            for step in range(8):
                optim.zero_grad()
                model.train()(**batch(reads, slice(step * BATCH, (step + 1) * BATCH))).loss.backward()
                optim.step()
            seconds.append(time.perf_counter() - begin)
        ratios.append(seconds[1] / seconds[0])
    return statistics.median(ratios)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--steps", type=int, default=200)
    chosen = options.parse_args()
    torch.set_num_threads(1)
    same: dict[str, list[str]] = {"identical": [], "different": []}
    for name, optimizer, scheduler in itertools.product(models(), OPTIMIZERS, SCHEDULERS):
        plain = facts(*train(name, optimizer, scheduler, None, chosen.steps)[:2])
        attached = facts(*train(name, optimizer, scheduler, "wait", chosen.steps)[:2])
        equal = len(plain) == len(attached) and all(map(torch.equal, plain, attached))
        same["identical" if equal else "different"].append(f"{name}, {optimizer}, {scheduler}")
        print(name, optimizer, scheduler, equal, flush=True)
    delivered, ratios = {name: grown(name) for name in models()}, {name: overhead(name) for name in models()}
    print(delivered, ratios)
    write(chosen, "do_no_harm", {"steps": chosen.steps, "combinations": len(same["identical"]) + len(same["different"]), **same,
                                 "delivered": delivered, "dormant_over_plain": ratios})


if __name__ == "__main__":
    main()
