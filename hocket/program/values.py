"""Which values an op reads: the meaning of a plan, in one table.

Every op produces at most one value, named by the op's key. `reads` lists the values that an op takes as inputs or still
uses. `follows` lists the earlier ops of the same part whose saved state it continues. The lowering turns both into
`deps`, the checker proves that they hold, and the dry run and the executor act on them.

Note: [Values of communication lanes live longer]
A tensor belongs to the lane on which it was allocated. A tensor of the compute lane that only compute ops use may be
dropped at any time: the lane's own order protects it. A received tensor belongs to a communication lane, which could
reuse its memory while the compute lane still reads it. So an op that keeps a received tensor in its saved state, or in
the queue of weight gradients, counts as a reader too; a part lists these values (`Part.kept`, `Part.wgrad_kept`).
hocket's experts keep a reordered copy of their rows, except for rows that arrive in that order (`placed`): then weight
gradients read what dispatch and the backward of combine have received. The residual addition passes the gradient of a
layer's output on unchanged, so the last layer of a chunk keeps the received gradient until its shared expert's or dense
MLP's weight gradients are done.

Note: [An update's gradients belong to the compute lane]
An update reads the gradients of the step before. Its value is their memory, which belongs to the compute lane, because
the unit's first weight gradient allocated it (`fsdp/planned/unit.py`). The update, on its own lane, is the only reader.
So the update counts as its own reader, and the compute lane drops the value once it is known to run after the update:
at the unit's first forward at the latest.

Note: [Offloaded tensors belong to the compute lane]
A forward leaves its saved tensors to its segment, and offload copies them to host memory on a separate lane. The
value of offload is the tensors themselves, in memory of the compute lane. No other op reads it, but offload itself has
read it. So the compute lane drops it once it is known to run after the copy. The tensors that reload restores are
memory of the compute lane too; on its own lane they would stay until the next reload. That memory is free by then,
since a reload waits for the compute op before it. Backward reads them, and so does the weight gradient.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from hocket.program.ops import HOST, TIED, Key, Lane, Layout, Op
from hocket.program.parts import INPUT, OUTPUT_GRADIENT, UNITS, Unit
from hocket.program.transformer import EMBED, HEAD

UnitName = tuple[Unit, int, int]
"""(class, chunk, layer): one unit of a rank. Embed and head units have layer -1."""
Name = tuple[str, str, int, int]
"""(verb, part, chunk, layer): an op of any microbatch."""


def layer_input(layout: Layout, rank: int, m: int, chunk: int, layer: int) -> Key:
    """The op whose value is the input of a layer. For the layer after the last one: the chunk's output."""
    layers = layout.layers(rank, chunk)
    if layer > layers.start:
        return ("fwd", layout.type_of(layer - 1).exit.name, m, chunk, layer - 1)
    source = layout.before(rank, chunk)
    if source is None:
        return ("fwd", EMBED.name, m, chunk, -1)
    if source[0] == rank:
        return chunk_output(layout, rank, m, source[1])
    return ("recv", "act", m, chunk, -1)


def chunk_output(layout: Layout, rank: int, m: int, chunk: int) -> Key:
    return layer_input(layout, rank, m, chunk, layout.layers(rank, chunk).stop)


def input_grad(layout: Layout, rank: int, m: int, chunk: int, layer: int = -1) -> Key:
    """The op whose value is the gradient of a layer's input, by default of a chunk's."""
    layers = layout.layers(rank, chunk)
    if not layers:
        return output_grad(layout, rank, m, chunk)
    layer = layers.start if layer < 0 else layer
    return ("bwd", layout.type_of(layer).entry.name, m, chunk, layer)


def output_grad(layout: Layout, rank: int, m: int, chunk: int, layer: int = -1) -> Key:
    """The op whose value is the gradient of a layer's output, by default of a chunk's last layer."""
    if 0 <= layer < layout.layers(rank, chunk).stop - 1:
        return input_grad(layout, rank, m, chunk, layer + 1)
    source = layout.after(rank, chunk)
    if source is None:
        return ("bwd", HEAD.name, m, chunk, -1)
    if source[0] == rank:
        return input_grad(layout, rank, m, source[1])
    return ("recv", "grad", m, chunk, -1)


def reads(op: Op, layout: Layout, rank: int) -> list[Key]:
    """Keys of the ops whose values `op` uses: first its inputs, in order, then those that its saved state refers to.

    See Note: [Values of communication lanes live longer].
    """
    m, c, part = op.microbatch, op.chunk, op.part
    match op.verb:
        case "fwd" | "recompute":
            shared = op.layer >= 0 and layout.part(part, op.layer).shares_input
            return [*_inputs(op, layout, rank), *(_kept(op, layout, rank, (INPUT,)) if shared else [])]
        case "bwd":
            lent = [("recompute", lent_to(layout, part, op.layer), m, c, op.layer)]
            kept = _kept(op, layout, rank, layout.part(part, op.layer).kept)
            return [
                *output_grads(op, layout, rank),
                *(key for key in kept if key not in lent),
                *lent[: bool(lent[0][1])],
                *_reloaded(op, layout),
            ]
        case "wgrad":
            return [*_kept(op, layout, rank, layout.part(part, op.layer).wgrad_kept), *_reloaded(op, layout)]
        case "send" if part == TIED:
            return []  # the last step's gradients, which are no op's value
        case "step":
            return [("recv", TIED, m, c, -1)] if c >= 0 else []
        case "send":
            return [chunk_output(layout, rank, m, c) if part == "act" else input_grad(layout, rank, m, c)]
    return []


def _inputs(op: Op, layout: Layout, rank: int) -> list[Key]:
    """The inputs of a forward."""
    m, c, layer = op.microbatch, op.chunk, op.layer
    if op.part == EMBED.name:
        return []
    if layer < 0:
        return [chunk_output(layout, rank, m, c)]
    found: list[Key] = []
    for source in layout.part(op.part, layer).sources:
        if source == INPUT:
            found.append(layer_input(layout, rank, m, c, layer))
        else:
            again = op.verb == "recompute" and recomputed_for_readers(layout, source, layer)
            found.append(("recompute" if again else "fwd", source, m, c, layer))
    return found


def recomputed_for_readers(layout: Layout, part: str, layer: int) -> bool:
    """Whether a part is recomputed to give its value to its readers' backwards."""
    return layout.recomputes(part, layer) and layout.part(part, layer).lends


def lent_to(layout: Layout, part: str, layer: int) -> str:
    """The input part whose value this part does not save, since that part is recomputed; empty if there is none.

    Such a part reads the recomputed value last in its backward. A recomputed part reads it in its own recompute.
    """
    if layer < 0 or layout.recomputes(part, layer):
        return ""
    sources = (source for source in layout.part(part, layer).sources if source != INPUT)
    return next((source for source in sources if recomputed_for_readers(layout, source, layer)), "")


def output_grads(op: Op, layout: Layout, rank: int) -> list[Key]:
    """The values that hold the gradients of a part's outputs: its readers' backwards, in forward order."""
    m, c, layer = op.microbatch, op.chunk, op.layer
    if op.part == HEAD.name:
        return []
    if layer < 0:
        return [input_grad(layout, rank, m, c)]
    readers = layout.type_of(layer).readers[op.part]
    return [("bwd", r, m, c, layer) for r in readers] or [output_grad(layout, rank, m, c, layer)]


def _kept(op: Op, layout: Layout, rank: int, values: tuple[str, ...]) -> list[Key]:
    """Those of the values in saved state that a communication lane has allocated."""
    m, c, layer = op.microbatch, op.chunk, op.layer
    found: list[Key] = []
    for value in values:
        if value == INPUT:
            key = chunk_output(layout, rank, m, c) if layer < 0 else layer_input(layout, rank, m, c, layer)
        elif value == OUTPUT_GRADIENT:
            key = output_grads(op, layout, rank)[0] if layer < 0 else output_grad(layout, rank, m, c, layer)
        else:
            verb, _, part = value.partition(" ")
            again = verb == "fwd" and op.verb != "recompute" and recomputed_for_readers(layout, part, layer)
            key = ("recompute" if again else verb, part, m, c, layer)
        if key[0] == "recv" or (key[4] >= 0 and layout.part(key[1], key[4]).communicates):
            found.append(key)
    return found


def _reloaded(op: Op, layout: Layout) -> list[Key]:
    """The reloads that a backward reads. See Note: [Offloaded tensors belong to the compute lane]."""
    return [("reload", *op.key[1:])] if layout.offloads(op.part, op.layer) else []


def first_reader(op: Op, layout: Layout) -> str:
    """The part that reads one share of an op's value before another part reads the rest; empty if there is one reader.

    Readers of a forward's value are the parts that read its outputs; readers of a backward's value are the parts whose
    output gradients it made: see Note: [One reader for each output]. So the exchange's reader can free a layer's rows
    before the residual is read.
    """
    if op.layer < 0 or op.verb not in ("fwd", "bwd"):
        return ""
    kind = layout.type_of(op.layer)
    parts = kind.readers[op.part] if op.verb == "fwd" else kind.by_name[op.part].sources
    if op.verb == "fwd" and parts and recomputed_for_readers(layout, parts[0], op.layer):
        return ""  # it reads its share again when it is recomputed
    return parts[0] if len(parts) > 1 and INPUT not in parts else ""


def shares(op: Op, layout: Layout) -> tuple[int, ...]:
    """Indices of the first reader's share in an op's value, which is a list of outputs or of input gradients."""
    kind, first = layout.type_of(op.layer), first_reader(op, layout)
    part = kind.by_name[op.part]
    if op.verb == "bwd":
        return tuple(n for n, read in enumerate(part.reads) if read.partition(".")[0] == first)
    return tuple(n for n, output in enumerate(part.outputs) if kind.gradient_of(part, output)[0] == first)


def memory_lane(op: Op) -> Lane:
    """The lane that owns the memory of an op's value: its own, except for updates, offloads and reloads."""
    return "compute" if op.verb in ("update", *HOST) else op.lane


def reads_itself(op: Op) -> bool:
    """Whether an op's value is memory of the compute lane that only the op itself has read.

    See Note: [An update's gradients belong to the compute lane], Note: [Offloaded tensors belong to the compute lane].
    """
    return op.verb in ("update", "offload")


def follows(op: Op, layout: Layout) -> list[Key]:
    """Keys of the ops whose saved state `op` continues, of the same part: bwd after fwd, wgrad after bwd.

    A recompute is between fwd and bwd, and reuses the routing that fwd chose. Offload and reload are between them too.
    For units: orthogonalise follows collect, and scatter follows orthogonalise.
    """
    forward = "recompute" if layout.recomputes(op.part, op.layer) else "fwd"
    forward = "reload" if layout.offloads(op.part, op.layer) else forward
    matrices = {"orthogonalise": "collect", "scatter": "orthogonalise"}
    away = {"offload": "fwd", "reload": "offload"}
    before = {"recompute": "fwd", "bwd": forward, "wgrad": "bwd", **matrices, **away}.get(op.verb)
    return [(before, *op.key[1:])] if before else []


def _unit_of(op: Op, layout: Layout) -> UnitName | None:
    unit = layout.unit(op.part)
    if unit is None:
        return None
    if layout.tied and unit == EMBED.unit:
        return (unit, 0, -1)
    return (unit, op.chunk, op.layer)


def unit_read(op: Op, layout: Layout) -> UnitName | None:
    """The unit whose weights an op reads: fwd, recompute or bwd of a part that owns weights.

    The backward of some parts reads none (`Part.backward_reads_weights`), nor does any weight gradient.
    """
    if op.verb not in ("fwd", "recompute", "bwd"):
        return None
    if op.verb == "bwd" and not layout.part(op.part, op.layer).backward_reads_weights:
        return None
    return _unit_of(op, layout)


def unit_moved(op: Op) -> UnitName:
    """The unit that a gather, release, add, reduce or update works on."""
    assert op.part in UNITS, f"{op} works on no unit"
    return (op.part, op.chunk, op.layer)  # pyrefly: ignore[bad-return]


def unit_written(op: Op, layout: Layout) -> UnitName | None:
    """The unit whose gradient slot a wgrad writes."""
    return _unit_of(op, layout) if op.verb == "wgrad" else None


class Meaning(NamedTuple):
    """The results of the functions above for an op. All ops that it reads or follows are of its own microbatch."""

    reads: tuple[Name, ...]
    follows: Name | None
    needs: tuple[Name, ...]
    """The values it reads, then the ops it follows."""
    unit_read: UnitName | None
    unit_written: UnitName | None
    first_reader: str


class Meanings(dict[Name, Meaning]):
    """The meanings of a rank's ops by name, computed once for all microbatches."""

    def __init__(self, layout: Layout, rank: int) -> None:
        super().__init__()
        self._layout, self._rank = layout, rank

    def __missing__(self, name: Name) -> Meaning:
        verb, part, chunk, layer = name
        op, layout = Op(verb, part, 0, chunk, layer), self._layout  # pyrefly: ignore[bad-argument-type]
        read, followed = reads(op, layout, self._rank), follows(op, layout)
        assert all(key[2] == op.microbatch for key in (*read, *followed)), f"{op} reads of another microbatch"
        names = [(verb, part, chunk, layer) for verb, part, _, chunk, layer in (*read, *followed)]
        found = self[name] = Meaning(
            reads=tuple(names[: len(read)]),
            follows=names[-1] if followed else None,
            needs=tuple(names),
            unit_read=unit_read(op, layout),
            unit_written=unit_written(op, layout),
            first_reader=first_reader(op, layout),
        )
        return found


@lru_cache(maxsize=64)
def meanings(layout: Layout, rank: int) -> Meanings:
    """The meanings of one rank's ops, shared by all programs of a layout."""
    return Meanings(layout, rank)
