"""An order over a V whose forwards and backwards run merged: one half goes down the ranks while the other comes up.

Rank r has stages r and 2 * pp - 1 - r, as in `zb_v`. Forwards of its first chunk are merged with backwards of the
second one, and the other way round. With two ranks and five microbatches (`m.c` is microbatch.chunk, W a step of weight
gradients alone):

    F0.0 F1.0 F2.0 F0.1 [B0.1] W0.1 F1.1 (F3.0|B1.1) (F2.1|B0.0) (F4.0|B2.1) (F3.1|B1.0) [B3.1] (F4.1|B2.0) ...
    F0.0 F0.1 F1.0 F1.1 F2.0 [B0.1] (F2.1|B0.0) (F3.0|B1.1) (F3.1|B1.0) (F4.0|B2.1) (F4.1|B2.0) [B3.1] W3.1 ...

Source: DeepSeek, DualPipeV (github.com/deepseek-ai/DualPipe), the cut-in-half form of DualPipe.

Note: [What a merged V holds, and what is left of the bubble]
A microbatch takes 2 * pp steps down and up, and as many back. A rank begins one every other step, so it holds
2 * pp + 1 chunk activations at most, every rank equally many; merged interleaved 1F1B with two chunks holds 3 * pp on
its first rank. Warm-up and cool-down are shorter than there, since forwards and backwards of both chunks share them,
and weight gradients fill part of what is left. benchmarks/bubbles.py says how much that is beside other orders.
"""

from __future__ import annotations

from hocket.program.pipeline import Item, Order, Step


def merged_v(pp: int, microbatches: int) -> Order:
    """Two chunks per rank, placed as a V, which hold 2 * pp + 1 activations at most.

    Raises ValueError for fewer than 2 * pp microbatches: a forward and a backward that could be merged do not meet.
    """
    if microbatches < 2 * pp:
        raise ValueError(f"plan.order=merged_v needs 2 * pp = {2 * pp} microbatches or more, got {microbatches}")
    return tuple(tuple(_Rank().run(pp, rank, microbatches)) for rank in range(pp))


class _Rank:
    """Writes down the steps of one rank; every chunk's microbatches come in ascending order."""

    def __init__(self) -> None:
        self._steps: list[Step] = []
        self._forwards, self._backwards = [0, 0], [0, 0]
        self._late: list[Item] = []
        """Items whose weight gradients are still to come."""

    def run(self, pp: int, rank: int, count: int) -> list[Step]:
        """All steps of a rank."""
        behind = pp - 1 - rank
        for _ in range(2 * behind):
            self._forward(0)
        for _ in range(rank + 1):
            self._forward(0)
            self._forward(1)
        for _ in range(behind):
            self._backward(1, apart=True)
            self._weights()
            self._forward(1)
        for n in range(count - 2 * pp + rank + 1):
            if n == 0 and behind == 0:  # what is to be merged is the gradient of the forward right before it
                self._forward(0)
                self._backward(1)
            else:
                self._merged(0, 1)
            self._merged(1, 0)
        for _ in range(behind):
            self._backward(1)
            self._merged(1, 0)
        self._cool_down(rank, behind)
        return self._steps

    def _cool_down(self, rank: int, behind: int) -> None:
        """Backwards alone; from the middle on their weight gradients wait, to be done where the rank would rest."""
        for n in range(2 * (rank + 1)):
            self._backward(1 - n % 2, apart=n > rank)
        for _ in range(behind):
            self._weights()
            self._backward(0, apart=True)
        while self._late:
            self._weights()

    def _forward(self, chunk: int) -> None:
        self._steps.append(Step(fwd=_next(self._forwards, chunk)))

    def _merged(self, forward: int, backward: int) -> None:
        self._steps.append(Step(_next(self._forwards, forward), _next(self._backwards, backward)))

    def _backward(self, chunk: int, apart: bool = False) -> None:
        """`apart`: its weight gradients have a step of their own."""
        item = _next(self._backwards, chunk)
        self._steps.append(Step(bwd=item))
        self._late += [item] if apart else []

    def _weights(self) -> None:
        self._steps.append(Step(wgrad=self._late.pop(0)))


def _next(counts: list[int], chunk: int) -> Item:
    counts[chunk] += 1
    return counts[chunk] - 1, chunk
