"""The optimizer of a planned step: AdamW and Muon on shards, and skipped steps.

AdamW updates shard memory without communication. Weight decay depends on the *whole* parameter's name and number of
dimensions. On a GPU one kernel clips, updates, and writes the compute copy of weights held whole; on a CPU torch does.

Note: [Averages in bf16]
A step converts bf16 averages to fp32, updates, and rounds to nearest, without random numbers. Squares of small
gradients don't vanish, since bf16 has fp32's exponents. But with 8 significant bits a decay by `1 - beta` is lost below
half of the last digit, up to 2^-8 of the value. So an average may stay off by 2^-8 / (1 - beta): 4 % at 0.9, 8 % at
0.95, all of it at 0.996. Settings allow rates up to where it is a quarter, and a step an eighth
(`config/precision.py`). DeepSeek-V3 was trained so, with 0.9 and 0.95 (DeepSeek-AI 2024, section 3.3.3).

Note: [Recorded updates]
With `overlap.dp.update = next_step` a recorded step (`engine/graphed.py`) begins with the updates of the step before. A
replay reads the recorded addresses: gradients, whose memory stays from the recording on, and `step_values`, written at
the end of each step. It updates every unit. If that was done already (`catch_up` before a validation or a checkpoint),
or there are no gradients yet, `step_values` says to skip.

Note: [Skipped steps]
All ranks know the norm of all gradients before any update, so they decide alike. The decision stays on the device,
where each update reads it; the host does not wait. A skipped step changes only the position in the text and the run's
step count, which sets the learning rate.

Note: [Muon under a plan]
After its last reduction a unit goes through the verbs of `WHOLE_MATRICES` (`muon.py`, Note: [Each matrix on one rank]),
then the update moves the weights. With `overlap.dp.update = next_step` these are ops at the beginning of the
next step: see `Note: [Whole matrices of sharded units]` in `program/shard.py`. Otherwise the step op does all of it,
without overlap.

Note: [What is one matrix]
Stacked gate and up projections count as two matrices, as in Hugging Face models. Each expert has its own matrices,
transposed since their input width comes first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from hocket.fsdp.buffers import squares_of
from hocket.fsdp.piece import Piece
from hocket.fsdp.planned.model import PlannedModel
from hocket.fsdp.planned.muon import WholeMatrices, factor_of
from hocket.fsdp.planned.unit import PlannedUnit
from hocket.kernels import usable
from hocket.program.ops import WHOLE_MATRICES
from hocket.runtime.comm import Group, Pending

WINDOW = 128
ENOUGH = 16
"""Norms needed before a step can be a spike."""


class Verdict(NamedTuple):
    """The decision from the norm of a step's gradients: on the device, the same on every rank."""

    skipped: Tensor
    """Whether to update nothing, a bool."""
    factor: Tensor
    """Clip factor of the gradients; fp64."""
    lr: float


class StepGuard:
    """Decides from gradient norms whether to skip a step. The same on every rank."""

    def __init__(self, device: torch.device, factor: float = 0.0) -> None:
        """A norm is a spike above `factor` times the median of the last ones; 0: never."""
        self._factor = factor
        self.skipped = torch.zeros((), dtype=torch.bool, device=device)
        self.total = torch.zeros((), dtype=torch.int64, device=device)
        self._norms = torch.full((WINDOW,), torch.nan, dtype=torch.float64, device=device)
        """Norms of the last steps taken, oldest first, after nan where there were fewer."""

    def judge(self, norm: Tensor) -> Tensor:
        """Whether to skip the step with this gradient norm, fp64: a bool on the device. The host does not wait."""
        self.skipped = ~norm.isfinite()
        if self._factor:
            self.skipped = self.skipped | (norm > self._factor * self._usual())
            longer = torch.cat([self._norms[1:], norm.reshape(1)])
            self._norms = torch.where(self.skipped, self._norms, longer)
        self.total = self.total + self.skipped
        return self.skipped

    def _usual(self) -> Tensor:
        """The lower median of the remembered norms, fp64; infinite while there are too few."""
        known = WINDOW - self._norms.isnan().sum()
        median = self._norms.sort().values.gather(0, ((known - 1) // 2).clamp(min=0).reshape(1)).squeeze(0)
        return torch.where(known >= ENOUGH, median, torch.inf)

    @property
    def usual(self) -> float:
        """The norm that others are compared with. Synchronizes."""
        return float(self._usual())

    @property
    def norms(self) -> list[float]:
        """The remembered norms. Synchronizes."""
        return self._norms[~self._norms.isnan()].tolist()

    @property
    def remembered(self) -> dict[str, Tensor]:
        """What it goes by, by name: live tensors."""
        return {"skipped": self.total, "norms": self._norms}

    def forget(self) -> None:
        self.total.zero_()
        self._norms.fill_(torch.nan)


@dataclass(frozen=True)
class MuonOptions:
    takes: Callable[[str, Sequence[int]], bool]
    """Whether it updates a parameter, by name and whole shape."""
    decays: Callable[[str, Sequence[int]], bool]
    weight_decay: float = 0.1
    momentum: float = 0.95
    scale: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    slots: int = 1
    """Units of a class in flight at once."""


def matrices_of(name: str, weight: Tensor) -> list[Tensor]:
    """Views of the matrices of a weight, [output, input] each. See Note: [What is one matrix]."""
    halves = 2 if name.endswith(".w_gate_up") else 1
    if ".experts." in name:
        return [half.mT for expert in weight for half in expert.chunk(halves, 1)]
    return list(weight.chunk(halves))


@dataclass
class _Slot:
    whole: Tensor
    """Its momenta, then the results: bf16."""
    parts: Tensor
    """This rank's results: fp32."""


@dataclass
class _UnderWay:
    slot: _Slot
    done: str
    pending: Pending


class PlannedMuon:
    """Muon of one rank's sharded model, for the parameters that its options take."""

    def __init__(self, model: PlannedModel, options: MuonOptions) -> None:
        self.model, self.options = model, options
        self.momenta: dict[str, tuple[Piece, Tensor]] = {}
        """Momenta of this rank's elements, by name: live, 1-D, fp32."""
        self._whole: dict[PlannedUnit, WholeMatrices] = {}
        self._under_way: dict[PlannedUnit, _UnderWay] = {}
        for unit in model.units.values():
            names = [member.name for member in unit.group.members]
            pieces = [piece for piece in unit.pieces() if options.takes(piece.name, piece.shape)]
            self.momenta |= {piece.name: (piece, torch.zeros_like(piece.main)) for piece in pieces}
            shapes = [unit.group.span_of(i).shape for i in range(len(names))]
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
        return unit in self._whole

    def begun(self, unit: PlannedUnit) -> bool:
        return unit in self._under_way

    @torch.no_grad()
    def go_on(self, verb: str, unit: PlannedUnit, slot: int, verdict: Verdict) -> Pending:
        """Run one of `WHOLE_MATRICES` on a unit, in order. Momenta stay in a skipped step."""
        if verb == "collect":
            assert unit not in self._under_way, f"{unit} is collected twice"
            place = self._slots[unit.kind][slot]
            for other in self._under_way.values():
                if other.slot is place:  # on a CPU a collective may still use it
                    other.pending.wait()
            self._under_way[unit] = _UnderWay(place, "", Pending())
        of, matrices = self._under_way[unit], self._whole[unit]
        of.pending.wait()
        whole, parts = of.slot.whole[: unit.group.layout.total], of.slot.parts[: unit.group.main.numel()]
        of.pending, of.done = Pending(), verb
        match verb:
            case "collect":
                of.pending = matrices.gather(whole, self._average(unit, verdict))
            case "orthogonalise":
                matrices.iterate(whole)
            case _:
                of.pending = matrices.scatter(whole, parts)
        return of.pending

    @torch.no_grad()
    def update(self, unit: PlannedUnit, verdict: Verdict) -> None:
        """Update a unit's weights, after any verbs left to run. Nothing changes in a skipped step."""
        done = self._under_way[unit].done if unit in self._under_way else ""
        for verb in WHOLE_MATRICES[WHOLE_MATRICES.index(done) + 1 if done else 0 :]:
            self.go_on(verb, unit, 0, verdict)
        of, here = self._under_way.pop(unit), unit.group.here
        of.pending.wait()
        for i in self._kept(unit):
            self._move(self.momenta[unit.group.members[i].name][0], of.slot.parts[here[i]], verdict)

    def _kept(self, unit: PlannedUnit) -> list[int]:
        """Its members of which this rank has elements."""
        return [i for i in self._whole[unit].taken if unit.group.spans[i]]

    def _average(self, unit: PlannedUnit, verdict: Verdict) -> dict[int, Tensor]:
        """Update the momenta. Returns Nesterov's lookahead by member."""
        beta, ahead = self.options.momentum, dict[int, Tensor]()
        for i in self._kept(unit):
            piece, momentum = self.momenta[unit.group.members[i].name]
            grad = piece.grad * verdict.factor.float()
            moved = momentum.lerp(grad, 1 - beta)
            momentum.copy_(torch.where(verdict.skipped, momentum, moved))
            ahead[i] = grad.lerp(moved, beta)
        return ahead

    def _move(self, piece: Piece, update: Tensor, verdict: Verdict) -> None:
        options, main, lr = self.options, piece.main, verdict.lr
        decay = options.weight_decay if options.decays(piece.name, piece.shape) else 0.0
        shape = matrices_of(piece.name, torch.empty(piece.shape, device="meta"))[0].shape
        moved = (main * (1 - lr * decay)).add_(update, alpha=-lr * factor_of(shape, options.scale))
        main.copy_(torch.where(verdict.skipped, main, moved))


AVERAGES = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class AdamWOptions:
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip: float = 1.0
    """Largest total gradient norm; 0: no clipping."""
    spike: float = 0.0
    """Skip steps with a norm above this factor times the usual norm; 0: skip none that is finite."""
    averages: torch.dtype = torch.float32
    """Dtype of both averages between steps. See Note: [Averages in bf16]."""
    decays: Callable[[str, Sequence[int]], bool] = lambda name, shape: len(shape) - (".experts." in name) > 1
    """Whether a parameter decays, by name and whole shape."""
    muon: MuonOptions | None = None


@dataclass(frozen=True)
class PieceState:
    """Checkpointed state of one parameter on this rank; live 1-D tensors, weights in fp32."""

    piece: Piece
    exp_avg: Tensor
    exp_avg_sq: Tensor


@dataclass(frozen=True)
class _Run:
    """Contiguous elements of a unit that are updated alike."""

    unit: PlannedUnit
    at: slice
    decays: bool
    averages: tuple[Tensor, Tensor]

    @classmethod
    def of(cls, unit: PlannedUnit, pieces: Sequence[Piece], options: AdamWOptions) -> list[_Run]:
        places = unit.group.here
        alike: list[tuple[int, int, bool]] = []
        for piece in pieces:
            here, decays = places[piece.position], options.decays(piece.name, piece.shape)
            start = alike.pop()[0] if alike and alike[-1][1:] == (here.start, decays) else here.start
            alike.append((start, here.stop, decays))

        def zeros(length: int) -> Tensor:
            return torch.zeros(length, dtype=options.averages, device=unit.group.main.device)

        return [
            cls(unit, slice(start, stop), decays, (zeros(stop - start), zeros(stop - start)))
            for start, stop, decays in alike
        ]

    def state(self, piece: Piece) -> PieceState:
        place = self.unit.group.here[piece.position]
        here = slice(place.start - self.at.start, place.stop - self.at.start)
        return PieceState(piece, *(average[here] for average in self.averages))


class PlannedAdamW:
    """The optimizer of one rank's sharded model. `control` has all ranks of the world."""

    def __init__(self, model: PlannedModel, control: Group, options: AdamWOptions) -> None:
        self.model, self.control, self.options = model, control, options
        self.guard = StepGuard(model.device, options.spike)
        self._squares = torch.zeros(0)
        self._apart = [
            (unit, piece) for unit in model.units.values() if unit.tensors.size > 1 for piece in unit.pieces()
        ]
        """Pieces counted one by one, since tensor-parallel ranks share some of a unit."""
        replicas = [unit.group.groups.replicas * unit.copies for unit in model.units.values()]
        if self._apart:
            replicas = [unit.group.groups.replicas * unit.copies * piece.shared for unit, piece in self._apart]
        self._replicas = torch.tensor(replicas, device=model.device)  # ranks that hold each counted gradient
        self.muon = None if options.muon is None else PlannedMuon(model, options.muon)
        self._count = torch.zeros((), dtype=torch.int64, device=model.device)
        self._betas = torch.tensor(options.betas, dtype=torch.float64, device=model.device)
        self._verdict = Verdict(self.guard.skipped, self._betas.new_ones(()), options.lr)
        self._step_values = self._betas.new_zeros(5)
        """Device values of a step (`kernels/adamw.py`), always at the same address for recorded steps."""
        momenta = self.momenta
        self._runs: dict[PlannedUnit, list[_Run]] = {}
        self._pieces: dict[str, tuple[Piece, _Run]] = {}
        for unit in model.units.values():
            pieces = [piece for piece in unit.pieces() if piece.name not in momenta]
            self._runs[unit] = runs = _Run.of(unit, pieces, options)
            places = unit.group.here
            for piece in pieces:
                start = places[piece.position].start
                run = next(run for run in runs if run.at.start <= start < run.at.stop)
                self._pieces[piece.name] = piece, run

    @property
    def steps(self) -> int:
        """Updates made so far. Set it after loading `exp_avg` and `exp_avg_sq`."""
        return int(self._count)

    @steps.setter
    def steps(self, value: int) -> None:
        self._count.fill_(value)

    @property
    def exchanges(self) -> bool:
        """Whether updates wait for other ranks: for whole matrices, or for the scales of casts."""
        return self.muon is not None or self.model.casts_agree

    @property
    def momenta(self) -> Mapping[str, tuple[Piece, Tensor]]:
        return {} if self.muon is None else self.muon.momenta

    @property
    def state(self) -> Mapping[str, PieceState]:
        """AdamW's state on this rank by parameter name."""
        return {name: run.state(piece) for name, (piece, run) in self._pieces.items()}

    @property
    def settings(self) -> Mapping[str, Mapping[str, Any]]:
        """Settings as of torch's AdamW, by parameter name: `lr`, `betas`, ..."""
        o = self.options
        one = torch.optim.AdamW([torch.zeros(1)], lr=self._verdict.lr, betas=o.betas, eps=o.eps).defaults
        decays = {True: o.weight_decay, False: 0.0}
        return {name: {**one, "weight_decay": decays[run.decays]} for name, (_, run) in self._pieces.items()}

    def grad_norm(self) -> Tensor:
        """Norm of the whole model's gradients, fp64, on the device. Every rank calls this.

        Squares are divided by the number of ranks that hold an element, then summed. In fp64 their order does not
        affect the clip factor in fp32.
        """
        counted = [piece.grad for _, piece in self._apart] or [u.group.main_grad for u in self.model.units.values()]
        self._squares = squares_of(counted)
        square = (self._squares / self._replicas).sum().reshape(1)
        self.control.all_reduce(square).wait()
        return square.sqrt().squeeze(0)

    def not_finite(self) -> list[tuple[int, str]]:
        """(layer, name) of this rank's last gradients that were not finite; the head has the layer after the last."""
        units = [unit for unit, _ in self._apart] or list(self.model.units.values())
        last = 1 + max((unit.layer for unit in units), default=0)
        bad = (~self._squares.isfinite()).tolist()
        return [
            (last if unit.kind == "head" else unit.layer, str(unit))
            for unit, wrong in zip(units, bad, strict=True)
            if wrong
        ]

    @torch.no_grad()
    def judge(self, lr: float | None = None) -> Tensor:
        """The norm of all gradients before clipping, fp64; `guard.skipped` tells whether the step is skipped."""
        self.catch_up()
        norm = self.grad_norm()
        self._judge(norm, self._verdict.lr if lr is None else lr)
        return norm

    @torch.no_grad()
    def apply(self, later: bool = False) -> None:
        """Clip, update this rank's weights, and free the gradients.

        With `later`, gradients stay until `update` is called for each unit, or `catch_up`.
        """
        if later:
            self.model.rest_grads()
            return
        for unit in self.model.units.values():
            self._step(unit)
        self.model.agree()
        self.model.forget_grads()

    def _judge(self, norm: Tensor, lr: float) -> None:
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
        """Update a unit whose gradients wait for that. Returns their memory, on any lane.

        The caller keeps it until the lane that allocated it has waited for the update.
        """
        if not unit.awaits_update:
            return ()
        self._step(unit)
        return unit.take_grads(self.model.held)

    @torch.no_grad()
    def with_matrices(self, verb: str, unit: PlannedUnit, slot: int) -> Pending:
        """Run one of `WHOLE_MATRICES` before the update of a unit whose gradients wait for that."""
        if self.muon is None or not unit.awaits_update or not self.muon.takes(unit):
            return Pending()
        return self.muon.go_on(verb, unit, slot, self._verdict)

    def catch_up(self) -> None:
        """Make deferred updates: weights and state are then those after the last step."""
        units, muon = [unit for unit in self.model.units.values() if unit.awaits_update], self.muon
        for unit in sorted(units, key=lambda unit: muon is None or not muon.begun(unit)):  # begun units hold slots
            self.update(unit)
        if units:
            self._step_values[3].fill_(1)

    def begin_recording(self) -> None:
        """Before recording a step, which makes the updates of the step before. See Note: [Recorded updates]."""
        units = self.model.units.values()
        if not all(unit.awaits_update for unit in units):
            self._step_values[3].fill_(1)
        for unit in units:
            unit.keep_grads()

    def not_recorded(self) -> None:
        """After a failed recording, which has updated nothing."""
        for unit in self.model.units.values():
            unit.awaits_update = True
            unit.let_grads_go()

    def replayed(self) -> None:
        """After a replay, which has made all deferred updates."""
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
    """The formula of `kernels/adamw.py`, with the bits of torch's AdamW on a CPU."""
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
