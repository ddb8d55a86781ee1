"""Runs a program without tensors: one process, all ranks, values are hashes of where they come from.

Ops run in a random legal order (`linearize.py`): any order that keeps the lanes and the dependencies, as a GPU
might. Values are dropped, slots overwritten and weights forgotten when the program says so. A missing
dependency then shows as a missing value or as a hash that differs from that of the plain recursion over the
layers: a race detector for GPU streams that needs no GPU.

Note: [Tokens]
A token is the hash of what an op is (verb, part, layer, microbatch) and of the tokens it used: its inputs, the
weights it found in the unit's slot, and the state that its forward or backward left. It says nothing about rank,
chunk, slot or order. So the sequential reference, which knows none of these, arrives at the same tokens exactly
if every op found the right things.

Note: [Two ways to the same tokens]
What an op of a plan reads comes from the description of its layer. A reference that read the same description would
repeat its mistakes. So the reference spells out hocket's own dense and mixture-of-experts layers by hand. For any other
kind it goes forward through the description and backward by a tape, as autograd does; tests hold the tape against the
layers that are spelt out.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from hocket.program.linearize import linearize
from hocket.program.ops import TIED, WHOLE_MATRICES, Key, Layout, Op, Program
from hocket.program.parts import INPUT
from hocket.program.transformer import EMBED, HEAD
from hocket.program.values import UnitName, first_reader, follows, reads, unit_moved, unit_read, unit_written

Token = int
Unit = tuple[str, int]
"""(class, layer)."""
Gradients = dict[str, Token]
"""Part of a unit -> the token of its weight gradient."""


@dataclass
class Outcome:
    """What a step leaves behind: the loss of every microbatch, and for every unit what was reduced, in order."""

    losses: dict[int, Token] = field(default_factory=dict)
    reduced: dict[Unit, list[tuple[int, Gradients]]] = field(default_factory=lambda: defaultdict(list))
    exchanged: dict[Unit, Token] = field(default_factory=dict)
    """What came to the ends of a tied embedding on two ranks from each other, by the unit of who has received it."""


def dry_run(program: Program, seed: int | None, forward_only: bool = False) -> None:
    """Run all ranks in one random legal order and compare with the sequential reference.

    `forward_only` says that the program is a validation: only its losses count.

    Raises ValueError at the first op that doesn't find what it needs, for a loss or gradient that differs from
    the reference, and for anything left behind.
    """
    outcome = Outcome()
    mail: dict[tuple[int, Key], Token] = {}
    ranks = [_Rank(program, rank, mail, outcome, forward_only) for rank in range(len(program.ranks))]
    for rank, position in linearize(program, seed):
        ranks[rank].run(position)
    for machine in ranks:
        machine.finish()
    if mail:
        raise ValueError(f"dry run: sent and never received: {sorted(mail)[0]}")
    wanted = reference(program.layout, program.microbatches)
    _compare(outcome, Outcome(wanted.losses) if forward_only else wanted)


def _compare(found: Outcome, wanted: Outcome) -> None:
    for m, loss in wanted.losses.items():
        if found.losses.get(m) != loss:
            raise ValueError(f"dry run: the loss of microbatch {m} differs from the sequential reference")
    for unit, gradients in wanted.reduced.items():
        got = found.reduced.get(unit, [])
        if got != gradients:
            bad = next((a[0] for a, b in zip(got, gradients, strict=False) if a != b), len(got))
            raise ValueError(f"dry run: the gradients of {unit} differ from the reference, first for microbatch {bad}")
    for unit, token in wanted.exchanged.items():
        if found.exchanged.get(unit) != token:
            raise ValueError(f"dry run: the gradients that have come to {unit} are not all of the other end's")


class _Rank:
    """One rank: its values, saved states and slots."""

    def __init__(
        self, program: Program, rank: int, mail: dict[tuple[int, Key], Token], outcome: Outcome, forward_only: bool
    ) -> None:
        self.program, self.rank, self.mail, self.outcome = program, rank, mail, outcome
        self.forward_only = forward_only
        self.ops = program.ranks[rank]
        self.values: dict[Key, Token] = {}
        self.states: dict[Key, Token] = {}
        self.weights: dict[tuple[str, int], UnitName] = {}  # slot -> what was last gathered into it
        self.resident: dict[UnitName, int] = {}  # unit -> its slot
        self.gradients: dict[tuple[str, int], tuple[UnitName, int, Gradients]] = {}
        self.updated = {unit_moved(op): False for op in self.ops if op.verb == "update"}
        self.matrices: dict[tuple[str, str, int], tuple[str, UnitName]] = {}  # what lies where -> what was done with it
        self.trimmed: dict[Key, str] = {}  # value -> the part whose share of it is gone
        self.host: dict[tuple[str, int], Token] = {}  # slot in the host's memory -> the state that lies there
        self.sums: dict[UnitName, list[tuple[int, Gradients]]] = {}  # what was added up, oldest first

    def run(self, position: int) -> None:
        op = self.ops[position]
        wanted = reads(op, self.program.layout, self.rank)
        inputs = [self._look(self.values, key, op, "the value of") for key in wanted]
        for key in wanted:
            if self.trimmed.get(key) == op.part:
                raise ValueError(f"dry run, rank {self.rank}: {op} needs its share of {key}, which has been dropped")
        inputs = inputs[: _arguments(op, self.program.layout)]
        match op.verb:
            case "fwd" | "recompute" | "bwd" | "wgrad":
                self._compute(op, inputs)
            case "offload" | "reload":
                self._move_saved(op)
            case "send" if op.part == TIED:
                mine = hash(str(self.outcome.reduced[self._ends_unit()]))
                self.mail[self.program.layout.peer(op, self.rank)] = mine
            case "step" if inputs:
                self.outcome.exchanged[self._ends_unit()] = inputs[0]
            case "send":
                self.mail[self.program.layout.peer(op, self.rank)] = inputs[0]
            case "recv":
                self.values[op.key] = self._take(self.mail, (self.rank, op.key), op, "what was sent for")
            case "collect" | "orthogonalise" | "scatter":
                self._exchange_matrices(op)
            case "update":
                if op.slot >= 0:
                    self._take_matrices("parts", "scatter", op)
                self.updated[unit_moved(op)] = True
                self.values[op.key] = hash(op.key)
            case "gather":
                unit = unit_moved(op)
                self._look_updated(unit, op)
                self.weights[op.part, op.slot] = unit
                self.resident[unit] = op.slot
            case "release":
                self._take(self.resident, unit_moved(op), op, "the weights of")
            case "add":
                self.sums.setdefault(unit_moved(op), []).append(self._complete_gradient(op))
            case "reduce":
                added = self.sums.pop(unit_moved(op), [])
                unit = self._ends_unit() if op.layer < 0 and op.part == EMBED.unit else (op.part, op.layer)
                self.outcome.reduced[unit] += [*added, self._complete_gradient(op)]
        for p in op.frees:
            self._take(self.values, self.ops[p].key, op, "to drop the value of")
            self.trimmed.pop(self.ops[p].key, None)
        for p in op.trims:
            key = self.ops[p].key
            self._look(self.values, key, op, "to drop a share of the value of")
            self.trimmed[key] = first_reader(self.ops[p], self.program.layout)

    def _move_saved(self, op: Op) -> None:
        """What a forward has left goes to a slot in the host's memory, and from there to the backward."""
        if op.verb == "offload":
            (before,) = follows(op, self.program.layout)
            token = self.host[op.part, op.slot] = self._take(self.states, before, op, "the state of")
        else:
            token = self.states[op.key] = self._take(self.host, (op.part, op.slot), op, "what lies in")
        self.values[op.key] = token

    def _exchange_matrices(self, op: Op) -> None:
        """Whole matrices lie in a slot until they are scattered to another place of it, where the update finds them."""
        if op.verb != "collect":
            self._take_matrices("whole", WHOLE_MATRICES[WHOLE_MATRICES.index(op.verb) - 1], op)
        place = ("parts" if op.verb == "scatter" else "whole", op.part, op.slot)
        if place in self.matrices:
            raise ValueError(f"dry run, rank {self.rank}: {op} overwrites matrices of {self.matrices[place][1]}")
        self.matrices[place] = op.verb, unit_moved(op)

    def _take_matrices(self, where: str, verb: str, op: Op) -> None:
        found = self.matrices.pop((where, op.part, op.slot), None)
        if found != (verb, unit_moved(op)):
            raise ValueError(f"dry run, rank {self.rank}: {op} needs matrices behind their {verb}, and finds {found}")

    def _ends_unit(self) -> Unit:
        """Under what name gradients of the embedding's unit count: those of a tied head elsewhere for themselves."""
        chunk = self.program.layout.apart.get(self.rank, -1)
        head = chunk >= 0 and self.program.layout.is_last(self.rank, chunk)
        return (HEAD.name if head else EMBED.name), -1

    def _take(self, table: dict, key: object, op: Op, what: str) -> Token:
        """Look up and remove."""
        token = self._look(table, key, op, what)
        del table[key]
        return token

    def _look(self, table: dict, key: object, op: Op, what: str) -> Token:
        if key not in table:
            raise ValueError(f"dry run, rank {self.rank}: {op} needs {what} {key}, which is not there")
        return table[key]

    def _compute(self, op: Op, inputs: list[Token]) -> None:
        state = tuple(
            self._take(self.states, before, op, "the state of") for before in follows(op, self.program.layout)
        )
        if op.verb == "recompute":  # is the forward once more
            self.states[op.key] = hash(("fwd", op.part, op.layer, op.microbatch, self._weights(op), *inputs))
            if self.program.layout.part(op.part, op.layer).lends:
                self.values[op.key] = self.states[op.key]
            return
        token = hash((op.verb, op.part, op.layer, op.microbatch, self._weights(op), *state, *inputs))
        if op.verb == "wgrad":
            self._accumulate(op, token)
            return
        if not self.forward_only and (op.verb == "fwd" or self.program.layout.unit(op.part) is not None):
            self.states[op.key] = token
        if op.key[:2] == ("fwd", HEAD.name):
            self.outcome.losses[op.microbatch] = token
        elif op.key[:2] != ("bwd", EMBED.name):
            self.values[op.key] = token

    def _look_updated(self, unit: UnitName, op: Op) -> None:
        if not self.updated.get(unit, True):
            raise ValueError(f"dry run, rank {self.rank}: {op} comes before the unit's update")

    def _weights(self, op: Op) -> Unit | None:
        """What the op finds where it looks for its weights."""
        unit = unit_read(op, self.program.layout)
        if unit is not None and unit[0] in self.program.weight_slots:
            unit = self.weights[unit[0], self._look(self.resident, unit, op, "the weights of")]
        elif unit is not None:
            self._look_updated(unit, op)
        return unit and (unit[0], unit[2])

    def _accumulate(self, op: Op, token: Token) -> None:
        unit = unit_written(op, self.program.layout)
        assert unit is not None, f"{op} has no weights"
        self._look_updated(unit, op)
        owner = (unit, op.microbatch)
        held = self.gradients.get((unit[0], op.slot))
        if held is None or held[:2] != owner:  # overwrites whatever is there
            held = self.gradients[unit[0], op.slot] = (*owner, {})
        held[2][op.part] = token

    def _complete_gradient(self, op: Op) -> tuple[int, Gradients]:
        """(microbatch, gradient) of the slot that an add or reduce reads; the slot is empty then."""
        slot = (op.part, op.slot)
        if slot not in self.gradients:
            raise ValueError(f"dry run, rank {self.rank}: {op} finds its slot empty")
        _, _, gradients = self.gradients.pop(slot)
        return op.microbatch, gradients

    def finish(self) -> None:
        for name in ("values", "states", "resident", "gradients", "sums", "matrices", "host"):
            left = getattr(self, name)
            if left:
                raise ValueError(
                    f"dry run, rank {self.rank}: {len(left)} {name} left behind, such as {next(iter(left))}"
                )


def _arguments(op: Op, layout: Layout) -> int:
    """How many of an op's reads are its inputs; the rest it only keeps alive."""
    if op.verb == "wgrad":
        return 0
    if op.verb == "bwd":
        if op.layer < 0:
            return 0 if op.part == HEAD.name else 1
        return len(layout.type_of(op.layer).readers[op.part]) or 1
    return len(layout.part(op.part, op.layer).sources) if op.verb in ("fwd", "recompute") else 1


def reference(layout: Layout, microbatches: int) -> Outcome:
    """The tokens of plain training: each microbatch forward and backward through all layers, one after the other.

    Written from the model alone; uses neither `values.py` nor any plan. For hocket's own layers it does not use their
    descriptions either: see Note: [Two ways to the same tokens].
    """
    outcome = Outcome()
    for m in range(microbatches):
        model = _Model(layout, m, outcome)
        x = model.forward("embed", -1)
        for layer in range(len(layout.kinds)):
            x = model.layer_forward(layer, x)
        outcome.losses[m] = model.forward("head", -1, x)
        g = model.backward("head", -1)
        for layer in reversed(range(len(layout.kinds))):
            g = model.layer_backward(layer, g)
        model.backward("embed", -1, g)
    if layout.apart:
        ends = ("embed", -1), ("head", -1)
        outcome.exchanged = {mine: hash(str(outcome.reduced[other])) for mine, other in (ends, ends[::-1])}
    return outcome


class _Model:
    """One microbatch of the reference."""

    def __init__(self, layout: Layout, microbatch: int, outcome: Outcome) -> None:
        self.layout, self.m, self.outcome = layout, microbatch, outcome
        self.states: dict[tuple[str, int], Token] = {}

    def forward(self, part: str, layer: int, *inputs: Token) -> Token:
        weights = self._weights(part, layer)
        self.states[part, layer] = hash(("fwd", part, layer, self.m, weights, *inputs))
        return self.states[part, layer]

    def backward(self, part: str, layer: int, *inputs: Token) -> Token:
        """The input gradient; the weight gradient, where there is one, goes straight to the outcome."""
        unit = self._weights(part, layer)
        owner = (part, layer) if unit and layer < 0 and self.layout.apart else unit
        read = None if part == "embed" else unit  # the embedding's backward reads no weights
        token = hash(("bwd", part, layer, self.m, read, self.states[part, layer], *inputs))
        if owner is not None:
            gradients = self.outcome.reduced[owner]
            if not gradients or gradients[-1][0] != self.m:
                gradients.append((self.m, {}))
            gradients[-1][1][part] = hash(("wgrad", part, layer, self.m, None, token))
        return token

    def _weights(self, part: str, layer: int) -> Unit | None:
        unit = self.layout.unit(part)
        return (unit, layer) if unit else None

    def attention_forward(self, layer: int, x: Token) -> Token:
        """Attention; where ranks share sequences, of queries to the keys that were gathered meanwhile."""
        if self.layout.cp == 1:
            return self.forward("attn", layer, x)
        keys = self.forward("keys", layer, x)
        kv, queries = self.forward("kv", layer, keys), self.forward("queries", layer, keys)
        if not self.layout.heads:
            return self.forward("attn", layer, kv, queries, keys)
        found = self.forward("core", layer, kv, self.forward("spread", layer, queries))
        return self.forward("attn", layer, self.forward("results", layer, found), queries, keys)

    def attention_backward(self, layer: int, *grads: Token) -> Token:
        g = self.backward("attn", layer, *grads)
        if self.layout.cp == 1:
            return g
        if not self.layout.heads:
            queries = self.backward("queries", layer, g)
            return self.backward("keys", layer, self.backward("kv", layer, g), queries, g)
        core = self.backward("core", layer, self.backward("results", layer, g))
        queries = self.backward("queries", layer, self.backward("spread", layer, core), g)
        return self.backward("keys", layer, self.backward("kv", layer, core), queries, g)

    def layer_forward(self, layer: int, x: Token) -> Token:
        match self.layout.kinds[layer].partition("_")[0]:
            case "dense":
                return self.forward("mlp", layer, self.attention_forward(layer, x))
            case "moe":
                a = self.attention_forward(layer, x)
                rows = self.forward("dispatch", layer, a) if self._dispatches() else a
                rows = self.forward("experts", layer, rows)
                rows = rows if self.layout.ep == 1 else self.forward("combine", layer, rows)
                return self.forward("unpermute", layer, rows, a)
        return self.taped_forward(layer, x)

    def layer_backward(self, layer: int, g: Token) -> Token:
        match self.layout.kinds[layer].partition("_")[0]:
            case "dense":
                return self.attention_backward(layer, self.backward("mlp", layer, g))
            case "moe":
                side = self.backward("unpermute", layer, g)
                rows = side if self.layout.ep == 1 else self.backward("combine", layer, side)
                rows = self.backward("experts", layer, rows)
                rows = self.backward("dispatch", layer, rows) if self._dispatches() else rows
                return self.attention_backward(layer, rows, side)
        return self.taped_backward(layer, g)

    def _dispatches(self) -> bool:
        """Whether rows are sent to experts, or made apart so that they can be made again."""
        return self.layout.ep > 1 or any(name.partition(":")[0] == "dispatch" for name in self.layout.recompute)

    # A kind of layer that is not hocket's own, from its description. See Note: [Two ways to the same tokens].

    def taped_forward(self, layer: int, x: Token) -> Token:
        made = {INPUT: x}
        for part in self.layout.type_of(layer).parts:
            made[part.name] = self.forward(part.name, layer, *(made[source] for source in part.sources))
        return made[part.name]

    def taped_backward(self, layer: int, g: Token) -> Token:
        """Each part hands its gradient to whatever it read, which runs when all who read it have run."""
        parts = self.layout.type_of(layer).parts
        waiting: dict[str, list[Token]] = {part.name: [] for part in parts} | {INPUT: []}
        waiting[parts[-1].name].append(g)
        for part in reversed(parts):
            token = self.backward(part.name, layer, *reversed(waiting[part.name]))
            for source in part.sources:
                waiting[source].append(token)
        return waiting[INPUT][0]
