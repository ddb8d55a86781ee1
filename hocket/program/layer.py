"""Orders of parts inside one layer step, as data.

A template lists the ops of one merged layer step, forward layer `i` of one microbatch with backward layer `j` of
another, in host order. F, B and W are forward, input gradient and weight gradient; letters are those of parts
(`program/parts.py`): a, d, e, c, u are attn, dispatch, experts (or a dense layer's mlp), combine, unpermute. The
literature's order:

    host      cB  aF  eB  dF  eW  dB  eF  cF  aB  uB' aW  uF
    compute       aF  eB      eW      eF      aB  uB' aW  uF        cB runs beside aF, dF beside eB and eW,
    a2a       cB          dF      dB      cF                        dB beside eW and eF, cF beside aB and aW

Note: [uB' belongs to the next layer]
The backward of unpermute must run before the backward all-to-all of combine can start. At the head of its own layer
step it would run after the previous step's weight gradient and expose that all-to-all. So `uB` in a template is the one
of the *next* backward layer, right after the gradient that it needs. `Part.early` marks such parts.

Note: [A long op is queued before the host waits]
dispatch forward blocks the host until the routing counts have arrived. In every template the backward of experts is
issued before it, so that the GPU has work meanwhile.

Note: [Templates for other kinds of layers]
A template names parts by their letters, and a kind of layer uses the letters that it has: a dense layer has no
dispatch. Kinds with other letters get a template from `interleaved`, or from the text of `plan.layer_order`.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise, zip_longest

from hocket.program.ops import Layout, Verb
from hocket.program.parts import LayerKind, Part
from hocket.program.transformer import moe

Token = tuple[Verb, str]
"""(verb, letter of a part)."""

_VERBS: dict[str, Verb] = {"F": "fwd", "B": "bwd", "W": "wgrad"}


def template(text: str) -> tuple[Token, ...]:
    """Parse a template such as `cB aF eB dF eW dB eF cF aB uB aW uF`."""
    tokens: list[Token] = [(_VERBS[word[1]], word[0]) for word in text.split()]
    assert len(set(tokens)) == len(tokens), f"a template has each op once, got {text!r}"
    return tuple(tokens)


MERGED: dict[str, tuple[Token, ...]] = {
    "literature": template("cB aF eB dF eW dB eF cF aB uB aW uF"),
    "early_release": template("cB aF eB dF eW dB aB uB eF cF aW uF"),
    "wgrad_last": template("cB aF eB dF dB eF cF aB uB eW aW uF"),
}
"""Orders of a merged layer step.

`literature` is the order that published systems use. `early_release` runs the attention backward earlier, so
that its activations are freed sooner. `wgrad_last` moves the experts' weight gradient after the attention
backward, under combine: the best order when all-to-alls take longer than attention.
"""

Half = tuple[int, Token]
"""A token of a template of two forwards or two backwards: 0 for the earlier microbatch, 1 for the other."""


def pair_template(text: str) -> tuple[Half, ...]:
    """Parse a template of two items of one kind, such as `aF1 uF2 aF2 dF1 eF1 dF2 cF1 eF2 cF2 uF1`."""
    halves = tuple((int(word[2]) - 1, (_VERBS[word[1]], word[0])) for word in text.split())
    assert len(set(halves)) == len(halves), f"a template of a pair has each op once, got {text!r}"
    return halves


LATE: Half = (1, ("fwd", "u"))
"""The token of `FORWARDS` that belongs to the layer before."""

FORWARDS = pair_template("aF1 uF2 aF2 dF1 eF1 dF2 cF1 eF2 cF2 uF1")
"""Two forwards of one layer. `uF2` is the one of the layer *before*, since its combine runs under `uF1` and `aF1`:

    compute       aF1 uF2' aF2  eF1      eF2      uF1       dF1 runs beside uF2' and aF2, dF2 beside eF1,
    a2a               dF1       dF2      cF1      cF2       cF1 beside eF2, cF2 beside uF1 and the next aF1
"""

BACKWARDS = pair_template("cB1 cB2 eB1 dB1 eB2 dB2 eW1 aB1 uB1 eW2 aB2 uB2 aW1 aW2")
"""Two backwards of one layer. `uB1` and `uB2` are those of the next backward layer, as in all templates:

    compute       eB1  eB2      eW1  aB1 uB1' eW2  aB2 uB2' aW1 aW2       cB1 runs beside eW2 and aB2, cB2 beside aW1,
    a2a           cB2  dB1      dB2           cB1'          cB2'          aW2 and eB1, dB1 beside eB2, dB2 beside aB1

Weight gradients of the earlier microbatch come first, so that they are added in ascending order.
"""

ALONE = template("aF dF eF cF uF cB eB eW dB aB uB aW")
"""A forward alone and a backward alone. The experts' weight gradient covers the backward dispatch."""


FULL = moe(ep=2)
"""The kind of layer with all letters of the templates above."""


def chains(kind: LayerKind) -> tuple[list[str], ...]:
    """Chains of a layer's template words, each of which needs the one before it."""
    forward = [f"{part.letter}F" for part in kind.parts]
    backward = [f"{part.letter}B" for part in reversed(kind.parts) if not part.early]
    early = [f"{part.letter}B" for part in kind.parts if part.early]  # of the next backward layer
    return (forward, backward + early, *([f"{p.letter}B", f"{p.letter}W"] for p in reversed(kind.weighted)))


def merged_order(text: str, layout: Layout | None = None) -> tuple[Token, ...]:
    """The order of a merged layer step that `plan.layer_order` names or spells out, for the layers of a layout.

    A name selects an order of hocket's own letters; for layers with others it selects that of `interleaved`. Raises
    ValueError for an order that cannot run.
    """
    largest = FULL if layout is None else _largest(layout)
    if text in MERGED:
        return MERGED[text] if largest is FULL else interleaved(largest)
    if problem := order_problem(text, largest):
        raise ValueError(f"plan.layer_order={text!r}: {problem}")
    return template(text)


def order_problem(text: str, kind: LayerKind = FULL) -> str:
    """Why `text` is no order of a merged layer step that can run; empty if it is one."""
    words = text.split()
    place = {word: position for position, word in enumerate(words)}
    if text in MERGED:
        return ""
    order = chains(kind)
    every = {word for chain in order for word in chain}
    if len(words) != len(every) or set(place) != every:
        return f"neither one of {', '.join(MERGED)}, nor all {len(every)} ops of a merged layer step"
    for chain in order:
        for before, after in pairwise(chain):
            if place[before] > place[after]:
                return f"{after} needs {before}, which comes later"
    moves = {part.letter for part in kind.parts if part.communicates}
    for part in (part for part in kind.parts if part.counted):
        first, stop = f"{kind.by_name[part.sources[0]].letter}F", f"{part.letter}F"
        if all(word[0] in moves for word in words[place[first] + 1 : place[stop]]):
            return f"no compute stands between {first} and {stop}: a GPU would rest while the host waits at {stop}"
    return ""


def pairs_problem(layout: Layout) -> str:
    """Why a layout cannot have steps of two forwards or two backwards; empty if it can."""
    if _largest(layout) is FULL:
        return ""
    names = " and ".join(kind.name for kind in layout.layer_types)
    return f"the orders of pairs know parts a d e c u in the roles of hocket's own layers, and {names} has others"


def _largest(layout: Layout) -> LayerKind:
    """The kind of a layout whose orders fit all others; hocket's own full one if its orders fit.

    Raises ValueError if there is none.
    """
    for kind in (FULL, *layout.layer_types):
        if all(_fits(kind, other) for other in layout.layer_types):
            return kind
    every = {part.letter for kind in layout.layer_types for part in kind.parts}
    names = " and ".join(kind.name for kind in layout.layer_types)
    raise ValueError(
        f"no kind of layer has all the letters of {names} in their order: {' '.join(sorted(every))}; give parts of one "
        "role (in one place, early or not, with weights or without) one letter, so that one template orders them all"
    )


def _fits(kind: LayerKind, other: LayerKind) -> bool:
    """Whether an order for one kind has all ops of another, each after what it reads."""
    roles = {part.letter: part for part in kind.parts}
    letters = [part.letter for part in other.parts]
    return [letter for letter in roles if letter in letters] == letters and all(
        part.early == roles[part.letter].early and (part.unit is None or roles[part.letter].unit is not None)
        for part in other.parts
    )


def interleaved(kind: LayerKind) -> tuple[Token, ...]:
    """An order of a merged layer step for any kind of layer: a transfer of one half overlaps compute of the other.

    Both halves are split after their transfers. The order alternates: a stretch of the forward's compute, one of the
    backward's, the transfers after them, and weight gradients.
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
    """Splits parts into stretches of compute, each with the transfers after it."""
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


def undeferred(tokens: tuple[Token, ...]) -> tuple[Token, ...]:
    """The same order with each weight gradient right after its input gradient: nothing is deferred."""
    return tuple(token for _, token in pair_undeferred(tuple((0, token) for token in tokens)))


def pair_undeferred(halves: tuple[Half, ...]) -> tuple[Half, ...]:
    """The same for a template of two items."""
    late = {(half, letter) for half, (verb, letter) in halves if verb == "wgrad"}
    order: list[Half] = []
    for half, (verb, letter) in halves:
        if verb != "wgrad":
            order.append((half, (verb, letter)))
        if verb == "bwd" and (half, letter) in late:
            order.append((half, ("wgrad", letter)))
    return tuple(order)
