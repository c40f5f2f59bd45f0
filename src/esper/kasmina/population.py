"""The population: N growing hosts as one tensor program; a structural change is a write into tensors.

Legend: N rows (environments), S slots, B batch, P parameters.
"""

import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from esper.kasmina.blending import Graft, GrownNetwork
from esper.kasmina.blueprints import find_blueprint, kind_of, range_table
from esper.kasmina.config import DTYPES, PopulationConfig
from esper.kasmina.engine import engines_of
from esper.kasmina.engine.epoch import EngineEpoch
from esper.kasmina.foreign import grow_behind
from esper.kasmina.grouped import Grouped
from esper.kasmina.hosts import Host, Impairments
from esper.kasmina.lifecycle import Lifecycle, expand_actions
from esper.kasmina.lift import draw_rows
from esper.kasmina.objectives import find_objective
from esper.kasmina.packing import Bank, Prefix
from esper.leyline import Contribution, EsperError, Head, LifecycleOp, StateFormatError, Style
from esper.leyline.codec import from_dict, to_dict
from esper.leyline.keys import mix, seeded
from esper.leyline.stages import SeedStage
from esper.leyline.storage import decoding, read_state, write_state


class Population:
    """N hosts of one architecture that grow and train together.

    An epoch is `begin_epoch(actions)`, some `train_step`s, any number of `forward`s, and `end_epoch`.
    Samples are [B, N, *inputs], labels [B, N].
    """

    def __init__(self, config: PopulationConfig | Host, rows: int, *, seed: int = 0, **changes: Any) -> None:
        """`changes` are fields of `PopulationConfig`; a bare host takes its defaults for the others."""
        full = (replace(config, **changes) if isinstance(config, PopulationConfig)
                else PopulationConfig(config, **changes))
        if type(rows) is not int or rows < 1:
            raise EsperError(f"a population of {rows} rows is impossible; use a whole number of at least 1")
        self.config, self.rows, self.host, self.spec = full, rows, full.host, full.spec
        self.optim, self.incubation, self.compile = full.optim, full.incubation, full.compile
        self.objective = find_objective(full.objective, full.entropy)
        self.device = torch.device(full.device)
        self.dtype, self.compute_dtype = DTYPES[full.dtype], DTYPES[full.compute_dtype]
        host = self.host
        self.prototypes = [[find_blueprint(kind_of(shape), name).prototype(shape)
                            for name in self.spec.blueprints] for shape in host.slots.shapes]
        self.life = Lifecycle(rows, self.spec, full.gates)
        widest = [max(p.layout.size for p in row) + row[0].gate_size for row in self.prototypes]
        self.banks = [Bank(rows, size, self.dtype, self.device) for size in (host.layout.size, *widest)]
        self._ranges = [range_table(row, self.device) for row in self.prototypes]
        self.keys = torch.zeros(rows, dtype=torch.int64)
        self.trainable = torch.ones(rows, host.layout.size, dtype=self.dtype, device=self.device)
        self.lr = torch.full((rows, len(self.banks)), self.optim.lr, dtype=torch.float64)
        self.decay = torch.full_like(self.lr, self.optim.weight_decay)
        self._working: Tensor | None = None  # [W] rows of this epoch, None is all of them
        self._set_up()
        self.reset(torch.arange(rows), mix(torch.full((rows,), seed), torch.arange(rows)))

    def _set_up(self) -> None:
        # What runs it knows it weakly: graphs go when it goes, and not when a collector comes by.
        self._weak: Population = weakref.proxy(self)
        self._engines = engines_of(self._weak)
        self._running: Grouped | EngineEpoch | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Of a copy, which has what runs it to itself."""
        self._flush()
        own = ("_weak", "_engines", "_running")
        return {name: value for name, value in vars(self).items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._set_up()

    def reset(self, rows: Tensor, keys: Tensor, impairments: Impairments | None = None) -> None:
        """Start these rows anew: host weights from the keys [R] alone, empty slots, fresh optimisers.
        Learning rates and decays stay as they were set."""
        rows, where = rows.cpu(), rows.to(self.device)
        weights, trainable = self.host.fresh(keys.to(self.device)), self.host.layout.free()
        if impairments is not None:
            alive, trainable = self.host.masks(impairments)
            weights *= alive.to(self.device)
        self._flush()
        self.keys[rows] = keys.cpu()
        self.life.clear(rows)
        for bank in self.banks:
            bank.write(where)
        self.banks[0].write(where, weights)
        self.trainable[where] = trainable.to(self.trainable)

    def begin_epoch(self, actions: Tensor, resting: Tensor | None = None) -> None:
        """One action per row, [N, len(spec.heads)]. Raises before anything is written if one is denied.

        Rows at rest, bool [N], do not train: until `end_epoch` samples, rows and alphas are those of the W
        others, counted among themselves, and what follows runs as if there were no more.
        """
        self._flush()
        working = self._check_resting(resting)
        full, before = expand_actions(self.spec, actions), self.life.planted
        self.life.begin_epoch(full)
        self._working = working
        self._free(before & ~self.life.planted)
        born = full[:, Head.OP] == LifecycleOp.GERMINATE
        for slot in range(self.spec.slots):
            self._plant((born & (full[:, Head.SLOT] == slot)).nonzero().flatten(), slot)

    def at_work(self, values: Tensor, dim: int = 0) -> Tensor:
        """Of values by row, along `dim`, those of the rows that train in this epoch."""
        return values if (at := self._working) is None else values.index_select(dim, at.to(values.device))

    def of_all(self, values: Tensor, rest: float) -> Tensor:
        """Values [W, ...] of the rows that train in this epoch as values of all rows, the others at rest."""
        if self._working is None:
            return values
        out = torch.full((self.rows, *values.shape[1:]), rest, dtype=values.dtype, device=values.device)
        out[self._working.to(values.device)] = values
        return out

    @property
    def count(self) -> int:
        """Rows that train in this epoch."""
        return self.rows if self._working is None else len(self._working)

    @property
    def by_engine(self) -> bool:
        """Do the engine's kernels run it? Otherwise the general path does: on the CPU, in float64, and where
        a layer of its host or of a seed has no kernel."""
        return self._engines is not None and self._engines.fit()

    def install(self, rows: Tensor, blueprint: Tensor, style: Tensor, alpha: Tensor,
                stage: SeedStage = SeedStage.HOLDING) -> None:
        """Give empty rows a whole topology at once: newborn seeds. Each tensor [R, S], -1 is no seed."""
        self._flush()
        rows = rows.cpu()
        self.life.install(rows, blueprint, style, alpha, stage)
        for slot in range(self.spec.slots):
            self._plant(rows[blueprint[:, slot] >= 0], slot)

    def _plant(self, rows: Tensor, slot: int) -> None:
        """Newborn weights for these rows: one draw for all of them, each within its blueprint's range."""
        if not len(rows):
            return
        kinds = self.life.blueprint[rows, slot]
        keys = mix(self.keys[rows], 1 + slot, self.life.germinations[rows, slot]).to(self.device)
        centre, radius = (table[kinds.to(self.device)] for table in self._ranges[slot])
        fresh = draw_rows((centre, radius), keys)
        for number, prototype in enumerate(self.prototypes[slot]):
            if prototype.range is None and bool((kinds == number).any()):
                mine = (kinds == number).to(self.device)
                fresh[mine, : prototype.layout.size] = prototype.fresh(keys[mine])
        self.banks[1 + slot].write(rows.to(self.device), fresh)

    def _free(self, freed: Tensor) -> None:
        for slot, bank in enumerate(self.banks[1:]):
            if len(rows := freed[:, slot].nonzero().flatten()):
                bank.write(rows.to(self.device))

    def train_step(self, x: Tensor, y: Tensor) -> Tensor:
        """A step of all hosts and seeds on samples [B, N, *inputs], labels [B, N]; losses [N] before it."""
        self._check_samples(x, self.count)
        if y.shape != (expected := self.objective.label_shape(x)):
            raise EsperError(f"labels have shape {list(y.shape)}; expected {list(expected)}")
        if self._run.untrained:
            self._check_first(x, y)
        return self._run.train(x, y)

    def shadow_step(self, x: Tensor, y: Tensor, prefix: Prefix | None = None) -> None:
        """A step of incubating seeds alone, each behind its stopped host. Not to be mixed with `train_step`.

        Samples are [B, N, *inputs]; with a `prefix`, [B, D, *inputs] for the rows that it names. Give all
        else a learning rate of 0: on the general path it takes a step without a gradient, and momentum moves.
        """
        self._check_samples(x, self.count if prefix is None else len(prefix.rows))
        if not self._run.shadow(x, y, prefix):
            raise EsperError("no row has an incubating seed that could take a shadow step")

    @torch.no_grad()
    def forward(self, x: Tensor, rows: Tensor | None = None, alpha: Tensor | None = None) -> Tensor:
        """Logits [B, R, classes] for samples [B, R, *inputs]; [B, R, T, classes] for tokens.

        `rows` [R] names population rows (any, repeated or not; None is all N in order), `alpha` [R, S] is in
        place of their alphas: 0 switches a seed off, above 0 previews an incubating one. Live state stays.
        """
        self._check_samples(x, self.count if rows is None else len(rows))
        if rows is not None:
            rows = rows.cpu()
        if alpha is not None:
            alpha, shape = alpha.cpu().to(torch.float32), (x.shape[1], self.spec.slots)
            if alpha.shape != shape or not bool(((alpha >= 0) & (alpha <= 1)).all()):
                raise EsperError(f"alpha needs {list(shape)} numbers from 0 to 1; "
                                 f"got shape {list(alpha.shape)}")
        return self._by_sample(self._run.forward(x, rows, alpha), len(x))

    def probe(self, rows: Tensor, alpha: Tensor, prefix: Prefix | None = None) -> Callable[[Tensor], Tensor]:
        """A function of samples [B, N, *inputs], to logits [B, N + R, classes]: all live rows (or the D rows
        of a `prefix`), then rows [R] of the population (any, repeated or not) at alphas [R, S] of their own.

        What such a row shares with its live row is computed once: it starts where their alphas first differ.
        The function holds until weights change hands again (`begin_epoch`, `end_epoch`, `reset`).
        """
        outputs_of = self._run.probe(rows.cpu(), alpha.cpu().float(), prefix)

        @torch.no_grad()
        def run(x: Tensor) -> Tensor:
            self._check_samples(x, self.count if prefix is None else len(prefix.rows))
            return self._by_sample(outputs_of(x), len(x))

        return run

    def end_epoch(self, contribution: Contribution | None = None) -> None:
        """Record evidence and make the moves of time. Contributions not given are unknown."""
        self._flush()
        self._working, before = None, self.life.planted
        self.life.end_epoch(contribution)
        self._free(before & ~self.life.planted)

    def set_lr(self, lr: Tensor) -> None:
        """Learning rates [N, 1 + S]: the host's, then each slot's. Takes effect with the next step."""
        if lr.shape != self.lr.shape:
            raise EsperError(f"rates have shape {list(lr.shape)}; "
                             f"expected {list(self.lr.shape)}: host, then slots")
        self.lr = lr.detach().cpu().double().clone()
        if self._running is not None:
            self._running.set_lr(self.lr)

    def _check_samples(self, x: Tensor, rows: int) -> None:
        if x.dim() < 2 or not len(x) or x.shape[1] != rows or x.shape[2:] != self.host.inputs:
            raise EsperError(f"samples have shape {list(x.shape)}; expected [batch of at least 1, {rows}, "
                             f"{', '.join(map(str, self.host.inputs))}]")
        if self.host.tokens and not x.is_cuda and not 0 <= int(x.min()) <= int(x.max()) < self.host.classes:
            raise EsperError(f"tokens go from {int(x.min())} to {int(x.max())}; this host knows 0 to "
                             f"{self.host.classes - 1}")  # beyond them lie the embeddings of other rows

    def _check_resting(self, resting: Tensor | None) -> Tensor | None:
        """The rows at work; None is all of them."""
        if resting is None:
            return None
        if resting.dtype != torch.bool or resting.shape != (self.rows,) or bool(resting.all()):
            raise EsperError(f"resting needs {self.rows} truth values, one a row, and not all of them true")
        return (~resting).nonzero().flatten().cpu() if bool(resting.any()) else None

    def _by_sample(self, outputs: Tensor, batch: int) -> Tensor:
        """[R, B, O] as [B, R, O], and of tokens, [R, B * T, O] as [B, R, T, O]."""
        return (outputs.unflatten(1, (batch, -1)) if self.host.tokens else outputs).transpose(0, 1)

    def _check_first(self, x: Tensor, y: Tensor) -> None:
        """What would train silently and wrongly; once per epoch, since asking a device makes it wait."""
        if not self.life.open:
            raise EsperError("no epoch has begun; call begin_epoch before train_step")
        for numbers in (x, y) if self.objective.tokens else (y,):
            self.objective.check(numbers.flatten(), self.host.classes)
        if not bool(x.isfinite().all()):
            raise EsperError("samples hold NaN or infinite numbers; clean them before training")

    def costs(self) -> tuple[Tensor, Tensor]:
        """(parameters, FLOPs per sample) of the seed in each slot, [N, S] int64; empty slots cost nothing."""
        table = torch.tensor([[(p.cost.params, p.cost.flops) for p in row] for row in self.prototypes])
        chosen = table[torch.arange(len(table)), self.life.blueprint.clamp(min=0)]
        chosen = chosen * self.life.planted[..., None]
        gated = (chosen[..., 0] > 0) & (self.life.style == Style.GATE)
        sizes = torch.tensor([row[0].gate_size for row in self.prototypes]) * gated
        times = torch.tensor([max(row[0].shape.tokens, 1) for row in self.prototypes])  # gates of tokens
        return chosen[..., 0] + sizes, chosen[..., 1] + 2 * (sizes - gated.long()) * times

    def extract(self, row: int, kept: bool = False) -> nn.Module:
        """The row's network as a plain module of the same function. Seeds without effect are left out; with
        `kept`, all that are not fossils: what an episode delivers."""
        if not 0 <= row < self.rows:
            raise EsperError(f"there is no row {row}; a population of {self.rows} has 0 to {self.rows - 1}")
        self._flush()
        with seeded(0):
            net = self.host.module().to(self.dtype)
        self.host.layout.load(net, self.banks[0].weights[row])
        live = (self.life.alpha[row] > 0) & (self.costs()[0][row] > 0)
        live = live & self.life.at(SeedStage.FOSSILIZED)[row] if kept else live
        grafts = {slot: self.graft(row, slot) for slot in live.nonzero().flatten().tolist()}
        if self.host.foreign is not None:
            names = self.host.slots.names
            return grow_behind(net, {names[slot]: graft for slot, graft in grafts.items()}).to(self.device)
        behind = nn.ModuleList(grafts.get(slot, nn.Identity()) for slot in range(self.spec.slots))
        return GrownNetwork(net.stages, behind, net.head).to(self.device)  # type: ignore[arg-type]

    def graft(self, row: int, slot: int) -> Graft:
        """The seed of one slot as a plain module at its present alpha, incubating or not."""
        self._flush()
        if not self.life.planted[row, slot]:
            raise EsperError(f"slot {slot} of row {row} holds no seed")
        prototype = self.prototypes[slot][int(self.life.blueprint[row, slot])]
        weights, size = self.banks[1 + slot].weights[row].cpu(), prototype.layout.size
        style, alpha, gate = Style(int(self.life.style[row, slot])), float(self.life.alpha[row, slot]), None
        if style is Style.GATE:
            gate = nn.Linear(prototype.shape.channels, 1, dtype=weights.dtype)
            with torch.no_grad():
                gate.weight.copy_(weights[None, size : size + prototype.gate_size - 1])
                gate.bias.copy_(weights[size + prototype.gate_size - 1])
        seed, tokens = prototype.plain(weights[:size]), bool(prototype.shape.tokens)
        return Graft(seed, style, alpha, tokens, gate).to(weights.dtype)

    def tensors(self) -> dict[str, Tensor]:
        """Everything that belongs to rows, each tensor with N first."""
        self._flush()
        own = {"keys": self.keys, "trainable": self.trainable, "lr": self.lr, "decay": self.decay}
        banks = {f"bank.{i}.{name}": t for i, bank in enumerate(self.banks)
                 for name, t in bank.tensors().items()}
        return banks | own | {f"life.{name}": t for name, t in self.life.fields()}

    def snapshot(self, rows: Tensor) -> dict[str, Tensor]:
        """A copy of all state of these rows."""
        return {name: tensor[rows.to(tensor.device)].clone() for name, tensor in self.tensors().items()}

    def restore(self, rows: Tensor, snapshot: dict[str, Tensor]) -> None:
        """Put a snapshot into these rows (its own or others); every other row is untouched."""
        mine = self.tensors()
        if {n: t.shape[1:] for n, t in mine.items()} != {n: t.shape[1:] for n, t in snapshot.items()}:
            raise StateFormatError("this snapshot is of another kind of population; nothing was restored")
        for name, tensor in mine.items():
            tensor[rows.to(tensor.device)] = snapshot[name].to(tensor)

    def save(self, path: str | Path) -> None:
        """Write the whole population to one safetensors file, which appears whole or not at all."""
        header = {"epoch": self.life.epoch, "open": self.life.open, "config": to_dict(self.config)}
        write_state(path, "population", header, self.tensors())

    @classmethod
    def load(cls, path: str | Path, device: str = "", compile: bool = False) -> "Population":
        """On the device that it was saved from, or another."""
        header, tensors = read_state(path, "population")
        with decoding(path, "population"):
            saved = from_dict(PopulationConfig, header["config"], str(path))
            saved = replace(saved, device=device or saved.device, compile=compile)
            population = cls(saved, len(tensors["keys"]))
            expected = {name: t.shape for name, t in population.tensors().items()}
            if expected != {name: t.shape for name, t in tensors.items()}:
                raise StateFormatError(f"{path} does not fit its own header; "
                                       "was a blueprint changed since it was saved?")
            population.restore(torch.arange(population.rows), tensors)
            population.life.epoch, population.life.open = int(header["epoch"]), bool(header["open"])
        return population

    @property
    def _run(self) -> Grouped | EngineEpoch:
        """How this epoch is run; what it reads from the banks holds until `_flush`."""
        if self._running is None:
            self._running = (EngineEpoch(self._weak, self._engines) if self._engines and self.by_engine
                             else Grouped(self._weak))
        return self._running

    def _flush(self) -> None:
        """What was trained goes back to the banks; whatever reads or writes banks comes after this."""
        if self._running is not None:
            self._running.finish()
        self._running = None
