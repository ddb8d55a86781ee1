"""What it takes to gather, multiply, gate and combine experts' rows, in products and beside them.

    python -m benchmarks.expert_layers

Each product of a rank's experts in Qwen3-30B-A3B is timed as torch's with kernels beside it, and as kernels that gather
and gate themselves, with several tiles each (`hocket/kernels/experts.py`, `hocket/kernels/grouped.py`). Results are
compared with sums in fp32. Kernels are compiled first, by many processes.

Without a GPU, and with TRITON_INTERPRET=1, sizes are tiny: it shows only that everything works.
"""

# pyrefly: ignore-errors
from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from types import SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from hocket.kernels import experts, grouped, rows, swiglu
from hocket.kernels.experts import BLOCK, _gate, _gate_backward, _place
from hocket.kernels.grouped import Tile

GPU = torch.cuda.is_available()
D, F, E, T, K = (2048, 768, 32, 8192, 8) if GPU else (64, 128, 4, 24, 4)
UPS = [(128, 128, 64, 8, 3), (128, 128, 64, 8, 4)]
DOWNS = [(128, 128, 64, 8, 3), (128, 256, 64, 8, 3)]
GRADS = [(128, 256, 64, 8, 5), (256, 128, 64, 8, 5)]
CHOSEN = (
    "up: rows, TMA (128, 128, 64, 8, 4)", "up: rows, persistent (128, 128, 64, 8, 3)",
    "up: rows, flat (128, 128, 64, 8, 3)", "up: rows, one (128, 128, 64, 8, 4)",
    "up: gathered, one (128, 128, 64, 8, 4)", "up: gathered, one (128, 128, 64, 8, 3)",
    "down backward: rows, TMA (128, 128, 64, 8, 3)", "down backward: gathered (128, 256, 64, 8, 3)",
    "up grads: gathered (128, 256, 64, 8, 5)", "down grads: gathered (256, 128, 64, 8, 5)",
    "down grads: gathered (128, 256, 64, 8, 5)",
)  # fmt: skip
if not GPU:
    UPS, DOWNS, GRADS = [(16, 16, 16, 4, 2)], [(16, wide, 16, 4, 2) for wide in (16, 64, 128)], [(16, 16, 16, 4, 2)]


@triton.jit
def _up_tma(
    x, w, ends, weights, gate_up, inner,
    width: tl.constexpr, ffn: tl.constexpr, experts: tl.constexpr,
    tall: tl.constexpr, wide: tl.constexpr, deep: tl.constexpr, block_e: tl.constexpr,
):  # fmt: skip
    across: tl.constexpr = ffn // wide
    expert, first, stop = _place(ends, tl.program_id(0) // across, experts, tall, block_e)
    if first >= stop:
        return
    start = tl.program_id(0) % across * wide
    gate, up = tl.zeros([tall, wide], tl.float32), tl.zeros([tall, wide], tl.float32)
    for low in range(0, width, deep):
        x_tile = x.load([first, low])
        gate = tl.dot(x_tile, w.load([expert * width + low, start]), gate)
        up = tl.dot(x_tile, w.load([expert * width + low, ffn + start]), up)
    row, n = first + tl.arange(0, tall), start + tl.arange(0, wide)
    _gate(gate, up, row, n, stop, weights, gate_up, inner, ffn, True)


@triton.jit
def _up_persistent(
    x, w, ends, weights, gate_up, inner,
    width: tl.constexpr, ffn: tl.constexpr, experts: tl.constexpr,
    tall: tl.constexpr, wide: tl.constexpr, deep: tl.constexpr, block_e: tl.constexpr, flat: tl.constexpr,
):  # fmt: skip
    across: tl.constexpr = ffn // wide
    e = tl.arange(0, block_e)
    end = tl.load(ends + e, mask=e < experts, other=0)
    begin = tl.load(ends + e - 1, mask=(e > 0) & (e < experts), other=0)
    slots = tl.where(e < experts, (end - begin + tall - 1) // tall, 0)
    behind = tl.cumsum(slots, 0)
    tiles = tl.sum(slots) * across
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=flat):
        slot, start = tile // across, tile % across * wide
        expert = tl.sum((behind <= slot).to(tl.int32))
        mine = e == expert
        first = tl.sum(tl.where(mine, begin + (slot - behind + slots) * tall, 0))
        stop = tl.sum(tl.where(mine, end, 0))
        gate, up = tl.zeros([tall, wide], tl.float32), tl.zeros([tall, wide], tl.float32)
        for low in range(0, width, deep):
            x_tile = x.load([first, low])
            gate = tl.dot(x_tile, w.load([expert * width + low, start]), gate)
            up = tl.dot(x_tile, w.load([expert * width + low, ffn + start]), up)
        row, n = first + tl.arange(0, tall), start + tl.arange(0, wide)
        _gate(gate, up, row, n, stop, weights, gate_up, inner, ffn, True)


@triton.jit
def _up_one(
    x, source, w, ends, weights, gate_up, inner,
    width: tl.constexpr, ffn: tl.constexpr, experts: tl.constexpr, gathered: tl.constexpr,
    tall: tl.constexpr, wide: tl.constexpr, deep: tl.constexpr, block_e: tl.constexpr,
):  # fmt: skip
    """One product for 8 gates and 8 ups in turn."""
    across: tl.constexpr = ffn // wide
    expert, first, stop = _place(ends, tl.program_id(0) // across, experts, tall, block_e)
    if first >= stop:
        return
    row = first + tl.arange(0, tall)
    here = tl.minimum(row, stop - 1)
    taken = tl.load(source + here).to(tl.int64) if gathered else here.to(tl.int64)
    start, k, c = tl.program_id(0) % across * wide, tl.arange(0, deep), tl.arange(0, 2 * wide)
    column = tl.max_contiguous(tl.multiple_of(c // 16 * 8 + c % 8 + c // 8 % 2 * ffn, 8), 8)
    from_x = x + taken[:, None] * width + k[None, :]
    from_w = w + expert.to(tl.int64) * (2 * width * ffn) + start + k[:, None] * (2 * ffn) + column[None, :]
    total = tl.zeros([tall, 2 * wide], tl.float32)
    for low in range(0, width, deep):
        total = tl.dot(tl.load(from_x), tl.load(from_w), total)
        from_x += deep
        from_w += deep * 2 * ffn
    pairs = tl.permute(tl.reshape(total, [tall, wide // 8, 2, 8]), [0, 1, 3, 2])
    gate, up = tl.split(pairs)
    gate, up = tl.reshape(gate, [tall, wide]), tl.reshape(up, [tall, wide])
    _gate(gate, up, row, start + tl.arange(0, wide), stop, weights, gate_up, inner, ffn, True)


@triton.jit
def _down_backward_tma(
    g, w, ends, weights, gate_up, g_gate_up, g_weights, rows,
    width: tl.constexpr, ffn: tl.constexpr, experts: tl.constexpr,
    tall: tl.constexpr, wide: tl.constexpr, deep: tl.constexpr, block_e: tl.constexpr,
):  # fmt: skip
    across: tl.constexpr = ffn // wide
    expert, first, stop = _place(ends, tl.program_id(0) // across, experts, tall, block_e)
    if first >= stop:
        return
    tile = tl.program_id(0) % across
    total = tl.zeros([tall, wide], tl.float32)
    for low in range(0, width, deep):
        total = tl.dot(g.load([first, low]), w.load([expert * ffn + tile * wide, low]).T, total)
    row, sums = first + tl.arange(0, tall), g_weights + tile * rows
    _gate_backward(
        total,
        row,
        tile * wide,
        stop,
        weights,
        gate_up,
        g_gate_up,
        sums,
        ffn,
        True,
        wide,
        BLOCK if wide > BLOCK else wide,
    )


@dataclass
class Data:
    """Operands, of `count` rows."""

    x: Tensor
    rows: Tensor
    g: Tensor
    g_rows: Tensor
    source: Tensor
    place: Tensor
    w_up: Tensor
    w_down: Tensor
    ends: Tensor
    weights: Tensor
    gate_up: Tensor
    inner: Tensor
    g_gate_up: Tensor

    @property
    def count(self) -> int:
        return len(self.rows)


def data(tokens: int, device: str) -> Data:
    """Random tokens, each with K of E experts."""
    new = partial(torch.randn, device=device)
    torch.manual_seed(3)
    chosen = new(tokens, E).topk(K, 1).indices.flatten()
    order = chosen.argsort(stable=True)
    source = (order // K).to(torch.int32)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=device)
    ends = torch.bincount(chosen, minlength=E).cumsum(0).to(torch.int32)
    x, g = new(tokens, D).bfloat16(), new(tokens, D).bfloat16()
    w_up, w_down = (new(E, D, 2 * F) / D**0.5).bfloat16(), (new(E, F, D) / F**0.5).bfloat16()
    at, count = source.long(), len(order)
    wide = new(count, 2 * F).bfloat16()
    return Data(
        x, x[at], g, g[at], source, place.to(torch.int32).view(tokens, K), w_up, w_down, ends, new(count).abs(),
        wide, new(count, F).bfloat16(), new(count, 2 * F).bfloat16(),
    )  # fmt: skip


def up_tma(d: Data, tile: Tile) -> tuple[Tensor, Tensor]:
    gate_up, inner = d.rows.new_empty(d.count, 2 * F), d.rows.new_empty(d.count, F)
    x = TensorDescriptor.from_tensor(d.rows, [tile.tall, tile.deep])
    w = TensorDescriptor.from_tensor(d.w_up.view(E * D, 2 * F), [tile.deep, tile.wide])
    grid = (d.count // tile.tall + E) * (F // tile.wide)
    sizes = (D, F, E, tile.tall, tile.wide, tile.deep, triton.next_power_of_2(E))
    how = {"num_warps": tile.warps, "num_stages": tile.stages}
    _up_tma[grid,](x, w, d.ends, d.weights, gate_up, inner, *sizes, **how)
    return gate_up, inner


def up_persistent(d: Data, tile: Tile, flat: bool) -> tuple[Tensor, Tensor]:
    gate_up, inner = d.rows.new_empty(d.count, 2 * F), d.rows.new_empty(d.count, F)
    x = TensorDescriptor.from_tensor(d.rows, [tile.tall, tile.deep])
    w = TensorDescriptor.from_tensor(d.w_up.view(E * D, 2 * F), [tile.deep, tile.wide])
    sizes = (D, F, E, tile.tall, tile.wide, tile.deep, triton.next_power_of_2(E), flat)
    how = {"num_warps": tile.warps, "num_stages": tile.stages}
    _up_persistent[132,](x, w, d.ends, d.weights, gate_up, inner, *sizes, **how)
    return gate_up, inner


def up_one(d: Data, tile: Tile, gathered: bool) -> tuple[Tensor, Tensor]:
    gate_up, inner = d.rows.new_empty(d.count, 2 * F), d.rows.new_empty(d.count, F)
    grid = (d.count // tile.tall + E) * (F // tile.wide)
    given = (d.x if gathered else d.rows, d.source, d.w_up, d.ends, d.weights, gate_up, inner)
    sizes = (D, F, E, gathered, tile.tall, tile.wide, tile.deep, triton.next_power_of_2(E))
    _up_one[grid,](*given, *sizes, num_warps=tile.warps, num_stages=tile.stages)
    return gate_up, inner


def down_tma(d: Data, tile: Tile) -> tuple[Tensor, Tensor]:
    out, across = torch.empty_like(d.gate_up), F // tile.wide
    g_weights = d.weights.new_empty(across, d.count)
    g = TensorDescriptor.from_tensor(d.g_rows, [tile.tall, tile.deep])
    w = TensorDescriptor.from_tensor(d.w_down.view(E * F, D), [tile.wide, tile.deep])
    grid = (d.count // tile.tall + E) * across
    sizes = (D, F, E, tile.tall, tile.wide, tile.deep, triton.next_power_of_2(E))
    how = {"num_warps": tile.warps, "num_stages": tile.stages}
    _down_backward_tma[grid,](g, w, d.ends, d.weights, d.gate_up, out, g_weights, d.count, *sizes, **how)
    return out, g_weights.sum(0)


def grads(d: Data, tile: Tile, gathered: bool, first: bool, add: bool = False) -> Tensor:
    """The weight gradient of the first or of the second product."""
    x, g = ((d.x, d.source) if gathered else d.rows, d.g_gate_up) if first else (d.inner, d.g_rows)
    if gathered and not first:
        g = d.g, d.source
    out = torch.empty(E, *((D, 2 * F) if first else (F, D)), device=d.x.device, dtype=torch.bfloat16)
    grouped.weight_gradients(x, g, d.ends, out, add, 1.0, tile)
    return out


def variants() -> dict[str, Callable[[Data], Any]]:
    """By name; what stands before the colon is the piece that they are variants of."""
    found: dict[str, Callable[[Data], Any]] = {}
    for t in UPS:
        tile = Tile(*t)
        found[f"up: gathered {t}"] = lambda d, tile=tile: experts.up(
            d.x, d.source, d.w_up, d.ends, d.weights, d.count, tile
        )
        found[f"up: rows {t}"] = lambda d, tile=tile: experts.up(d.rows, None, d.w_up, d.ends, d.weights, d.count, tile)
        found[f"up: rows, TMA {t}"] = partial(up_tma, tile=tile)
        found[f"up: rows, persistent {t}"] = partial(up_persistent, tile=tile, flat=False)
        found[f"up: rows, flat {t}"] = partial(up_persistent, tile=tile, flat=True)
        found[f"up: gathered, one {t}"] = partial(up_one, tile=tile, gathered=True)
        found[f"up: rows, one {t}"] = partial(up_one, tile=tile, gathered=False)

    def given(d: Data) -> tuple[Tensor, ...]:
        return d.w_down, d.ends, d.weights, d.gate_up

    for t in DOWNS:
        tile = Tile(*t)
        found[f"down backward: gathered {t}"] = lambda d, tile=tile: experts.down_backward(
            d.g, d.source, *given(d), tile
        )
        found[f"down backward: rows {t}"] = lambda d, tile=tile: experts.down_backward(d.g_rows, None, *given(d), tile)
        found[f"down backward: rows, TMA {t}"] = partial(down_tma, tile=tile)
    for t in GRADS:
        for name, first in (("up grads", True), ("down grads", False)):
            for how, gathered in (("gathered", True), ("rows", False)):
                tile = Tile(*t) if gathered else Tile(*t[:4], min(t[4], 4))  # indices take stages of their own
                found[f"{name}: {how} {t}"] = partial(grads, tile=tile, gathered=gathered, first=first)
    return {name: run for name, run in found.items() if name in CHOSEN} if GPU else found


def torchs(d: Data) -> dict[str, Callable[[], Any]]:
    """Today's kernels."""

    def mm(a: Tensor, b: Tensor) -> Tensor:
        return torch._grouped_mm(a, b, offs=d.ends)

    out = torch.empty_like(d.rows)
    leaves = d.gate_up.clone().requires_grad_(), d.weights.clone().requires_grad_()
    gated = swiglu.swiglu(leaves[0], None, 0.0, 1.0, leaves[1])

    def gate_backward() -> Any:
        return torch.autograd.grad(gated, leaves, d.inner, retain_graph=True)

    return {
        "up: torch, product": lambda: mm(d.rows, d.w_up),
        "up: today, gate": lambda: swiglu.swiglu(d.gate_up, None, 0.0, 1.0, d.weights),
        "down backward: today, gate": gate_backward,
        "up: today, spread": lambda: rows.spread(d.x, d.place, out),
        "down: torch, product": lambda: mm(d.inner, d.w_down),
        "down: today, total": lambda: rows.total(d.rows, None, d.place, None, None),
        "down backward: torch, product": lambda: mm(d.g_rows, d.w_down.transpose(1, 2)),
        "up backward: torch, product": lambda: mm(d.g_gate_up, d.w_up.transpose(1, 2)),
        "up grads: torch, product": lambda: mm(d.rows.t(), d.g_gate_up),
        "down grads: torch, product": lambda: mm(d.inner.t(), d.g_rows),
    }


def exact(d: Data) -> dict[str, list[Tensor]]:
    """Results in fp32 of the first expert's and the last one's rows."""

    def piece(e: int) -> dict[str, list[Tensor]]:
        lo, hi = int(d.ends[e - 1]) if e else 0, int(d.ends[e])
        here = slice(lo, hi)
        wide = (d.rows[here].float() @ d.w_up[e].float()).bfloat16()
        gate, up = wide.float().chunk(2, 1)
        w = d.weights[here, None]
        made = torch.nn.functional.silu(gate) * up * w
        leaf, leaf_w = d.gate_up[here].float().requires_grad_(), w.clone().requires_grad_()
        gate, up = leaf.chunk(2, 1)
        y = torch.nn.functional.silu(gate) * up * leaf_w
        g_inner = d.g_rows[here].float() @ d.w_down[e].float().t()
        g_leaf, g_w = torch.autograd.grad(y, [leaf, leaf_w], g_inner)
        return {
            "up": [wide.float(), made],
            "down backward": [g_leaf, g_w[:, 0]],
            "up grads": [d.rows[here].float().t() @ d.g_gate_up[here].float()],
            "down grads": [d.inner[here].float().t() @ d.g_rows[here].float()],
        }  # fmt: skip

    first, last = piece(0), piece(E - 1)
    return {name: [*first[name], *last[name]] for name in first}


def apart(d: Data, name: str, made: Any, wanted: dict[str, list[Tensor]]) -> float:
    """The largest difference over the largest number."""
    kind = name.split(":")[0]
    made = made if isinstance(made, tuple) else (made,)
    end, start = int(d.ends[0]), int(d.ends[-2])
    if kind.endswith("grads"):
        pieces = [made[0][0], made[0][-1]]
    else:
        pieces = [*(m[:end] for m in made), *(m[start : int(d.ends[-1])] for m in made)]
    return max(float((a.float() - b).abs().max() / b.abs().max()) for a, b in zip(pieces, wanted[kind], strict=True))


def compiled(names: list[str]) -> list[str]:
    """Compile variants in a process of its own. Returns what went wrong."""
    d, wrong = data(64, "cuda"), []
    for name in names:
        try:
            variants()[name](d)
            torch.cuda.synchronize()
        except Exception as error:
            wrong.append(f"{name}: {type(error).__name__} {str(error)[:200]}")
    return wrong


def took(run: Callable[[], Any], repeats: int = 8) -> float:
    """Microseconds of one of several runs in a row."""
    if not GPU:
        begin = time.perf_counter()
        run()
        return 1e6 * (time.perf_counter() - begin)
    torch.cuda._sleep(2_000_000)
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()
    for _ in range(repeats):
        run()
    last.record()
    last.synchronize()
    return 1e3 * first.elapsed_time(last) / repeats


def main() -> None:
    started, names = time.time(), list(variants())
    if GPU:
        workers = min(len(names), max((os.cpu_count() or 4) - 2, 2), 20)
        with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
            for wrong in pool.map(compiled, [names[i::workers] for i in range(workers)]):
                for line in wrong:
                    print("WRONG", line)
        print(f"compiled {len(names)} in {time.time() - started:.0f} s", flush=True)
    d = data(T, "cuda" if GPU else "cpu")
    wanted, runs, far = exact(d), dict(torchs(d)), {}
    for name, run in variants().items():
        try:
            far[name] = apart(d, name, run(d), wanted)
            again, once = (t if isinstance(t, tuple) else (t,) for t in (run(d), run(d)))
            runs[name] = partial(run, d)
            if not all(torch.equal(a, b) for a, b in zip(again, once, strict=True)):
                print("NOT THE SAME BITS TWICE", name)
        except Exception as error:
            print("WRONG", name, type(error).__name__, str(error)[:160], flush=True)
    print(f"checked after {time.time() - started:.0f} s", flush=True)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        took(run, 2)
    for _ in range(4 if GPU else 1):
        for name, run in runs.items():
            times[name].append(took(run))
    flops = {"up": 4, "up backward": 4, "up grads": 4}
    for name in sorted(times, key=lambda name: (name.split(":")[0], statistics.median(times[name]))):
        us = statistics.median(times[name])
        rate = flops.get(name.split(":")[0], 2) * d.count * D * F / us / 1e6
        rates = f"{rate:6.0f} TFLOP/s" if "today" not in name else " " * 14
        print(f"{us:8.1f} us {rates}  {far.get(name, 0.0):.1e}  {name}", flush=True)
    print(f"after {time.time() - started:.0f} s", flush=True)
    if GPU:
        del d, runs, wanted
        layers()
        print(f"after {time.time() - started:.0f} s", flush=True)


def layers() -> None:
    """A whole layer: with single kernels, with products that gate rows, and with those that also gather them."""
    from benchmarks import kernels as k
    from benchmarks.bench.plain import Exchange, Kept, SyncMoELayer
    from hocket.model.moe import Experts

    class Rows(Exchange):
        """Keeps rows, that are made."""

        splits = Kept.splits

    device, gates = torch.device("cuda"), Experts.gates_itself
    sizes = k.Sizes(k.qwen3_30b_a3b(), T, device)
    made = SyncMoELayer(sizes.model, k.ExpertPlace(k.RANKS, stays=True), 1.0)
    made.to(sizes.dtype).to_empty(device=device)
    with torch.no_grad():
        for param in made.parameters():
            param.normal_(std=0.02) if param.dim() > 1 else param.fill_(1.0)
    x, g = sizes.new(1, T, D), torch.randn(1, T, D, device=device).bfloat16()
    wanted = [x, *made.parameters()]

    def step() -> None:
        torch.autograd.grad(made(x), wanted, g)

    flops = k.model_flops_per_token(k.replace(sizes.model, layers=1, vocab=1, tied=True), T) * T
    gated_up, gated_backward = experts.up, experts.down_backward

    def up(x: Tensor, source: Tensor | None, w: Tensor, ends: Tensor, weights: Tensor | None, count: int) -> Any:
        if source is not None:
            return gated_up(x, source, w, ends, weights, count)
        d = SimpleNamespace(rows=x, w_up=w, ends=ends, weights=weights, count=count)
        return up_tma(d, Tile(128, 128, 64, 8, 4))

    def down(
        g: Tensor, source: Tensor | None, w: Tensor, ends: Tensor, weights: Tensor, gate_up: Tensor
    ) -> tuple[Tensor, Tensor]:
        if source is not None:
            return gated_backward(g, source, w, ends, weights, gate_up, Tile(128, 256, 64, 8, 3))
        if single:
            g_inner = torch._grouped_mm(g, w.transpose(1, 2), offs=ends)
            ctx = SimpleNamespace(saved_tensors=(gate_up, weights, None), limits=(0.0, 1.0, False))
            return swiglu._Swiglu.backward(ctx, g_inner)[:2]
        d = SimpleNamespace(g_rows=g, w_down=w, ends=ends, weights=weights, count=len(g), gate_up=gate_up)
        return down_tma(d, Tile(128, 128, 64, 8, 3))

    experts.up, experts.down_backward = up, down
    ways = {
        "single kernels": (False, False, Rows(None, k.RANKS, 0)),
        "gated forward": (True, True, Rows(None, k.RANKS, 0)),
        "gated": (True, False, Rows(None, k.RANKS, 0)),
        "gated and gathered": (True, False, Kept(k.RANKS, 0)),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(4):
        for name, (gated, single, exchange) in ways.items():
            made.exchange = exchange
            Experts.gates_itself = gates if gated else lambda *_: False
            times[name].append(1e6 * k.seconds(step, device, 6))
            if turn == 3:
                spent = k.kernels(step, device, 200)
                total = sum(one["microseconds"] for one in spent)
                us = statistics.median(times[name])
                each = " ".join(f"{t:.0f}" for t in times[name])
                print(f"layer, {name}: {us:.0f} us {flops / us / 1e6:.0f} TFLOP/s ({each}); kernels {total:.0f} us")
                for one in spent[:24]:
                    print(f"    {one['microseconds']:8.1f} us {one['count']:4.0f} times  {one['name'][:80]}")


if __name__ == "__main__":
    sys.exit(main())
