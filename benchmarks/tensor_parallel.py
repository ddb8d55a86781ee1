"""Linear layers of tensor-parallel ranks: what does communication cost when products run beside it?

    torchrun --nproc-per-node 4 -m benchmarks.tensor_parallel [--as-of 8]

The layers of Llama-3 8B and 70B on 8,192 tokens, all ranks together as one tensor-parallel group; with `--as-of`, with
weights as narrow as those of so many ranks. *Plain* is a collective of NCCL and then a product, or a product and then a
collective, in bf16 with NCCL's own settings. Every way of `hocket/layers/tensor.py` does the same work, forward and
backward with the weight gradient; *auto* is the way that the rule chooses (`tune/rules.py`), and *products
alone* move nothing: no way can be faster. Ways take turns with plain in blocks, and a speed-up is the median of the
ratios of neighbouring blocks. Then whole layers, with attention and norms. A minute.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.options import arguments
from benchmarks.ranks import join
from benchmarks.record import write
from benchmarks.tensor_layers import ALONE, PLAIN, Bench, Call, Layer, Role, shapes, tried
from hocket.config import Config, DataConfig, MeshConfig, ModelConfig, PrecisionConfig, TrainConfig
from hocket.config.overlap import ROLES
from hocket.config.rule import Host
from hocket.layers.tensor import Way, ways_of
from hocket.recipes import LLAMA3_8B
from hocket.resolve import Settings, resolve

MODELS = {
    "llama3_8b": LLAMA3_8B,
    "llama3_70b": replace(LLAMA3_8B, hidden=8192, layers=80, heads=64, ffn=28672),
    "smoke": replace(LLAMA3_8B, hidden=1024, heads=16, ffn=2048, head_dim=64),
}


def transports(bench: Bench, hidden: int) -> dict[str, Any]:
    """Seconds of a gather and of a sum alone, by NCCL and by copies."""
    size = bench.size
    x, y = bench.new(bench.tokens // size, hidden), bench.new(bench.tokens, hidden)
    tokens = bench.ours.tokens
    assert tokens is not None

    def copied_sum() -> None:
        out = torch.empty_like(x)
        collect = tokens.collect(out)
        for step in range(1, size + 1):
            to = (bench.rank + step) % size
            collect.place(to, to + 1)
            collect.send(to, to + 1)
        collect.sum(out)

    calls: dict[str, Call] = {
        "gather, nccl": lambda: bench.plain.gather(x),
        "gather, hocket's nccl": lambda: bench.ours.gather(x),
        "gather, copies": lambda: bench.ours.begin_gather(x).get(),
        "sum, nccl": lambda: bench.plain.sum(y),
        "sum, hocket's nccl": lambda: bench.ours.sum(y),
        "sum, copies": copied_sum,
    }
    found = {name: min(bench.block(call, 10)[0] for _ in range(3)) for name, call in calls.items()}
    moved = y.nbytes * (size - 1) / size
    return {name: {"seconds": seconds, "gb_per_s": moved / seconds / 1e9} for name, seconds in found.items()}


def fastest(found: dict[str, Any], role: str, size: int) -> Way:
    """Of what was tried, the way that was fastest in each direction."""
    best = {}
    for direction in ("forward", "backward"):
        by_name = {case.name: case for case in (PLAIN, *tried(role, direction, size))}
        name = min(by_name, key=lambda name: found[direction][name]["seconds"])
        best[direction] = by_name[name].way
    forward, backward = best["forward"], best["backward"]
    return Way(forward.forward, backward.backward, (forward.splits[0], backward.splits[1]))


def settings(model: ModelConfig, size: int, tokens: int) -> Settings:
    """What the rule is asked."""
    config = Config(
        model=model,
        mesh=MeshConfig(tp=size),
        data=DataConfig(sequence_length=tokens),
        train=TrainConfig(microbatches=1, transport="nccl", device="cuda"),
        precision=PrecisionConfig(compute="bf16"),
    )
    return resolve(config, Host(gpus=size))


def model_of(name: str, asked: Mapping[str, Any]) -> ModelConfig:
    """A model of which one of `tp` ranks has what one of so many ranks as are asked for would have."""
    model, times = MODELS[name], max(1, asked["as_of"] // asked["tp"])
    return replace(model, heads=model.heads // times, kv_heads=max(1, model.kv_heads // times), ffn=model.ffn // times)


def measure_model(bench: Bench, model: ModelConfig) -> dict[str, Any]:
    """All roles and both directions of a model's layer, then the layer."""
    auto = ways_of(settings(model, bench.size, bench.tokens))
    found: dict[str, Any] = {"transport": transports(bench, model.hidden), "roles": {}}
    ways: dict[str, Way] = {}
    for role in ROLES:
        one = Role(bench, role, shapes(model)[role])
        found["roles"][role] = {direction: one.measure(direction, auto[role]) for direction in ("forward", "backward")}
        ways[role] = fastest(found["roles"][role], role, bench.size)
    for name, of in (("ways", ways), ("auto", auto)):
        found[name] = {role: [of[role].forward, of[role].backward, of[role].splits] for role in ROLES}
    found["layer"] = Layer(bench, model).measure(ways, auto)
    return found


def show(name: str, found: dict[str, Any]) -> None:
    """The figures, for people. Behind each, what the host takes to issue it."""
    print(f"== {name}")
    for what, figures in found["transport"].items():
        print(f"{what:24} {1e3 * figures['seconds']:7.3f} ms  {figures['gb_per_s']:6.0f} GB/s")
    for role, directions in found["roles"].items():
        for direction, ways in directions.items():
            most = ways["plain"]["seconds"] / ways[ALONE.name]["seconds"]
            print(f"{role} {direction}: at most {most:.2f}x")
            for way, figures in ways.items():
                times = f"{1e3 * figures['seconds']:7.3f} ms  {figures['tflop_per_s']:5.0f} TFLOP/s"
                print(f"  {way:24} {times}  {figures['speedup']:5.2f}x  host {1e3 * figures['host_seconds']:6.3f} ms")
    print("fastest", found["ways"])
    print("auto", found["auto"])
    for way, figures in found["layer"].items():
        host = f"host {1e3 * figures['host_seconds']:6.3f} ms"
        print(f"layer {way:16} {1e3 * figures['seconds']:7.3f} ms  {figures['speedup']:5.3f}x  {host}")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--models", nargs="*", default=["llama3_8b", "llama3_70b"], choices=MODELS)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--as-of", type=int, default=0, help="weights as narrow as those of so many ranks")
    parser.add_argument("--rounds", type=int, default=6)
    options = parser.parse_args()
    rank, device = join()
    world = dist.get_world_size()
    widest = max(MODELS[name].hidden for name in options.models)
    with torch.cuda.stream(torch.cuda.Stream(device)):
        bench = Bench(rank, device, options.tokens, widest, options.rounds)
        result: dict[str, Any] = {"tp": world, "as_of": options.as_of, "tokens": options.tokens, "models": {}}
        for name in options.models:
            result["models"][name] = measure_model(bench, model_of(name, result))
            if rank == 0:
                show(name, result["models"][name])
    if rank == 0:
        name = "tensor_parallel" + (f"_{world}" if world != 4 else "") + (f"_as_{options.as_of}" * bool(options.as_of))
        print(write(name, result, options.out, options.commit))
    dist.barrier()
    bench.groups.destroy()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
