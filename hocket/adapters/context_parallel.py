"""`context_parallel`: ranks share the sequences of an unmodified model of transformers.

Note: [The loss, and what its gradient is]
A rank computes the sum of the losses of its own tokens. Times ranks over the number of targets of the whole batch, its
mean over the ranks is the loss of the whole batch. The value returned is that mean. The gradient is the rank's own, so
gradients are to be averaged over context-parallel ranks as over data-parallel ones, as `fully_shard` over both does.
"""

from __future__ import annotations

import inspect
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from hocket.adapters.context_attention import COMPUTED, KEYWORD, SharedBatch, attend_shared
from hocket.adapters.shareable import unshareable, windows_of
from hocket.model.chunks import Shares, shares
from hocket.model.context import context_of
from hocket.model.documents import documents_of
from hocket.program.documents import of_windows
from hocket.runtime.transports import gather_flat, sum_flat

NAME = "hocket_context_parallel"
"""Of the attention in transformers' `AttentionInterface`."""

TAKEN = ("input_ids", "labels", "position_ids", "num_items_in_batch")
COMPARED = ("input_ids", "position_ids", "labels")
"""What all ranks are to be given alike."""
IGNORED = -100
"""The label of a token that does not count, as in transformers."""


class ContextParallel:
    """A model whose calls share sequences over ranks. Made by `context_parallel`."""

    shares: Shares | None = None
    """Which tokens of the last batch each rank had, and how even their attention was."""

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
        """What the model is called with, of this rank's tokens, instead of a whole batch."""
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
        told = SharedBatch(documents, context_of(documents, chunks, rank), self.group, self.method)
        called = {"input_ids": _of(ids, mine), "position_ids": _of(positions, mine), "use_cache": False, KEYWORD: told}
        if (labels := given.get("labels")) is not None:
            targets = F.pad(labels, (0, 1), value=IGNORED)[:, 1:]
            count = given.get("num_items_in_batch")
            count = (targets != IGNORED).sum() if count is None else count
            own = _of(targets, mine)
            called |= {"labels": own, "shift_labels": own, "num_items_in_batch": count / self.group.size()}
        return (), called

    def _given(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Arguments by name. Raises ValueError for those that a part of the tokens cannot be called with."""
        bound = dict(self._signature.bind(model, *args, **kwargs).arguments)
        del bound["self"]
        bound |= bound.pop("kwargs", {})
        for name, value in bound.items():
            harmless = value is None or value is (name == "return_dict")
            if name not in TAKEN and not harmless and not (name == "logits_to_keep" and value == 0):
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
        """Raise on all ranks if one has an error, its own there, or if they were not given the same batch."""
        # What has -1 rows is not given, and -2 is an error.
        found = [torch.tensor([0, -2 if error else -1, 0], device=device) for _ in given]
        for i, x in enumerate(given):
            if x is not None and error is None:
                flat = x.flatten().long()
                places = torch.arange(1, len(flat) + 1, device=flat.device)
                # products wrap around, which is what a checksum wants
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
    """The mean over ranks of a value whose gradient is the rank's own."""

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
    and `position_ids` [sequences, tokens] that begin anew where documents do. Each rank computes as many of the tokens
    as the others, chosen so that attention takes all of them as long. The loss is that of the whole batch, `logits` are
    those of the rank's own tokens. Gradients are to be averaged over these ranks as over data-parallel ones, which
    `fully_shard` over the ranks of both does, called before or after.

    Args:
        model: a causal language model of transformers of a type in `FAMILIES`.
        group: the ranks that share sequences, as a mesh of one axis or a process group.
        method: `gather` gathers keys and values, `heads` exchanges tokens for heads, which must divide.

    Returns: a handle that undoes it, and tells of the last batch's balance.

    Raises: ValueError for a model or method that would compute something else than the whole model.

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
    """The rank's tokens of all sequences, as one: [1, T]."""
    return x.flatten().index_select(0, tokens).unsqueeze(0)
