"""Packed documents: which token belongs to which document, and attention that stays inside each document.

Note: [Masked targets and padding]
Many trainers use one mask for targets and padding; here there are two. *A target* of `IGNORED` does not count in the
loss; its token is an ordinary token, to which later ones attend, so it goes through all layers. *Padding* has no
document (`PADDING`): no other token attends to it, and its targets must be ignored, so training does not depend on it.
Padding is routed to experts like any token, because buffers are sized for all rows of a microbatch. But it is not
counted, neither in the load-balancing loss nor in the loads that move the balance biases. Packed text has no padding.

Note: [The mean over the tokens of a step]
The loss of a step is the sum over its targets that count, of all microbatches and data-parallel ranks, divided by their
number. So a token's weight depends neither on its place nor on masks around it. A microbatch's loss is the mean over
its own n targets. Its weight is n * dp / N with N those of the step, since gradients are averaged over dp ranks, which
here include context-parallel ranks. The same holds for a router's losses that are means over tokens or over sequences:
they are sums over a microbatch, in which a token or sequence weighs dp / N (`weights_2`). Padding counts for neither.

Shapes: B sequences, S sequence length, T tokens (B * S), H query heads, K key and value heads, N width of a head.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, lru_cache
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

PADDING = -1
"""The document of tokens that belong to none."""


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copies a host tensor to a device without a host wait. A copy from memory that is not pinned would wait for all
    earlier GPU work.
    """
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.contiguous().pin_memory().to(device, non_blocking=True)  # expanded tensors cannot be pinned
    return tensor.to(device)


@dataclass(frozen=True, eq=False)
class Documents:
    """The documents of one microbatch. Made by `documents_of`."""

    ids_BS: Tensor
    """Number of every token's document; adjacent tokens of a sequence with the same number share a document."""
    position_T: Tensor
    """Position of every token in its document, int64."""
    ends: Tensor
    """Starts and ends of all documents in the concatenated sequences: int32, from 0 to T."""
    longest: int
    """Tokens of the longest document."""
    bounds: tuple[int, ...]
    """The values of `ends`, on the host."""
    real_T: Tensor | None = None
    """Mask of tokens that are not padding; None if all are."""
    weights_2: Tensor | None = None
    """Weights of a token and of a sequence in means over a step: see Note: [The mean over the tokens of a step]. fp32.
    None before an engine has counted the step's; without padding all are equal."""

    def to(self, device: torch.device) -> Documents:
        """A copy on a device."""
        real_T = None if self.real_T is None else to_device(self.real_T, device)
        moved = {name: to_device(getattr(self, name), device) for name in ("ids_BS", "position_T", "ends")}
        return replace(self, **moved, real_T=real_T)

    @property
    def count(self) -> int:
        """Number of documents."""
        return len(self.ends) - 1

    @property
    def batch(self) -> int:
        """B."""
        return self.ids_BS.shape[0]

    @property
    def length(self) -> int:
        """S."""
        return self.ids_BS.shape[1]

    @property
    def key_ends(self) -> Tensor:
        """The same as `ends`: keys are those of the query tokens, unlike in `Span`."""
        return self.ends

    @property
    def key_longest(self) -> int:
        """Keys of the longest document."""
        return self.longest

    def with_capacity(self, count: int, padded: bool) -> Documents:
        """A copy with fixed shapes: `count` documents, of which the last are empty and any may be as long as a
        sequence. With `padded` it has a padding mask.
        """
        ends = F.pad(self.ends, (0, count - self.count), value=self.ids_BS.numel())
        real_T = torch.ones_like(self.position_T, dtype=torch.bool) if self.real_T is None else self.real_T.clone()
        longest = self.ids_BS.shape[1]
        kept = replace(self, ids_BS=self.ids_BS.clone(), position_T=self.position_T.clone(), ends=ends, longest=longest)
        weights_2 = None if self.weights_2 is None else self.weights_2.clone()
        return replace(kept, real_T=real_T if padded else None, weights_2=weights_2)

    def copy_from(self, other: Documents) -> None:
        """Copy the values of another microbatch into these tensors, which `with_capacity` has made on a device."""
        given = other.with_capacity(self.count, self.real_T is not None)
        for name in ("ids_BS", "position_T", "ends", "real_T", "weights_2"):
            mine, theirs = getattr(self, name), getattr(given, name)
            if mine is not None:
                mine.copy_(theirs)

    @cached_property
    def mask_B1SS(self) -> Tensor:
        """Which tokens attend to which: to earlier ones of the same document, and to themselves."""
        batch, seq = self.ids_BS.shape
        index = torch.arange(len(self.ends) - 1, device=self.ends.device)
        document_BS = index.repeat_interleave(self.ends.diff(), output_size=batch * seq).view(batch, seq)
        return (document_BS.unsqueeze(1) == document_BS.unsqueeze(2)).tril().unsqueeze(1)

    def within(self, window: int) -> Tensor:
        """`mask_B1SS`, limited to a query's last `window` tokens, itself included; 0: no limit."""
        return self.mask_B1SS.triu(1 - window) if window else self.mask_B1SS


@dataclass(frozen=True, eq=False)
class Span:
    """A chunk of a rank's tokens as queries, and the stretch of keys that they attend to, both by document.

    Attention uses it like `Documents`, where queries and keys are of the same tokens.
    """

    queries: range
    """Indices among the rank's tokens."""
    keys: range
    """Indices among the tokens of all ranks, in the order of sequences. The last key is that of the last query."""
    ends: Tensor
    """Starts and ends of documents among the queries: int32, from 0."""
    key_ends: Tensor
    """The same among the keys."""
    longest: int
    """Queries of the longest document."""
    key_longest: int
    """Keys of the longest document."""

    batch = 1

    @cached_property
    def _documents(self) -> tuple[Tensor, Tensor]:
        """The document of every query, and of every key."""
        number = torch.arange(len(self.ends) - 1, device=self.ends.device)
        both = (self.ends, self.queries), (self.key_ends, self.keys)
        of_queries, of_keys = (number.repeat_interleave(e.diff(), output_size=len(r)) for e, r in both)
        return of_queries, of_keys

    def within(self, window: int) -> Tensor:
        """Which queries attend to which keys, [1, 1, queries, keys]: as `Documents.within`."""
        of_queries, of_keys = self._documents
        ahead = len(self.keys) - len(self.queries)
        mask = (of_queries.unsqueeze(1) == of_keys).tril(ahead)
        return (mask.triu(ahead + 1 - window) if window else mask).view(1, 1, *mask.shape)

    def to(self, device: torch.device) -> Span:
        return replace(self, ends=to_device(self.ends, device), key_ends=to_device(self.key_ends, device))


@dataclass(frozen=True, eq=False)
class Context:
    """One context-parallel rank's tokens of a microbatch; its layers get this in place of `Documents`."""

    length: int
    """S."""
    position_T: Tensor
    """Position of every token in its document, int64."""
    order_U: Tensor
    """For tokens in the order of sequences: the index of each one's gathered row; gathered rows are sorted by rank."""
    place_U: Tensor
    """For every gathered row, the index of its token in the order of sequences."""
    spans: tuple[Span, ...]
    """One for every chunk, in the order of the rank's tokens."""
    real_T: Tensor | None = None
    """Mask of tokens that are not padding; None if all are."""
    weights_2: Tensor | None = None
    """As in `Documents`."""
    documents: Documents | None = None
    """Documents of all ranks' tokens, in the order of sequences; None if each sequence is one document."""
    bounds: tuple[int, ...] = ()
    """Starts and ends of documents of all sequences, also if each sequence is one document."""

    @cached_property
    def of_sequences(self) -> bool:
        """Whether each document is a whole sequence."""
        return all(hi - lo == self.length for lo, hi in pairwise(self.bounds))


Seen = Documents | Span
"""Which keys queries attend to. The queries of a `Span` are its last keys."""
Packing = Documents | Context
"""A microbatch's documents, as layers get them."""


def documents_of(ids_BS: Tensor) -> Documents:
    """Makes `Documents` from each token's document number, on a CPU. `PADDING` marks tokens that belong to none."""
    assert ids_BS.device.type == "cpu", "documents are found on the host, which must know the longest"
    first_BS = torch.ones_like(ids_BS, dtype=torch.bool)
    first_BS[:, 1:] = ids_BS[:, 1:] != ids_BS[:, :-1]
    tokens = ids_BS.numel()
    starts = first_BS.flatten().nonzero().flatten()
    ends = torch.cat([starts, torch.tensor([tokens])])
    lengths = ends.diff()
    position_T = torch.arange(tokens) - starts.repeat_interleave(lengths)
    real_T = ids_BS.flatten() != PADDING
    longest, bounds = int(lengths.max()) if tokens else 0, tuple(ends.tolist())
    real = None if bool(real_T.all()) else real_T
    return Documents(ids_BS, position_T, ends.to(torch.int32), longest, bounds, real)


@lru_cache(maxsize=16)
def whole_sequences(batch: int, seq: int, device: torch.device) -> Documents:
    """Sequences of one document each."""
    # Cached, so the tensors must not become inference tensors, which autograd cannot save.
    with torch.inference_mode(False):
        return documents_of(torch.arange(batch).unsqueeze(1).expand(batch, seq)).to(device)


def attend(
    q_THN: Tensor, k_TKN: Tensor, v_TKN: Tensor, documents: Seen, window: int = 0, scale: float | None = None
) -> Tensor:
    """Causal attention inside each document, limited to the last `window` tokens; 0: no limit. [T, H, N].

    `scale` defaults to 1 / sqrt(N). On a CPU values may have another width than keys. For a `Span`, T is the number of
    its queries in `q`, and of its keys in `k` and `v`.
    """
    if has_flash(q_THN):
        return _flash(q_THN, k_TKN, v_TKN, documents, window, scale)
    q, k, v = (x.unflatten(0, (documents.batch, -1)).transpose(1, 2) for x in (q_THN, k_TKN, v_TKN))
    grouped, mask_B1SS = k.shape[1] != q.shape[1], documents.within(window)
    o_BHSN = F.scaled_dot_product_attention(q, k, v, attn_mask=mask_B1SS, enable_gqa=grouped, scale=scale)
    return o_BHSN.transpose(1, 2).flatten(0, 1)


def has_flash(q_THN: Tensor) -> bool:
    """Whether flash attention supports such queries."""
    return q_THN.is_cuda and q_THN.dtype in (torch.bfloat16, torch.float16)


def _flash(q_THN: Tensor, k_TKN: Tensor, v_TKN: Tensor, documents: Seen, window: int, scale: float | None) -> Tensor:
    """Flash attention over concatenated documents; it skips blocks that the mask would exclude."""
    from torch.nn.attention.varlen import varlen_attn

    options, repeats = _options(window, scale), q_THN.shape[1] // k_TKN.shape[1]
    if repeats > 1 and "enable_gqa" not in options:
        k_TKN, v_TKN = (x.repeat_interleave(repeats, 1) for x in (k_TKN, v_TKN))
    if scale is not None and "scale" not in options:  # only 1 / sqrt(N) is supported
        q_THN = q_THN * (scale * q_THN.shape[-1] ** 0.5)
    ends, longest = (documents.ends, documents.key_ends), (documents.longest, documents.key_longest)
    return varlen_attn(q_THN, k_TKN, v_TKN, *ends, *longest, **options)  # pyrefly: ignore[bad-return]


@cache
def _options(window: int, scale: float | None) -> dict[str, Any]:
    """The arguments of this torch's `varlen_attn` for causal attention of grouped queries, with a scale if possible."""
    from torch.nn.attention.varlen import varlen_attn

    known = inspect.signature(varlen_attn).parameters
    assert not window or "window_size" in known, "this torch's varlen_attn knows no windows"
    causal: dict[str, Any] = {"window_size": (window - 1, 0)} if "window_size" in known else {"is_causal": True}
    scaled = {"scale": scale} if scale is not None and "scale" in known else {}
    return causal | scaled | ({"enable_gqa": True} if "enable_gqa" in known else {})


# -- Inputs of the model -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Microbatch:
    """Token ids and the tokens to predict, both of shape [B, S].

    Targets that are `IGNORED` do not count. With `documents`, attention stays inside each document. With context
    parallelism the engine makes a rank's part, which has a `Context` in place of documents.
    """

    ids: Tensor
    targets: Tensor
    documents: Packing | None = field(default=None, kw_only=True)
