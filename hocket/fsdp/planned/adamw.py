"""AdamW on shards: each rank updates the elements it keeps, nothing is gathered.

A rank updates runs of its units' memory; AdamW is elementwise, so this is the same as updating whole parameters. Weight
decay goes by the *whole* parameter: its name, and its number of dimensions. Gradients are there from the reduces of a
step until the optimizer has read them. On a GPU one kernel clips, updates, and writes weights in the compute dtype
where they lie whole; on a CPU torch's operations do.

Note: [Averages in bf16]
The two averages may be kept in bf16. A step makes them fp32, updates, and rounds them to nearest,
so an update is exact but for what was rounded before, the same on every run, and no random number is part of a
checkpoint. bf16 has fp32's exponents, so squares of small gradients do not vanish. But it has 8 significant bits: a
decay by `1 - beta` of a value is lost where that is less than half of its last digit, up to 2^-8 of the value. An
average may so stay off by 2^-8 / (1 - beta) of itself: 4 % at 0.9, 8 % at 0.95, all of it at 0.996. Settings allow
rates up to where it is a quarter, and a step an eighth (`settings/training_rules.py`). DeepSeek-V3 was trained so, with
rates of 0.9 and 0.95 (DeepSeek-AI 2024, section 3.3.3).

Note: [Recorded updates]
With `overlap.dp.update = next_step` a recorded step (`engine/graphed.py`) begins with the updates that the step before
has left to it. A replay reads what the recording read: gradients where each step writes them, so their memory stays
from the recording on; and `told`, which the end of each step writes. A replay updates every unit, whether or not its
gradients wait for that. So where they were updated before, by `catch_up` in front of a validation or a checkpoint, or
where none are there yet, `told` says that nothing is to be done.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hocket.fsdp.grad_norm import squares_of
from hocket.fsdp.planned.model import PlannedModel
from hocket.fsdp.planned.muon import MuonOptions, PlannedMuon
from hocket.fsdp.planned.skipping import StepGuard, Verdict
from hocket.fsdp.planned.unit import Piece, PlannedUnit
from hocket.kernels import usable
from hocket.runtime.comm import Group, Pending

AVERAGES = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class AdamWOptions:
    """Settings of the optimizer."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    """Of what decays."""
    clip: float = 1.0
    """Largest norm of all gradients together; 0 clips nothing."""
    spike: float = 0.0
    """Factor above the usual norm of gradients from which a step is not taken; 0: any finite one is."""
    averages: torch.dtype = torch.float32
    """What both averages are kept in between steps. See Note: [Averages in bf16]."""
    decays: Callable[[str, Sequence[int]], bool] = lambda name, shape: len(shape) - (".experts." in name) > 1
    """Whether a parameter decays, by its name and its shape in the whole model."""
    muon: MuonOptions | None = None
    """What Muon updates in the place of AdamW; None: nothing."""


@dataclass(frozen=True)
class PieceState:
    """What a checkpoint holds of one parameter on this rank; the tensors are live and 1-D, the weights fp32."""

    piece: Piece
    exp_avg: Tensor
    exp_avg_sq: Tensor


@dataclass(frozen=True)
class _Run:
    """Neighbours in a unit's memory that are updated alike."""

    unit: PlannedUnit
    at: slice
    decays: bool
    averages: tuple[Tensor, Tensor]

    @classmethod
    def of(cls, unit: PlannedUnit, pieces: Sequence[Piece], options: AdamWOptions) -> list[_Run]:
        """The runs of some pieces of a unit."""
        places = unit.group.kept.slices(unit.group.position)
        alike: list[tuple[int, int, bool]] = []
        for piece in pieces:
            here, decays = places[piece.shard.position], options.decays(piece.name, piece.shape)
            start = alike.pop()[0] if alike and alike[-1][1:] == (here.start, decays) else here.start
            alike.append((start, here.stop, decays))

        def zeros(length: int) -> Tensor:
            return torch.zeros(length, dtype=options.averages, device=unit.group.main.device)

        return [
            cls(unit, slice(start, stop), decays, (zeros(stop - start), zeros(stop - start)))
            for start, stop, decays in alike
        ]

    def state(self, piece: Piece) -> PieceState:
        """What is kept of one of its pieces."""
        place = self.unit.group.kept.slices(self.unit.group.position)[piece.shard.position]
        here = slice(place.start - self.at.start, place.stop - self.at.start)
        return PieceState(piece, *(average[here] for average in self.averages))


class PlannedAdamW:
    """The optimizer of one rank's sharded model. `control` joins all ranks of the world."""

    def __init__(self, model: PlannedModel, control: Group, options: AdamWOptions) -> None:
        self.model, self.control, self.options = model, control, options
        self.guard = StepGuard(model.device, options.spike)
        """Tells which steps are not taken. See Note: [A step that is not taken]."""
        self._squares = torch.zeros(0)
        self._apart = [
            (unit, piece) for unit in model.units.values() if unit.tensors.size > 1 for piece in unit.pieces()
        ]
        """Pieces that are counted one by one, for some of a unit are on all tensor-parallel ranks."""
        replicas = [unit.group.groups.replicas * unit.copies for unit in model.units.values()]
        if self._apart:
            replicas = [unit.group.groups.replicas * unit.copies * piece.shared for unit, piece in self._apart]
        self._replicas = torch.tensor(replicas, device=model.device)  # of every gradient that is counted
        self.muon = None if options.muon is None else PlannedMuon(model, options.muon)
        self._count = torch.zeros((), dtype=torch.int64, device=model.device)
        """Updates made so far."""
        self._betas = torch.tensor(options.betas, dtype=torch.float64, device=model.device)
        self._verdict = Verdict(self.guard.skipped, self._betas.new_ones(()), options.lr)
        self._told = self._betas.new_zeros(5)
        """What updates read on the device: see `kernels/adamw.py`. Always the same memory, which recorded ones read."""
        momenta = self.momenta
        self._runs: dict[PlannedUnit, list[_Run]] = {}
        self._pieces: dict[str, tuple[Piece, _Run]] = {}
        for unit in model.units.values():
            pieces = [piece for piece in unit.pieces() if piece.name not in momenta]
            self._runs[unit] = runs = _Run.of(unit, pieces, options)
            places = unit.group.kept.slices(unit.group.position)
            for piece in pieces:
                start = places[piece.shard.position].start
                run = next(run for run in runs if run.at.start <= start < run.at.stop)
                self._pieces[piece.name] = piece, run

    @property
    def steps(self) -> int:
        """Updates made so far. Setting it matters after loading `exp_avg` and `exp_avg_sq` from a checkpoint."""
        return int(self._count)

    @steps.setter
    def steps(self, value: int) -> None:
        self._count.fill_(value)

    @property
    def momenta(self) -> Mapping[str, tuple[Piece, Tensor]]:
        """The averages of what Muon updates on this rank, by parameter name: live, 1-D, fp32."""
        return {} if self.muon is None else self.muon.momenta

    @property
    def state(self) -> Mapping[str, PieceState]:
        """AdamW's state by parameter name, for what this rank keeps of what it updates."""
        return {name: run.state(piece) for name, (piece, run) in self._pieces.items()}

    @property
    def settings(self) -> Mapping[str, Mapping[str, Any]]:
        """The settings of torch's AdamW of what this rank keeps, by parameter name: `lr`, `betas`, ..."""
        o = self.options
        one = torch.optim.AdamW([torch.zeros(1)], lr=self._verdict.lr, betas=o.betas, eps=o.eps).defaults
        decays = {True: o.weight_decay, False: 0.0}
        return {name: {**one, "weight_decay": decays[run.decays]} for name, (_, run) in self._pieces.items()}

    def _grads(self) -> list[Tensor]:
        """The gradients of this rank, one flat tensor per unit."""
        return [unit.group.main_grad for unit in self.model.units.values()]

    def grad_norm(self) -> Tensor:
        """Norm of the gradients of the whole model, fp64, on the device. Every rank calls this.

        Every element of every gradient is kept by one rank of the world, or by as many as its group has replicas, and
        the squares add up. In fp64 the order in which they do makes no difference that would survive rounding the clip
        factor to fp32.
        """
        counted = [piece.grad for _, piece in self._apart] or self._grads()
        self._squares = squares_of(counted)
        square = (self._squares / self._replicas).sum().reshape(1)
        self.control.all_reduce(square).wait()
        return square.sqrt().squeeze(0)

    def not_finite(self) -> list[tuple[int, str]]:
        """What this rank's last gradients were not finite of, each behind its layer; the head's is behind the last."""
        units = [unit for unit, _ in self._apart] or list(self.model.units.values())
        last = 1 + max((unit.layer for unit in units), default=0)
        bad = (~self._squares.isfinite()).tolist()
        return [
            (last if unit.kind == "head" else unit.layer, str(unit))
            for unit, wrong in zip(units, bad, strict=True)
            if wrong
        ]

    @torch.no_grad()
    def step(self, lr: float | None = None, later: bool = False) -> Tensor:
        """Clip, update the weights of this rank, forget the gradients. Returns the norm before clipping.

        Nothing is updated where the guard says so, which `guard.skipped` tells.
        With `later`, gradients rest as they are until `update` is called for each unit, or `catch_up`.
        """
        self.catch_up()
        norm = self.grad_norm()
        self._judge(norm, self._verdict.lr if lr is None else lr)
        if later:
            self.model.rest_grads()
            return norm
        for unit in self.model.units.values():
            self._step(unit)
        self.model.agree()
        self.model.forget_grads()
        return norm

    def _judge(self, norm: Tensor, lr: float) -> None:
        """Decide what a step does, from the norm of its gradients, on the device."""
        skipped, factor = self.guard.judge(norm), torch.ones_like(norm)
        if self.options.clip:
            factor = (self.options.clip / (norm + 1e-6)).clamp(max=1.0)
        self._verdict = Verdict(skipped, factor, lr)
        self._count += ~skipped
        corrections = 1 - self._betas**self._count
        decay = torch.full_like(factor, 1 - lr * self.options.weight_decay)
        told = [factor, lr / corrections[0], corrections[1].sqrt(), skipped.double(), decay]
        torch.stack(told, out=self._told)

    def _step(self, unit: PlannedUnit) -> None:
        """Update one unit."""
        if self.muon is not None and self.muon.takes(unit):
            self.muon.update(unit, self._verdict)
        group = unit.group
        fused, copy = usable(group.main), group.weight if group.whole and group.weight is not group.main else None
        for run in self._runs[unit]:
            main, grad = group.main[run.at], group.main_grad[run.at]
            given = self._told, run.decays, (*self.options.betas, self.options.eps)
            if fused:
                from hocket.kernels.adamw import adamw

                adamw(main, grad, run.averages, None if copy is None else copy[run.at], *given)
            else:
                _adamw(main, grad, run.averages, *given)
        unit.refresh(written=fused and self.muon is None)

    @torch.no_grad()
    def update(self, unit: PlannedUnit) -> tuple[Tensor, ...]:
        """Update the weights of one unit, if its gradients wait for that. Returns their memory, on any lane.

        The caller keeps it until the lane that made it comes behind the update.
        """
        if not unit.awaits_update:
            return ()
        self._step(unit)
        return unit.take_grads(self.model.held)

    @torch.no_grad()
    def with_matrices(self, verb: str, unit: PlannedUnit, slot: int) -> Pending:
        """One of `WHOLE_MATRICES`, in front of the update of a unit whose gradients wait for that."""
        if self.muon is None or not unit.awaits_update or not self.muon.takes(unit):
            return Pending()
        return self.muon.go_on(verb, unit, slot, self._verdict)

    def catch_up(self) -> None:
        """Make the updates that were left to the next step: weights and state are those behind the last step."""
        units, muon = [unit for unit in self.model.units.values() if unit.awaits_update], self.muon
        for unit in sorted(units, key=lambda unit: muon is None or not muon.begun(unit)):  # begun ones have the slots
            self.update(unit)
        if units:
            self._told[3].fill_(1)

    def begin_recording(self) -> None:
        """Before a step is recorded: it makes the updates of the step before. See Note: [Recorded updates]."""
        units = self.model.units.values()
        if not all(unit.awaits_update for unit in units):
            self._told[3].fill_(1)
        for unit in units:
            unit.keep_grads()

    def not_recorded(self) -> None:
        """Behind a recording that has failed, in which no update was made."""
        for unit in self.model.units.values():
            unit.awaits_update = True
            unit.let_grads_go()

    def replayed(self) -> None:
        """Behind a replay: it has made all updates that were left."""
        for unit in self.model.units.values():
            unit.awaits_update = False


def _adamw(
    main: Tensor,
    grad: Tensor,
    averages: tuple[Tensor, Tensor],
    told: Tensor,
    decays: bool,
    rates: tuple[float, float, float],
) -> None:
    """What `kernels/adamw.py` does, in torch's operations, with the bits of torch's own AdamW on a CPU."""
    factor, size, root, skipped, decay = told.tolist()
    if skipped:
        return
    beta1, beta2, eps = rates
    average, squares = (kept.float() for kept in averages)
    grad.mul_(torch.tensor(factor, dtype=torch.float32))
    main.mul_(decay if decays else 1.0)
    average.lerp_(grad, 1 - beta1)
    squares.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    main.addcdiv_(average, squares.sqrt().div_(root).add_(eps), value=-size)
    for kept, moved in zip(averages, (average, squares), strict=True):
        kept.copy_(moved)
