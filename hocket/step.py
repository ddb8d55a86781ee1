"""A planned step that trains, as `hocket.plan_model` and `hocket.plan(...).start()` return it.

Checkpoints of steps and runs hold what `state_of` returns. Its keys `model` and `optimizer` are those of
`hocket.checkpoint.save` (`fsdp/saving/checkpoint.py`), the latter in torch's flat layout, since pipeline ranks hold
different parameters. A third key, `step`, has further state of the next step: expert shares for the balance loss over a
batch, and the gradient norms that decide whether a step is skipped.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hocket.config import Config
from hocket.config.optimizer import unmatched
from hocket.engine import Engine
from hocket.fsdp.piece import local_of
from hocket.fsdp.planned.optimizer import AVERAGES
from hocket.fsdp.saving.storage import MODEL, OPTIMIZER, CheckpointReader, differences, save_state
from hocket.kernels import IGNORED
from hocket.model.documents import Documents, Microbatch
from hocket.model.transformer import Chunk
from hocket.predict.simulate import Timeline, simulate
from hocket.problems import stop_if
from hocket.program.ops import Program
from hocket.resolve import Settings
from hocket.runtime.world import everyone
from hocket.timeline import text_timeline
from hocket.tune.trials import Price, model_costs
from hocket.typed import is_a

T = TypeVar("T")

STEP = "step"
"""Key in checkpoints."""
_PIECE = 1 << 26
"""Elements that ranks combine at a time."""
_LARGEST = 1e30
"""Largest learning rate, as for `train.lr`."""


class Outcome(NamedTuple):
    """The result of a step, the same on all ranks."""

    loss: float
    """Mean cross-entropy over the targets of all microbatches and data-parallel ranks."""
    grad_norm: float
    """Norm of the whole gradient before clipping. If it is not finite, the step was skipped: weights stay."""


class PlannedStep:
    """One rank of a planned step that trains, as `plan_model` and `Plan.start` return it. All methods are collective.

    `parameters` maps hocket's name of each trained parameter to the model's own name and its whole shape. `buffers` are
    further state of the model, which steps do not change. `others` maps further names of parameters to these names.
    """

    def __init__(
        self,
        engine: Engine,
        settings: Settings,
        price: Price,
        parameters: Mapping[str, tuple[str, torch.Size]],
        buffers: Mapping[str, Tensor] | None = None,
        others: Mapping[str, str] | None = None,
    ) -> None:
        self.settings, self.parameters = settings, parameters
        self.buffers, self.others = buffers or {}, others or {}
        self._engine: Engine | None = engine
        self._price = price

    @property
    def engine(self) -> Engine:
        """The engine that runs the step. Raises ValueError after `close`."""
        if self._engine is None:
            raise ValueError("step: it is closed; fix: plan it again")
        return self._engine

    def __call__(self, batch: Sequence[Microbatch] | tuple[Tensor, Tensor], lr: float | None = None) -> Outcome:
        """Train on this data-parallel rank's part of a batch: one optimizer step.

        `batch` is a list of microbatches, or token ids and targets, both [microbatches * sequences, sequence length];
        targets are the tokens to predict (-100 is ignored). Ranks of one pipeline get the same batch. `lr` defaults to
        `train.lr`. Every target has the same weight, in every microbatch and on every rank. Raises ValueError, before
        anything runs, for a batch of other shapes or with tokens outside the model's vocabulary, on the rank with that
        batch, while the others wait; and on all ranks for a step without targets. After an error inside of the step the
        weights are those before it.
        """
        lr = self.settings.train.lr if lr is None else lr
        if not is_a(lr, float) or not 0 <= lr <= _LARGEST:
            raise ValueError(f"lr = {lr}: it would spoil all weights; fix: a finite number, 0 or larger")
        engine, microbatches = self.engine, self._microbatches(batch)
        result = self._or_abort(lambda: engine.train_step(microbatches, lr))
        agreed = engine.agree(result.loss)
        return Outcome(agreed.loss, agreed.grad_norm)

    def evaluate(self, batch: Sequence[Microbatch] | tuple[Tensor, Tensor]) -> float:
        """The mean cross-entropy without training. Raises as a step does."""
        engine, microbatches = self.engine, self._microbatches(batch)
        return engine.agree(self._or_abort(lambda: engine.evaluate(microbatches))).loss

    def _or_abort(self, work: Callable[[], T]) -> T:
        """The result of `work`. After an error, unfinished operations are dropped."""
        try:
            return work()
        except Exception:
            self.engine.abort()
            raise

    @property
    def program(self) -> Program:
        """The program of the step."""
        return self.engine.program

    def simulate(self) -> Timeline:
        """When each op is expected to run."""
        return simulate(self.program, self._price(self.settings))

    def draw(self, width: int = 120) -> str:
        """The expected step as text."""
        return text_timeline(self.simulate(), self.program, width)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every trained parameter by its own name: whole, fp32, on the CPU, gathered one after another.

        Raises ValueError with tensor parallelism, where ranks hold parts of parameters: save a checkpoint instead.
        """
        if self.settings.mesh.tp > 1:
            raise ValueError(
                f"mesh.tp = {self.settings.mesh.tp}: named_weights puts no parts of tensor-parallel ranks together; "
                "fix: save(folder), which any mesh loads"
            )
        self.engine.catch_up()
        control, device = self.engine.groups.control, self.engine.device
        pieces: dict[str, list[Any]] = {}
        for unit in self.engine.sharded.units.values():
            for piece in unit.pieces():
                pieces.setdefault(piece.name, []).append(piece)
        for name, (theirs, shape) in self.parameters.items():
            whole = torch.empty(shape.numel())
            for lo in range(0, shape.numel(), _PIECE):
                hi = min(lo + _PIECE, shape.numel())
                # Ranks that hold the same elements have equal values, so the maximum is the value.
                part = torch.full((hi - lo,), -torch.inf, device=device)
                for piece in pieces.get(name, ()):
                    first, last = max(lo, piece.lo), min(hi, piece.hi)
                    if first < last:
                        part[first - lo : last - lo] = piece.main[first - piece.lo : last - piece.lo]
                control.all_reduce(part, "max").wait()
                whole[lo:hi] = part.cpu()
            yield theirs, whole.view(shape)

    def state_dict(self) -> dict[str, Tensor]:
        """Everything in the model's own `state_dict`, by the same names: `named_weights` and buffers. On every rank.

        The model's `load_state_dict` takes it, and transformers' `save_pretrained(..., state_dict=...)`.
        """
        weights = dict(self.named_weights())
        found = {**weights, **{other: weights[name] for other, name in self.others.items()}}
        found |= {name: buffer.to("cpu", copy=True) for name, buffer in self.buffers.items()}
        for biases in everyone({name: bias.cpu() for name, bias in self.engine.balance.biases().items()}):
            found |= biases
        return found

    def load_into(self, model: nn.Module) -> None:
        """Copy the weights into a model of the same shapes, such as the planned one. ValueError for another."""
        params = dict(model.named_parameters()) if isinstance(model, nn.Module) else {}
        constants = {name: buffer for name, buffer in self.buffers.items() if name in params}
        if wrong := differences(params, {**dict(self.parameters.values()), **constants}):
            raise ValueError(f"model = {type(model).__name__}: {wrong}; fix: a model like the one that was planned")
        with torch.no_grad():
            for name, value in chain(self.named_weights(), constants.items()):
                params[name].copy_(value)

    def save(self, folder: str | os.PathLike[str], *, asynchronously: bool = False) -> Future[Path]:
        """Save weights, optimizer state and buffers to a new folder, which appears once it is complete.

        With `asynchronously` this returns as soon as the next step may begin, like `hocket.checkpoint.save`: `result()`
        of the future waits for the folder. Otherwise the folder is complete on return.

        The format is that of `hocket.checkpoint.save`, with the model's own names: `load` reads it on any mesh,
        `hocket.checkpoint.load` into the model under `fully_shard`, and torch's DCP into the plain model. Raises
        ValueError if the folder is in use or the ranks do not share it, OSError if it cannot be written.
        """
        path = Path(folder)
        if not path.name:
            raise ValueError(f"folder = {str(folder)!r}: it has no name; fix: such as checkpoints/10")
        self._refuse_state()
        state = self._state()
        for name, settings in self.engine.optimizer.settings.items():
            theirs = self.parameters[name][0]
            state[OPTIMIZER] |= {f"param_groups.{theirs}.{key}": value for key, value in settings.items()}
        return save_state(path, state, self.others, asynchronously=asynchronously)

    def load(self, folder: str | os.PathLike[str], *, optimizer: bool = True) -> None:
        """Load what `save` or `hocket.checkpoint.save` wrote, on any number of ranks; each reads only its part.

        Without `optimizer` only weights are loaded, and the optimizer starts afresh. Its settings stay those of
        `train.*`. Raises ValueError, before anything changes, for a folder that is no checkpoint of this model; for
        damaged files ValueError or OSError, after which some weights may have been loaded.
        """
        self._refuse_state()
        reader = CheckpointReader(Path(folder))
        stored = reader.shapes()
        self._refuse_other_model(Path(folder), stored, optimizer)
        reset_step_state(self.engine)
        state = self._state()
        lacking = {name for name in state[STEP] if f"{STEP}.{name}" not in stored}
        for name in lacking:
            del state[STEP][name]
        reader.load(state if optimizer else {MODEL: state[MODEL]})
        if not optimizer:
            reset_optimizer(self.engine)
            return
        if lacks := self._lacks(lacking):
            warnings.warn(f"checkpoint {folder} lacks {lacks}: they begin anew", stacklevel=2)
        resume_from(self.engine, state[OPTIMIZER])

    def _state(self) -> dict[str, dict[str, Any]]:
        """The tensors of this rank for a checkpoint, by the model's own names."""
        state = state_of(self.engine, {name: theirs for name, (theirs, _) in self.parameters.items()})
        state[MODEL] |= self.buffers
        return state

    def _refuse_state(self) -> None:
        """Raise ValueError if the transport exchanges nothing: such a state is not worth saving or loading."""
        if self.settings.train.transport == "null":
            raise ValueError(
                "train.transport = null: ranks have not exchanged what they learnt, which is nothing to save or go on "
                "from; fix: another train.transport"
            )

    def _lacks(self, missing: Collection[str]) -> str:
        """The missing state of the next step, in words."""
        spikes = self.engine.config.optimizer.skip_spikes
        words = {
            "the shares of rows that model.aux_loss_over = batch goes by": any(n.endswith(".share") for n in missing),
            f"the norms that optimizer.skip_spikes = {spikes:g} compares with": "norms" in missing and spikes > 0,
        }
        return " and ".join(text for text, lacking in words.items() if lacking)

    def _refuse_other_model(self, folder: Path, shapes: Mapping[str, Any], optimizer: bool) -> None:
        """Raise ValueError, the same on all ranks, for a checkpoint of another model or optimizer."""
        if not shapes:
            raise ValueError(f"checkpoint {folder}: it is not complete, for it has no .metadata; fix: what save wrote")
        mine = self._state()
        model, state = dict[str, Any](), dict[str, Any]()
        for weights, kept in everyone([{name: x.shape for name, x in mine[key].items()} for key in (MODEL, OPTIMIZER)]):
            model |= weights
            state |= {f"{OPTIMIZER}.{name}": shape for name, shape in kept.items()}
        found = {key.removeprefix(f"{MODEL}."): shape for key, shape in shapes.items() if key.startswith(f"{MODEL}.")}
        found = {name: shape for name, shape in found.items() if name not in self.others}
        if wrong := differences(found, model):
            raise ValueError(f"checkpoint {folder}: it is of another model: {wrong}; fix: the model that was saved")
        if optimizer and (wrong := differences({key: shapes[key] for key in state if key in shapes}, state)):
            raise ValueError(
                f"checkpoint {folder}: it is of another optimizer: {wrong}; fix: load(folder, optimizer=False)"
            )

    def close(self) -> None:
        """Free memory and process groups. The step cannot be used afterwards."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def _microbatches(self, batch: Sequence[Microbatch] | tuple[Tensor, Tensor]) -> list[Microbatch]:
        c, device = self.settings, self.engine.device
        count, shape = c.train.microbatches, (c.train.sequences, c.data.sequence_length)
        given = list(batch) if isinstance(batch, Sequence) else []
        found = [one for one in given if isinstance(one, Microbatch)]
        several, expected = [tensor for one in found for tensor in (one.ids, one.targets)], shape
        if not found and len(given) == 2:
            several, expected = [one for one in given if isinstance(one, Tensor)], (count * shape[0], shape[1])
        if len(several) != (2 * len(found) or 2) or len(found) not in (0, len(given)) or not all(map(_usable, several)):
            raise ValueError(
                "batch: give the microbatches, or (token ids, targets); token ids and targets are whole numbers; fix: "
                "tensors of torch.int64"
            )
        if {tuple(tensor.shape) for tensor in several} != {expected} or len(found) not in (0, count):
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in several[:4])
            raise ValueError(
                f"batch: {len(found)} microbatches, tensors of {shapes}, and the step was planned for "
                f"train.microbatches = {count} of {shape}; fix: ids and targets of {count * shape[0]} sequences of "
                f"{shape[1]} tokens"
            )
        found = found or [Microbatch(*pair) for pair in zip(*(x.split(shape[0]) for x in several), strict=True)]
        microbatches = [self._checked(n, one, device) for n, one in enumerate(found)]
        learnt = torch.stack([(one.targets != IGNORED).sum() for one in microbatches]).sum()
        self.engine.groups.control.all_reduce(learnt).wait()
        if not learnt and self.settings.train.transport != "null":
            raise ValueError(
                "batch: no target of any microbatch or rank counts, and the mean of none is no number; fix: give the "
                f"step sequences with targets other than {IGNORED}"
            )
        return microbatches

    def _checked(self, n: int, one: Microbatch, device: torch.device) -> Microbatch:
        """A microbatch on the device. Raises ValueError for tokens outside the model's vocabulary."""
        ids, targets = one.ids.long(), one.targets.long()
        packed = self.settings.data.packing != "off"
        there = isinstance(one.documents, Documents) and one.documents.ids_BS.shape == ids.shape
        if there != packed or (one.documents is not None) != packed:
            raise ValueError(
                f"batch: microbatch {n} has {'' if there else 'no '}documents of its tokens, and data.packing = "
                f"{self.settings.data.packing}; fix: Microbatch(..., documents=documents_of(numbers)) of "
                "hocket.model.documents where it is not off, and there alone"
            )
        counted = targets[targets != IGNORED]
        for what, values, size in (("token ids", ids, self._rows), ("targets", counted, self.settings.model.vocab)):
            least, most = (int(values.min()), int(values.max())) if values.numel() else (0, 0)
            if least < 0 or most >= size:
                raise ValueError(
                    f"batch: {what} of microbatch {n} go from {least} to {most}, and the model's from 0 to {size - 1}; "
                    f"fix: this model's own tokenizer, and {IGNORED} for targets that are not to count"
                )
        where = one.documents.to(device) if isinstance(one.documents, Documents) else None
        return Microbatch(ids.to(device).contiguous(), targets.to(device).contiguous(), documents=where)

    @property
    def _rows(self) -> int:
        """Rows of the embedding; rows of the head if it is not a single table."""
        tables = [shape for name, (_, shape) in self.parameters.items() if name.startswith("embed.")]
        return tables[0][0] if len(tables) == 1 and len(tables[0]) == 2 else self.settings.model.vocab


def _usable(value: object) -> bool:
    """Whether a value is a tensor of integers with data."""
    if not isinstance(value, Tensor) or value.is_meta or value.layout is not torch.strided:
        return False
    return not (value.is_floating_point() or value.is_complex() or value.dtype is torch.bool)


def other_ranks(config: Config) -> list[str]:
    """A problem if the number of ranks differs from the mesh's."""
    ranks, mesh = dist.get_world_size() if dist.is_initialized() else 1, config.mesh
    if mesh.world == ranks:
        return []
    started = f"{ranks} rank{'s have' if ranks > 1 else ' has'} started"
    replicas, rest = divmod(ranks, mesh.pp * mesh.cp * mesh.tp)
    smaller = f"mesh.dp = {replicas}" if replicas and not rest else f"a mesh of {ranks}"
    alone = "" if dist.is_initialized() else ", without a process group"
    fix = f"torchrun --nproc-per-node {mesh.world}, or {smaller}"
    contexts = " * mesh.cp" if mesh.cp > 1 else ""
    return [f"mesh.pp * mesh.dp{contexts} * mesh.tp = {mesh.world}: {started}{alone}; fix: {fix}"]


def start(settings: Settings) -> PlannedStep:
    """The part of this rank in a step of hocket's own transformer, with initial weights. See `Plan.start`."""
    whole = Chunk(settings.model, range(settings.model.layers), first=True, last=True)
    names = {name: (name, param.shape) for name, param in whole.named_parameters()}
    stop_if([*other_ranks(settings), *unmatched(settings.optimizer, [(name,) for name in names], settings.origins)])
    if settings.train.device == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "train.device = cuda: torch sees no GPU here; fix: a host with GPUs, or train.device = cpu with "
            "precision.compute = fp32"
        )
    on_gpu = settings.train.device == "cuda"
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    engine = Engine(settings, dist.get_rank() if dist.is_initialized() else 0, device)
    engine.init_weights()
    return PlannedStep(engine, settings, model_costs, names)


def state_of(engine: Engine, names: Mapping[str, str] | None = None) -> dict[str, dict[str, Any]]:
    """The weights and state of this rank, by key of a checkpoint: live tensors, except for update counts.

    `names` maps parameters to their names in the checkpoint.
    """
    optimizer, updates = engine.optimizer, torch.tensor(float(engine.optimizer.steps))
    kept = [(each.piece, {key: getattr(each, key) for key in AVERAGES}) for each in optimizer.state.values()]
    kept += [(piece, {"momentum_buffer": momentum}) for piece, momentum in optimizer.momenta.values()]
    weights, state = dict[str, Any](engine.balance.biases()), dict[str, Any]()
    for piece, items in kept:
        name = names[piece.name] if names else piece.name
        weights[name] = piece.boxes(piece.main)
        state |= {f"state.{name}.{key}": piece.boxes(flat) for key, flat in items.items()}
        state[f"state.{name}.step"] = updates.clone()
    return {MODEL: weights, OPTIMIZER: state, STEP: step_state(engine)}


def step_state(engine: Engine) -> dict[str, Any]:
    """State of the next step besides weights and the optimizer's state."""
    shares = {f"layers.{n}.share": share for n, share in engine.balance.shares().items()}
    return {**shares, **engine.optimizer.guard.remembered}


def reset_step_state(engine: Engine) -> None:
    """Reset what `step_state` returns."""
    for share in engine.balance.shares().values():
        share.fill_(1 / len(share))
    engine.optimizer.guard.forget()


def resume_from(engine: Engine, state: Mapping[str, Any]) -> None:
    """Continue from loaded weights and optimizer state."""
    updates = (int(value) for key, value in state.items() if key.endswith(".step"))
    engine.optimizer.steps = max(everyone(max(updates, default=0)))  # small parameters are only on some ranks
    engine.sharded.refresh()


def reset_optimizer(engine: Engine) -> None:
    """Restart the optimizer, after loading only weights."""
    state = state_of(engine)[OPTIMIZER]
    for value in state.values():
        local_of(value).zero_()
    resume_from(engine, state)
