"""The loads of a rank's experts, and what they move: biases, and shares for the load-balancing loss over a batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hocket.layers.routing import balance_bias
from hocket.model.moe import MoELayer
from hocket.model.transformer import Chunk
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
        if mine:
            numbers = sorted(mine)
            total = torch.stack([mine[n] for n in numbers])
            self._groups.sum_over_dp(total)
            self._groups.tp.all_reduce(total).wait()
            self.loads = dict(zip(numbers, total.unbind(), strict=True))
            mine.clear()
        for number, layer in self.layers.items():
            if layer.router.bias is not None:
                moved = balance_bias(layer.router.bias, self.loads[number], self._rate)
                layer.router.bias.copy_(torch.where(stay, layer.router.bias, moved))
            if layer.router.share is not None:
                load = self.loads[number]
                share = load / load.sum().clamp(min=1)
                layer.router.share.copy_(torch.where(stay, layer.router.share, share))

    def shares(self) -> dict[str, Tensor]:
        """The shares of the last step's rows by layer: live tensors, fp32 [E]. There are none where no loss asks."""
        layers = self.layers.items()
        return {str(n): layer.router.share for n, layer in layers if layer.router.share is not None}

    def biases(self) -> dict[str, Tensor]:
        """The biases by name, as in a checkpoint: live tensors, fp32 [E]. There are none where the rate is 0."""
        layers = self.layers.items()
        return {f"layers.{n}.router.bias": layer.router.bias for n, layer in layers if layer.router.bias is not None}
