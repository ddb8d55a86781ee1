"""Checkpoints of a planned step: its weights, its optimizer's state and its buffers, by the model's own names.

The format is that of `hocket.checkpoint.save` (`fsdp/saving/checkpoint.py`): DCP's, with the keys `model` and
`optimizer`, the latter in torch's flat layout, since pipeline ranks hold different parameters. A third key, `step`, has
what else the next step goes by: shares of the balance loss over a batch, and the norms by which steps are skipped.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hocket.engine import Engine
from hocket.fsdp.planned.optimizer import AVERAGES
from hocket.fsdp.saving.background import tell_all
from hocket.fsdp.saving.checkpoint import MODEL, OPTIMIZER, CheckpointReader, write_now_or_behind
from hocket.fsdp.saving.inventory import FlatTensor
from hocket.fsdp.saving.state import differences
from hocket.runtime.world import everyone

STEP = "step"


@dataclass(frozen=True)
class StepState:
    """What a step saves. All ranks call its methods alike, and an error of one rank is raised on all.

    `parameters` has the model's own name and whole shape of each parameter, by hocket's name of it. `buffers` are what
    else the model's state has, which no step changes, and `others` further names of parameters.
    """

    engine: Engine
    parameters: Mapping[str, tuple[str, torch.Size]]
    buffers: Mapping[str, Tensor]
    others: Mapping[str, str]

    def save(self, folder: Path, asynchronously: bool) -> Future[Path]:
        """Write a new folder. Raises ValueError if it is in use or not shared, OSError if it cannot be written."""
        tell_all()
        optimizer = self.engine.optimizer
        state: dict[str, Any] = dict(self._averages())
        for name, settings in optimizer.settings.items():
            theirs = self.parameters[name][0]
            state[f"state.{theirs}.step"] = torch.tensor(float(optimizer.steps))
            state |= {f"param_groups.{theirs}.{key}": value for key, value in settings.items()}
        whole = {MODEL: self._weights(), OPTIMIZER: state, STEP: self._next()}
        return write_now_or_behind(folder, whole, self.others, asynchronously)

    def load(self, folder: Path, optimizer: bool) -> None:
        """Read what this rank keeps; without `optimizer` AdamW begins anew. Raises ValueError for what does not fit."""
        reader = CheckpointReader(folder)
        stored = reader.shapes()
        self._refuse(folder, stored, optimizer)
        averages = self._averages()
        steps = {f"state.{theirs}.step": torch.zeros(()) for theirs, _ in self.parameters.values()}
        state: dict[str, Any] = {MODEL: self._weights()}
        following = self._begun_anew()
        known = {name: tensor for name, tensor in following.items() if f"{STEP}.{name}" in stored}
        state |= {OPTIMIZER: {**averages, **steps}, STEP: known} if optimizer else {}
        reader.load(state)
        if not optimizer:
            for tensor in averages.values():
                tensor.flat.zero_()
        elif lacks := self._lacks(following.keys() - known.keys()):
            warnings.warn(f"checkpoint {folder} lacks {lacks}: they begin anew", stacklevel=4)
        self.engine.optimizer.steps = int(max(steps.values()))
        self.engine.sharded.refresh()

    def _next(self) -> dict[str, Tensor]:
        """What the next step goes by beside weights and averages: live tensors."""
        shares = {f"layers.{n}.share": share for n, share in self.engine.balance.shares().items()}
        return {**shares, **self.engine.optimizer.guard.remembered}

    def _begun_anew(self) -> dict[str, Tensor]:
        """The same, as before a first step."""
        for share in self.engine.balance.shares().values():
            share.fill_(1 / len(share))
        self.engine.optimizer.guard.go_on(0, ())
        return self._next()

    def _lacks(self, missing: Collection[str]) -> str:
        """In words, what the next step will miss."""
        spikes = self.engine.config.optimizer.skip_spikes
        words = {
            "the shares of rows that model.aux_loss_over = batch goes by": any(n.endswith(".share") for n in missing),
            f"the norms that optimizer.skip_spikes = {spikes:g} compares with": "norms" in missing and spikes > 0,
        }
        return " and ".join(text for text, lacking in words.items() if lacking)

    def _weights(self) -> dict[str, Tensor]:
        """The main weights that this rank keeps, and buffers: live tensors."""
        mine = {
            self.parameters[name][0]: s.piece.tensor(s.piece.main) for name, s in self.engine.optimizer.state.items()
        }
        return {**mine, **self.buffers, **self.engine.balance.biases()}

    def _averages(self) -> dict[str, FlatTensor]:
        """The optimizer's averages that this rank keeps: live tensors, by torch's names of them."""
        return {
            f"state.{self.parameters[name][0]}.{key}": state.piece.tensor(getattr(state, key))
            for name, state in self.engine.optimizer.state.items()
            for key in AVERAGES
        }

    def _refuse(self, folder: Path, shapes: Mapping[str, Any], optimizer: bool) -> None:
        """Raise ValueError, the same on all ranks, for a checkpoint that is none of such a model."""
        if not shapes:
            raise ValueError(f"checkpoint {folder}: it is not complete, for it has no .metadata; fix: what save wrote")
        wanted: dict[str, Any] = {name: torch.Size(shape) for name, shape in self.parameters.values()}
        averages = {f"{OPTIMIZER}.state.{name}.{key}": shape for name, shape in wanted.items() for key in AVERAGES}
        wanted |= self.buffers
        for biases in everyone({name: bias.shape for name, bias in self.engine.balance.biases().items()}):
            wanted |= biases
        found = {key.removeprefix(f"{MODEL}."): shape for key, shape in shapes.items() if key.startswith(f"{MODEL}.")}
        found = {name: shape for name, shape in found.items() if name not in self.others}
        if wrong := differences(found, wanted):
            raise ValueError(f"checkpoint {folder}: it is of another model: {wrong}; fix: the model that was saved")
        averages |= {f"{OPTIMIZER}.state.{name}.step": torch.Size() for name, _ in self.parameters.values()}
        if optimizer and (wrong := differences({key: shapes[key] for key in averages if key in shapes}, averages)):
            raise ValueError(
                f"checkpoint {folder}: it has no AdamW of all parameters: {wrong}; fix: load(folder, optimizer=False)"
            )
