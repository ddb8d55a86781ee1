"""What each op of a plan does to tensors: one method per verb and part.

An action takes the op and the values it reads, in the order of `plan/values.py` (values that an op only keeps
alive come last and are ignored), and returns the op's value. Actions of communication lanes return the value
and a `Pending`. State that outlives an op, islands and routings, is kept here by (microbatch, chunk, layer)
and dropped by the op that uses it last; `assert_clean` proves that nothing is left after a step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hocket.engine.room import RowRoom
from hocket.fsdp.planned.unit import PlannedUnit
from hocket.model.microbatch import Microbatch
from hocket.model.transformer import Chunk
from hocket.parallel.dispatch import Splits, exchange_counts
from hocket.parallel.placed import PlacedSplits, place_counts
from hocket.parallel.routing import Routing
from hocket.plan.ops import Layout, Op
from hocket.plan.values import UnitName, unit_moved, unit_read, unit_written
from hocket.runtime.blocks import Blocks, HostBlocks
from hocket.runtime.comm import Group, Groups, Pending, RowTable
from hocket.runtime.island import Island
from hocket.runtime.weights import Weight

Place = tuple[int, int, int]
"""(microbatch, chunk, layer)."""

CommResult = tuple[Tensor | None, Pending]
"""A communication op's value and when it may be read."""


@dataclass(frozen=True)
class Activation:
    """What travels between pipeline ranks: a tensor of this shape and dtype, [B, S, D]."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class Actions:
    """The work behind the ops of one rank, on the microbatches that the executor was given last."""

    def __init__(
        self,
        layout: Layout,
        chunks: Sequence[Chunk],
        units: Mapping[UnitName, PlannedUnit],
        groups: Groups,
        activation: Activation,
        on_step: Callable[[], None] | None,
        room: RowRoom,
    ) -> None:
        """Without an `on_step`, in programs of forwards alone, no graphs are kept."""
        self._layout, self._chunks, self._units, self._groups = layout, chunks, units, groups
        self._activation, self.on_step, self._room = activation, on_step, room
        self._islands: dict[tuple[str, Place], Island] = {}
        self._routings: dict[Place, Routing] = {}
        self._splits: dict[Place, Splits | PlacedSplits] = {}
        self._written: dict[tuple[UnitName, int], set[Weight]] = {}
        self.training = on_step is not None
        self.on_update: Callable[[PlannedUnit], Sequence[Tensor]] | None = None
        """Updates a unit by what the step before has reduced, and hands over the memory of that."""
        self.microbatches: Sequence[Microbatch] = ()
        self.losses: list[Tensor] = []
        self.weights_M: Tensor | None = None
        """Factor of every microbatch's loss, fp32; None: all weigh the same."""
        self.loads: dict[int, Tensor] = {}
        """Rows that each expert was sent in this step by this rank's tokens, by layer: int64 [E]."""

    def find(self, op: Op) -> Callable[..., Any]:
        """The action of an op. Ops that read weights first make sure that they may."""
        read = unit_read(op, self._layout)
        if read is None:
            return self._find(op)
        unit, act = self._units[read], self._find(op)

        def checked(op: Op, *values: Any) -> Any:
            unit.assert_readable()
            return act(op, *values)

        return checked

    def _find(self, op: Op) -> Callable[..., Any]:
        name = f"{op.verb}_{op.part}"
        if op.verb in ("wgrad", "send", "recv", "gather", "release", "add", "reduce", "step", "update"):
            name = op.verb
        return getattr(self, name)

    def assert_clean(self) -> None:
        """Nothing may be left after a step."""
        left = [*self._islands, *self._routings, *self._splits, *self._written]
        assert not left, f"left after the step: {left[:5]}"

    def discard(self) -> None:
        """Forget everything that an interrupted step left behind."""
        self._islands.clear()
        self._routings.clear()
        self._splits.clear()
        self._written.clear()
        self.loads.clear()

    # -- forward ---------------------------------------------------------------------------------------------

    def _forward(self, op: Op, fn: Callable[..., Any], *inputs: Any) -> Any:
        """Run a part: as an island, or without a graph if there is no backward or it will run once more for it."""
        if not self.training or (op.verb == "fwd" and op.part in self._layout.recompute):
            with torch.no_grad():
                return fn(*inputs)
        island = self._islands[op.part, _place(op)] = Island()
        return island.forward(fn, *inputs)

    def _layer(self, op: Op) -> Any:
        return self._chunks[op.chunk].layer(op.layer)

    def fwd_embed(self, op: Op) -> Tensor:
        embed = self._chunks[op.chunk].embed
        assert embed is not None
        return self._forward(op, embed, self.microbatches[op.microbatch].ids)

    def fwd_attn(self, op: Op, x: Tensor) -> Any:
        """A dense layer's output, or the sides of a MoE layer: (rows, residual, shared, probs)."""
        result = self._forward(op, self._layer(op).forward_attn, x, self.microbatches[op.microbatch].documents)
        if self._layout.kinds[op.layer] == "dense":
            return result
        *sides, routing = result
        self._routings[_place(op)] = routing
        if self.training:
            load = self.loads.get(op.layer)
            self.loads[op.layer] = routing.load_E.clone() if load is None else load.add_(routing.load_E)
        return sides

    def fwd_dispatch(self, op: Op, sides: list[Tensor]) -> CommResult:
        splits = self._exchange(op)
        return self._all_to_all(sides[0][: splits.table.sent], splits.table)

    def _exchange(self, op: Op) -> Splits | PlacedSplits:
        place, group, room = _place(op), self._groups.a2a, self._room.now
        if room is None or group.size == 1:
            placed = self._layout.placed and not self._layout.uncounted  # else by the transport that needs no host
            splits = exchange_counts(self._routings[place], group, placed)
        else:
            splits = place_counts(self._routings[place], group, room)
        self._splits[place] = splits
        return splits

    def fwd_experts(self, op: Op, rows: Any) -> Tensor:
        if self._layout.ep == 1:
            rows = rows[0]
            self._exchange(op)
        return self._forward(op, self._layer(op).forward_experts, rows, self._splits[_place(op)])

    def fwd_combine(self, op: Op, rows: Tensor) -> CommResult:
        splits = self._splits[_place(op)]
        return self._all_to_all(rows, splits.table.back)

    def fwd_unpermute(self, op: Op, rows: Tensor, sides: list[Tensor | None]) -> Tensor:
        _, residual, shared, probs = sides
        routing = self._routings[_place(op)]
        out = self._forward(op, self._layer(op).forward_unpermute, rows, residual, shared, probs, routing)
        if not self.training:
            self._forget_routing(op)
        return out

    def fwd_mlp(self, op: Op, x: Tensor) -> Tensor:
        return self._forward(op, self._layer(op).forward_mlp, x)

    def fwd_head(self, op: Op, x: Tensor) -> None:
        loss = self._forward(op, self._chunks[op.chunk].loss, x, self.microbatches[op.microbatch].targets)
        self.losses.append(loss.detach())

    # -- forward once more: the values are known, what is wanted are the islands -----------------------------

    def recompute_attn(self, op: Op, x: Tensor) -> None:
        """The routing stays what it was: a row is where forward put it."""
        kept = [self._routings[_place(op)]] if self._layout.kinds[op.layer] == "moe" else []
        self._forward(op, self._layer(op).forward_attn, x, self.microbatches[op.microbatch].documents, *kept)

    def recompute_experts(self, op: Op, rows: Any) -> None:
        rows = rows[0] if self._layout.ep == 1 else rows
        self._forward(op, self._layer(op).forward_experts, rows, self._splits[_place(op)])

    def recompute_mlp(self, op: Op, x: Tensor) -> None:
        self.fwd_mlp(op, x)

    # -- input gradients -------------------------------------------------------------------------------------

    def _backward(self, op: Op, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        place = _place(op)
        island = self._islands[op.part, place]
        result = island.backward(*grads)
        if self._layout.unit(op.part) is None:
            del self._islands[op.part, place]
        return result

    def bwd_head(self, op: Op, *_kept: Any) -> Tensor | None:
        scale = torch.full((), 1.0 / len(self.microbatches), device=self._activation.device)
        if self.weights_M is not None:
            scale = self.weights_M[op.microbatch]
        return self._backward(op, scale)[0]

    def bwd_unpermute(self, op: Op, g: Tensor, *_kept: Any) -> tuple[Tensor | None, ...]:
        return self._backward(op, g)[:4]

    def bwd_combine(self, op: Op, grads: tuple[Tensor, ...]) -> CommResult:
        splits = self._splits[_place(op)]
        return self._all_to_all(grads[0], splits.table)

    def bwd_experts(self, op: Op, g: Any, *_kept: Any) -> Tensor | None:
        return self._backward(op, g[0] if self._layout.ep == 1 else g)[0]

    def bwd_dispatch(self, op: Op, g: Tensor) -> CommResult:
        splits, room = self._splits[_place(op)], self._routings[_place(op)].room
        return self._all_to_all(g, splits.table.back, room)

    def bwd_attn(self, op: Op, g: Tensor, *others: Any) -> Tensor | None:
        if self._layout.kinds[op.layer] == "dense":
            return self._backward(op, g)[0]
        _, residual, shared, probs = others[0]
        self._forget_routing(op)
        return self._backward(op, g, residual, shared, probs, None)[0]

    def _forget_routing(self, op: Op) -> None:
        del self._routings[_place(op)]
        del self._splits[_place(op)]

    def bwd_mlp(self, op: Op, g: Tensor, *_kept: Any) -> Tensor | None:
        return self._backward(op, g)[0]

    def bwd_embed(self, op: Op, g: Tensor) -> None:
        self._backward(op, g)

    # -- weight gradients and sharded units ------------------------------------------------------------------

    def wgrad(self, op: Op, *_kept: Any) -> None:
        """Drain the queue of a part's island into the unit's gradient slot."""
        name = unit_written(op, self._layout)
        assert name is not None
        unit = self._units[name]
        island = self._islands.pop((op.part, _place(op)))
        if unit.collects:
            unit.collect(island.queue, op.microbatch)
            return
        written = self._written.setdefault((name, op.slot), set())
        views = unit.grad_views(op.slot)
        island.queue.drain(lambda weight: views[weight], written, unit.group.compute_dtype)

    def add(self, op: Op) -> None:
        self._complete(op).add(op.slot)

    def reduce(self, op: Op) -> CommResult:
        return None, self._complete(op).reduce(op.slot, last=op.microbatch == len(self.microbatches) - 1)

    def _complete(self, op: Op) -> PlannedUnit:
        """The unit of an op, with all of its gradient in the slot, if that is where it is written."""
        name = unit_moved(op)
        unit = self._units[name]
        if not unit.collects:
            unit.zero_missing(op.slot, self._written.pop((name, op.slot)))
        return unit

    def gather(self, op: Op) -> CommResult:
        return None, self._units[unit_moved(op)].gather(op.slot)

    def release(self, op: Op) -> None:
        self._units[unit_moved(op)].release()

    def update(self, op: Op) -> Sequence[Tensor]:
        """The gradients that were read: see Note: [What an update has read is the compute lane's]."""
        return () if self.on_update is None else self.on_update(self._units[unit_moved(op)])

    def step(self, op: Op) -> None:
        if self.on_step is not None:
            self.on_step()

    # -- communication of rows and activations ---------------------------------------------------------------

    def _all_to_all(self, rows: Tensor, table: RowTable | HostBlocks | Blocks, room: int = 0) -> CommResult:
        """Exchange rows [R, D] between expert-parallel ranks. What arrives is followed by anything, up to `room`."""
        count = table.room
        out = rows.new_empty((max(count, room), rows.shape[1]))
        return out, self._groups.a2a.all_to_all(out[:count], rows, table)

    def _edge(self, op: Op) -> Group:
        """The group of a send or receive."""
        back = "_back" if self._layout.turns(op.chunk) else ""
        group: Group | None = getattr(self._groups, f"{op.verb}_{op.part}{back}")
        assert group is not None, f"{op} has no group"
        return group

    def send(self, op: Op, x: Tensor, *_kept: Any) -> CommResult:
        group = self._edge(op)
        return None, group.send(x.contiguous(), group.other)

    def recv(self, op: Op) -> CommResult:
        group = self._edge(op)
        a = self._activation
        out = torch.empty(a.shape, dtype=a.dtype, device=a.device)
        return out, group.recv(out, group.other)


def _place(op: Op) -> Place:
    return op.microbatch, op.chunk, op.layer
