"""Orders of parts inside one layer step, as data.

A template lists the ops of one merged layer step, forward layer `i` of one microbatch beside backward layer
`j` of another, in host order. F, B and W are forward, input gradient and weight gradient; a, d, e, c, u are
attn, dispatch, experts (or a dense layer's mlp), combine, unpermute. The literature's order:

    host      cB  aF  eB  dF  eW  dB  eF  cF  aB  uB' aW  uF
    compute       aF  eB      eW      eF      aB  uB' aW  uF        cB runs beside aF, dF beside eB and eW,
    a2a       cB          dF      dB      cF                        dB beside eW and eF, cF beside aB and aW

Note: [uB' belongs to the next layer]
The backward of unpermute must run before the backward all-to-all of combine can start. Placed at the head of
its own layer step it would sit behind the previous step's weight gradient and uncover that all-to-all.
So `uB` in a template is the one of the *next* backward layer, right behind the gradient that it needs.

Note: [A long op is queued before the host waits]
dispatch forward stops the host until the routing counts have arrived. In every template the backward of
experts is issued before it, so that the GPU has work meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from hocket.plan.ops import Layout, Part, Verb

Token = tuple[Verb, Part]
"""(verb, part); the part `experts` also stands for a dense layer's mlp."""

_VERBS: dict[str, Verb] = {"F": "fwd", "B": "bwd", "W": "wgrad"}
_PARTS: dict[str, Part] = {"a": "attn", "d": "dispatch", "e": "experts", "c": "combine", "u": "unpermute"}


def template(text: str) -> tuple[Token, ...]:
    """Parse a template such as `cB aF eB dF eW dB eF cF aB uB aW uF`."""
    tokens: list[Token] = [(_VERBS[word[1]], _PARTS[word[0]]) for word in text.split()]
    assert len(set(tokens)) == len(tokens) == 12, f"a template has 12 distinct ops, got {text!r}"
    return tuple(tokens)


def spelt(tokens: tuple[Token, ...]) -> str:
    """The text of a template: what `template` parses."""
    verbs, parts = ({name: letter for letter, name in table.items()} for table in (_VERBS, _PARTS))
    return " ".join(parts[part] + verbs[verb] for verb, part in tokens)


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
    halves = tuple((int(word[2]) - 1, (_VERBS[word[1]], _PARTS[word[0]])) for word in text.split())
    assert len(set(halves)) == len(halves) in (10, 14), f"a template of a pair has 10 or 14 distinct ops, got {text!r}"
    return halves


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


CHAINS = tuple(chain.split() for chain in ("aF dF eF cF uF", "cB eB dB aB uB", "eB eW", "aB aW"))
"""What of one layer runs behind what."""


def merged_order(text: str) -> tuple[Token, ...]:
    """The order of a merged layer step that `plan.layer_order` names or spells out."""
    assert not order_problem(text), f"{text!r}: {order_problem(text)}"
    return MERGED.get("literature" if text == "auto" else text) or template(text)


def order_problem(text: str) -> str:
    """Why `text` names and spells out no order of a merged layer step that can run; empty if it does."""
    words = text.split()
    place = {word: position for position, word in enumerate(words)}
    if text in MERGED or text == "auto":
        return ""
    if len(words) != 12 or set(place) != {word for chain in CHAINS for word in chain}:
        return f"neither one of {', '.join(MERGED)}, nor all twelve ops of a merged layer step"
    for chain in CHAINS:
        for before, behind in pairwise(chain):
            if place[before] > place[behind]:
                return f"{behind} needs {before}, which comes later"
    if all(word[0] in "dc" for word in words[place["aF"] + 1 : place["dF"]]):
        return "no compute stands between aF and dF: a GPU would have none while the host waits at dF"
    return ""


def without_wgrads(tokens: tuple[Token, ...]) -> tuple[Token, ...]:
    """The same order for a backward whose weight gradients have a step of their own."""
    return tuple((verb, part) for verb, part in tokens if verb != "wgrad")


def at_once(tokens: tuple[Token, ...]) -> tuple[Token, ...]:
    """The same order with each weight gradient right behind its input gradient: nothing is deferred."""
    return tuple(token for _, token in pair_at_once(tuple((0, token) for token in tokens)))


def pair_at_once(halves: tuple[Half, ...]) -> tuple[Half, ...]:
    """The same for a template of two items."""
    order: list[Half] = []
    for half, (verb, part) in halves:
        if verb != "wgrad":
            order.append((half, (verb, part)))
        if verb == "bwd" and part in ("attn", "experts"):
            order.append((half, ("wgrad", part)))
    return tuple(order)


def parts_of(token: Token, layout: Layout, layer: int) -> Iterator[tuple[Verb, Part]]:
    """What a template's token means for one layer: mlp for experts in a dense layer, nothing for absent parts."""
    verb, part = token
    if part == "experts" and layout.kinds[layer] == "dense":
        part = "mlp"
    if part in layout.forward_parts(layer):
        yield verb, part
