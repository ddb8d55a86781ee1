"""The runs behind the tables of contenders: `hocket bench` with the words that make each of them.

    python -m benchmarks.baselines fsdp --gpus 4
    python -m benchmarks.baselines --list

Whatever follows the number of GPUs goes to `hocket bench`, such as `--blocks 3` or `--lengths 4096`. The result goes
to benchmarks/results/, or where `--out` says, and has the name of the preset, or `--name`.
"""

from __future__ import annotations

import argparse
import itertools
import shlex

from benchmarks.bench import command as bench
from benchmarks.record import RESULTS
from hocket.config.load import split

DENSE = "llama3_8b --optimizer off --train.microbatches 1"
"""Llama-3 8B sharded over all ranks: what gathers and reductions cost."""
EXPERTS = (
    "qwen3_30b_a3b --model.layers 12 --mesh.pp 1 --plan.chunks 1 --mesh.ep {gpus} --optimizer off "
    "--train.microbatches 4 --steps 2"
)
"""A quarter of Qwen3-30B-A3B with its experts spread over all ranks: what the all-to-all costs."""
EXPERTS_AGAINST = "--against bound_graph,bound,fsdp2_tuned,torchtitan,megatron_core,hocket_ce,hocket_graph_ce"
EXPERT_STEPS = (
    "qwen3_30b_a3b --model.layers 6 --mesh.pp 1 --plan.chunks 1 --mesh.ep {gpus} --optimizer off "
    "--train.microbatches 4 --plan.graphs off --overlap.ep.splits host --overlap.ep.copies per_expert "
    "--overlap.ep.merge_ends on --overlap.defer_wgrad on --blocks 4 --steps 2 "
    "--against hocket_sequential,hocket,hocket_ce,hocket_graph,hocket_graph_ce,hocket_null "
    "--variant 'merged --overlap.ep.merge_ends off --overlap.defer_wgrad off' 'deferred --overlap.ep.merge_ends off'"
)
"""What each step from a sequential plan to replayed, merged steps on copy engines buys."""
EXPERT_ROUTING = (
    "qwen3_30b_a3b --model.layers 12 --mesh.pp 1 --plan.chunks 1 --mesh.ep {gpus} --train.microbatches 4 --blocks 3 "
    "--steps 2 --against hocket_graph_ce,hocket_null --alone"
)
"""Whole steps with natural routing, and under another name with `--model.routing even`."""
REPLAYED = "--plan.graphs on --overlap.ep.splits device --train.transport copy_engine"
EXPERT_ADAMW = (
    "qwen3_30b_a3b --model.layers 12 --mesh.pp 1 --plan.chunks 1 --mesh.ep {gpus} --train.microbatches 4 --blocks 2 "
    "--steps 2 --alone --against hocket_graph_ce,hocket_null,fsdp2_tuned,megatron_core --variant "
    f"'averages_bf16 --precision.averages bf16 {REPLAYED}' 'next_step --overlap.dp.update next_step {REPLAYED}'"
)
"""Whole steps of a quarter of Qwen3-30B-A3B beside peers, and what each of two settings buys."""
SHARED_EXPERT = (
    "moonlight_16b --model.kv_lora_rank 0 --model.kv_heads 16 --model.head_dim 128 --model.layers 8 "
    "--model.bias_rate 0 --mesh.pp 1 --plan.chunks 1 --mesh.ep {gpus} --optimizer off --train.microbatches 4 "
    "--against bound_graph,bound,fsdp2_tuned,hocket_ce,hocket_graph_ce --blocks 4 --steps 2"
)
"""Layers of a 16B model with 3B active, with a shared expert, a dense first layer and plain attention."""
SKINNY = (
    "qwen3_30b_a3b --model.hidden 1024 --model.heads 16 --model.expert_ffn 384 --model.vocab 32768 --model.layers 8 "
    "--mesh.pp 1 --plan.chunks 1 --mesh.ep {gpus} --optimizer off --train.microbatches 4 --train.sequences 4 "
    "--against bound_graph,bound,exchanges,ep_sync,hocket_ce,hocket_graph_ce --blocks 4 --steps 2"
)
"""Experts so narrow that rows travel for about as long as they are worked on: the bound is the larger of the two."""
ANY_MODEL = (
    "qwen3_30b_a3b --model.layers 8 --model.aux_loss 0 --mesh.pp 1 --plan.chunks 1 --mesh.ep {gpus} --optimizer off "
    "--train.microbatches 4 --plan.graphs off --overlap.ep.splits host --steps 2 --blocks 4 "
    "--against hocket_ce,hocket_nccl,transformers_plan_ce,transformers_plan,transformers_fsdp2,hocket_null"
)
"""Eight layers of Qwen3-30B-A3B: hocket's transformer, transformers' own classes in a plan, and these under FSDP2."""
COPIES = "--overlap.ep.copies per_expert --against hocket,hocket_per_rank,hocket_ce,hocket_per_rank_ce,hocket_null"
"""A copy of a token for each rank that has some of its experts, or for each expert."""
PEERS = "--against bound,fsdp2_tuned,megatron_fsdp,megatron_fsdp_experimental,megatron_core,torchtitan,deepspeed,hocket"
SHARDED = (
    "--against bound,fsdp2_tuned,fsdp2_tuned_fp32,fully_shard,fully_shard_ce,fully_shard_null --blocks 4 --steps 2"
)
"""`hocket.fully_shard` beside FSDP2: what fits beside the activations of 4,096 tokens on 4 GPUs."""
SHARDED_LONG = "--against bound,fsdp2_tuned,fsdp2_tuned_fp32,fully_shard_ce,fully_shard_null --blocks 4 --steps 2"
SHARDED_COMPILED = "--against bound,fsdp2_tuned,fully_shard_ce,fully_shard_null --blocks 4 --steps 2 --compile on"
SHARDED_PLAN = "--against bound,hocket,hocket_ce,fully_shard_ce --blocks 4 --steps 2"
"""The same hiding, with a plan and without."""
SHARDED_STEPS = (
    "--model.layers 16 --against fully_shard_fp32_wire,fully_shard,"
    "fully_shard_ce_gather,fully_shard_ce,fully_shard_null --blocks 4 --steps 2"
)
"""What each part of `hocket.fully_shard` buys: all but one part of it on NCCL, then copy engines. Half of the layers,
so that all have room."""
SHARDED_PEERS = (
    "--model.layers 16 --against bound,megatron_fsdp,megatron_fsdp_experimental,hocket_ce,fully_shard_ce "
    "--blocks 4 --steps 2"
)
"""Beside the peers whose buffers are flat too."""
SHARDED_HOST = "--against bound,fsdp2_tuned,fully_shard,fully_shard_null --blocks 4 --steps 4"
"""So few tokens that a step takes as long as the host needs to issue it."""
SHARDED_ADAMW = (
    "llama3_8b --model.layers 16 --train.microbatches 1 --against bound,fsdp2_tuned,fsdp2_tuned_fp32,fully_shard_ce "
    "--blocks 4 --steps 2"
)
"""With the optimizer, whose state leaves room for half of the layers."""
SHARDED_ADAMW_COMPILED = (
    "llama3_8b --model.layers 16 --train.microbatches 1 --against fsdp2_tuned_fp32,fully_shard_ce,fully_shard_null "
    "--blocks 3 --steps 4 --compile on --alone"
)
"""The same with compiled layers, as FSDP2 and as `fully_shard` are trained at their best. Each has the memory for
itself, so that an H100 holds them."""
SHARDED_ADAMW_OFFLOADED = (
    "llama3_8b --model.layers 16 --train.microbatches 1 --against fully_shard,fully_shard_offload,fully_shard_null "
    "--blocks 2 --steps 1 --alone"
)
"""What shards, gradients and an optimizer in the host's memory cost."""
DENSE_FP8 = (
    "llama3_8b --model.layers 16 --train.microbatches 1 --blocks 3 --steps 4 --alone "
    "--against hocket_graph_ce,hocket_null "
    "--variant 'fp8 --precision.compute fp8 --plan.graphs on --train.transport copy_engine' "
    "'fp8_gathers --precision.compute fp8 --precision.gather fp8 --plan.graphs on --train.transport copy_engine'"
)
"""Whole steps in bf16, with products in fp8, and with weights gathered in fp8, too."""
DATA_PARALLEL = (
    "--model.layers 14 --blocks 4 --steps 2 --against bound,ddp,fsdp2_kept,fully_shard_optim,fully_shard_optim_ce"
)
"""Weights whole on every rank: as many layers as all of these programs can hold side by side."""
DATA_PARALLEL_WHOLE = (
    "--model.layers 6 --overlap.dp.strategy optim --blocks 4 --steps 2 "
    "--against bound,ddp,fully_shard_no_shard,fully_shard_optim,hocket,hocket_ce"
)
"""Main weights and their gradients whole, too, which leaves room for fewer layers; and the plan."""
DATA_PARALLEL_ADAMW = (
    "llama3_8b --model.layers 4 --train.microbatches 1 --overlap.dp.strategy optim --blocks 4 --steps 2 "
    "--against bound,ddp,fsdp2_kept,fully_shard_optim,fully_shard_optim_ce"
)
"""With the optimizer, which DDP runs on every rank for all weights."""
PIPELINE = (
    "moe_8gpu --mesh.ep 2 --train.microbatches 8 --train.sequences 4 --overlap.dp.strategy auto "
    "--against hocket,hocket_null,pipelining_interleaved,pipelining_zb,megatron_core,torchtitan"
)
"""The recipe with a pipeline of 2: sends, all-to-alls and sharding at once."""
PIPELINE_DENSE = (
    "llama3_8b --model.vocab 8192 --mesh.pp 4 --plan.chunks 2 --optimizer off "
    "--against hocket,hocket_ce,hocket_signal,pipelining_interleaved --blocks 4 --steps 2"
)
"""Llama-3 8B in a pipeline, with so few words that the head weighs on no rank: sends and bubble alone."""
EVERYTHING = (
    "qwen3_30b_a3b --model.layers 8 --model.vocab 32768 --mesh.pp 2 --plan.chunks 2 --mesh.ep {half} --optimizer off "
    "--train.microbatches 8 --against hocket,hocket_ce,hocket_signal,hocket_null --blocks 4 --steps 2"
)
"""Pipeline of 2 with 2 chunks, experts and full sharding over the other ranks: all four kinds of communication."""
CONTEXT = {
    "dense": "llama3_8b --model.layers 8 --train.microbatches 1 --blocks 3 --steps 2 --alone",
    "experts": (
        "qwen3_30b_a3b --model.layers 6 --model.aux_loss 0 --mesh.pp 1 --plan.chunks 1 --mesh.ep 1 "
        "--train.microbatches 1 --blocks 3 --steps 2 --alone"
    ),
}
"""Layers of Llama-3 8B and of Qwen3-30B-A3B, for long sequences."""
CONTEXT_SHARED = "--mesh.cp {gpus} --against hocket,hocket_null,torch_cp_gather"
"""All ranks share every sequence."""
CONTEXT_LONG = f"{CONTEXT_SHARED},torch_cp_ring,hocket_ce --optimizer off"
CONTEXT_ALL = (
    f"{CONTEXT_SHARED},torch_cp_ring,ulysses,hocket_ce --optimizer off --variant 'heads --overlap.cp.method heads'"
)
CONTEXT_WHOLE = "--mesh.cp 1 --against hocket,hocket_null --optimizer off"
"""Each rank has sequences of its own: the memory that sharing them saves."""
CONTEXT_DOCUMENTS = (
    "--data.packing on --mesh.cp {gpus} --against hocket,hocket_zigzag,hocket_null --optimizer off --plan.graphs off"
)
"""Documents share sequences: chunks that go by them, and those that do not."""

WHOLE_EXPERTS = (
    "qwen3_30b_a3b --mesh.pp 1 --plan.chunks 1 --mesh.ep {gpus} --optimizer off --train.microbatches 16 --blocks 3 "
    "--steps 1 --against hocket_ce,hocket_null,fsdp2_tuned"
)
"""All 48 layers of Qwen3-30B-A3B, for eight GPUs. Training it is in `benchmarks.training`."""

PRESETS = {
    "dense_peers": (f"{DENSE} --model.layers 16 {PEERS}", (4096,)),
    "fsdp": (f"{DENSE} {SHARDED}", (2048, 4096)),
    "fsdp_long": (f"{DENSE} {SHARDED_LONG}", (8192,)),
    "fsdp_compiled": (f"{DENSE} {SHARDED_COMPILED}", (4096,)),
    "fsdp_plan": (f"{DENSE} {SHARDED_PLAN}", (4096,)),
    "fsdp_steps": (f"{DENSE} {SHARDED_STEPS}", (4096,)),
    "fsdp_peers": (f"{DENSE} {SHARDED_PEERS}", (4096,)),
    "fsdp_host": (f"{DENSE} {SHARDED_HOST}", (256,)),
    "fsdp_adamw": (SHARDED_ADAMW, (2048, 4096, 8192)),
    "fsdp_adamw_offloaded": (SHARDED_ADAMW_OFFLOADED, (4096, 8192)),
    "fsdp_adamw_compiled": (SHARDED_ADAMW_COMPILED, (2048, 4096, 8192)),
    "dense_fp8": (DENSE_FP8, (2048, 8192)),
    "data_parallel": (f"{DENSE} {DATA_PARALLEL}", (4096, 8192)),
    "data_parallel_whole": (f"{DENSE} {DATA_PARALLEL_WHOLE}", (4096,)),
    "data_parallel_adamw": (DATA_PARALLEL_ADAMW, (8192,)),
    "expert_parallel": (f"{EXPERTS} {EXPERTS_AGAINST}", (4096, 8192)),
    "expert_steps": (EXPERT_STEPS, (4096,)),
    "expert_routing": (EXPERT_ROUTING, (4096, 8192)),
    "expert_adamw": (EXPERT_ADAMW, (4096, 8192)),
    "any_model": (ANY_MODEL, (4096, 8192)),
    "copies": (f"{EXPERTS} {COPIES}", (4096,)),
    "expert_parallel_host": (f"{EXPERTS} --against bound_graph,bound,hocket,hocket_graph --blocks 4", (256,)),
    "shared_expert": (SHARED_EXPERT, (8192,)),
    "skinny": (SKINNY, (4096,)),
    "pipeline_dense_8": (f"{PIPELINE_DENSE} --train.microbatches 8", (4096,)),
    "pipeline_dense_16": (f"{PIPELINE_DENSE} --train.microbatches 16", (4096,)),
    "everything": (EVERYTHING, (8192,)),
    "pipeline_peers": (PIPELINE, (2048,)),
    "whole_experts": (WHOLE_EXPERTS, (4096,)),
    **{f"context_{name}": (f"{of} {CONTEXT_ALL}", (32768, 65536)) for name, of in CONTEXT.items()},
    **{f"context_{name}_long": (f"{of} {CONTEXT_LONG}", (131072,)) for name, of in CONTEXT.items()},
    **{f"context_{name}_adamw": (f"{of} {CONTEXT_SHARED}", (32768,)) for name, of in CONTEXT.items()},
    **{f"context_{name}_documents": (f"{of} {CONTEXT_DOCUMENTS}", (32768, 131072)) for name, of in CONTEXT.items()},
    **{f"context_{name}_whole": (f"{of} {CONTEXT_WHOLE}", (32768, 65536)) for name, of in CONTEXT.items()},
}
"""Result -> the words of `hocket bench`, and the sequence lengths."""


def words(name: str, gpus: int, more: list[str], result: str = "") -> list[str]:
    """The words of `hocket bench` for a preset; settings in `more` take the place of its own.

    A contender of hocket is on NCCL unless its name says otherwise. The result is called as the preset, or as told.
    With `--against` in `more` the preset's variants are left out too: they are contenders.
    """
    preset, lengths = PRESETS[name]
    recipe, *rest = shlex.split(preset.format(gpus=gpus, half=gpus // 2))
    rest += ["--gpus", str(gpus), "--train.transport", "nccl", "--lengths", *map(str, lengths)]
    rest += ["--out", str(RESULTS / f"{result or name}.json")]
    changed = {flag for flag, _ in split([word for word in more if word.startswith("--")], [])}
    changed |= {"--variant"} if "--against" in changed else set()
    kept = [[flag, *values] for flag, values in split(rest, []) if flag not in changed]
    return [recipe, *itertools.chain(*kept), *more]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("preset", nargs="?", choices=list(PRESETS))
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--name", default="", help="of the result, where it is not that of the preset")
    parser.add_argument("--list", action="store_true")
    options, more = parser.parse_known_args()
    if options.list or not options.preset:
        for name in PRESETS:
            print(f"hocket bench {shlex.join(words(name, options.gpus, more))}")
        return
    bench.run(words(options.preset, options.gpus, more, options.name))


if __name__ == "__main__":
    main()
