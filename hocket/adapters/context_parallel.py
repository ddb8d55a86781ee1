"""`context_parallel`: ranks share the sequences of an unmodified model of transformers.

Note: [The loss, and what its gradient is]
A rank sums the losses of its own tokens, times the number of ranks over the number of targets of the whole batch. The
mean of this over the ranks is the loss of the whole batch, and is returned. The gradient is the rank's own. So
gradients must be averaged over context-parallel ranks like over data-parallel ones, as `fully_shard` over both does.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from hocket.adapters.transformers import unshareable, windows_of
from hocket.model.context import Shares, context_of, in_order, in_ranks, shares
from hocket.model.documents import Context, attend, documents_of
from hocket.model.heads import attend_spans
from hocket.program.documents import of_windows
from hocket.runtime.transports import exchange_flat, gather_flat, reduce_scatter_flat, sum_flat

# -- context attention -------------------------------------------------------------------------------------------------
# Attention for models of transformers whose tokens are shared by context-parallel ranks.
#
# Models call attention by a name in transformers' `AttentionInterface`, and pass on all keywords of their own call. So
# the shared batch is passed as a keyword, also through recomputation, and no module is changed.
#
# Note: [Gathers under attention of other heads]
# Keys and values are gathered in `PARTS` parts of the heads. All gathers start before the first attention, so the later
# ones overlap it. Backward runs in reverse order: attention of the last part, the start of its sum over ranks,
# attention of the previous part. It waits for the sums at the very end, because `_Start` ran first.
#
# Shapes: T tokens of this rank, U tokens of all ranks, H query heads, K key and value heads, N width of one.

PARTS = 2
"""Parts of heads in which keys and values are gathered, if the heads divide evenly."""

KEYWORD = "hocket_shared"
"""Keyword by which layers pass a `SharedBatch` to attention."""

UNKNOWN = ("s_aux", "softcap", "position_bias", "cache", "head_mask", "attention_bias")
"""Arguments that change attention in ways that are not supported here."""


@dataclass(frozen=True, eq=False)
class SharedBatch:
    """A batch whose tokens ranks share, as attention needs it."""

    context: Context
    group: dist.ProcessGroup
    method: str


class _Exchanged:
    """State shared by the two ends of a gather."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.work: dist.Work | None = None
        self.grad: Tensor | None = None

    def wait(self) -> None:
        assert self.work is not None
        self.work.wait()
        self.work = None


class _Start(torch.autograd.Function):
    """Starts a gather of rows of all ranks; the values are valid after `_Finish`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchanged: _Exchanged) -> Tensor:
        ctx.exchanged, rows = exchanged, rows.contiguous()
        out = rows.new_empty(exchanged.group.size() * rows.shape[0], *rows.shape[1:])
        exchanged.work = gather_flat(out, rows, group=exchanged.group, async_op=True)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        ctx.exchanged.wait()
        return ctx.exchanged.grad, None


class _Finish(torch.autograd.Function):
    """Waits for the rows. In backward it starts the sum of their gradients, each part on its own rank."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchanged: _Exchanged) -> Tensor:
        ctx.exchanged = exchanged
        exchanged.wait()
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        group, grad = ctx.exchanged.group, grad.contiguous()
        out = grad.new_empty(grad.shape[0] // group.size(), *grad.shape[1:])
        ctx.exchanged.work = reduce_scatter_flat(out, grad, group=group, async_op=True)
        ctx.exchanged.grad = out
        return grad, None  # the result of `_Start` has the summed values


class _AllToAll(torch.autograd.Function):
    """Sends the r-th part of the first dimension to rank r."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group, rows = group, rows.contiguous()
        out = torch.empty_like(rows)
        exchange_flat(out, rows, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        return _AllToAll.apply(grad, ctx.group), None


def attend_shared(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Causal attention as transformers calls it: from [1, heads, T, N] to [1, T, H, N], for this rank's tokens.

    Raises: ValueError for unsupported arguments, such as dropout, masks and sinks.

    """
    shared = others.get(KEYWORD)
    name = type(module).__name__
    if not isinstance(shared, SharedBatch):
        raise ValueError(
            f"{name} computes attention outside of a call of the model given to hocket.context_parallel: "
            f"call that model, or undo it with .remove()"
        )
    causal, window = others.get("is_causal"), others.get("sliding_window") or 0
    causal = getattr(module, "is_causal", True) if causal is None else causal
    wrong = [key for key in UNKNOWN if others.get(key) is not None]
    wrong += ["dropout"] * bool(dropout) + ["attention_mask"] * (attention_mask is not None)
    if wrong or not causal:
        raise ValueError(
            f"{name} asks for {', '.join(wrong) or 'attention that is not causal'}: not with context_parallel"
        )
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return COMPUTED[shared.method](q, k, v, shared, window, scaling).unsqueeze(0), None


def _gathered(q: Tensor, k: Tensor, v: Tensor, shared: SharedBatch, window: int, scale: float | None) -> Tensor:
    """Attention to gathered keys and values of all ranks. See Note: [Gathers under attention of other heads]."""
    parts = PARTS if k.shape[1] % PARTS == 0 else 1
    widths = [k.shape[-1], v.shape[-1]]
    ends = [_Exchanged(shared.group) for _ in range(parts)]
    pairs = zip(k.chunk(parts, 1), v.chunk(parts, 1), ends, strict=True)
    rows = [_Start.apply(torch.cat([k_part, v_part], -1), end) for k_part, v_part, end in pairs]
    found = []
    for q_part, kv, end in zip(q.chunk(parts, 1), rows, ends, strict=True):
        kv_UKN = in_order(_Finish.apply(kv, end), shared.context)
        k_UKN, v_UKN = kv_UKN.split(widths, -1)
        found.append(attend_spans(q_part, k_UKN, v_UKN, shared.context, window, scale))
    return torch.cat(found, 1)


def _by_heads(q: Tensor, k: Tensor, v: Tensor, shared: SharedBatch, window: int, scale: float | None) -> Tensor:
    """Attention of a part of the heads, for all tokens."""
    ranks, context = shared.group.size(), shared.context
    assert context.documents is not None
    heads = [x.shape[1] // ranks for x in (q, k, v)]
    sent = torch.cat([x.unflatten(1, (ranks, -1)) for x in (q, k, v)], 2).transpose(0, 1)  # [ranks, T, heads, N]
    rows_UHN = in_order(_AllToAll.apply(sent, shared.group).flatten(0, 1), context)
    q_UHN, k_UKN, v_UKN = rows_UHN.split(heads, 1)
    out_UHN = attend(q_UHN, k_UKN, v_UKN, context.documents, window, scale)
    back = in_ranks(out_UHN, context).unflatten(0, (ranks, -1))
    return _AllToAll.apply(back, shared.group).transpose(0, 1).flatten(1, 2)


COMPUTED: dict[str, Callable[[Tensor, Tensor, Tensor, SharedBatch, int, float | None], Tensor]] = {
    "gather": _gathered,
    "heads": _by_heads,
}
"""Attention by method."""


# -- context parallel --------------------------------------------------------------------------------------------------

NAME = "hocket_context_parallel"
"""Name of the attention in transformers' `AttentionInterface`."""

TAKEN = ("input_ids", "labels", "position_ids", "num_items_in_batch")
COMPARED = ("input_ids", "position_ids", "labels")
"""Arguments that must be the same on all ranks."""
IGNORED = -100
"""The label of a token without loss, as in transformers."""


class ContextParallel:
    """A model whose calls share sequences over ranks. Made by `context_parallel`."""

    shares: Shares | None = None
    """The tokens of each rank in the last batch, and how balanced their attention was."""

    def __init__(self, model: nn.Module, group: dist.ProcessGroup, method: str) -> None:
        from transformers import AttentionInterface

        self.group, self.method = group, method
        self._model, self._signature = model, inspect.signature(type(model).forward)
        AttentionInterface.register(NAME, attend_shared)
        config: Any = model.config
        self._before = config._attn_implementation
        config._attn_implementation = NAME
        self._hooks = [
            model.register_forward_pre_hook(self._share, with_kwargs=True, prepend=True),
            model.register_forward_hook(self._mean),
        ]

    def remove(self) -> None:
        """Make the model compute whole sequences again."""
        for hook in self._hooks:
            hook.remove()
        config: Any = self._model.config
        config._attn_implementation = self._before

    def _share(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[()], dict[str, Any]]:
        """Replace the arguments of a whole batch by those for this rank's tokens."""
        error: Exception | None = None
        given: dict[str, Any] = {}
        try:
            given = self._given(model, args, kwargs)
        except (TypeError, ValueError) as raised:
            error = raised
        tensors = (x for x in chain(args, kwargs.values(), model.parameters()) if isinstance(x, Tensor))
        self._same_everywhere(next(tensors).device, error, *map(given.get, COMPARED))
        ids = given["input_ids"]
        batch, length = ids.shape
        positions = given.get("position_ids")
        if positions is None:
            positions = torch.arange(length, device=ids.device).unsqueeze(0)
        positions = positions.expand(batch, length)
        first = positions.diff(dim=1, prepend=positions[:, :1] - 1) != 1
        documents = documents_of(first.cumsum(1).cpu())
        attention = of_windows(windows_of(model.config), length)
        self.shares = shares(documents.bounds, length, self.group.size(), attention)
        chunks, rank = self.shares.chunks, self.group.rank()
        mine = torch.cat([torch.arange(c.start, c.stop) for c in chunks[rank]]).to(ids.device)
        documents = documents.to(ids.device)
        share = SharedBatch(context_of(documents, chunks, rank), self.group, self.method)
        inputs = {"input_ids": _of(ids, mine), "position_ids": _of(positions, mine), "use_cache": False, KEYWORD: share}
        if (labels := given.get("labels")) is not None:
            targets = F.pad(labels, (0, 1), value=IGNORED)[:, 1:]
            count = given.get("num_items_in_batch")
            count = (targets != IGNORED).sum() if count is None else count
            own = _of(targets, mine)
            inputs |= {"labels": own, "shift_labels": own, "num_items_in_batch": count / self.group.size()}
        return (), inputs

    def _given(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Arguments by name. Raises ValueError for those that are impossible with part of the tokens."""
        bound = dict(self._signature.bind(model, *args, **kwargs).arguments)
        del bound["self"]
        bound |= bound.pop("kwargs", {})
        for name, value in bound.items():
            default = value is None or value is (name == "return_dict")
            if name not in TAKEN and not default and not (name == "logits_to_keep" and value == 0):
                hint = ": leave it out, and mark documents by position_ids, padding by labels of -100"
                raise ValueError(f"{name} does not go with context_parallel" + hint * (name == "attention_mask"))
        ids = bound.get("input_ids")
        if not isinstance(ids, Tensor) or ids.ndim != 2:
            raise ValueError("context_parallel needs input_ids of the whole batch, [sequences, tokens]")
        for name in ("labels", "position_ids"):
            value = bound.get(name)
            shapes = (ids.shape, (1, ids.shape[1])) if name == "position_ids" else (ids.shape,)
            if value is not None and value.shape not in shapes:
                raise ValueError(f"{name} has shape {tuple(value.shape)}, input_ids {tuple(ids.shape)}")
        return bound

    def _same_everywhere(self, device: torch.device, error: Exception | None, *given: Tensor | None) -> None:
        """Raise on all ranks if one has an error (its own error there), or if their batches differ."""
        # A row count of -1 means not given, -2 an error.
        found = [torch.tensor([0, -2 if error else -1, 0], device=device) for _ in given]
        for i, x in enumerate(given):
            if x is not None and error is None:
                flat = x.flatten().long()
                places = torch.arange(1, len(flat) + 1, device=flat.device)
                # Products wrap around, as a checksum needs.
                total = ((flat + 7) * (places * 0x9E3779B97F4A7C1 + 1)).sum()
                found[i] = torch.stack([total, *flat.new_tensor(x.shape)]).to(device)
        mine = torch.cat(found)
        everyone = mine.new_empty(self.group.size(), len(mine))
        gather_flat(everyone.view(-1), mine, group=self.group)
        if error is not None:
            raise error
        failed = [rank for rank, one in enumerate(everyone[:, 1].tolist()) if one == -2]
        if failed:
            raise ValueError(
                f"ranks {failed} of those that share sequences were called with what does not go with "
                f"context_parallel, as their own messages say: give all ranks the same arguments"
            )
        if not bool((everyone == everyone[0]).all()):
            raise ValueError(
                "ranks that share sequences were given different batches: give all ranks of one context-parallel group "
                "the same input_ids, labels and position_ids, such as by sampling by the data-parallel rank alone"
            )

    def _mean(self, model: nn.Module, args: Any, output: Any) -> Any:
        if output.loss is not None:
            output.loss = _Mean.apply(output.loss, self.group)
        return output


class _Mean(torch.autograd.Function):
    """The mean over ranks of a value; its gradient is passed on unchanged."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, group: dist.ProcessGroup) -> Tensor:
        mean = loss.clone()
        sum_flat(mean, group=group)
        return mean / group.size()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        return grad, None


def context_parallel(
    model: nn.Module, group: DeviceMesh | dist.ProcessGroup, *, method: str = "gather"
) -> ContextParallel:
    """Have ranks share every sequence that a causal language model of transformers is called with.

    Call the model as before, with the same whole batch on all ranks of the group: `model(input_ids=..., labels=...)`,
    and `position_ids` [sequences, tokens] that restart where documents begin. All ranks compute equally many tokens,
    chosen to balance attention. The loss is that of the whole batch, `logits` are those of the rank's own tokens.
    Gradients must be averaged over these ranks like over data-parallel ones, which `fully_shard` over the ranks of both
    does, called before or after.

    Args:
        model: a causal language model of transformers of a type in `FAMILIES`.
        group: the ranks that share sequences, as a one-axis mesh or a process group.
        method: `gather` gathers keys and values, `heads` exchanges tokens for heads, which must divide evenly.

    Returns: a handle that undoes this, and describes the balance of the last batch.

    Raises: ValueError for a model or method whose result would differ from the whole model's.

    """
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(f"context_parallel needs a mesh of one axis, not {group.ndim}: give mesh['cp']")
        group = group.get_group()
    if method not in COMPUTED:
        raise ValueError(f"method={method!r} must be one of {', '.join(COMPUTED)}")
    config: Any = getattr(model, "config", None)
    if getattr(config, "_attn_implementation", None) == NAME:
        raise ValueError("context_parallel was called on this model before: call .remove() of what it returned first")
    if reason := unshareable(model):
        raise ValueError(f"{reason}: not with context_parallel")
    heads = {"num_attention_heads": config.num_attention_heads, "num_key_value_heads": config.num_key_value_heads}
    for name, count in heads.items():
        if method == "heads" and count % group.size():
            raise ValueError(f"method='heads' needs {name}={count} to divide by {group.size()} ranks: use 'gather'")
    return ContextParallel(model, group, method)


def _of(x: Tensor, tokens: Tensor) -> Tensor:
    """The rank's tokens of all sequences, concatenated: [1, T]."""
    return x.flatten().index_select(0, tokens).unsqueeze(0)
