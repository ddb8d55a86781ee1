"""AdamW on shards: each rank updates the elements it keeps, nothing is gathered.

The optimizer sees one 1-D tensor per parameter and rank, the unit's shard; AdamW is elementwise, so this is the same as
updating whole parameters. Weight decay goes by the *whole* parameter: its name, and its number of dimensions. Gradients
are there from the reduces of a step until the optimizer has read them.

Note: [Averages in bf16]
The two averages may be kept in bf16. A step makes those of one unit fp32, updates the unit, and rounds them to nearest,
so an update is exact but for what was rounded before, the same on every run, and no random number is part of a
checkpoint. bf16 has fp32's exponents, so squares of small gradients do not vanish. But it has 8 significant bits: a
decay by `1 - beta` of a value is lost where that is less than half of its last digit, up to 2^-8 of the value. An
average may so stay off by 2^-8 / (1 - beta) of itself: 4 % at 0.9, 8 % at 0.95, all of it at 0.996. Settings allow
rates up to where it is a quarter, and a step an eighth (`settings/rules.py`). DeepSeek-V3 was trained so, with rates of
0.9 and 0.95 (DeepSeek-AI 2024, section 3.3.3).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hocket.fsdp.grad_norm import squares_of
from hocket.fsdp.optimizer_holding import optimizer_holding
from hocket.fsdp.planned.model import PlannedModel
from hocket.fsdp.planned.muon import MuonOptions, PlannedMuon
from hocket.fsdp.planned.skipping import StepGuard
from hocket.fsdp.planned.unit import Piece, PlannedUnit
from hocket.runtime.comm import Group, Pending

AVERAGES = ("exp_avg", "exp_avg_sq")


def fastest(device: torch.device) -> Literal["foreach", "fused"]:
    """Which of torch's implementations of AdamW to ask for on a device.

    On a GPU `fused` reads and writes all that there is once, where `foreach` does so for every operation. On a CPU both
    are as fast, and `foreach` has the bits of the plain formula.
    """
    return "fused" if device.type == "cuda" else "foreach"


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


def _by_decay(pieces: Iterable[Piece], options: AdamWOptions) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The shards that decay, and the others."""
    found: tuple[list[nn.Parameter], list[nn.Parameter]] = ([], [])
    for piece in pieces:
        found[not options.decays(piece.name, piece.shape)].append(piece.shard)
    return found


class PlannedAdamW:
    """The optimizer of one rank's sharded model. `control` joins all ranks of the world."""

    def __init__(self, model: PlannedModel, control: Group, options: AdamWOptions) -> None:
        self.model, self.control, self.options = model, control, options
        self._steps = 0
        self.guard = StepGuard(model.device, options.spike)
        """Tells which steps are not taken. See Note: [A step that is not taken]."""
        self._squares = torch.zeros(0)
        self._factor: Tensor | None = None
        """What scales the gradients that rest, if they are clipped."""
        self._apart = [
            (unit, piece) for unit in model.units.values() if unit.tensors.size > 1 for piece in unit.pieces()
        ]
        """Pieces that are counted one by one, for some of a unit are on all tensor-parallel ranks."""
        replicas = [unit.group.groups.replicas * unit.copies for unit in model.units.values()]
        if self._apart:
            replicas = [unit.group.groups.replicas * unit.copies * piece.shared for unit, piece in self._apart]
        self._replicas = torch.tensor(replicas, device=model.device)  # of every gradient that is counted
        self.muon = None if options.muon is None else PlannedMuon(model, options.muon)
        momenta = self.momenta
        of_units = {unit: [p for p in unit.pieces() if p.name not in momenta] for unit in model.units.values()}
        self._pieces = {piece.name: piece for pieces in of_units.values() for piece in pieces}
        how = fastest(model.device)
        self._host_asks = how != "fused"
        self._shards = {unit: _by_decay(pieces, options) for unit, pieces in of_units.items()}
        groups = _by_decay(self._pieces.values(), options)
        self._adamw = torch.optim.AdamW(
            [
                {"params": groups[0], "weight_decay": options.weight_decay},
                {"params": groups[1], "weight_decay": 0.0},
            ],
            lr=options.lr,
            betas=options.betas,
            eps=options.eps,
            **{how: True},
        )
        for piece in self._pieces.values():  # now rather than in the first step: memory is fixed, loading is simple
            self._adamw.state[piece.shard] = {
                "step": torch.tensor(0.0, device=model.device if how == "fused" else "cpu"),
                **{name: torch.zeros_like(piece.main, dtype=options.averages) for name in AVERAGES},
            }

    @property
    def steps(self) -> int:
        """Updates made so far. Setting it matters after loading `exp_avg` and `exp_avg_sq` from a checkpoint."""
        return self._steps - int(self.guard.total)

    @steps.setter
    def steps(self, value: int) -> None:
        self._steps = value + int(self.guard.total)
        for state in self._adamw.state.values():
            state["step"].fill_(value)

    @property
    def momenta(self) -> Mapping[str, tuple[Piece, Tensor]]:
        """The averages of what Muon updates on this rank, by parameter name: live, 1-D, fp32."""
        return {} if self.muon is None else self.muon.momenta

    @property
    def state(self) -> Mapping[str, PieceState]:
        """AdamW's state by parameter name, for what this rank keeps of what it updates."""
        found = {}
        for name, piece in self._pieces.items():
            state = self._adamw.state[piece.shard]
            found[name] = PieceState(piece, state["exp_avg"], state["exp_avg_sq"])
        return found

    @property
    def settings(self) -> Mapping[str, Mapping[str, Any]]:
        """Torch's settings of what this rank keeps, by parameter name: `lr`, `betas`, `weight_decay`, ..."""
        groups = {id(shard): group for group in self._adamw.param_groups for shard in group["params"]}
        found = {name: groups[id(piece.shard)] for name, piece in self._pieces.items()}
        return {name: {key: value for key, value in group.items() if key != "params"} for name, group in found.items()}

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
        norm, self._factor = self.grad_norm(), None
        skipped = self.guard.judge(norm)
        if self.options.clip:
            self._factor = (self.options.clip / (norm + 1e-6)).clamp(max=1.0).float()
        if lr is not None:
            for group in self._adamw.param_groups:
                group["lr"] = lr
        self._steps += 1
        if not self._host_asks:
            self._adamw.found_inf = skipped.float()  # pyrefly: ignore[missing-attribute]
        elif skipped:
            self.model.forget_grads()
            return norm
        if later:
            for unit in self.model.units.values():
                unit.rest_grads()
            return norm
        self._clip(self._grads())
        if self.muon is not None:
            for unit in self.model.units.values():
                self._move_matrices(unit)
        if self.options.averages is torch.float32:
            self._adamw.step()
        else:
            for unit in self.model.units.values():
                self._step(unit)
        self.model.refresh()
        self.model.forget_grads()
        return norm

    def _step(self, unit: PlannedUnit) -> None:
        """AdamW on one unit. See Note: [Averages in bf16]."""
        shards = self._shards[unit]
        with optimizer_holding(self._adamw, shards):
            if self.options.averages is torch.float32:
                self._adamw.step()
                return
            states = [self._adamw.state[shard] for of_decay in shards for shard in of_decay]
            kept = [state[name] for state in states for name in AVERAGES]
            for state in states:
                state.update({name: state[name].float() for name in AVERAGES})
            self._adamw.step()
            if kept:
                torch._foreach_copy_(kept, [state[name] for state in states for name in AVERAGES])
            for i, state in enumerate(states):
                state.update(zip(AVERAGES, kept[2 * i : 2 * i + 2], strict=True))

    def _clip(self, grads: list[Tensor]) -> None:
        if self._factor is not None:
            torch._foreach_mul_(grads, self._factor)

    @torch.no_grad()
    def update(self, unit: PlannedUnit) -> tuple[Tensor, ...]:
        """Update the weights of one unit, if its gradients wait for that. Returns their memory, on any lane.

        The caller keeps it until the lane that made it comes behind the update.
        """
        if not unit.awaits_update:
            return ()
        if self.muon is None or not self.muon.begun(unit):
            self._clip([unit.group.main_grad])
        self._move_matrices(unit)
        self._step(unit)
        unit.refresh()
        return unit.take_grads()

    @torch.no_grad()
    def with_matrices(self, verb: str, unit: PlannedUnit, slot: int) -> Pending:
        """One of `WHOLE_MATRICES`, in front of the update of a unit whose gradients wait for that."""
        if self.muon is None or not unit.awaits_update or not self.muon.takes(unit):
            return Pending()
        if verb == "collect":
            self._clip([unit.group.main_grad])
        return self.muon.go_on(verb, unit, slot, self._not_taken)

    def _move_matrices(self, unit: PlannedUnit) -> None:
        if self.muon is not None and self.muon.takes(unit):
            self.muon.update(unit, self._adamw.param_groups[0]["lr"], self._not_taken)

    @property
    def _not_taken(self) -> Tensor | None:
        """Whether the last step is not to be taken, on the device; None where the host has asked."""
        return None if self._host_asks else self.guard.skipped

    def catch_up(self) -> None:
        """Make the updates that were left to the next step: weights and state are those behind the last step."""
        units, muon = self.model.units.values(), self.muon
        for unit in sorted(units, key=lambda unit: muon is None or not muon.begun(unit)):  # begun ones have the slots
            self.update(unit)
