"""hocket's own layers as data: the parts of dense and mixture-of-experts layers, embedding and head.

Part names appear only here and in `hocket/model/`, whose layers have a method `forward_<part>` for each.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache, partial
from typing import get_args

from hocket.program.parts import INPUT, OUTPUT_GRADIENT, LayerKind, Mixer, Part, layer_kind

EMBED = Part(
    "embed", "i", unit="embed", backward_reads_weights=False, wgrad_kept=(OUTPUT_GRADIENT,), products=("embed",),
    size="embed",
)  # fmt: skip
"""Token ids to hidden states. If its stage has no layers, its output gradient is a received tensor."""
HEAD = Part("head", "h", unit="head", kept=(INPUT,), wgrad_kept=(INPUT,), products=("head",), size="head")
"""The last norm, logits and the loss. If its stage has no layers, its input is a received tensor."""

DENSE = layer_kind(
    "dense",
    (
        Part(
            "attn", "a", takes=("documents",), unit="dense", kept=(INPUT,), recomputable=True, products=("qkv", "proj"),
            size="attention",
        ),
        Part(
            "mlp", "e", ("attn",), unit="dense", wgrad_kept=(OUTPUT_GRADIENT,), recomputable=True, mark="M",
            products=("fc1", "fc2"), size="mlp",
        ),
    ),
)  # fmt: skip
"""`attn`: attention with its norm and residual; `mlp`: the gated MLP with its own."""


GATHERED = "kv"
"""Keys and values of context-parallel ranks: gathered for attention, or exchanged."""

DISPATCHED = "dispatch"
"""Experts' rows: made from tokens, and sent if experts are on other ranks."""


def _shared_sequences(kind: LayerKind, ranks: int, heads: bool) -> LayerKind:
    """The same kind with context parallelism: the first part is split where keys and values are gathered.

    Queries are computed while keys and values travel, and gradients of queries while theirs do. With `heads` queries
    travel too: `core` has all tokens of some heads, and its output returns to the ranks of the tokens.
    """
    attn = kind.entry
    away = partial(Part, lane="cp", purpose="cp", ranks=ranks)
    made = (
        Part(
            "keys", "k", outputs=("kv", "normed", "residual"), takes=("documents",),
            unit="dense", kept=(INPUT,), wgrad_kept=(f"bwd {GATHERED}",), products=("qkv",),
            size="keys",
        ),
        away(GATHERED, "g", ("keys.kv",), recomputable=not heads, size="kv"),
        Part(
            "queries", "q", ("keys.normed",), outputs=("queries", "gates"), takes=("documents",), unit="dense",
            shares_input=True, wgrad_kept=("bwd spread",) if heads else (), products=("qkv",), size="queries",
        ),
    )  # fmt: skip
    reads = ("kv", "queries.queries")
    if heads:
        made = (
            *made,
            away("spread", "s", ("queries.queries",), size="spread"),
            Part("core", "o", ("kv", "spread"), takes=("documents",), size="core"),
            away("results", "r", ("core",), size="spread"),
        )
        reads = ("results",)
    rest = replace(
        attn, reads=(*reads, "queries.gates", "keys.residual"),
        shares_input=True, kept=tuple(dict.fromkeys((INPUT, *attn.kept))),
        products=tuple(p for p in attn.products if p != "qkv"),
    )  # fmt: skip
    return LayerKind(kind.name, (*made, rest, *kind.parts[1:]))


@lru_cache
def moe(
    ep: int = 1, per_rank: bool = False, placed: bool = False, uncounted: bool = False, again: bool = False
) -> LayerKind:
    """A layer whose experts are spread over `ep` ranks.

    With `per_rank` a token is sent once per target rank, and received results are not kept for backward. With `placed`
    rows arrive grouped by expert, so experts make no copy. If `ep` is 1, experts also get each row's routing weight.
    With `uncounted` the host never waits for row counts. With `again` rows can be dispatched again for the backward of
    experts, which then do not keep them: `dispatch` makes the rows from tokens, which the router keeps. Rows sent once
    per rank are few, and are kept.
    """
    away = partial(Part, lane="a2a", purpose="a2a", ranks=ep)
    arrived = ("fwd dispatch",) if placed else ()
    made, weights = again and not (per_rank and ep > 1), "weights" if ep == 1 else "_"
    dispatch = away(
        DISPATCHED, "d", ("attn.tokens" if made else "attn.rows",), way="out", counted=not uncounted,
        recomputable=again, size="dispatch",
    )  # fmt: skip
    if ep == 1 and again:
        dispatch = Part(
            DISPATCHED, "d", ("attn.tokens", "attn.weights"), outputs=("rows", "weights"), takes=("routing",),
            recomputable=True, lends=True, size=dispatch.size,
        )  # fmt: skip
    here = tuple(f"{DISPATCHED if again else 'attn'}.{output}" for output in ("rows", "weights"))
    return layer_kind(
        "moe",
        (
            Part(
                "attn", "a", outputs=("tokens" if made else "rows", "residual", "shared", weights, "probs"),
                takes=("documents",), makes=("routing",), unit="dense",
                kept=(INPUT, OUTPUT_GRADIENT), wgrad_kept=(OUTPUT_GRADIENT,), recomputable=True,
                products=("qkv", "proj", "shared_fc1", "shared_fc2"),
                size="attention_and_routing",
            ),
            dispatch,
            Part(
                "experts", "e", here if ep == 1 else (DISPATCHED,), takes=("splits",),
                unit="experts", kept=arrived, wgrad_kept=(*arrived, "bwd combine") if placed else (),
                recomputable=True, size="experts",
            ),
            away("combine", "c", ("experts",), way="back", size="combine"),
            Part(
                "unpermute", "u", ("combine", "attn.residual", "attn.shared", "attn.probs"), takes=("routing",),
                kept=() if per_rank else ("fwd combine",), early=True, size="unpermute",
            ),
        ),
    )  # fmt: skip


STANDARD = ("dense", "moe")
"""Names of the kinds of layers described here. With the suffix `_window` or `_delta` a kind has attention over a
window, or a gated delta net in place of attention."""


_MIXING = ("attn", "core")
"""Parts whose cost depends on the mixer."""


@lru_cache
def _with(kind: LayerKind, mixer: Mixer) -> LayerKind:
    """The same kind of layer with another mixer."""
    parts = (replace(part, mixer=mixer) if part.name in _MIXING else part for part in kind.parts)
    return LayerKind(f"{kind.name}_{mixer}", tuple(parts))


@lru_cache
def standard_types(
    kinds: tuple[str, ...], cp: int = 1, heads: bool = False, **moved: bool | int
) -> tuple[LayerKind, ...]:
    """The descriptions of hocket's own kinds among `kinds`.

    With `cp` ranks, layers exchange `heads` or gather keys and values; `moved` is as for `moe`.
    """
    own = (DENSE, moe(**moved))  # type: ignore[arg-type]
    if cp > 1:
        own = tuple(_shared_sequences(kind, cp, heads) for kind in own)
    others = (_with(kind, mixer) for mixer in get_args(Mixer)[1:] for kind in own)
    return tuple(kind for kind in (*own, *others) if kind.name in kinds)
