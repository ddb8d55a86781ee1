"""What the kernels of `hocket/kernels/` save: each of them beside its formula, then a whole MoE layer with and without.

    python -m benchmarks.kernels
    python -m benchmarks.kernels --only unpermute,layer

Every piece runs forward and backward with the sizes of Qwen3-30B-A3B, as torch formulas and as kernels; the bytes are
those that have to be moved at the least. The layer is what one of four expert-parallel ranks computes, with its 32 of
128 experts and all communication left out. A profile says what the layer's time goes to.

About 40 s on one H200. Without a GPU the sizes are tiny and formulas run twice: it shows only that everything works.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.bench.plain import Kept, SyncMoELayer
from benchmarks.options import arguments
from benchmarks.record import write
from hocket.config import ModelConfig
from hocket.kernels import formulas, usable
from hocket.layers.dispatch import (
    Splits,
    counts_to_send,
    from_experts,
    group_rows,
    permute,
    send_rows,
    splits_of,
    to_experts,
    unpermute,
)
from hocket.layers.functional import score
from hocket.layers.linears import cross_entropy
from hocket.layers.norms import add_rms_norm, norm_rotate, rms_norm, rotate
from hocket.layers.routing import route
from hocket.model.layers import swiglu
from hocket.model.parts import ExpertPlace
from hocket.model.rotary import rotary_table
from hocket.predict.part_sizes import model_flops_per_token
from hocket.recipes import QWEN3_30B_A3B
from hocket.runtime.transports import RowTable

COPY = 4.3e12
"""Bytes per second that copies reach on one H200, read and written together."""
RANKS = 4
"""Expert-parallel ranks, of which one is measured."""
WAYS: dict[str, Callable[[], AbstractContextManager[None]]] = {"formula": formulas, "kernel": nullcontext}


@dataclass(frozen=True)
class Sizes:
    """What is measured, and where."""

    model: ModelConfig
    tokens: int
    device: torch.device
    dtype: torch.dtype = torch.bfloat16

    @property
    def rows(self) -> int:
        return self.tokens * self.model.top_k

    def new(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Random numbers, for which gradients are wanted."""
        return torch.randn(shape, device=self.device, dtype=dtype or self.dtype).requires_grad_()

    def bytes(self, *elements: int) -> int:
        """Of so many elements of the compute dtype."""
        return sum(elements) * self.dtype.itemsize


@dataclass(frozen=True)
class Piece:
    """A function, and the bytes that it has to read and write at the least."""

    name: str
    run: Callable[..., Tensor | Sequence[Tensor]]
    inputs: Sequence[Tensor]
    forward_bytes: int
    backward_bytes: int
    parameters: Sequence[Tensor] = field(default=())
    """Gets a gradient too, without being an argument."""
    consumes: bool = False
    """Backward overwrites what it needs: for each there is a forward, whose time is subtracted."""
    meant: Callable[[Tensor], Tensor] = lambda out: out
    """What of an output is compared: the rest holds anything."""


def row_pieces(sizes: Sizes) -> Iterator[Piece]:
    """The way of the rows: to the experts and back."""
    m, tokens, rows = sizes.model, sizes.tokens * sizes.model.hidden, sizes.rows * sizes.model.hidden
    logits = sizes.new(sizes.tokens, m.experts, dtype=torch.float32)
    scores = logits.numel() * 4
    yield Piece("route", lambda logits: route(logits, m)[0], [logits], 2 * scores, 3 * scores)
    probs, routing = route(logits.detach(), m)
    probs.requires_grad_()
    yield Piece(
        "permute",
        lambda x: permute(x, routing),
        [sizes.new(sizes.tokens, m.hidden)],
        sizes.bytes(tokens, rows),
        sizes.bytes(tokens, rows),
    )
    yield Piece(
        "unpermute",
        lambda rows, probs, residual: unpermute(rows, probs, residual, None, routing),
        [sizes.new(sizes.rows, m.hidden), probs, sizes.new(sizes.tokens, m.hidden)],
        sizes.bytes(rows, 2 * tokens),
        sizes.bytes(2 * rows, tokens),
    )
    counts_PL = routing.counts_E.view(RANKS, -1)
    table = RowTable([[rows] + [0] * (RANKS - 1) for rows in counts_PL.sum(1).tolist()], 0)
    kept = Splits(table, counts_PL)

    def group(x: Tensor) -> Tensor:
        return group_rows(x, replace(kept))  # a new value, whose order is not known yet

    yield Piece("group", group, [sizes.new(sizes.rows, m.hidden)], sizes.bytes(2 * rows), sizes.bytes(2 * rows))


def pair_pieces(sizes: Sizes) -> Iterator[Piece]:
    """The same way with one copy per rank. What this rank sends to all is what it gets from all."""
    m, tokens, rows = sizes.model, sizes.tokens * sizes.model.hidden, sizes.rows * sizes.model.hidden
    logits = torch.randn(sizes.tokens, m.experts, device=sizes.device)
    probs, routing = route(logits, m)
    probs, routing = probs.requires_grad_(), routing.by_rank(RANKS)
    with torch.no_grad():
        sent, *_ = send_rows(sizes.new(sizes.tokens, m.hidden), probs, routing)
        splits = splits_of(counts_to_send(routing, RANKS).expand(RANKS, -1, -1).transpose(0, 1), 0, routing)
    count = sum(splits.table.receive)
    received, pairs = sent[:count].clone().requires_grad_(), count * m.hidden

    def opened(rows: Tensor) -> Tensor:
        return to_experts(rows, replace(splits))[0]  # a new value, whose order is not known yet

    with torch.no_grad():
        places = to_experts(received, splits, weighted=True)[2]
    moved, both = sizes.bytes(tokens, pairs), sizes.bytes(pairs, rows)
    yield Piece(
        "pack",
        lambda x, p: send_rows(x, p, routing)[0],
        [sizes.new(sizes.tokens, m.hidden), probs],
        moved,
        moved,
        meant=lambda sent: sent[:count, : m.hidden],
    )
    yield Piece("open", opened, [received], both, both)
    yield Piece("close", lambda rows: from_experts(rows, places, splits), [sizes.new(sizes.rows, m.hidden)], both, both)
    yield Piece(
        "sum pairs",
        lambda rows, residual: unpermute(rows, None, residual, None, routing),
        [sizes.new(count, m.hidden), sizes.new(sizes.tokens, m.hidden)],
        sizes.bytes(pairs, 2 * tokens),
        moved,
    )


def dense_pieces(sizes: Sizes) -> Iterator[Piece]:
    """What stands between the matrix products."""
    m, tokens = sizes.model, sizes.tokens
    hidden, heads = tokens * m.hidden, tokens * m.heads * m.head_dim
    x, q = sizes.new(1, tokens, m.hidden), sizes.new(1, tokens, m.heads, m.head_dim)
    p, p_q = sizes.new(m.hidden), sizes.new(m.head_dim)
    table = rotary_table(tokens, m.head_dim, m.rope_theta, sizes.device)

    def normed(x: Tensor) -> Tensor:
        return rms_norm(x, p, m.norm_eps)

    def normed_heads(q: Tensor) -> Tensor:
        return norm_rotate(q, p_q, m.norm_eps, table)

    yield Piece("norm", normed, [x], sizes.bytes(2 * hidden), sizes.bytes(3 * hidden), [p])
    more = sizes.new(1, tokens, m.hidden)
    stream = sizes.bytes(4 * hidden)
    yield Piece("add norm", lambda x, more: add_rms_norm(x, more, p, m.norm_eps), [x, more], stream, stream, [p])
    yield Piece("norm rotary", normed_heads, [q], sizes.bytes(2 * heads), sizes.bytes(3 * heads), [p_q])
    yield Piece("rotary", lambda q: rotate(q, table), [q], sizes.bytes(2 * heads), sizes.bytes(2 * heads))
    w_router, scores = sizes.new(m.experts, m.hidden), 4 * tokens * m.experts
    moved = sizes.bytes(hidden, w_router.numel()) + scores  # backward also adds the gradient of who else reads x
    back = 2 * moved + sizes.bytes(hidden)
    yield Piece("router", lambda x: score(x.flatten(0, -2), w_router), [x], moved, back, [w_router])
    inner = sizes.rows * m.expert_ffn
    gate_up = sizes.new(sizes.rows, 2 * m.expert_ffn)
    yield Piece("swiglu", swiglu, [gate_up], sizes.bytes(3 * inner), sizes.bytes(5 * inner))
    targets = torch.randint(m.vocab, (tokens,), device=sizes.device)
    logits, size = sizes.new(tokens, m.vocab), sizes.bytes(tokens * m.vocab)
    yield Piece("loss", lambda logits: cross_entropy(logits, targets), [logits], size, 2 * size, consumes=True)


PIECES: list[Callable[[Sizes], Iterator[Piece]]] = [row_pieces, pair_pieces, dense_pieces]
"""Add a function of your own here."""


def seconds(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Seconds of one of several runs in a row, the median of three times; on a GPU those of the device alone."""
    run()
    times = []
    for _ in range(3):
        if device.type == "cpu":
            started = time.perf_counter()
            for _ in range(repeats):
                run()
            times.append((time.perf_counter() - started) / repeats)
            continue
        torch.cuda._sleep(20_000_000)  # 10 ms, in which the host gets ahead
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        for _ in range(repeats):
            run()
        last.record()
        last.synchronize()
        times.append(first.elapsed_time(last) / 1e3 / repeats)
    return statistics.median(times)


def measure(piece: Piece, sizes: Sizes, repeats: int) -> dict[str, Any]:
    """Seconds and bytes per second of a piece, both ways, and by how much they differ."""
    found: dict[str, Any] = {"name": piece.name, "tokens": sizes.tokens}
    wanted = [t for t in (*piece.inputs, *piece.parameters) if t.requires_grad]
    results: dict[str, list[Tensor]] = {}
    for way, within in WAYS.items():
        with within():
            out = _several(piece.run(*piece.inputs))
            g = [torch.randn(t.shape, device=t.device, generator=_generator(t.device)).to(t.dtype) for t in out]

            def backward(out: Sequence[Tensor] = out, g: Sequence[Tensor] = g) -> Sequence[Tensor]:
                made = _several(piece.run(*piece.inputs)) if piece.consumes else out
                return torch.autograd.grad(made, wanted, g, retain_graph=True)

            results[way] = [t.detach().clone() for t in (*map(piece.meant, out), *backward())]
            with torch.no_grad():
                forward_s = seconds(lambda: piece.run(*piece.inputs), sizes.device, repeats)
            backward_s = seconds(backward, sizes.device, repeats) - piece.consumes * forward_s
        found[way] = {
            "forward": {"seconds": forward_s, "bytes_per_second": piece.forward_bytes / forward_s},
            "backward": {"seconds": backward_s, "bytes_per_second": piece.backward_bytes / backward_s},
        }
    pairs = zip(results["formula"], results["kernel"], strict=True)
    found["largest_difference"] = max(float((a - b).abs().max() / a.abs().max().clamp(1e-9)) for a, b in pairs)
    found["least_bytes"] = {"forward": piece.forward_bytes, "backward": piece.backward_bytes}
    return found


def _several(out: Tensor | Sequence[Tensor]) -> Sequence[Tensor]:
    return (out,) if isinstance(out, Tensor) else out


def _generator(device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(7)


def update(elements: int, averages: torch.dtype, device: torch.device, repeats: int) -> dict[str, Any]:
    """Seconds of a clipped AdamW update of fp32 weights and their copy in bf16: torch's operations, and the kernel."""
    main, grad = torch.randn(elements, device=device), torch.randn(elements, device=device)
    copy = main.bfloat16()
    kept = torch.zeros(elements, dtype=averages, device=device), torch.zeros(elements, dtype=averages, device=device)
    factor = torch.ones((), device=device)
    found: dict[str, Any] = {"elements": elements, "averages": str(averages).removeprefix("torch.")}
    param = torch.nn.Parameter(main)
    param.grad = grad
    torchs = torch.optim.AdamW([param], fused=device.type == "cuda")
    torchs.step()

    def by_torch() -> None:
        grad.mul_(factor)
        state = torchs.state[param]
        for name, value in zip(("exp_avg", "exp_avg_sq"), kept, strict=True):
            state[name] = value.float()
        torchs.step()
        for name, value in zip(("exp_avg", "exp_avg_sq"), kept, strict=True):
            if averages is not torch.float32:
                value.copy_(state[name])
        copy.copy_(main)

    found["torch"] = seconds(by_torch, device, repeats)
    torchs.state.clear()
    told = torch.tensor([1.0, 1e-4, 1.0, 0.0, 0.999], dtype=torch.float64, device=device)
    given = told, True, (0.9, 0.95, 1e-8)
    if usable(main):
        from hocket.kernels.adamw import adamw

        found["kernel"] = seconds(lambda: adamw(main, grad, kept, copy, *given), device, repeats)
    return found


def layer(sizes: Sizes, repeats: int) -> dict[str, Any]:
    """Forward and backward of a MoE layer, both ways: seconds, TFLOP/s, and what the time goes to."""
    made = SyncMoELayer(sizes.model, ExpertPlace(RANKS, stays=True), 1.0)
    made.exchange = Kept(RANKS, 0)
    made.to(sizes.dtype).to_empty(device=sizes.device)
    with torch.no_grad():
        for param in made.parameters():
            param.normal_(std=0.02) if param.dim() > 1 else param.fill_(1.0)
    x, g = (sizes.new(1, sizes.tokens, sizes.model.hidden) for _ in range(2))
    g = g.detach()
    wanted = [x, *made.parameters()]

    def step() -> None:
        torch.autograd.grad(made(x), wanted, g)

    alone = replace(sizes.model, layers=1, vocab=1, tied=True)
    flops = model_flops_per_token(alone, sizes.tokens) * sizes.tokens
    found: dict[str, Any] = {"tokens": sizes.tokens, "flops": flops}
    for way, within in WAYS.items():
        with within():
            took = seconds(step, sizes.device, repeats)
            found[way] = {"seconds": took, "tflop_per_s": flops / took / 1e12, "kernels": kernels(step, sizes.device)}
    return found


def kernels(step: Callable[[], object], device: torch.device, most: int = 30) -> list[dict[str, Any]]:
    """What a step runs on the device, costliest first."""
    if device.type == "cpu":
        return []
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as traced:
        for _ in range(2):
            step()
        torch.cuda.synchronize()
    spent: dict[str, list[float]] = defaultdict(list)
    for event in traced.events() or []:
        if event.device_type == torch.autograd.DeviceType.CUDA:
            spent[event.name].append(event.device_time_total / 2)
    ordered = sorted(spent.items(), key=lambda item: -sum(item[1]))
    return [{"name": name[:160], "count": len(us) / 2, "microseconds": sum(us)} for name, us in ordered[:most]]


def show(row: dict[str, Any]) -> None:
    """The figures of a piece, for people."""
    print(f"{row['name']:18} {row['tokens']:6} tokens, apart by {row['largest_difference']:.1e}")
    for way in WAYS:
        words = [
            f"{what} {1e6 * one['seconds']:8.1f} us  {one['bytes_per_second'] / COPY:5.0%} of a copy's speed"
            for what, one in row[way].items()
        ]
        print(f"    {way:8}", "    ".join(words), flush=True)


def show_layer(row: dict[str, Any]) -> None:
    """The figures of the layer, for people."""
    for way in WAYS:
        found = row[way]
        print(f"layer, {way:8} {row['tokens']:6} tokens  {1e3 * found['seconds']:7.3f} ms", end="  ")
        print(f"{found['tflop_per_s']:.1f} TFLOP/s", flush=True)
    for kernel in row["kernel"]["kernels"]:
        print(f"    {kernel['microseconds']:8.1f} us {kernel['count']:4.0f} times  {kernel['name'][:110]}")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 8192])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--only", default="", help="names of pieces, `layer` and `update`, with commas between them")
    options = parser.parse_args()
    gpu = torch.cuda.is_available()
    device, model = torch.device("cuda" if gpu else "cpu"), QWEN3_30B_A3B
    if not gpu:
        model = replace(model, hidden=64, heads=2, kv_heads=1, head_dim=32, experts=16, top_k=4, expert_ffn=32)
    chosen = {name for name in options.only.split(",") if name}
    pieces, layers = [], []
    for count in options.tokens if gpu else [count // 128 for count in options.tokens]:
        torch.manual_seed(0)
        sizes = Sizes(model, count, device)
        for made in PIECES:
            for piece in made(sizes):
                if not chosen or piece.name in chosen:
                    pieces.append(measure(piece, sizes, options.repeats if gpu else 1))
                    show(pieces[-1])
        if not chosen or "layer" in chosen:
            layers.append(layer(sizes, max(options.repeats // 4, 1) if gpu else 1))
            show_layer(layers[-1])
    updates = []
    if not chosen or "update" in chosen:
        for averages in (torch.float32, torch.bfloat16):
            updates.append(update(1 << (28 if gpu else 12), averages, device, options.repeats))
            print(updates[-1], flush=True)
    result = {"copy_bytes_per_second": COPY, "pieces": pieces, "layers": layers, "updates": updates}
    print(write("kernels", result, options.out, options.commit))


if __name__ == "__main__":
    main()
