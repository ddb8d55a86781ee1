"""`hocket.testing.check_layer`: a layer of one's own through the planned step, beside its forward."""

from __future__ import annotations

import copy
import multiprocessing
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn

from hocket.adapters.step import plan_model
from hocket.problems import stop_if
from hocket.runtime.world import join_world
from hocket.step import PlannedStep
from hocket.typed import is_a

_VOCAB = 32
_MICROBATCHES = 2
_SMALL = 0.01
"""Share of the whole gradient's norm below which a parameter's is measured by that share."""
_UNGUARDED = 77
"""Exit code of a rank whose import of the calling file comes to `check_layer` again."""


class Between(nn.Module):
    """Two copies of a layer between an embedding and a head."""

    def __init__(self, layer: nn.Module, hidden: int, context: Callable[[Tensor], Any] | None) -> None:
        super().__init__()
        self.embed = nn.Embedding(_VOCAB, hidden)
        self.layers = nn.ModuleList([layer, copy.deepcopy(layer)])
        self.head = nn.Linear(hidden, _VOCAB, bias=False)
        self._context = context

    def context(self, x_BSD: Tensor) -> Any:
        """What layers are told."""
        return None if self._context is None else self._context(x_BSD)

    def forward(self, ids_BS: Tensor) -> Tensor:
        """Logits, by the layers' own forward."""
        x_BSD = self.embed(ids_BS)
        context = self.context(x_BSD)
        for layer in self.layers:
            x_BSD = layer(x_BSD, context)
        return self.head(x_BSD)


def check_layer(
    layer: nn.Module,
    hidden: int,
    *,
    context: Callable[[Tensor], Any] | None = None,
    shape: tuple[int, int] = (2, 8),
    ranks: int = 2,
    tolerance: float = 1e-6,
) -> None:
    """Assert that a planned step over a layer computes what plain autograd computes over its `forward`, on CPUs.

    `layer` is a `DenseLayer` or `ExpertLayer` of hocket.adapters.layer that takes and returns [B, S, hidden] in fp32;
    `context` makes what it is told beside that, from hidden states; `shape` is (sequences, their length). Losses and
    gradients of two copies of the layer are compared: of a dense layer bit for bit, of one with experts, whose sums
    have another order, to a relative `tolerance`. A layer with experts also runs on so many `ranks` of gloo, in
    processes of their own, each with some of the experts; there `layer` and `context` must be picklable. These
    processes import the calling file again: in a script the call belongs under `if __name__ == "__main__":`.

    Raises AssertionError, naming what differs and how much, ValueError if the pieces do not fit together or an argument
    is of another type, and RuntimeError for a call that is not under `__main__`.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):  # a rank that imports the calling file
        sys.exit(_UNGUARDED)
    stop_if(
        [
            f"{name} = {value!r:.40}: not {what}; fix: {what}"
            for name, value, fits, what in (
                ("layer", layer, isinstance(layer, nn.Module), "a torch.nn.Module"),
                ("hidden", hidden, is_a(hidden, int) and hidden > 0, "a whole number from 1"),
                ("context", context, context is None or callable(context), "a function of hidden states"),
                ("shape", shape, is_a(shape, tuple[int, int]) and min(shape) > 0, "two whole numbers from 1"),
                ("ranks", ranks, is_a(ranks, int) and ranks > 0, "a whole number from 1"),
                ("tolerance", tolerance, is_a(tolerance, float) and 0 <= tolerance < 1, "a number from 0, below 1"),
            )
            if not fits
        ],
        "arguments",
    )
    if other := [name for name, p in layer.named_parameters() if p.is_meta or p.dtype is not torch.float32]:
        raise ValueError(f"layer = {type(layer).__name__}: {other[0]} is no fp32 tensor with data; fix: layer.float()")
    model = Between(layer, hidden, context).train()
    with_experts = hasattr(layer, "expert_weights")
    for count in (1, ranks) if with_experts and ranks > 1 else (1,):
        batches = _batches(shape, count)
        if count > 1 and (rest := len(next(layer.get_submodule(str(layer.expert_weights)).parameters())) % count):
            raise ValueError(f"ranks = {count}: {rest} experts are left over; fix: a divisor of the number of experts")
        if count == 1:
            found = gradients(_planned(model, shape, count), [ranks[0] for ranks in batches])
        else:
            found = _on_ranks(model, shape, batches)
        _compare(
            found, _plain(model, batches), tolerance if with_experts else 0.0, f"on {count} rank{'s'[: count - 1]}"
        )


Batch = tuple[Tensor, Tensor]
Found = tuple[list[float], dict[str, Tensor]]


def gradients(step: PlannedStep, microbatches: list[Batch]) -> Found:
    """Losses of this rank, and whole gradients where they are here; the weights are updated."""
    held: dict[str, Tensor] = {}
    finish = step.engine.optimizer.step

    def keep(*args: Any, **kwargs: Any) -> Tensor:
        for unit in step.engine.sharded.units.values():
            for piece in unit.pieces():
                theirs, shape = step.parameters[piece.name]
                whole = held.setdefault(theirs, torch.full((shape.numel(),), -torch.inf))
                whole[piece.lo : piece.hi] = piece.grad
        return finish(*args, **kwargs)

    step.engine.optimizer.step = keep  # type: ignore[method-assign]
    step((torch.cat([ids for ids, _ in microbatches]), torch.cat([targets for _, targets in microbatches])))
    shapes = dict(step.parameters.values())
    for name in sorted(shapes):
        whole = held.setdefault(name, torch.full((shapes[name].numel(),), -torch.inf))
        step.engine.groups.control.all_reduce(whole, "max").wait()
    losses = [loss.item() for loss in step.engine.executor.actions.losses]
    return losses, {name: whole.view(shapes[name]) for name, whole in held.items()}


def _planned(model: nn.Module, shape: tuple[int, int], ranks: int) -> PlannedStep:
    settings: Mapping[str, Any] = {
        "train.device": "cpu", "train.sequences": shape[0], "data.sequence_length": shape[1], "train.clip": 0.0,
        "train.microbatches": _MICROBATCHES, "mesh.dp": ranks, "mesh.ep": ranks, "precision.compute": "fp32",
        "overlap.ep.merge": "on" if ranks > 1 else "off",
    }  # fmt: skip
    return plan_model(model, settings)


def _batches(shape: tuple[int, int], ranks: int) -> list[list[Batch]]:
    """By microbatch and rank."""
    generator = torch.Generator().manual_seed(1)

    def batch() -> Batch:
        ids = torch.randint(_VOCAB, (shape[0], shape[1] + 1), generator=generator)
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    return [[batch() for _ in range(ranks)] for _ in range(_MICROBATCHES)]


def _plain(model: Between, batches: list[list[Batch]]) -> Found:
    """The same by plain autograd. Of each microbatch gradients are summed over ranks first, as reduces do."""
    params, losses = dict(model.named_parameters()), list[float]()
    total: dict[str, Tensor] = {}  # of those that some gradient reaches
    for ranks in batches:
        found = []
        for ids, targets in ranks:
            loss = F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())
            losses.append(loss.item())
            found.append(torch.autograd.grad(loss / len(batches), list(params.values()), allow_unused=True))
        for name, grads in zip(params, zip(*found, strict=True), strict=True):
            if grads[0] is not None:
                total[name] = total.get(name, 0) + sum(grads[1:], grads[0]) * (1 / len(ranks))
    return losses, total


def _on_ranks(model: nn.Module, shape: tuple[int, int], batches: list[list[Batch]]) -> Found:
    with tempfile.TemporaryDirectory(prefix="check-layer-") as folder:
        ranks = len(batches[0])
        try:
            mp.spawn(_rank, (ranks, folder, model, shape, batches), nprocs=ranks)
        except mp.ProcessExitedException as error:
            if error.exit_code != _UNGUARDED:
                raise
            raise RuntimeError(
                "check_layer: its ranks are processes that import the calling file again, and the call with it; "
                'fix: write if __name__ == "__main__": above the call, or make it in a test'
            ) from None
        results = [torch.load(Path(folder) / f"{rank}.pt") for rank in range(ranks)]
    losses = [loss for of_microbatch in zip(*[losses for losses, _ in results], strict=True) for loss in of_microbatch]
    return losses, results[0][1]


def _rank(
    rank: int, ranks: int, folder: str, model: nn.Module, shape: tuple[int, int], batches: list[list[Batch]]
) -> None:
    torch.set_num_threads(1)
    join_world(False, 120.0, store=dist.FileStore(f"{folder}/store", ranks), rank=rank, world_size=ranks)
    found = gradients(_planned(model, shape, ranks), [of_ranks[rank] for of_ranks in batches])
    torch.save(found, Path(folder) / f"{rank}.pt")


def _compare(found: Found, expected: Found, tolerance: float, where: str) -> None:
    problems = []
    for i, (loss, exact) in enumerate(zip(found[0], expected[0], strict=True)):
        if abs(loss - exact) > tolerance * abs(exact):
            problems.append(f"loss {i} is {loss}, and by forward {exact}")
    least = _SMALL * float(torch.stack([grad.norm() for grad in expected[1].values()]).norm())
    for name, grad in expected[1].items():
        difference = float((found[1][name] - grad).norm() / grad.norm().clamp(min=least))
        if not difference <= tolerance:
            problems.append(f"the gradient of {name} differs by {difference:.2g} of its norm")
    assert not problems, f"{where}, beyond {tolerance:g}:\n" + "\n".join(problems)
