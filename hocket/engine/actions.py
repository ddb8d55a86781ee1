"""What each op of a plan does to tensors.

An action takes the op and the values it reads, in the order of `program/values.py`, and returns the op's value. Values
that an op only keeps alive come last and are ignored. Actions of communication lanes return the value and a `Pending`.
State that outlives an op (segments, routings, splits) is kept here by (microbatch, chunk, layer) and dropped by the op
that uses it last; `assert_clean` proves that nothing is left after a step.

The layer's description (`program/parts.py`) says what each part reads and which values its gradients come from. A
compute part is the method `forward_<part>` of the layer's module. It takes the part's inputs and the state in `takes`,
and returns the part's outputs and the state in `makes`. This file exchanges the rows of experts. Any other
communication part is two methods of the module, `forward_<part>` and `backward_<part>`, which return a value and a
`Pending`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hocket.engine.experts import RowRoom
from hocket.fsdp.planned.unit import PlannedUnit
from hocket.layers.dispatch import exchange_counts, place_counts, rows_of, tokens_of
from hocket.model.documents import Microbatch
from hocket.model.transformer import Chunk
from hocket.program.ops import HOST, TIED, UNIT_VERBS, Lane, Layout, Op
from hocket.program.parts import INPUT, LayerKind, Part
from hocket.program.values import UnitName, lent_to, unit_moved, unit_read, unit_written
from hocket.runtime.blocks import Blocks, HostBlocks
from hocket.runtime.comm import Group, Groups, Pending, RowTable
from hocket.runtime.segment import HostMemory, OffloadedTensors, RebuiltTensor, Saver, Segment
from hocket.runtime.transports import DONE
from hocket.runtime.weights import Weight

Place = tuple[int, int, int]
"""(microbatch, chunk, layer)."""

CommResult = tuple[Tensor | None, Pending]
"""A communication op's value, and a `Pending` that says when it may be read."""


@dataclass(frozen=True)
class Activation:
    """The shape [B, S, D] and dtype of activations that pipeline ranks send each other."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class Actions:
    """The actions of one rank's ops, on the executor's current microbatches."""

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
        """Without `on_step`, for forward-only programs, no graphs are kept."""
        self._layout, self._chunks, self._units, self._groups = layout, chunks, units, groups
        self._activation, self.on_step, self._room = activation, on_step, room
        self._segments: dict[tuple[str, Place], Segment] = {}
        self._state: dict[Place, dict[str, Any]] = {}  # in `takes` and `makes` of parts: routing, splits
        self._host = HostMemory(pinned=activation.device.type == "cuda")
        self._wiring: dict[tuple[str, str], Wiring] = {}
        self._written: dict[tuple[UnitName, int], set[Weight]] = {}
        self.training = on_step is not None
        self.on_update: Callable[[PlannedUnit], Sequence[Tensor]] | None = None
        """Updates a unit with the gradients that the last step reduced, and returns those gradients' memory."""
        self.on_matrices: Callable[[str, PlannedUnit, int], Pending] | None = None
        """Runs one of `WHOLE_MATRICES` on a unit and a slot."""
        self.allocating: Callable[[Lane], AbstractContextManager[object]] = lambda _: nullcontext()
        """In this context new tensors are allocated in the memory pool of the given lane."""
        self.microbatches: Sequence[Microbatch] = ()
        self.losses: list[Tensor] = []
        self.weights_M = torch.empty(0)
        """Factor of each microbatch's loss, fp32: see Note: [The mean over the tokens of a step]."""
        self.loads: dict[int, Tensor] = {}
        """Rows that this rank's tokens sent to each expert in this step, by layer: int64 [E]."""

    def find(self, op: Op) -> Callable[..., Any]:
        """The action of an op. An op that reads weights first asserts that they are gathered."""
        read = unit_read(op, self._layout)
        if read is None:
            return self._find(op)
        unit, act = self._units[read], self._find(op)

        def checked(op: Op, *values: Any) -> Any:
            unit.assert_readable()
            return act(op, *values)

        return checked

    def _find(self, op: Op) -> Callable[..., Any]:
        if op.verb in (*UNIT_VERBS, *HOST, "wgrad", "send", "recv", "step"):
            return getattr(self, op.verb)
        if op.layer < 0:
            return getattr(self, f"{op.verb}_{op.part}")
        kind, part = self._layout.type_of(op.layer), self._layout.part(op.part, op.layer)
        if (kind.name, part.name) not in self._wiring:
            self._wiring[kind.name, part.name] = Wiring.of(kind, part)
        wiring = self._wiring[kind.name, part.name]
        if part.way:
            return partial(getattr(self, f"exchange_{op.verb}"), wiring)
        if part.communicates:
            return partial(self.communicate, wiring)
        return partial(getattr(self, op.verb), wiring)

    def assert_clean(self) -> None:
        """Assert that nothing is left after a step."""
        left = [*self._segments, *self._state, *self._written]
        assert not left, f"left after the step: {left[:5]}"

    def discard(self) -> None:
        """Drop everything that an interrupted step left."""
        self._segments.clear()
        self._state.clear()
        self._written.clear()
        self.loads.clear()

    # -- parts of layers that compute ------------------------------------------------------------------------

    def _forward(self, op: Op, fn: Callable[..., Any], *inputs: Any) -> Any:
        """Run a part: in a segment, or without a graph if it has no backward or is recomputed for it."""
        again = self._layout.recomputes(op.part, op.layer)
        lends = again and self._layout.part(op.part, op.layer).lends  # then the graph is of the first forward
        if not self.training or (again and (op.verb == "fwd") != lends):
            with torch.no_grad():
                return fn(*inputs)
        segment = self._segments[op.part, _place(op)] = Segment(self._saver(op, inputs))
        return segment.forward(fn, *inputs)

    def _saver(self, op: Op, inputs: Sequence[Any]) -> Saver | None:
        """The saver of a segment's tensors; None: the segment keeps them itself."""
        if lent_to(self._layout, op.part, op.layer):
            return RebuiltTensor()
        if not self._layout.offloads(op.part, op.layer):
            return None
        reads = self._layout.part(op.part, op.layer).reads
        foreign = [self._is_foreign(read, op.layer) for read in reads]
        stay = [x for x, stays in zip(inputs, foreign, strict=False) if stays and isinstance(x, Tensor)]
        return OffloadedTensors(self._activation.device, stay)

    def _is_foreign(self, read: str, layer: int) -> bool:
        """Whether an input of a part may be memory of a communication lane.

        The input of a pipeline stage's first layer may be, under any name that a part reads it by.
        """
        source = read.partition(".")[0]
        exchanged = source != INPUT and self._layout.part(source, layer).communicates
        return exchanged or layer in self._layout.bounds[1:]

    def offload(self, op: Op) -> tuple[list[Tensor], Pending]:
        """Copy a forward's saved tensors to host memory. Returns the device tensors, whose memory becomes free."""
        saved = self._offloaded(op).take()
        self._host.store((op.part, op.slot), saved)
        return saved, DONE

    def reload(self, op: Op) -> tuple[list[Tensor], Pending]:
        """Copy them back for the backward."""
        with self.allocating("compute"):
            saved = self._offloaded(op).place()
        self._host.load((op.part, op.slot), saved)
        return saved, DONE

    def _offloaded(self, op: Op) -> OffloadedTensors:
        saver = self._segments[op.part, _place(op)].saver
        assert isinstance(saver, OffloadedTensors), f"{op} is of a part that keeps all here"
        return saver

    def fwd(self, wiring: Wiring, op: Op, *values: Any) -> Any:
        """A part's output, or a list of its outputs."""
        part, place = wiring.part, _place(op)
        state = [self._taken(name, op) for name in part.takes]
        result = self._forward(op, self._method(op), *wiring.inputs(values), *state)
        if part.makes:
            *result, made = (
                result if len(part.makes) == 1 else (*result[: -len(part.makes)], result[-len(part.makes) :])
            )
            names = dict(zip(part.makes, (made,) if len(part.makes) == 1 else made, strict=True))
            self._state.setdefault(place, {}).update(names)
            self._count_rows(op.layer, names)
            result = result if part.outputs else result[0]
        if wiring.last and not self.training:
            self._state.pop(place, None)
        return list(result) if part.outputs else result

    def recompute(self, wiring: Wiring, op: Op, *values: Any) -> Any:
        """Run forward again, to build the segment, or to compute the value that the part lends.

        State made by the first forward is reused: each row must go where that put it.
        """
        part, state = wiring.part, self._state.get(_place(op), {})
        kept = [self._taken(name, op) for name in part.takes] + [state[name] for name in part.makes]
        result = self._forward(op, self._method(op), *wiring.inputs(values), *kept)
        if part.lends:
            return list(result) if part.outputs else result
        return None

    def bwd(self, wiring: Wiring, op: Op, *values: Any) -> Any:
        """The gradient of a part's input, or a tuple of those of its inputs."""
        part, place = wiring.part, _place(op)
        if wiring.first:
            self._state.pop(place, None)
        if lent_to(self._layout, op.part, op.layer):
            lent = self._segments[op.part, place].saver
            assert isinstance(lent, RebuiltTensor)
            lent.give(values[-1][0] if isinstance(values[-1], list) else values[-1])
        grads = self._backward(op, *wiring.grads(values), *[None] * len(part.makes))
        return grads[: len(part.reads)] if len(part.reads) > 1 else grads[0]

    def _method(self, op: Op) -> Callable[..., Any]:
        return getattr(self._chunks[op.chunk].layer(op.layer), f"forward_{op.part}")

    def _taken(self, name: str, op: Op) -> Any:
        """A piece of state that a part takes."""
        if name == "documents":
            return self.microbatches[op.microbatch].documents
        state = self._state.setdefault(_place(op), {})
        if name == "splits" and name not in state:  # no exchange has run: all rows stay on this rank
            self._split(op)
        return state[name]

    def _count_rows(self, layer: int, made: Mapping[str, Any]) -> None:
        if self.training and "routing" in made:
            load, more = self.loads.get(layer), made["routing"].load_E
            self.loads[layer] = more.clone() if load is None else load.add_(more)

    # -- parts of layers that communicate ----------------------------------------------------------------------

    def communicate(self, wiring: Wiring, op: Op, *values: Any) -> CommResult:
        """A part with its own lane: the module communicates the value, or in backward the gradient."""
        way, moved = ("backward", wiring.grads(values)) if op.verb == "bwd" else ("forward", wiring.inputs(values))
        method = getattr(self._chunks[op.chunk].layer(op.layer), f"{way}_{op.part}")
        return method(*moved, *[self._taken(name, op) for name in wiring.part.takes])

    def _split(self, op: Op) -> Any:
        """Exchange the row counts of a layer; all its exchanges of this microbatch use them."""
        state, group, room = self._state[_place(op)], self._groups.a2a, self._room.now
        if room is None or group.size == 1:
            placed = self._layout.placed and not self._layout.uncounted  # else this fallback uses the plain transport
            state["splits"] = exchange_counts(state["routing"], group, placed)
        else:
            state["splits"] = place_counts(state["routing"], group, room)
        return state["splits"]

    def exchange_fwd(self, wiring: Wiring, op: Op, *values: Any) -> CommResult:
        """Send rows to their experts, or back."""
        (rows,) = wiring.inputs(values)
        if wiring.part.way == "out":
            state = self._state[_place(op)]
            table = state["splits"].table if op.verb == "recompute" else self._split(op).table
            if self._layout.makes_rows_later:
                rows, _ = rows_of(rows, None, state["routing"])
            return self._all_to_all(rows[: table.sent], table)
        return self._all_to_all(rows, self._state[_place(op)]["splits"].table.back)

    exchange_recompute = exchange_fwd

    def exchange_bwd(self, wiring: Wiring, op: Op, *values: Any) -> CommResult:
        """Send the rows' gradients the opposite way."""
        (grad,) = wiring.grads(values)
        state = self._state[_place(op)]
        if wiring.part.way == "out":
            rows, pending = self._all_to_all(grad, state["splits"].table.back, state["routing"].room)
            return tokens_of(rows, pending, state["routing"]) if self._layout.makes_rows_later else (rows, pending)
        return self._all_to_all(grad, state["splits"].table)

    # -- embedding and head ------------------------------------------------------------------------------------

    def fwd_embed(self, op: Op) -> Tensor:
        embed = self._chunks[op.chunk].embed
        assert embed is not None
        return self._forward(op, embed, self.microbatches[op.microbatch].ids)

    def fwd_head(self, op: Op, x: Tensor) -> None:
        loss = self._forward(op, self._chunks[op.chunk].loss, x, self.microbatches[op.microbatch].targets)
        self.losses.append(loss.detach())

    def bwd_head(self, op: Op, *_kept: Any) -> Tensor | None:
        return self._backward(op, self.weights_M[op.microbatch])[0]

    def bwd_embed(self, op: Op, g: Tensor) -> None:
        self._backward(op, g)

    def _backward(self, op: Op, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        place = _place(op)
        segment = self._segments[op.part, place]
        result = segment.backward(*grads)
        if self._layout.unit(op.part) is None:
            del self._segments[op.part, place]
        return result

    # -- weight gradients and sharded units ------------------------------------------------------------------

    def wgrad(self, op: Op, *_kept: Any) -> None:
        """Drain the queue of a part's segment into the unit's gradient slot."""
        name = unit_written(op, self._layout)
        assert name is not None
        unit = self._units[name]
        segment = self._segments.pop((op.part, _place(op)))
        if unit.collects:
            unit.collect(segment.queue, op.microbatch)
            return
        written = self._written.setdefault((name, op.slot), set())
        views = unit.grad_views(op.slot)
        segment.queue.drain(lambda weight: views[weight], written, unit.group.compute_dtype)

    def add(self, op: Op) -> None:
        self._complete(op).add(op.slot)

    def reduce(self, op: Op) -> CommResult:
        return None, self._complete(op).reduce(op.slot, last=op.microbatch == len(self.microbatches) - 1)

    def _complete(self, op: Op) -> PlannedUnit:
        """The unit of an op. Parts of its slot's gradient that no wgrad has written are zeroed."""
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
        """The gradients it has read: see Note: [An update's gradients belong to the compute lane]."""
        return () if self.on_update is None else self.on_update(self._units[unit_moved(op)])

    def collect(self, op: Op) -> CommResult:
        return None, self._on_matrices(op)

    def orthogonalise(self, op: Op) -> None:
        self._on_matrices(op)

    def scatter(self, op: Op) -> CommResult:
        return None, self._on_matrices(op)

    def _on_matrices(self, op: Op) -> Pending:
        if self.on_matrices is None:
            return Pending()
        return self.on_matrices(op.verb, self._units[unit_moved(op)], op.slot)

    def step(self, op: Op, *others: Tensor) -> None:
        for grad in others:
            self._tied.sum_of_step().add_(grad)
        if self.on_step is not None:
            self.on_step()

    # -- communication of rows and activations ---------------------------------------------------------------

    def _all_to_all(self, rows: Tensor, table: RowTable | HostBlocks | Blocks, room: int = 0) -> tuple[Tensor, Pending]:
        """All-to-all of rows [R, D] between expert-parallel ranks. Rows after the received ones are undefined."""
        count = table.room
        out = rows.new_empty((max(count, room), rows.shape[1]))
        return out, self._groups.a2a.all_to_all(out[:count], rows, table)

    def _edge(self, op: Op) -> Group:
        """The process group of a send or receive."""
        if op.part == TIED:
            return getattr(self._groups, op.lane)
        back = "_back" if self._layout.turns(op.chunk) else ""
        group: Group | None = getattr(self._groups, f"{op.verb}_{op.part}{back}")
        assert group is not None, f"{op} has no group"
        return group

    @property
    def _tied(self) -> PlannedUnit:
        """The unit of a tied embedding, of which another pipeline rank has a copy."""
        return self._units["embed", 0, -1]

    def send(self, op: Op, *values: Tensor) -> CommResult:
        group = self._edge(op)
        x = self._tied.sum_of_step() if op.part == TIED else values[0].contiguous()
        return None, group.send(x, group.other)

    def recv(self, op: Op) -> CommResult:
        group = self._edge(op)
        a = self._activation
        unit = self._tied.group if op.part == TIED else None
        shape, dtype = (a.shape, a.dtype) if unit is None else (unit.main.shape, unit.formats.accumulate)
        out = torch.empty(shape, dtype=dtype, device=a.device)
        return out, group.recv(out, group.other)


def _place(op: Op) -> Place:
    return op.microbatch, op.chunk, op.layer


# --------------------------------------------------------------------------------------------------------------- wiring
#
# Which of an op's values are a part's inputs and output gradients.


@dataclass(frozen=True)
class Wiring:
    """Where a part's inputs and the gradients of its outputs are among the values that its op reads."""

    part: Part
    sources: tuple[tuple[int, int], ...]
    """Per input: index of the value, and of the output in it; -1 for the whole value."""
    readers: tuple[tuple[int, int], ...]
    """Per output: index of the value with its gradient, and the index in that; -1 for all of it. (-1, -1): none."""
    first: bool
    last: bool
    """Whether the part is the layer's first, and whether its last."""

    @classmethod
    def of(cls, kind: LayerKind, part: Part) -> Wiring:
        def source(read: str) -> tuple[int, int]:
            name, _, output = read.partition(".")
            place = kind.by_name[name].outputs.index(output) if output else -1
            return part.sources.index(name), place

        def reader(output: str) -> tuple[int, int]:
            name, place = kind.gradient_of(part, output)
            if not name:
                return -1, -1
            return kind.readers[part.name].index(name), place if len(kind.by_name[name].reads) > 1 else -1

        last = part is kind.exit
        return cls(
            part,
            tuple((0, -1) if read == INPUT else source(read) for read in part.reads),
            ((0, -1),) if last else tuple(reader(output) for output in part.outputs or ("",)),
            part is kind.entry,
            last,
        )

    def inputs(self, values: Sequence[Any]) -> list[Any]:
        return [values[n] if place < 0 else values[n][place] for n, place in self.sources]

    def grads(self, values: Sequence[Any]) -> list[Any]:
        return [None if n < 0 else values[n] if place < 0 else values[n][place] for n, place in self.readers]
