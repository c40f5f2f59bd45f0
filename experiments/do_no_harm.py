"""Attached and waiting, `esper.attach` changes no bit: models that are not ours, three optimizers, four schedulers.

    pip install transformers      # not among Esper's requirements
    python -m experiments.do_no_harm --steps 200
    python -m experiments.do_no_harm --compiled aot_eager --steps 16        # writes do_no_harm_aot_eager.json
    python -m experiments.do_no_harm --compiled inductor --steps 16 --few
    python -m experiments.do_no_harm --live                                 # writes do_no_harm_live.json
    python -m experiments.do_no_harm --exports                              # writes do_no_harm_exports.json

Every model is trained twice from the same state, plainly and attached with a controller that waits, and compared bit by bit:
weights, buffers, optimizer states, random states. Then it grows by a fixed plan, and what is delivered is compared with the
grown model. `--live` takes the time of 8 steps with 0, 1 and 3 live seeds over those of the plain loop. Writes experiments/results/do_no_harm.json.
"""

import itertools
import random
import statistics
import tempfile
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
        from transformers.modeling_outputs import SequenceClassifierOutput

        h = F.relu(self.inner(pixel_values.flatten(1)))
        logits = self.head(self.drop(self.norm(h + F.relu(self.left(h)) * self.right(h))))
        return SequenceClassifierOutput(F.cross_entropy(logits, labels), logits)


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


class Live:
    """Germinate in as many slots, one an epoch, and leave it at that."""

    def __init__(self, seeds: int) -> None:
        self.seeds = seeds

    def __call__(self, view: View) -> Tensor:
        slot = int(view.clock) - 1
        more = {"slot": slot, "blueprint": view.spec.blueprints[3]} if slot < min(self.seeds, view.spec.slots) else {}
        return torch.tensor([view.spec.action("GERMINATE" if more else "WAIT", **more)])


def train(name: str, optimizer: str, scheduler: str, controller: Any, steps: int, compiled: str = "") -> tuple[nn.Module, Any, Any]:
    """(model, optimizer, what attach returned) after so many steps in epochs of eight."""
    torch._dynamo.reset()
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(0)
    make, reads = models()[name]
    model: Any = make()
    optim = OPTIMIZERS[optimizer](model.parameters())
    turn, growing = SCHEDULERS[scheduler](optim), None
    model = torch.compile(model, backend=compiled) if compiled else model
    if controller is not None:
        options = {"slots": ["inner", "left", "right"]} if name == "skips" else {}
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


def grown(name: str, compiled: str) -> dict[str, float]:
    """A seed is trained, blended in and kept; how far is what is delivered from the grown model?"""
    model, _, growing = train(name, "adamw", "one cycle", Keep(), 96, compiled)
    reads = models()[name][1]
    with torch.no_grad():
        wanted = model.eval()(**batch(reads, slice(0, 8))).logits
        kept, net = growing.params, growing.deliver().eval()
        return {"parameters": kept, "difference": float((net(**batch(reads, slice(0, 8))).logits - wanted).abs().max())}


def exported(name: str) -> dict[str, float]:
    """A grown model in every format: file -> how far its outputs are from the model's."""
    _, _, growing = train(name, "adamw", "one cycle", Keep(), 96)
    net = growing.deliver().eval()
    if name == "gpt2":
        net.config.use_cache = False  # a cache is no tensor that a program can return
    with tempfile.TemporaryDirectory() as folder:
        written = esper.export(net, folder, batch(models()[name][1], slice(0, 8)), formats=("safetensors", "torch", "onnx"))
    return {each.file: each.difference for each in written}


def overhead(name: str, seeds: int, pairs: int = 20) -> dict[str, float]:
    """Attached with so many live seeds, time of 8 steps over that of the plain loop: the median of interleaved pairs."""
    made = [train(name, "adamw", "cosine", controller, 64) for controller in (None, Live(seeds))]
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
    growing = made[1][2]
    return {"live": len(growing.joined), "grown over host": growing.params / growing.cost.params, "time": statistics.median(ratios)}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--steps", type=int, default=200)
    options.add_argument("--compiled", default="", help="a backend of torch.compile")
    options.add_argument("--few", action="store_true", help="one optimizer and one scheduler for each model")
    options.add_argument("--live", action="store_true", help="what live seeds cost, and nothing else")
    options.add_argument("--exports", action="store_true", help="grown models in every format, and nothing else")
    chosen = options.parse_args()
    torch.set_num_threads(1)
    if chosen.exports:
        return write(chosen, "do_no_harm_exports", {"largest difference": {name: exported(name) for name in models()}})
    torch._dynamo.config.recompile_limit = 64
    if chosen.live:
        times = {name: [overhead(name, seeds) for seeds in (0, 1, 3)] for name in models()}
        print(times)
        return write(chosen, "do_no_harm_live", {"time of 8 steps over the plain loop's, median of 20 pairs": times})
    same: dict[str, list[str]] = {"identical": [], "different": []}
    optimizers, schedulers = (list(each)[: 1 if chosen.few else None] for each in (OPTIMIZERS, SCHEDULERS))
    for name, optimizer, scheduler in itertools.product(models(), optimizers, schedulers):
        plain = facts(*train(name, optimizer, scheduler, None, chosen.steps, chosen.compiled)[:2])
        attached = facts(*train(name, optimizer, scheduler, "wait", chosen.steps, chosen.compiled)[:2])
        equal = len(plain) == len(attached) and all(map(torch.equal, plain, attached))
        same["identical" if equal else "different"].append(f"{name}, {optimizer}, {scheduler}")
        print(name, optimizer, scheduler, equal, flush=True)
    result: dict[str, Any] = {"steps": chosen.steps, "compiled": chosen.compiled,
                              "combinations": len(same["identical"]) + len(same["different"]), **same}
    result["delivered"] = {name: grown(name, chosen.compiled) for name in models()}
    print(result)
    write(chosen, "do_no_harm" + f"_{chosen.compiled}" * bool(chosen.compiled), result)


if __name__ == "__main__":
    main()
