"""Documents that share a sequence: which token belongs to which, and attention that stays inside of each.

Note: [What is masked, and what padding is]
Two masks are often one, and are two here. *A target* of `IGNORED` counts for nothing in the loss; its token is a token
like others, which those after it attend to, so it goes through all layers. *Padding* has no document (`PADDING`): no
other token attends to it, and its targets have to be ignored, so nothing that is learnt depends on it. Padding is
routed to experts like any token, because the number of rows of a microbatch is what buffers are made for, but it is not
counted: neither in the load-balancing loss nor in the loads that move the balance biases. Packed text has none.

Note: [The mean over the tokens of a step]
The loss of a step is the sum over its targets that count, of all microbatches and data-parallel ranks, divided by their
number. So a token weighs the same wherever it stands, whatever is masked around it. A microbatch's loss is the mean
over its own n targets; its weight is n * dp / N with N those of the step, since gradients are averaged over dp ranks,
to which those that share sequences are added. The same holds for a router's losses that are means over tokens or over
sequences: they are sums over a microbatch's, of which each weighs dp / N (`weighs_2`). Padding counts for neither.

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
"""The document of a token that belongs to none."""


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on a device. The host does not wait: memory that is not pinned would make it wait for all
    that the GPU was given before.
    """
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.contiguous().pin_memory().to(device, non_blocking=True)  # expanded ones cannot be pinned
    return tensor.to(device)


@dataclass(frozen=True, eq=False)
class Documents:
    """The documents of one microbatch. Made by `documents_of`."""

    ids_BS: Tensor
    """Number of every token's document; neighbours of one sequence with the same number are in one document."""
    position_T: Tensor
    """Position of every token in its document, int64."""
    ends: Tensor
    """Where the documents of all sequences, one after the other, begin and end: int32, from 0 to T."""
    longest: int
    """Tokens of the longest one."""
    bounds: tuple[int, ...]
    """What `ends` are, known to the host."""
    real_T: Tensor | None = None
    """Which tokens are no padding; None if all."""
    weighs_2: Tensor | None = None
    """What a token, and a sequence, weigh in means over a step: see Note: [The mean over the tokens of a step]. fp32.
    None before an engine has counted the step's; if there is no padding, all weigh the same."""

    def to(self, device: torch.device) -> Documents:
        """The same on a device."""
        real_T = None if self.real_T is None else to_device(self.real_T, device)
        moved = {name: to_device(getattr(self, name), device) for name in ("ids_BS", "position_T", "ends")}
        return replace(self, **moved, real_T=real_T)

    @property
    def count(self) -> int:
        """How many there are."""
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
        """Keys are those of the same tokens; `Span` has more of them."""
        return self.ends

    @property
    def key_longest(self) -> int:
        """Keys of the longest one."""
        return self.longest

    def roomy(self, count: int, padded: bool) -> Documents:
        """A copy of the shapes that all have: so many documents, the last ones empty, none known to be shorter than a
        sequence; with `padded`, padding, or room for it.
        """
        ends = F.pad(self.ends, (0, count - self.count), value=self.ids_BS.numel())
        real_T = torch.ones_like(self.position_T, dtype=torch.bool) if self.real_T is None else self.real_T.clone()
        longest = self.ids_BS.shape[1]
        kept = replace(self, ids_BS=self.ids_BS.clone(), position_T=self.position_T.clone(), ends=ends, longest=longest)
        weighs_2 = None if self.weighs_2 is None else self.weighs_2.clone()
        return replace(kept, real_T=real_T if padded else None, weighs_2=weighs_2)

    def become(self, other: Documents) -> None:
        """Have the values of another microbatch's, on a device and after `roomy`."""
        given = other.roomy(self.count, self.real_T is not None)
        for name in ("ids_BS", "position_T", "ends", "real_T", "weighs_2"):
            mine, theirs = getattr(self, name), getattr(given, name)
            if mine is not None:
                mine.copy_(theirs)

    @cached_property
    def mask_B1SS(self) -> Tensor:
        """Who attends to whom: those before in the same document, and itself."""
        batch, seq = self.ids_BS.shape
        index = torch.arange(len(self.ends) - 1, device=self.ends.device)
        document_BS = index.repeat_interleave(self.ends.diff(), output_size=batch * seq).view(batch, seq)
        return (document_BS.unsqueeze(1) == document_BS.unsqueeze(2)).tril().unsqueeze(1)

    def within(self, window: int) -> Tensor:
        """`mask_B1SS`, of a query's last `window` tokens alone, itself included; with 0 of all."""
        return self.mask_B1SS.triu(1 - window) if window else self.mask_B1SS


@dataclass(frozen=True, eq=False)
class Span:
    """A chunk of a rank's tokens, and the stretch of keys that they attend to; in both, the documents that they are of.

    It is to attention what `Documents` are where queries and keys are of the same tokens.
    """

    queries: range
    """Among the tokens of the rank."""
    keys: range
    """Among the tokens of all ranks, in the order of sequences. The last one is that of the last query."""
    ends: Tensor
    """Where documents begin and end among the queries: int32, from 0."""
    key_ends: Tensor
    """The same among the keys."""
    longest: int
    """Queries of the longest one."""
    key_longest: int
    """Keys of the longest one."""

    batch = 1

    @cached_property
    def _documents(self) -> tuple[Tensor, Tensor]:
        """The number of every query's document, and of every key's."""
        number = torch.arange(len(self.ends) - 1, device=self.ends.device)
        both = (self.ends, self.queries), (self.key_ends, self.keys)
        of_queries, of_keys = (number.repeat_interleave(e.diff(), output_size=len(r)) for e, r in both)
        return of_queries, of_keys

    def within(self, window: int) -> Tensor:
        """Who attends to whom, [1, 1, queries, keys]: as `Documents.within`."""
        of_queries, of_keys = self._documents
        ahead = len(self.keys) - len(self.queries)
        mask = (of_queries.unsqueeze(1) == of_keys).tril(ahead)
        return (mask.triu(ahead + 1 - window) if window else mask).view(1, 1, *mask.shape)

    def to(self, device: torch.device) -> Span:
        return replace(self, ends=to_device(self.ends, device), key_ends=to_device(self.key_ends, device))


@dataclass(frozen=True, eq=False)
class Context:
    """One rank's tokens of a microbatch: what its layers are told in place of `Documents`."""

    length: int
    """S."""
    position_T: Tensor
    """Position of every token in its document, int64."""
    order_U: Tensor
    """In the order of sequences, where a token's row is among those gathered: rank after rank."""
    place_U: Tensor
    """Of every row gathered, the place of its token in the order of sequences."""
    spans: tuple[Span, ...]
    """One for every chunk, in the order of the rank's tokens."""
    real_T: Tensor | None = None
    """Which tokens are no padding; None if all."""
    weighs_2: Tensor | None = None
    """As of `Documents`."""
    documents: Documents | None = None
    """Those of all ranks' tokens, in the order of sequences; None if each sequence is one."""
    bounds: tuple[int, ...] = ()
    """Where documents of all sequences begin and end, sequences of one document too."""

    @cached_property
    def of_sequences(self) -> bool:
        """Whether each document is a whole sequence."""
        return all(hi - lo == self.length for lo, hi in pairwise(self.bounds))


Seen = Documents | Span
"""Which keys queries attend to. Those of a `Span` are the last of its keys."""
Told = Documents | Context
"""What layers are told of a microbatch's tokens."""


def documents_of(ids_BS: Tensor) -> Documents:
    """The documents that numbers of tokens' documents on a CPU mean. `PADDING` marks tokens that belong to none."""
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
    """Sequences that are one document each."""
    # They outlive the call, so their tensors must not become inference tensors, which autograd cannot save.
    with torch.inference_mode(False):
        return documents_of(torch.arange(batch).unsqueeze(1).expand(batch, seq)).to(device)


def attend(
    q_THN: Tensor, k_TKN: Tensor, v_TKN: Tensor, documents: Seen, window: int = 0, scale: float | None = None
) -> Tensor:
    """Causal attention inside of each document, to the last `window` tokens or with 0 to all before: [T, H, N].

    `scale` is 1 / sqrt(N) if it is not given. On a CPU values may be of another width than keys. Of a `Span`, T is the
    number of its queries in `q`, and of its keys in `k` and `v`.
    """
    if has_flash(q_THN):
        return _flash(q_THN, k_TKN, v_TKN, documents, window, scale)
    q, k, v = (x.unflatten(0, (documents.batch, -1)).transpose(1, 2) for x in (q_THN, k_TKN, v_TKN))
    grouped, mask_B1SS = k.shape[1] != q.shape[1], documents.within(window)
    o_BHSN = F.scaled_dot_product_attention(q, k, v, attn_mask=mask_B1SS, enable_gqa=grouped, scale=scale)
    return o_BHSN.transpose(1, 2).flatten(0, 1)


def has_flash(q_THN: Tensor) -> bool:
    """Whether flash attention takes such queries."""
    return q_THN.is_cuda and q_THN.dtype in (torch.bfloat16, torch.float16)


def _flash(q_THN: Tensor, k_TKN: Tensor, v_TKN: Tensor, documents: Seen, window: int, scale: float | None) -> Tensor:
    """Flash attention over documents one after the other: never computes blocks that the mask would throw away."""
    from torch.nn.attention.varlen import varlen_attn

    options, repeats = _options(window, scale), q_THN.shape[1] // k_TKN.shape[1]
    if repeats > 1 and "enable_gqa" not in options:
        k_TKN, v_TKN = (x.repeat_interleave(repeats, 1) for x in (k_TKN, v_TKN))
    if scale is not None and "scale" not in options:  # 1 / sqrt(N) alone
        q_THN = q_THN * (scale * q_THN.shape[-1] ** 0.5)
    ends, longest = (documents.ends, documents.key_ends), (documents.longest, documents.key_longest)
    return varlen_attn(q_THN, k_TKN, v_TKN, *ends, *longest, **options)  # pyrefly: ignore[bad-return]


@cache
def _options(window: int, scale: float | None) -> dict[str, Any]:
    """How this torch's `varlen_attn` is asked for causal attention of grouped queries, scaled if it can be."""
    from torch.nn.attention.varlen import varlen_attn

    known = inspect.signature(varlen_attn).parameters
    assert not window or "window_size" in known, "this torch's varlen_attn knows no windows"
    causal: dict[str, Any] = {"window_size": (window - 1, 0)} if "window_size" in known else {"is_causal": True}
    scaled = {"scale": scale} if scale is not None and "scale" in known else {}
    return causal | scaled | ({"enable_gqa": True} if "enable_gqa" in known else {})


# -- What a forward and a backward of the model are of -----------------------------------------------------------------


@dataclass(frozen=True)
class Microbatch:
    """Token ids and the tokens to predict, both of shape [B, S].

    Targets that are `IGNORED` count for nothing, and attention stays inside of `documents`, where they are given. Where
    ranks share sequences, an engine makes a rank's part of each, with a `Context` in place of documents.
    """

    ids: Tensor
    targets: Tensor
    documents: Told | None = field(default=None, kw_only=True)
