"""Orders of parts inside one layer step, as data.

A template lists the ops of one merged layer step, forward layer `i` of one microbatch beside backward layer
`j` of another, in host order. F, B and W are forward, input gradient and weight gradient; letters are those of parts
(`program/parts.py`): a, d, e, c, u are attn, dispatch, experts (or a dense layer's mlp), combine, unpermute. The
literature's order:

    host      cB  aF  eB  dF  eW  dB  eF  cF  aB  uB' aW  uF
    compute       aF  eB      eW      eF      aB  uB' aW  uF        cB runs beside aF, dF beside eB and eW,
    a2a       cB          dF      dB      cF                        dB beside eW and eF, cF beside aB and aW

Note: [uB' belongs to the next layer]
The backward of unpermute must run before the backward all-to-all of combine can start. Placed at the head of
its own layer step it would sit behind the previous step's weight gradient and uncover that all-to-all.
So `uB` in a template is the one of the *next* backward layer, right behind the gradient that it needs. `Part.early`
says of which parts that holds.

Note: [A long op is queued before the host waits]
dispatch forward stops the host until the routing counts have arrived. In every template the backward of
experts is issued before it, so that the GPU has work meanwhile.

Note: [Templates for other kinds of layers]
A template names parts by their letters, and a kind of layer takes from it the letters that it has: a dense layer has no
dispatch. Kinds with other letters get a template of their own from `woven`, or one that `plan.layer_order` spells out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise, zip_longest

from hocket.program.ops import Layout, Op, Verb
from hocket.program.parts import LayerKind, Part
from hocket.program.pipeline import Item, Step
from hocket.program.transformer import EMBED, HEAD, moe

Token = tuple[Verb, str]
"""(verb, letter of a part)."""

_VERBS: dict[str, Verb] = {"F": "fwd", "B": "bwd", "W": "wgrad"}
_LETTERS = {verb: letter for letter, verb in _VERBS.items()}


def template(text: str) -> tuple[Token, ...]:
    """Parse a template such as `cB aF eB dF eW dB eF cF aB uB aW uF`."""
    tokens: list[Token] = [(_VERBS[word[1]], word[0]) for word in text.split()]
    assert len(set(tokens)) == len(tokens), f"a template has each op once, got {text!r}"
    return tuple(tokens)


def spelt(tokens: Iterable[Token]) -> str:
    """The text of a template: what `template` parses."""
    return " ".join(letter + _LETTERS[verb] for verb, letter in tokens)


MERGED: dict[str, tuple[Token, ...]] = {
    "literature": template("cB aF eB dF eW dB eF cF aB uB aW uF"),
    "early_release": template("cB aF eB dF eW dB aB uB eF cF aW uF"),
    "wgrad_last": template("cB aF eB dF dB eF cF aB uB eW aW uF"),
}
"""Orders of a merged layer step.

`literature` is the order that published systems use. `early_release` runs the attention backward earlier, so
that its activations are freed sooner. `wgrad_last` moves the experts' weight gradient behind the attention
backward, under combine: the best order when all-to-alls take longer than attention.
"""

Half = tuple[int, Token]
"""A token of one half of a step of two forwards or two backwards: 0 for the earlier microbatch, 1 for the other."""


def pair_template(text: str) -> tuple[Half, ...]:
    """Parse a template of two items of one kind, such as `aF1 uF2 aF2 dF1 eF1 dF2 cF1 eF2 cF2 uF1`."""
    halves = tuple((int(word[2]) - 1, (_VERBS[word[1]], word[0])) for word in text.split())
    assert len(set(halves)) == len(halves), f"a template of a pair has each op once, got {text!r}"
    return halves


LATE: Half = (1, ("fwd", "u"))
"""What of `FORWARDS` belongs to the layer before."""

FORWARDS = pair_template("aF1 uF2 aF2 dF1 eF1 dF2 cF1 eF2 cF2 uF1")
"""Two forwards of one layer. `uF2` is the one of the layer *before*, since its combine runs under `uF1` and `aF1`:

    compute       aF1 uF2' aF2  eF1      eF2      uF1       dF1 runs beside uF2' and aF2, dF2 beside eF1,
    a2a               dF1       dF2      cF1      cF2       cF1 beside eF2, cF2 beside uF1 and the next aF1
"""

BACKWARDS = pair_template("cB1 cB2 eB1 dB1 eB2 dB2 eW1 aB1 uB1 eW2 aB2 uB2 aW1 aW2")
"""Two backwards of one layer. `uB1` and `uB2` are those of the layer that comes next, as everywhere:

    compute       eB1  eB2      eW1  aB1 uB1' eW2  aB2 uB2' aW1 aW2       cB1 runs beside eW2 and aB2, cB2 beside aW1,
    a2a           cB2  dB1      dB2           cB1'          cB2'          aW2 and eB1, dB1 beside eB2, dB2 beside aB1

Weight gradients of the earlier microbatch come first, so that they are added in ascending order.
"""

ALONE = template("aF dF eF cF uF cB eB eW dB aB uB aW")
"""A forward alone and a backward alone. The experts' weight gradient covers the backward dispatch."""


FULL = moe(ep=2)
"""The kind of layer that has all the letters of the templates above."""


def chains(kind: LayerKind) -> tuple[list[str], ...]:
    """What of one layer runs behind what, as words of a template."""
    forward = [f"{part.letter}F" for part in kind.parts]
    backward = [f"{part.letter}B" for part in reversed(kind.parts) if not part.early]
    early = [f"{part.letter}B" for part in kind.parts if part.early]  # of the layer that comes next
    return (forward, backward + early, *([f"{p.letter}B", f"{p.letter}W"] for p in reversed(kind.weighted)))


CHAINS = chains(FULL)


def merged_order(text: str, layout: Layout | None = None) -> tuple[Token, ...]:
    """The order of a merged layer step that `plan.layer_order` names or spells out, for the layers of a layout.

    A name stands for an order of hocket's own letters. Layers with others get theirs from `woven` instead. Raises
    ValueError for an order that cannot run.
    """
    largest = FULL if layout is None else _largest(layout)
    text = "literature" if text == "auto" else text
    if text in MERGED:
        return MERGED[text] if largest is FULL else woven(largest)
    if problem := order_problem(text, largest):
        raise ValueError(f"plan.layer_order={text!r}: {problem}")
    return template(text)


def order_problem(text: str, kind: LayerKind = FULL) -> str:
    """Why `text` names and spells out no order of a merged layer step that can run; empty if it does."""
    words = text.split()
    place = {word: position for position, word in enumerate(words)}
    if text in MERGED or text == "auto":
        return ""
    order = chains(kind)
    every = {word for chain in order for word in chain}
    if len(words) != len(every) or set(place) != every:
        return f"neither one of {', '.join(MERGED)}, nor all {_count(len(every))} ops of a merged layer step"
    for chain in order:
        for before, behind in pairwise(chain):
            if place[before] > place[behind]:
                return f"{behind} needs {before}, which comes later"
    moves = {part.letter for part in kind.parts if part.communicates}
    for part in (part for part in kind.parts if part.counted):
        first, stop = f"{kind.by_name[part.sources[0]].letter}F", f"{part.letter}F"
        if all(word[0] in moves for word in words[place[first] + 1 : place[stop]]):
            return f"no compute stands between {first} and {stop}: a GPU would rest while the host waits at {stop}"
    return ""


def _count(number: int) -> str:
    return {12: "twelve"}.get(number, str(number))


def pairs_problem(layout: Layout) -> str:
    """Why steps of two forwards or two backwards cannot be had for a layout; empty if they can."""
    if _largest(layout) is FULL:
        return ""
    names = " and ".join(kind.name for kind in layout.layer_types)
    return f"the orders of pairs know parts a d e c u in the roles of hocket's own layers, and {names} has others"


def _largest(layout: Layout) -> LayerKind:
    """The kind of a layout whose orders serve all others; hocket's own full one if its orders will do.

    Raises ValueError if no kind's will.
    """
    for kind in (FULL, *layout.layer_types):
        if all(_serves(kind, other) for other in layout.layer_types):
            return kind
    every = {part.letter for kind in layout.layer_types for part in kind.parts}
    names = " and ".join(kind.name for kind in layout.layer_types)
    raise ValueError(
        f"no kind of layer has all the letters of {names} in their order: {' '.join(sorted(every))}; give parts of one "
        "role (in one place, early or not, with weights or without) one letter, so that one template orders them all"
    )


def _serves(kind: LayerKind, other: LayerKind) -> bool:
    """Whether an order for one kind holds all ops of another, each behind what it reads."""
    roles = {part.letter: part for part in kind.parts}
    letters = [part.letter for part in other.parts]
    return [letter for letter in roles if letter in letters] == letters and all(
        part.early == roles[part.letter].early and (part.unit is None or roles[part.letter].unit is not None)
        for part in other.parts
    )


def woven(kind: LayerKind) -> tuple[Token, ...]:
    """An order of a merged layer step for any kind of layer: a transfer of one half runs beside compute of the other.

    Both halves are cut behind their transfers. Then a stretch of compute of the forward, one of the backward, the
    transfers behind them and weight gradients alternate.
    """
    forward, backward = _stretches(kind.parts), _stretches(tuple(reversed(kind.parts)))
    first: list[Part] = []
    order: list[Token] = []
    if not backward[0][0] or all(part.early for part in backward[0][0]):
        first = backward.pop(0)[1]

    def add(verb: Verb, parts: Iterable[Part]) -> None:
        order.extend((verb, part.letter) for part in parts)

    add("bwd", first)
    for (f, f_moves), (b, b_moves) in zip_longest(forward, backward, fillvalue=([], [])):
        add("fwd", f)
        add("bwd", (part for part in b if not part.early))
        if kind.entry in b and kind.exit.early:
            add("bwd", [kind.exit])
        add("fwd", f_moves)
        add("wgrad", (part for part in b if part.unit is not None))
        add("bwd", b_moves)
    if kind.exit.unit is not None and kind.exit.early:
        add("wgrad", [kind.exit])
    return tuple(order)


def _stretches(parts: tuple[Part, ...]) -> list[tuple[list[Part], list[Part]]]:
    """Compute, and the transfers behind it, again and again."""
    found: list[tuple[list[Part], list[Part]]] = [([], [])]
    for part in parts:
        if not part.communicates and found[-1][1]:
            found.append(([], []))
        found[-1][part.communicates].append(part)
    return found


def alone_order(layout: Layout) -> tuple[Token, ...]:
    """The order of a forward alone and of a backward alone."""
    kind = _largest(layout)
    if kind is FULL:
        return ALONE
    backward = [p for p in reversed(kind.parts) if not p.early] + [p for p in kind.parts if p.early]
    order: list[Token] = [("fwd", part.letter) for part in kind.parts]
    order.extend(("bwd", part.letter) for part in backward)
    late = [part for part in kind.weighted if part is not kind.entry]
    place = {token: n for n, token in enumerate(order)}
    for part in sorted(late, key=lambda part: -place["bwd", part.letter]):
        order.insert(place["bwd", part.letter] + 1, ("wgrad", part.letter))
    if kind.entry.unit is not None:
        order.append(("wgrad", kind.entry.letter))
    return tuple(order)


def at_once(tokens: tuple[Token, ...]) -> tuple[Token, ...]:
    """The same order with each weight gradient right behind its input gradient: nothing is deferred."""
    return tuple(token for _, token in pair_at_once(tuple((0, token) for token in tokens)))


def pair_at_once(halves: tuple[Half, ...]) -> tuple[Half, ...]:
    """The same for a template of two items."""
    late = {(half, letter) for half, (verb, letter) in halves if verb == "wgrad"}
    order: list[Half] = []
    for half, (verb, letter) in halves:
        if verb != "wgrad":
            order.append((half, (verb, letter)))
        if verb == "bwd" and (half, letter) in late:
            order.append((half, ("wgrad", letter)))
    return tuple(order)


def part_of(token: Token, layout: Layout, layer: int) -> Iterator[tuple[Verb, Part]]:
    """What a template's token means for one layer: nothing for a part, or a weight gradient, that it does not have."""
    verb, letter = token
    part = layout.type_of(layer).with_letter(letter)
    if part is not None and (verb != "wgrad" or part.unit is not None):
        yield verb, part


# ---------------------------------------------------------------------------------------------------------------- pairs
#
# The ops of a step with two items of one kind: two forwards or two backwards, layer by layer.
#
# Both are of one chunk, so they run through the same layers, and one gather serves both. The order inside a layer is a
# template of those above; when such steps stand in an order is in `pipeline.py`, Note: [Pairs at the ends].
#
# Note: [Two of what is big are kept apart]
# The gradients of head and embedding have one slot each. Between the two weight gradients that write it stands other
# compute, under which the first one is reduced: the other half's backward of the head, or what is left of the last
# layer.


def op_of(verb: Verb, part: Part, item: Item, layer: int = -1) -> Op:
    """A part of one item's forward or backward."""
    return Op(verb, part.name, item[0], item[1], layer, part.lane)


def ops_of(token: Token, item: Item, layer: int, layout: Layout) -> list[Op]:
    """What a template's token means for one layer of an item; nothing for a part that the layer does not have.

    A recomputation stands right ahead of its backward. It waits for no gradient, so it runs while one is on its way. If
    it communicates it stands ahead of the layer's backward, which it runs beside; if it computes what a reader does not
    keep, ahead of that one's. A weight gradient that cannot wait stands right behind it.
    """
    ops: list[Op] = []
    for verb, part in part_of(token, layout, layer):
        if verb == "wgrad" and not part.deferrable:
            continue
        kind = layout.type_of(layer)
        again = [p for p in kind.parts if p.communicates] if verb == "bwd" and part is kind.exit else []
        if verb == "bwd" and not part.communicates:
            again += [p for p in kind.parts if p.lends and not p.communicates and p.name in part.sources]
            again += [] if part.lends else [part]
        ops.extend(op_of("recompute", p, item, layer) for p in again if layout.recomputes(p.name, layer))
        ops.append(op_of(verb, part, item, layer))
        if verb == "bwd" and part.unit is not None and not part.deferrable:
            ops.append(op_of("wgrad", part, item, layer))
    return ops


def is_early(token: Token, layout: Layout) -> bool:
    """Whether a token is a backward that runs in the layer step before: see Note: [uB' belongs to the next layer]."""
    there = [part for kind in layout.layer_types if (part := kind.with_letter(token[1]))]
    return token[0] == "bwd" and (any(part.early for part in there) if there else token[1] == FULL.exit.letter)


def early_ops(item: Item, layer: int, layout: Layout) -> list[Op]:
    """The backward of a layer that runs in the step before, or at the start."""
    last = layout.type_of(layer).exit
    return ops_of(("bwd", last.letter), item, layer, layout) if last.early else []


def expand_pair(step: Step, layout: Layout, rank: int, defer: bool) -> list[Op]:
    """The parts of a step of two forwards or two backwards in host order. `defer` leaves weight gradients where the
    template has them; else each stands right behind its input gradient.
    """
    if step.forwards:
        return _forwards(step.forwards, layout, rank)
    return _backwards(step.backwards, layout, rank, BACKWARDS if defer else pair_at_once(BACKWARDS))


def _forwards(items: tuple[Item, ...], layout: Layout, rank: int) -> list[Op]:
    """Embeddings, layers, heads. The first half's head covers the second half's last combine."""
    chunk = items[0][1]
    layers = layout.layers(rank, chunk)
    ops = [op_of("fwd", EMBED, item) for item in items if layout.is_first(rank, chunk)]
    for layer in layers:
        for half, token in FORWARDS:
            where = layer - 1 if (half, token) == LATE else layer
            if where in layers:
                ops += ops_of(token, items[half], where, layout)
    heads = [[op_of("fwd", HEAD, item)] if layout.is_last(rank, chunk) else [] for item in items]
    late = ops_of(LATE[1], items[1], layers[-1], layout) if layers else []
    return [*ops, *heads[0], *late, *heads[1]]


def _backwards(items: tuple[Item, ...], layout: Layout, rank: int, order: tuple[Half, ...]) -> list[Op]:
    """Heads, layers, embeddings. See Note: [Two of what is big are kept apart]."""
    chunk = items[0][1]
    layers = layout.layers(rank, chunk)[::-1]
    ops: list[Op] = []
    for item in items:
        head = layout.is_last(rank, chunk)
        ops += [op_of("bwd", HEAD, item)] if head else []
        ops += early_ops(item, layers[0], layout) if layers else []
        ops += [op_of("wgrad", HEAD, item)] if head else []
    if not layers and layout.is_first(rank, chunk):
        ops += _embedding(items[0])
    for layer, after in pairwise([*layers, None]):
        assert layer is not None
        for half, token in order:
            if not is_early(token, layout):
                ops += ops_of(token, items[half], layer, layout)
            elif after is not None:
                ops += ops_of(token, items[half], after, layout)
            elif layout.is_first(rank, chunk) and half == 0:
                ops += _embedding(items[0])
    return [*ops, *_embedding(items[1])] if layout.is_first(rank, chunk) else ops


def _embedding(item: Item) -> list[Op]:
    return [op_of("bwd", EMBED, item), op_of("wgrad", EMBED, item)]
