"""Checks, before anything starts, that the pieces of a layer compute what the layer computes.

Each kind of layer is compared once, on the CPU in fp32, with random parameters and a few tokens: output, and the
gradients of input and parameters. Families are recognised by structure, which can mislead: a forward that does one
thing more fails here, by name, not in a loss curve.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from hocket.adapters.layer import DenseParts, ExpertParts
from hocket.adapters.source import ELSE, WHOLE, AdaptedModel, refuse
from hocket.layers.dispatch import exchange_counts
from hocket.model.documents import Documents, whole_sequences
from hocket.model.parts import ONLY

TOLERANCE = 1e-4
"""Largest relative difference in norm: sums in another order differ by 1e-6, a forgotten scale by 1e-1."""
_LARGE = 1 << 27
"""Elements above which a parameter is one row, expanded to all rows."""
_SHAPE = (2, 6)
"""Sequences and their length."""
_WRONG = RuntimeError, TypeError, AttributeError, AssertionError, LookupError, ArithmeticError
"""Errors that a foreign forward may raise."""


def verify(source: AdaptedModel, shared: bool = False) -> int:
    """Compare every kind of layer. Returns the experts per token, 0 without experts. Raises ValueError.

    Parameters without gradients become the source's constants.

    With `shared`, attention is also compared in the pieces for shared sequences.
    """
    chosen = set[int]()
    with torch.random.fork_rng(devices=[]), torch.inference_mode(False):
        torch.manual_seed(0)
        values, unreached = lambda name: torch.rand(source.model.get_buffer(name).shape), set[int]()
        memo = source.trial(values, _random, "eager")
        x_BSD = torch.randn(*_SHAPE, source.hidden)
        ids_BS = torch.arange(_SHAPE[0] * _SHAPE[1]).view(_SHAPE) % source.vocab
        try:
            with torch.no_grad():
                source.settle(memo, x_BSD, ids_BS)
            with torch.enable_grad():
                ends = source.ends(dict(memo))
                contexts = ends.contexts(x_BSD)
                reached = _reached(ends.embed(ids_BS)) | _reached(ends.logits(x_BSD))
        except _WRONG as error:
            raise refuse(
                source.model, f"what is around its layers cannot be computed apart from them: {error}"
            ) from error
        if any(isinstance(x, Tensor) and x.requires_grad for x in tree_leaves(contexts)):
            raise refuse(
                source.model, "what its layers are told depends on parameters, and no gradient would come back to them"
            )
        seen: dict[Any, set[str]] = {}
        for number, layer in enumerate(source.layers):
            if (kind := _kind(layer)) not in seen:
                top_k, seen[kind] = _compare(source, number, memo, x_BSD, contexts[number], shared)
                chosen.add(top_k)
            unreached |= {id(param) for name, param in layer.named_parameters() if name in seen[kind]}
    around = {name: param for name, param in source.params.items() if name.startswith(("embed.", "head."))}
    unreached |= {id(param) for param in around.values() if id(memo[id(param)]) not in reached}
    source.make_constants([name for name, param in source.params.items() if id(param) in unreached])
    chosen -= {0}
    if len(chosen) > 1:
        raise refuse(source.model, f"layers choose different numbers of experts per token: {sorted(chosen)}")
    return chosen.pop() if chosen else 0


def _random(name: str, param: nn.Parameter) -> nn.Parameter:
    """A random value for a parameter."""
    shape, large = param.shape, param.numel() > _LARGE or name.startswith(("embed.", "head."))
    if param.dim() <= 1:
        return nn.Parameter(0.5 + torch.rand(shape))
    value = torch.randn(1, *shape[1:]) if large else torch.randn(shape)
    return nn.Parameter((value / shape[-1] ** 0.5).expand(shape))


def _kind(layer: nn.Module) -> Any:
    """A key that is equal for equal forwards: module classes, shapes, and settings other than the layer's number."""
    return tuple(
        (
            name,
            type(module),
            tuple((key, tuple(p.shape)) for key, p in module.named_parameters(recurse=False)),
            tuple(
                (key, value)
                for key, value in vars(module).items()
                if isinstance(value, bool | int | float | str) and not key.startswith("_") and "idx" not in key
            ),
        )
        for name, module in layer.named_modules()
    )


def _compare(
    source: AdaptedModel, number: int, memo: dict[int, Any], x_BSD: Tensor, context: Any, shared: bool
) -> tuple[int, set[str]]:
    """Returns the experts per token, and the parameters of the layer without gradients."""
    model, name = source.model, type(source.layers[number]).__name__
    whole: Any = copy.deepcopy(source.layers[number], dict(memo))
    params = {name: param for name, param in whole.named_parameters() if param.numel() <= _LARGE}
    reached = set[int]()
    try:
        wanted = _with_gradients(lambda x: _whole(whole, x, context), x_BSD, params, reached)
    except (*_WRONG, ValueError) as error:
        raise refuse(
            model,
            f"the forward of layer {number}, {name}, fails on {tuple(x_BSD.shape)}: {error}",
            "a forward that works",
        ) from error
    parts = source.parts(number, dict(memo), lambda *_: context, ONLY)
    try:
        top_k, found = _by_parts(parts, x_BSD, params)
    except (*_WRONG, ValueError) as error:
        raise refuse(model, f"the pieces of layer {number}, {name}, do not fit together: {error}") from error
    if differing := _differing(found, wanted):
        raise refuse(
            model,
            f"the pieces of layer {number}, {name}, do not compute what its forward does: the {differing} differs",
            f"write pieces that together are the forward, and keep nothing on the module; {ELSE}",
        )
    if source.experts_in[number] and not _in_parts(source, number, memo, parts.layer):
        raise refuse(
            model,
            f"the experts of layer {number}, {name}, do not compute the same where a rank has half of them",
            "parameters stacked by expert alone, and hocket.adapters.grouped_linear",
        )
    if shared:
        try:
            parts = source.parts(number, dict(memo), lambda *_: context, ONLY, WHOLE)
            _, found = _by_parts(parts, x_BSD, params, whole_sequences(*_SHAPE, x_BSD.device))
            differing = _differing(found, wanted)
            problem = f"the {differing} differs" if differing else ""
        except (*_WRONG, ValueError) as error:
            problem = str(error)
        if problem:
            raise refuse(model, f"attention of layer {number}, {name}, cannot be shared: {problem}", "mesh.cp = 1")
    unreached = {key for key in params if wanted[f"gradient of {key}"] is None}
    return top_k, unreached | {key for key, p in whole.named_parameters() if id(p) not in reached}


def _in_parts(source: AdaptedModel, number: int, memo: dict[int, Any], layer: Any) -> bool:
    """Whether half of the experts alone compute the same for their rows as all experts together."""
    half, prefix = source.experts // 2, f"layers.{number}.experts."
    if not half:
        return True
    few = {
        id(param): nn.Parameter(memo[id(param)][:half])
        for name, param in source.params.items()
        if name.startswith(prefix)
    }
    part: Any = source.copied(number, {**memo, **few})
    rows_RD = torch.randn(2 * half, source.hidden)
    ends = (2 * torch.arange(1, source.experts + 1)).clamp(max=2 * half).to(torch.int32)
    try:
        return _close(part.experts(rows_RD, ends[:half]), layer.experts(rows_RD, ends))
    except (*_WRONG, ValueError):
        return False


def _differing(found: Mapping[str, Tensor | None], wanted: Mapping[str, Tensor | None]) -> str:
    """The first value that differs; empty if none does."""
    return next((what for what, expected in wanted.items() if not _close(found.get(what), expected)), "")


def _whole(layer: Any, x_BSD: Tensor, context: Any) -> Tensor:
    """A layer's own forward."""
    result = layer(x_BSD, **context) if isinstance(context, dict) else layer(x_BSD, context)
    return result[0] if isinstance(result, tuple) else result


def _by_parts(
    parts: DenseParts, x_BSD: Tensor, params: dict[str, nn.Parameter], documents: Documents | None = None
) -> tuple[int, dict[str, Tensor | None]]:
    """Experts per token, and output and gradients of a layer's parts, called one after the other."""
    seen = [0]

    def forward(x: Tensor) -> Tensor:
        first = parts.forward_attn(x, documents)
        parts.forward_attn(x.detach().flip(0), documents)  # a plan runs other ops before the next piece
        if not isinstance(parts, ExpertParts):
            return parts.forward_mlp(first)
        rows, residual, other, _, probs, routing = first
        tokens, experts = x.shape[0] * x.shape[1], len(routing.counts_E)
        if routing.tokens != tokens or rows.dim() != 2 or residual.shape != x.shape:
            raise ValueError(f"route returns {routing.tokens} tokens' ids and keeps {tuple(residual.shape)}")
        if routing.chosen_TK is not None and int(routing.chosen_TK.max()) >= experts:
            raise ValueError(f"route chooses expert {int(routing.chosen_TK.max())} of {experts}")
        seen[0] = routing.top_k
        rows = parts.forward_experts(rows, None, exchange_counts(routing, None))
        before = [x.detach().requires_grad_() if isinstance(x, Tensor) else x for x in (rows, residual, other, probs)]
        merged = parts.forward_unpermute(*before, routing)  # pyrefly: ignore
        if any(g is not None for g in torch.autograd.grad(merged.sum(), [*params.values()], allow_unused=True)):
            raise ValueError("merge reads parameters, and a plan has no weights after the experts")
        return parts.forward_unpermute(rows, residual, other, probs, routing)

    found = _with_gradients(forward, x_BSD, params)
    return seen[0], found


def _reached(y: Tensor) -> set[int]:
    """The ids of the tensors that a backward of `y` reaches."""
    found, seen, nodes = set[int](), set[Any](), [y.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            found.add(id(getattr(node, "variable", None)))
            nodes += [each for each, _ in node.next_functions]
    return found


def _with_gradients(
    forward: Any, x_BSD: Tensor, params: dict[str, nn.Parameter], reached: set[int] | None = None
) -> dict[str, Tensor | None]:
    """Output and gradients of a function of hidden states. Ids of tensors that its backward reaches go to `reached`."""
    x_BSD = x_BSD.clone().requires_grad_()
    with torch.enable_grad():
        y_BSD = forward(x_BSD)
        if reached is not None:
            reached |= _reached(y_BSD)
        weight = torch.linspace(-1, 1, y_BSD.numel()).view(y_BSD.shape)
        grads = torch.autograd.grad((y_BSD * weight).sum(), [x_BSD, *params.values()], allow_unused=True)
    names = ["gradient of its input", *(f"gradient of {name}" for name in params)]
    return {"output": y_BSD.detach(), **dict(zip(names, grads, strict=True))}


def _close(found: Tensor | None, expected: Tensor | None) -> bool:
    if found is None or expected is None:
        return all(x is None or not x.any() for x in (found, expected))
    if found.shape != expected.shape:
        return False
    return bool((found - expected).norm() <= TOLERANCE * expected.norm())
