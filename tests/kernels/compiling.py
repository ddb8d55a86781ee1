"""Compiles all kernels for a GPU that need not be there: `python -m tests.kernels.compiling`, without interpreter.

With `every`, each also for its other shapes and formats.

Calls launch as always, but where Triton would hand over to a driver it only compiles, down to machine code. So what a
kernel says must be right; what it does is for the interpreter to tell, and for tests/gpu.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from hocket.config import ModelConfig
from hocket.layers.tensor import Arriving

BF16 = torch.bfloat16
LONG = ("_local_sum",)
"""Kernels in which a program counts elements of tensors that may have more than 2^31 of them."""
HOPPER = GPUTarget("cuda", 90, 32)


def only_compile() -> list[str]:
    """From now on, launches compile only. Returns the names of kernels, growing."""
    compiled: list[str] = []
    launch: Any = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        compiled.append(self.__name__)
        kernel = launch(self, *args, grid=grid, warmup=True, **options)
        assert kernel.asm["cubin"], self.__name__
        if self.__name__ in LONG:
            loops = re.findall(r"scf.while.* -> (.*) {", kernel.asm["ttir"])
            assert loops == ["i64"], f"{self.__name__} counts in {loops}"
        if dict(zip(self.arg_names, args, strict=False)).get("aligned"):
            narrow = re.findall(r"(?:ld|st)\.global\.b(?:16|32)", kernel.asm["ptx"])
            assert not narrow, f"{self.__name__} does not move 16 bytes at a time"
        return kernel

    JITFunction.run = run  # pyrefly: ignore[bad-assignment]
    here: Any = SimpleNamespace(
        get_current_device=lambda: 0, get_current_stream=lambda device: 0, get_current_target=lambda: HOPPER
    )
    driver.set_active(here)
    return compiled


def more(*cases: Any) -> Sequence[Any]:
    """Cases beside the usual one, where they are asked for."""
    return cases if "every" in sys.argv else ()


def rows() -> None:
    from hocket.kernels import rows as kernels

    for top_k, width in ((8, 2048), *more((3, 100))):
        x, probs, place = of(BF16, 4, width), of(torch.float32, 4, top_k), of(torch.int32, 4, top_k)
        sent, wide = of(BF16, 4 * top_k, width), of(BF16, 4, width + 32)
        kernels.gather(sent, place.view(-1))
        for each in (x, wide[:, :width]):
            kernels.spread(each, place, sent)
            kernels.total(sent, probs, place, None, None, each)
        kernels.total(sent, None, place, x, None)
        kernels.total(sent, probs, place, x, x)
        kernels.total_backward(x, sent, probs, place)
        for back in (False, True):
            kernels.weights(probs, of(torch.float32, 800), place, back)


def per_rank() -> None:
    from hocket.kernels.rows import label_grads, number, read_labels, write_labels

    for ranks, top_k in ((8, 8), *more((3, 2))):
        probs = of(torch.float32, 100, top_k)
        row, _, seat, told = number(of(torch.int32, 100, top_k), of(torch.int64, ranks * 16), ranks)
        labelled = of(torch.int32, 100, 80)
        write_labels(labelled, 16, probs, row, seat)
        read_labels(labelled, 16, top_k, told, of(torch.int32, 200))
        label_grads(labelled, 16, row)


def routing() -> None:
    from hocket.kernels.routing import choose, regroup

    sigmoid = ModelConfig(experts=100, top_k=3, router="sigmoid", normalize_top_k=False)
    groups = replace(sigmoid, route_groups=10, route_top_groups=4)
    best = ModelConfig(experts=160, top_k=6, route_groups=8, route_top_groups=3, route_group_score="best")
    some = of(torch.float32, 100)
    usual = (ModelConfig(experts=128, top_k=8), None), (groups, some)
    for config, bias in (*usual, *more((best, None), (sigmoid, some))):
        logits = of(torch.float32, 7, config.experts).requires_grad_()
        choose(logits, bias, config, 0.1, Arriving)[0].sum().backward()
    for ranks in (4, *more(1)):
        regroup(of(torch.int64, ranks, 32), 100)


def router() -> None:
    from hocket.kernels.products import input_gradient, weight_gradient

    for experts, width in ((128, 2048), *more((5, 72))):
        g, x, weight = of(torch.float32, 7, experts), of(BF16, 7, width), of(BF16, experts, width)
        input_gradient(g, weight)
        input_gradient(g, weight, x)
        weight_gradient(g, x, weight)


def dense() -> None:
    from hocket.kernels import norm
    from hocket.kernels.loss import cross_entropy
    from hocket.kernels.norm import norm_rope_backward, rope
    from hocket.kernels.swiglu import swiglu

    x, weight = of(BF16, 7, 2048), of(BF16, 2048)
    norm.forward(x, weight, 1e-6, x)
    norm.sum_parts(norm.backward(x, x, weight, 1e-6, x)[1], weight)
    heads, table = of(BF16, 2, 16, 4, 128), of(torch.float32, 2, 16, 1, 64)
    rope(heads, table, back=True)
    rope(heads, table, weight[:128], 1e-6)
    norm_rope_backward(heads, heads, table, weight[:128], 1e-6)
    rope(heads, table[..., :32].contiguous(), weight[:128], 1e-6)
    norm_rope_backward(heads, heads, table[..., :32].contiguous(), weight[:128], 1e-6)
    swiglu(of(BF16, 7, 1536).requires_grad_()).sum().backward()
    swiglu(of(BF16, 7, 1536).requires_grad_(), of(torch.int32, 1)).sum().backward()
    swiglu(of(BF16, 7, 5760).requires_grad_(), of(torch.int32, 1), 7.0, 1.702).sum().backward()
    swiglu(of(BF16, 7, 1536).requires_grad_(), weights=of(torch.float32, 7).requires_grad_()).sum().backward()
    cross_entropy(of(BF16, 7, 1000).requires_grad_(), of(torch.int64, 7)).backward()


def sums() -> None:
    from hocket.kernels.pieces import Own, Pieces
    from hocket.kernels.sums import launch, place, squares

    for world in (4, *more(1)):
        launch(of(BF16, world, 112), of(torch.float32, 112), 0.5)
        for rank, pieces in (
            (0, Pieces.one(112, world + 1)),
            *more((world, Pieces(((0, 10), (30, 82)), 112, world + 1))),
        ):
            own = Own(rank, of(BF16, (world + 1) * 112), pieces)
            launch(of(BF16, world, 112), of(torch.float32, 112), 0.5, own=own)
            place(of(torch.float32, 112), own, 112, *more(of(BF16, 112)))
    for dtype in (torch.float32, *more(BF16)):
        squares([of(dtype, 5000)])


def merging() -> None:
    from hocket.kernels.sums import merge

    for width in (128, *more(64)):
        lse = of(torch.float32, 4, 100)
        merge(of(BF16, 100, 4, width), lse, of(BF16, 100, 4, width), lse)


def adamw() -> None:
    from hocket.kernels.adamw import adamw as kernel

    main, told = of(torch.float32, 5000), of(torch.float64, 5)
    for averages in (BF16, *more(torch.float32)):
        kept = of(averages, 5000), of(averages, 5000)
        for weight in (of(BF16, 5000), *more(None)):
            kernel(main, of(torch.float32, 5000), kept, weight, told, weight is None, (0.9, 0.95, 1e-8))


def grouped() -> None:
    from hocket.kernels.products import weight_gradients

    ends = of(torch.int32, 4)
    for width, inner in ((2048, 1536), *more((200, 72))):
        x, g = of(BF16, 100, width), of(BF16, 100, inner)
        weight_gradients(x, g, ends, of(BF16, 4, width, inner))
        for add in (False, True):
            weight_gradients(x, g, ends, of(torch.float32, 4, width, inner), add, 0.25)


def biases() -> None:
    from hocket.kernels.sums import add_by_expert, row_sums

    ends = of(torch.int32, 5)
    for width in (2880, *more(72)):
        rows = of(BF16, 100, width)
        add_by_expert(rows, of(BF16, 5, width), ends)
        row_sums(rows, ends, of(BF16, 5, width))
        row_sums(rows, ends, of(torch.float32, 5, width), True, 0.5)


def exchange() -> None:
    from hocket.kernels import exchange as kernels

    for ranks, width in ((8, 2048), *more((2, 72))):
        kernels.push_counts(of(torch.int64, ranks, 16), of(torch.int64, ranks), 1)
        leaving, _, ends = kernels.lay_out(of(torch.int64, ranks, ranks, 16), 1, 100, of(torch.int64, 1))
        rows = of(BF16, 100, width)
        kernels.push(rows, of(torch.int64, ranks), leaving, 1)
        kernels.take_blocks(of(torch.uint8, rows.nbytes), rows, rows, of(torch.int64, 3, 16), 0, 50)
        kernels.take(rows, rows, ends[:1])
        kernels.take(rows, rows, ends[:1], cycle=50)


def fp8() -> None:
    from hocket.kernels import fp8 as kernels

    for width in (4096, *more(100)):
        values, scale = kernels.cast_rows([of(BF16, 16, width)])
        kernels.cast_rows([of(BF16, 7, width), of(BF16, 7, 16), of(BF16, 7, 16)], of(torch.float32, width + 32))
        kernels.transposed(values)
        kernels.transposed(values, scale, scale[0])
        kernels.swiglu_rows(of(BF16, 7, 2 * width))
        kernels.swiglu_rows_backward(of(BF16, 7, width), of(BF16, 7, 2 * width), of(torch.float32, 2 * width))
        wide, gates, weights = of(BF16, 7, width), of(BF16, 7, 2 * width), (of(torch.float32, 7), of(torch.float32, 7))
        kernels.swiglu_rows(gates, wide=wide, weights_R=weights[0])
        kernels.swiglu_rows_backward(wide, gates, wide=of(BF16, 7, 2 * width), weights=weights)


def of(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


CALLS: list[Callable[[], None]] = [
    rows,
    per_rank,
    routing,
    router,
    dense,
    sums,
    merging,
    adamw,
    grouped,
    biases,
    exchange,
    fp8,
]
"""Add a function of your own here."""


def main() -> None:
    compiled = only_compile()
    for call in CALLS:
        call()
    print(*sorted(set(compiled)))


if __name__ == "__main__":
    main()
