"""A planned step that trains: what `hocket.plan_model` and `hocket.plan(...).start()` return."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hocket.engine import Engine
from hocket.model.microbatch import Microbatch
from hocket.model.transformer import Chunk
from hocket.program.ops import Program
from hocket.program.simulate import Timeline, simulate
from hocket.program.timeline import text_timeline
from hocket.resolve import Settings
from hocket.tune.trials import Price, model_costs

_PIECE = 1 << 26
"""Elements that ranks put together at a time."""


class Outcome(NamedTuple):
    """The result that a step reports, the same on all ranks."""

    loss: float
    """Mean cross-entropy over the microbatches of all ranks."""
    grad_norm: float
    """Norm of the whole gradient, before it is clipped."""


class PlannedStep:
    """One rank of a planned step that trains: what `plan_model` and `Plan.start` return. Ranks call its methods alike.

    `parameters` has the model's own name and whole shape of each parameter, by hocket's name of it.
    """

    def __init__(
        self, engine: Engine, settings: Settings, price: Price, parameters: Mapping[str, tuple[str, torch.Size]]
    ) -> None:
        self.engine, self.settings, self.parameters = engine, settings, parameters
        self._price = price

    def __call__(self, batch: Sequence[Microbatch] | tuple[Tensor, Tensor], lr: float | None = None) -> Outcome:
        """Train on this data-parallel rank's part of a batch: one optimizer step.

        `batch` is the microbatches, or token ids and targets, both [microbatches * sequences, sequence length]; targets
        are the tokens to predict (-100 counts for nothing). Ranks of one pipeline are given the same. Without `lr` it
        is `train.lr`.
        """
        lr = self.settings.train.lr if lr is None else lr
        if not (math.isfinite(lr) and lr >= 0):
            raise ValueError(f"lr = {lr}: it would spoil all weights; fix: a finite number, 0 or larger")
        result = self.engine.train_step(self._microbatches(batch), lr)
        loss, _, _ = self.engine.agree(result.loss)
        return Outcome(loss, float(result.grad_norm))

    def evaluate(self, batch: Sequence[Microbatch] | tuple[Tensor, Tensor]) -> float:
        """The mean cross-entropy without training."""
        return self.engine.agree(self.engine.evaluate(self._microbatches(batch)))[0]

    @property
    def program(self) -> Program:
        """The plan."""
        return self.engine.program

    def simulate(self) -> Timeline:
        """When each op is expected to run."""
        return simulate(self.program, self._price(self.settings))

    def draw(self, width: int = 120) -> str:
        """The expected step as text."""
        return text_timeline(self.simulate(), self.program, width)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter of the model by its own name, whole, fp32, on the CPU: put together one after the other.

        Raises ValueError with tensor-parallel ranks, which hold parts of parameters: save a checkpoint instead.
        """
        if self.settings.mesh.tp > 1:
            raise ValueError(
                f"mesh.tp = {self.settings.mesh.tp}: named_weights puts no parts of tensor-parallel ranks together; "
                "fix: hocket train saves checkpoints that any mesh loads"
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
                # What several ranks have is alike, so the largest is what it is.
                part = torch.full((hi - lo,), -torch.inf, device=device)
                for piece in pieces.get(name, ()):
                    first, last = max(lo, piece.lo), min(hi, piece.hi)
                    if first < last:
                        part[first - lo : last - lo] = piece.main[first - piece.lo : last - piece.lo]
                control.all_reduce(part, "max").wait()
                whole[lo:hi] = part.cpu()
            yield theirs, whole.view(shape)

    def state_dict(self) -> dict[str, Tensor]:
        """All of `named_weights`. A whole model in fp32 on each rank."""
        return dict(self.named_weights())

    def load_into(self, model: nn.Module) -> None:
        """Copy the weights into a model of the same shape, such as the one that was planned."""
        params = dict(model.named_parameters())
        with torch.no_grad():
            for name, value in self.named_weights():
                params[name].copy_(value)

    def close(self) -> None:
        """Give back memory and process groups."""
        self.engine.close()

    def _microbatches(self, batch: Sequence[Microbatch] | tuple[Tensor, Tensor]) -> list[Microbatch]:
        c, device = self.settings, self.engine.device
        found = [one for one in batch if isinstance(one, Microbatch)]
        if not found:
            if len(batch) != 2 or not all(isinstance(one, Tensor) for one in batch):
                raise ValueError("batch: give the microbatches, or (token ids, targets), two tensors of whole numbers")
            ids, targets = batch
            assert isinstance(ids, Tensor)
            assert isinstance(targets, Tensor)
            parts = zip(ids.chunk(c.train.microbatches), targets.chunk(c.train.microbatches), strict=True)
            found = [Microbatch(*pair) for pair in parts]
        if any(tensor.is_floating_point() for one in found for tensor in (one.ids, one.targets)):
            raise ValueError("batch: token ids and targets are whole numbers; fix: tensors of torch.int64")
        shape = c.train.sequences, c.data.sequence_length
        shapes = {tuple(tensor.shape) for one in found for tensor in (one.ids, one.targets)}
        if shapes != {shape} or len(found) != c.train.microbatches:
            raise ValueError(
                f"batch: {len(found)} microbatches of {sorted(shapes)}, and the step was planned for "
                f"train.microbatches = {c.train.microbatches} of {shape}; fix: ids and targets of "
                f"{c.train.microbatches * shape[0]} sequences of {shape[1]} tokens"
            )
        where = {"device": device, "dtype": torch.int64}
        return [Microbatch(one.ids.to(**where).contiguous(), one.targets.to(**where).contiguous()) for one in found]


def started(settings: Settings) -> PlannedStep:
    """The rank's part of a step over hocket's own transformer, with first values. See `Plan.start`."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if settings.world != ranks:
        started = f"{ranks} rank{'s have' if ranks > 1 else ' has'} started"
        replicas, rest = divmod(ranks, settings.mesh.pp * settings.mesh.tp)
        smaller = f"mesh.dp = {replicas}" if replicas and not rest else f"a mesh of {ranks}"
        raise ValueError(
            f"mesh.pp * mesh.dp * mesh.tp = {settings.world}: {started}"
            f"{'' if dist.is_initialized() else ', without a process group'}; fix: torchrun --nproc-per-node "
            f"{settings.world}, or {smaller}"
        )
    if settings.train.device == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "train.device = cuda: torch sees no GPU here; fix: a host with GPUs, or train.device = cpu with "
            "precision.compute = fp32"
        )
    on_gpu = settings.train.device == "cuda"
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    engine = Engine(settings, dist.get_rank() if dist.is_initialized() else 0, device)
    engine.init_weights()
    whole = Chunk(settings.model, range(settings.model.layers), first=True, last=True)
    names = {name: (name, param.shape) for name, param in whole.named_parameters()}
    return PlannedStep(engine, settings, model_costs, names)
