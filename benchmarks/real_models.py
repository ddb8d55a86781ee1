"""Whole training steps of models as they come, under torch's FSDP2 and under `hocket.fully_shard`.

    torchrun --nproc-per-node 2 -m benchmarks.real_models            llama, t5 and vit, into results/real_models_*.json
    torchrun --nproc-per-node 2 -m benchmarks.real_models llama --against fsdp2 hocket hocket_nccl
    torchrun --nproc-per-node 2 -m benchmarks.real_models t5 --compile --tokens 2048
    torchrun --nproc-per-node 2 -m benchmarks.real_models --tiny     a few layers, shown only; on CPUs without GPUs

The loop is the same for all: bf16 compute, fp32 weights and reductions, fused AdamW. One unit per layer. FSDP2 fetches
two layers ahead. `hocket` is `fully_shard` called as FSDP2 is: on GPUs of one host, copy engines move its bytes.
`hocket_nccl` is the same by NCCL. Forms take turns; times are medians of the slowest rank, and of rounds; memory is the
most that a step has in use, on the rank with the most. The result is written after every row.
"""

from __future__ import annotations

import gc
import importlib
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp

import hocket
from benchmarks.options import arguments
from benchmarks.ranks import join
from benchmarks.record import write
from hocket.runtime.world import everyone, join_world

AHEAD = 2
"""Layers that are fetched ahead."""
WARM = 3
FORMS = ("fsdp2", "hocket", "hocket_nccl")


@dataclass(frozen=True)
class Made:
    """A model with its layers, and the loss of a batch of about so many tokens."""

    model: nn.Module
    layers: list[nn.Module]
    loss: Callable[[int], Tensor]


def llama(tiny: bool, device: torch.device) -> Made:
    """The sizes of Llama-3.2 3B."""
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden, inner, layers, heads, groups, vocab = (64, 128, 2, 4, 2, 256) if tiny else (3072, 8192, 28, 24, 8, 128256)
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=groups, vocab_size=vocab, max_position_embeddings=16384,
    )  # fmt: skip
    with device:
        model: Any = LlamaForCausalLM(config)

    def loss(tokens: int) -> Tensor:
        ids = torch.randint(config.vocab_size, (1, tokens), device=device)
        return model(input_ids=ids, labels=ids, use_cache=False).loss

    return Made(model, list(model.model.layers), loss)


def t5(tiny: bool, device: torch.device) -> Made:
    """The sizes of T5 v1.1 XL, 2.8 billion parameters, with one table of words; a quarter of the tokens are targets."""
    from transformers import T5Config, T5ForConditionalGeneration

    hidden, inner, layers, heads, width, vocab = (64, 128, 2, 4, 16, 256) if tiny else (2048, 5120, 24, 32, 64, 32128)
    config = T5Config(
        d_model=hidden, d_ff=inner, num_layers=layers, num_decoder_layers=layers, num_heads=heads, d_kv=width,
        vocab_size=vocab, feed_forward_proj="gated-gelu",
    )  # fmt: skip
    config.decoder_start_token_id = config.pad_token_id = 0
    with device:
        model: Any = T5ForConditionalGeneration(config)

    def loss(tokens: int) -> Tensor:
        rows = max(1, tokens // 1024)
        ids = torch.randint(config.vocab_size, (rows, tokens // rows), device=device)
        return model(input_ids=ids, labels=ids[:, : max(1, ids.shape[1] // 4)].contiguous(), use_cache=False).loss

    return Made(model, [*model.encoder.block, *model.decoder.block], loss)


def vit(tiny: bool, device: torch.device) -> Made:
    """ViT-g/14 of timm, 1.0 billion parameters; 257 tokens an image. Needs timm."""
    timm = importlib.import_module("timm")
    name, more = ("vit_tiny_patch16_224", {"depth": 2}) if tiny else ("vit_giant_patch14_224", {})
    with device:
        model = timm.create_model(name, num_classes=1000, **more)

    def loss(tokens: int) -> Tensor:
        images = torch.randn(max(1, tokens // 257), 3, 224, 224, device=device, dtype=torch.bfloat16)
        labels = torch.randint(1000, (len(images),), device=device)
        return nn.functional.cross_entropy(model(images).float(), labels)

    return Made(model, list(model.blocks), loss)


MODELS: dict[str, Callable[[bool, torch.device], Made]] = {"llama": llama, "t5": t5, "vit": vit}


def shard(form: str, made: Made) -> None:
    """Shard a model, layer by layer, by FSDP2's calls but for `hocket_nccl`."""
    if form == "hocket_nccl":  # options are of a whole model
        precision = hocket.Precision(compute=torch.bfloat16, wire=torch.float32)
        options = hocket.ShardOptions(prefetch=AHEAD, transport="nccl")
        layers = set(made.layers)
        hocket.fully_shard(made.model, units=lambda _, module: module in layers, precision=precision, options=options)
        return
    policy = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard: Any = fsdp.fully_shard if form == "fsdp2" else hocket.sharding.fully_shard
    for layer in made.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(made.model, mp_policy=policy)
    if form == "fsdp2":
        for i, layer in enumerate(made.layers):
            ahead, behind = made.layers[i + 1 : i + 1 + AHEAD], made.layers[max(0, i - AHEAD) : i][::-1]
            assert isinstance(layer, fsdp.FSDPModule)
            layer.set_modules_to_forward_prefetch(ahead)  # pyrefly: ignore[bad-argument-type]
            layer.set_modules_to_backward_prefetch(behind)  # pyrefly: ignore[bad-argument-type]


@dataclass(frozen=True)
class Row:
    """What was measured of one form of one model."""

    milliseconds: float
    gigabytes: float
    loss: float
    rounds: tuple[float, ...] = ()
    """Milliseconds of each round."""


def both(before: Row, row: Row) -> Row:
    """Rounds of a form as one: the median of their times, and the most memory."""
    rounds = (*before.rounds, *row.rounds)
    return Row(statistics.median(rounds), max(before.gigabytes, row.gigabytes), row.loss, rounds)


def measure(name: str, form: str, device: torch.device, tiny: bool, tokens: int, steps: int, compiled: bool) -> Row:
    """Train one form of a model for some steps. Every rank calls this."""
    gc.collect()  # the model before: its loss held its graph
    torch.manual_seed(0)
    made = MODELS[name](tiny, device)
    if compiled:
        for layer in made.layers:
            layer.compile()
    shard(form, made)
    optimizer = torch.optim.AdamW(made.model.parameters(), lr=1e-5, fused=True)
    torch.manual_seed(1 + dist.get_rank())
    times, loss = list[float](), torch.zeros(())
    for step in range(WARM + steps):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
        dist.barrier()
        start = time.perf_counter()
        loss = made.loss(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times += [time.perf_counter() - start] * (step >= WARM)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    rows = everyone((statistics.median(times), peak))
    if compiled:
        torch.compiler.reset()
    took = 1e3 * max(seconds for seconds, _ in rows)
    return Row(took, max(most for _, most in rows) / 1e9, loss.item(), (took,))


def line(key: str, form: str, row: Row, first: Row) -> str:
    """A row beside the first one."""
    speed, memory = first.milliseconds / row.milliseconds, row.gigabytes / (first.gigabytes or 1)
    took = f"{row.milliseconds:9.1f} ms {speed:.3f} x  {row.gigabytes:6.2f} GB {memory:.3f} x"
    return f"{key:24} {form:22} {took}  loss {row.loss:.3f}"


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("models", nargs="*", choices=[[], *MODELS])
    parser.add_argument("--against", nargs="+", choices=FORMS, default=FORMS[:2])
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 4096, 8192])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=2, help="how often forms take turns, each made anew")
    options = parser.parse_args()
    if torch.cuda.is_available():
        _, device = join()
    else:
        device = torch.device("cpu")
        join_world(False, 600.0)
    for name in options.models or MODELS:
        result: dict[str, Any] = {"compiled": options.compile, "steps": options.steps, "models": {}}
        for tokens in [64] if options.tiny else options.tokens:
            key = f"{name}, {tokens} tokens"
            rows = dict[str, Row]()
            for form in [*options.against] * options.rounds:
                row = measure(name, form, device, options.tiny, tokens, options.steps, options.compile)
                rows[form] = both(rows[form], row) if form in rows else row
                result["models"][key] = {form: asdict(row) for form, row in rows.items()}
                if dist.get_rank() == 0:
                    print(line(key, form, rows[form], rows[options.against[0]]), flush=True)
                if dist.get_rank() == 0 and not options.tiny:
                    write(f"real_models_{name}", result, options.out, options.commit)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
