"""The optimizer of a planned step: AdamW and Muon on shards, and which steps are not taken.

AdamW is elementwise: a rank updates runs of its units' memory, and nothing is gathered. Weight
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
from the recording on; and `step_values`, which the end of each step writes. A replay updates every unit, whether or not
its gradients wait for that. So where they were updated before, by `catch_up` in front of a validation or a checkpoint, or
where none are there yet, `step_values` says that nothing is to be done.

Note: [A step that is not taken]
The norm of all gradients is there before any weight is updated, in the step or at the beginning of the next one, and
all ranks have the same. So they decide alike, from that number alone. The host does not wait for the decision: it
stays on the device, where each update asks for it and writes nothing; the count of its steps stays as well.

A step that is not taken changes nothing but the position in the text and the count of the run's steps, by which the
learning rate goes: weights, averages, the count of AdamW's corrections and balance biases stay.

Note: [Muon under a plan]
After the last reduction of a step each unit goes through the verbs of `WHOLE_MATRICES`: `collect` gathers the averages,
`orthogonalise` iterates, `scatter` distributes the results (`fsdp/muon.py`, Note: [Each matrix on one rank]), and the
update moves the weights. With `overlap.dp.update = next_step` these are ops of the plan, at the beginning of the next
step: see `Note: [Whole matrices of sharded units]` in `program/shard.py`. Otherwise the step op does all of it, unit by
unit, and nothing runs beside it.

Note: [What is one matrix]
Gate and up projections are stacked in one weight here and are two matrices, as in the models of Hugging Face; queries,
keys and values are weights of their own. Each expert has its own matrices. Experts' weights have their input width
first, so they are turned over: `original` scales by the shape of output by input width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from hocket.fsdp.muon import WholeMatrices, factor_of
from hocket.fsdp.planned.model import PlannedModel
from hocket.fsdp.planned.unit import Piece, PlannedUnit
from hocket.fsdp.shard_grads import squares_of
from hocket.kernels import usable
from hocket.program.ops import WHOLE_MATRICES
from hocket.runtime.comm import Group, Pending

WINDOW = 128
"""Steps whose norms are remembered."""
ENOUGH = 16
"""Norms without which no step is said to be far above them."""


class Verdict(NamedTuple):
    """What the norm of a step's gradients has decided: on the device, the same on every rank."""

    skipped: Tensor
    """Whether nothing is to be updated, a bool."""
    factor: Tensor
    """What gradients are multiplied with, so that their norm is not above the largest one allowed; fp64."""
    lr: float


class StepGuard:
    """Judges the norms of one run's gradients. The same on every rank."""

    def __init__(self, device: torch.device, factor: float = 0.0) -> None:
        """A norm is a spike above `factor` times the median of the last ones; with 0, none is."""
        self._factor = factor
        self.skipped = torch.zeros((), dtype=torch.bool, device=device)
        """Whether the last step was not taken."""
        self.total = torch.zeros((), dtype=torch.int64, device=device)
        """Steps that were not taken so far."""
        self._norms = torch.full((WINDOW,), torch.nan, dtype=torch.float64, device=device)
        """Of the last steps that were taken, oldest first, behind nan where there were fewer."""

    def judge(self, norm: Tensor) -> Tensor:
        """Whether the step of a gradient of this norm, fp64, is to be skipped: a bool on the device. No host waits."""
        self.skipped = ~norm.isfinite()
        if self._factor:
            self.skipped = self.skipped | (norm > self._factor * self._usual())
            longer = torch.cat([self._norms[1:], norm.reshape(1)])
            self._norms = torch.where(self.skipped, self._norms, longer)
        self.total = self.total + self.skipped
        return self.skipped

    def _usual(self) -> Tensor:
        """The median of the norms that are remembered, fp64: the lower of two. Infinite while there are not enough."""
        known = WINDOW - self._norms.isnan().sum()
        median = self._norms.sort().values.gather(0, ((known - 1) // 2).clamp(min=0).reshape(1)).squeeze(0)
        return torch.where(known >= ENOUGH, median, torch.inf)

    @property
    def usual(self) -> float:
        """The norm with which others are compared. Waits for the device."""
        return float(self._usual())

    @property
    def norms(self) -> list[float]:
        """The norms that are remembered. Waits for the device."""
        return self._norms[~self._norms.isnan()].tolist()

    @property
    def remembered(self) -> dict[str, Tensor]:
        """All that `go_on` takes, by name: live tensors."""
        return {"skipped": self.total, "norms": self._norms}

    def go_on(self, total: int, norms: Sequence[float]) -> None:
        """Remember what another guard did."""
        self.total.fill_(total)
        self._norms.fill_(torch.nan)
        if norms := norms[-WINDOW:]:
            self._norms[-len(norms) :] = self._norms.new_tensor(norms)


@dataclass(frozen=True)
class MuonOptions:
    """Settings of Muon."""

    takes: Callable[[str, Sequence[int]], bool]
    """Whether it updates a parameter, by its name and its shape in the whole model."""
    decays: Callable[[str, Sequence[int]], bool]
    weight_decay: float = 0.1
    momentum: float = 0.95
    scale: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    slots: int = 1
    """Units of a class that are under way at once."""


def matrices_of(name: str, weight: Tensor) -> list[Tensor]:
    """The matrices of a weight, [output, input] each: views. See Note: [What is one matrix]."""
    halves = 2 if name.endswith(".w_gate_up") else 1
    if ".experts." in name:
        return [half.mT for expert in weight for half in expert.chunk(halves, 1)]
    return list(weight.chunk(halves))


@dataclass
class _Slot:
    """Memory of one unit at a time."""

    whole: Tensor
    """Its averages, and then the results in their place: bf16."""
    parts: Tensor
    """What this rank keeps of the results: fp32."""


@dataclass
class _UnderWay:
    """A unit between its collect and its update."""

    slot: _Slot
    done: str
    pending: Pending


class PlannedMuon:
    """Muon of one rank's sharded model, for the parameters that its options take."""

    def __init__(self, model: PlannedModel, options: MuonOptions) -> None:
        self.model, self.options = model, options
        self.momenta: dict[str, tuple[Piece, Tensor]] = {}
        """The averages of what this rank keeps, by name: live, 1-D, fp32."""
        self._whole: dict[PlannedUnit, WholeMatrices] = {}
        self._under_way: dict[PlannedUnit, _UnderWay] = {}
        for unit in model.units.values():
            names = [member.name for member in unit.group.members]
            pieces = [piece for piece in unit.pieces() if options.takes(piece.name, piece.shape)]
            self.momenta |= {piece.name: (piece, torch.zeros_like(piece.main)) for piece in pieces}
            shapes = [unit.group.span_of(shard).shape for shard in unit.group.shards]
            if taken := [i for i, name in enumerate(names) if options.takes(name, shapes[i])]:
                self._whole[unit] = WholeMatrices(unit.group, taken, lambda i, view, of=names: matrices_of(of[i], view))
        self._slots = {kind: self._allocate(kind) for kind in ("dense", "experts")}

    def _allocate(self, kind: str) -> list[_Slot]:
        """The slots of a class of units. Every rank calls this."""
        groups = [unit.group for unit in self._whole if unit.kind == kind]
        if not groups:
            return []
        length, part = (max(sizes) for sizes in zip(*((g.layout.total, g.main.numel()) for g in groups), strict=True))
        device, found = self.model.device, list[_Slot]()
        for _ in range(1 if groups[0].keeps_all else self.options.slots):
            whole = torch.zeros(length, dtype=torch.bfloat16, device=device)
            found.append(_Slot(whole, torch.empty(part, device=device)))
        return found

    def takes(self, unit: PlannedUnit) -> bool:
        """Whether it updates some of a unit."""
        return unit in self._whole

    def begun(self, unit: PlannedUnit) -> bool:
        """Whether a unit's averages have been moved, but not its weights."""
        return unit in self._under_way

    @torch.no_grad()
    def go_on(self, verb: str, unit: PlannedUnit, slot: int, verdict: Verdict) -> Pending:
        """Do one of `WHOLE_MATRICES` with a unit, each in its turn. No average changes in a step that is skipped."""
        if verb == "collect":
            assert unit not in self._under_way, f"{unit} is collected twice"
            place = self._slots[unit.kind][slot]
            for other in self._under_way.values():
                if other.slot is place:  # on a CPU what is sent from there may still be under way
                    other.pending.wait()
            self._under_way[unit] = _UnderWay(place, "", Pending())
        of, matrices = self._under_way[unit], self._whole[unit]
        of.pending.wait()
        whole, parts = of.slot.whole[: unit.group.layout.total], of.slot.parts[: unit.group.main.numel()]
        of.pending, of.done = Pending(), verb
        match verb:
            case "collect":
                self._average(unit, matrices.mine(whole), verdict)
                of.pending = matrices.gather(whole)
            case "orthogonalise":
                matrices.iterate(whole)
            case _:
                of.pending = matrices.scatter(whole, parts)
        return of.pending

    @torch.no_grad()
    def update(self, unit: PlannedUnit, verdict: Verdict) -> None:
        """Move the weights of a unit, behind what is left to do before. Nothing changes in a step that is skipped."""
        done = self._under_way[unit].done if unit in self._under_way else ""
        for verb in WHOLE_MATRICES[WHOLE_MATRICES.index(done) + 1 if done else 0 :]:
            self.go_on(verb, unit, 0, verdict)
        of, here = self._under_way.pop(unit), unit.group.shard_layout.slices(unit.group.position)
        of.pending.wait()
        for i in self._kept(unit):
            self._move(self.momenta[unit.group.members[i].name][0], of.slot.parts[here[i]], verdict)

    def _kept(self, unit: PlannedUnit) -> list[int]:
        """The members that it updates and of which this rank keeps something."""
        return [i for i in self._whole[unit].taken if unit.group.shards[i].hi > unit.group.shards[i].lo]

    def _average(self, unit: PlannedUnit, mine: Tensor, verdict: Verdict) -> None:
        here = unit.group.shard_layout.slices(unit.group.position)
        for i in self._kept(unit):
            piece, momentum = self.momenta[unit.group.members[i].name]
            mine[here[i]] = self._averaged(piece.grad * verdict.factor.float(), momentum, verdict.skipped)

    def _averaged(self, grad: Tensor, momentum: Tensor, skipped: Tensor) -> Tensor:
        """Move the average, and return Nesterov's look ahead of it."""
        beta = self.options.momentum
        moved = momentum.lerp(grad, 1 - beta)
        momentum.copy_(torch.where(skipped, momentum, moved))
        return grad.lerp(moved, beta)

    def _move(self, piece: Piece, update: Tensor, verdict: Verdict) -> None:
        options, main, lr = self.options, piece.main, verdict.lr
        decay = options.weight_decay if options.decays(piece.name, piece.shape) else 0.0
        shape = matrices_of(piece.name, torch.empty(piece.shape, device="meta"))[0].shape
        moved = (main * (1 - lr * decay)).add_(update, alpha=-lr * factor_of(shape, options.scale))
        main.copy_(torch.where(verdict.skipped, main, moved))


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
        places = unit.group.shard_layout.slices(unit.group.position)
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
        place = self.unit.group.shard_layout.slices(self.unit.group.position)[piece.shard.position]
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
        self._step_values = self._betas.new_zeros(5)
        """What updates read on the device: see `kernels/adamw.py`. Always the same memory, which recorded ones read."""
        momenta = self.momenta
        self._runs: dict[PlannedUnit, list[_Run]] = {}
        self._pieces: dict[str, tuple[Piece, _Run]] = {}
        for unit in model.units.values():
            pieces = [piece for piece in unit.pieces() if piece.name not in momenta]
            self._runs[unit] = runs = _Run.of(unit, pieces, options)
            places = unit.group.shard_layout.slices(unit.group.position)
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
        step_values = [factor, lr / corrections[0], corrections[1].sqrt(), skipped.double(), decay]
        torch.stack(step_values, out=self._step_values)

    def _step(self, unit: PlannedUnit) -> None:
        """Update one unit."""
        if self.muon is not None and self.muon.takes(unit):
            self.muon.update(unit, self._verdict)
        group = unit.group
        fused, copy = usable(group.main), group.weight if group.whole and group.weight is not group.main else None
        for run in self._runs[unit]:
            main, grad = group.main[run.at], group.main_grad[run.at]
            given = self._step_values, run.decays, (*self.options.betas, self.options.eps)
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
            self._step_values[3].fill_(1)

    def begin_recording(self) -> None:
        """Before a step is recorded: it makes the updates of the step before. See Note: [Recorded updates]."""
        units = self.model.units.values()
        if not all(unit.awaits_update for unit in units):
            self._step_values[3].fill_(1)
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
    step_values: Tensor,
    decays: bool,
    rates: tuple[float, float, float],
) -> None:
    """What `kernels/adamw.py` does, in torch's operations, with the bits of torch's own AdamW on a CPU."""
    factor, size, root, skipped, decay = step_values.tolist()
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
