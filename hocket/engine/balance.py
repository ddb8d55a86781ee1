"""The loads of a rank's experts, and what they move: biases, and shares for the load-balancing loss over a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hocket.model.moe import MoELayer
from hocket.model.transformer import Chunk
from hocket.parallel.routing import balance_bias
from hocket.runtime.comm import Groups


class Balance:
    """What all MoE layers of one rank were sent in a step, and the balance biases of their routers."""

    def __init__(self, chunks: Sequence[Chunk], groups: Groups, rate: float) -> None:
        """Biases move by `rate` in each step."""
        self._groups, self._rate = groups, rate
        layers = ((int(name), layer) for chunk in chunks for name, layer in chunk.layers.items())
        self.layers = {number: layer for number, layer in layers if isinstance(layer, MoELayer)}
        """By number."""
        self.loads: dict[int, Tensor] = {}
        """Rows per expert and layer in the last step, summed over data-parallel ranks: int64 [E]."""

    def update(self, mine: dict[int, Tensor], stay: Tensor) -> None:
        """Sum this rank's loads with those of the others, and move the biases. Takes them out of `mine`.

        `stay` is a bool on the device: biases do not move where it is true.
        """
        self._sum(mine)
        for number, layer in self.layers.items():
            if layer.router.bias is not None:
                moved = balance_bias(layer.router.bias, self.loads[number], self._rate)
                layer.router.bias.copy_(torch.where(stay, layer.router.bias, moved))
            if layer.router.share is not None:
                load = self.loads[number]
                share = load / load.sum().clamp(min=1)
                layer.router.share.copy_(torch.where(stay, layer.router.share, share))

    def without_update(self, mine: dict[int, Tensor]) -> None:
        """The same where weights and biases stay. Loads are summed if experts are cloned by them, and taken out."""
        if any(layer.cloned is not None for layer in self.layers.values()):
            self._sum(mine)
        mine.clear()

    def _sum(self, mine: dict[int, Tensor]) -> None:
        if mine:
            numbers = sorted(mine)
            total = torch.stack([mine[n] for n in numbers])
            self._groups.sum_over_dp(total)
            self._groups.tp.all_reduce(total).wait()
            self.loads = dict(zip(numbers, total.unbind(), strict=True))
            mine.clear()

    def shares(self) -> dict[str, Tensor]:
        """The shares of the last step's rows by layer: live tensors, fp32 [E]. There are none where no loss asks."""
        layers = self.layers.items()
        return {str(n): layer.router.share for n, layer in layers if layer.router.share is not None}

    def rows(self) -> dict[str, list[int]]:
        """The loads of the last step by layer, for who goes on from a checkpoint: clones are chosen by them."""
        return {str(n): load.tolist() for n, load in self.loads.items() if self.layers[n].cloned is not None}

    def go_on(self, rows: Mapping[str, Sequence[int]]) -> None:
        """Take over the loads of all layers, by number, from a checkpoint."""
        of = {int(n): loads for n, loads in rows.items() if int(n) in self.layers}
        self.loads = {n: torch.tensor(of[n]) for n in sorted(of)}

    def biases(self) -> dict[str, Tensor]:
        """The biases by name, as in a checkpoint: live tensors, fp32 [E]. There are none where the rate is 0."""
        layers = self.layers.items()
        return {f"layers.{n}.router.bias": layer.router.bias for n, layer in layers if layer.router.bias is not None}
