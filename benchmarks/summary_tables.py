"""The table of results in short: one row for each shape, hocket beside the fastest of the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from benchmarks.bench.record import origins
from benchmarks.contender_tables import tokens_of, workloads
from benchmarks.markdown import Result, table


class Row(NamedTuple):
    """A row of the summary: one workload of a result file, and the contender of hocket's that it shows."""

    file: str
    what: str
    tokens: str
    ours: str
    short: bool = False
    """Whether the README has it, too."""


WHOLE = "Llama-3 8B, 16 compiled layers, with AdamW"
EXPERTS = "Qwen3-30B-A3B, 12 layers, with AdamW"

ROWS = (
    Row("fsdp_adamw_compiled", WHOLE, "2,048", "fully_shard_ce", short=True),
    Row("fsdp_adamw_compiled", WHOLE, "4,096", "fully_shard_ce"),
    Row("fsdp_adamw_compiled", WHOLE, "8,192", "fully_shard_ce"),
    Row("expert_adamw", EXPERTS, "4,096", "hocket_graph_ce", short=True),
    Row("expert_adamw", EXPERTS, "8,192", "hocket_graph_ce"),
    Row("context_dense", "8 layers of Llama-3 8B, sequences shared", "32,768", "hocket"),
    Row("context_dense_long", "8 layers of Llama-3 8B, sequences shared", "131,072", "hocket"),
    Row("context_experts", "6 layers of Qwen3-30B-A3B, sequences shared", "32,768", "hocket_ce", short=True),
    Row("fsdp", "Llama-3 8B, sharded weights", "2,048", "fully_shard_ce"),
    Row("fsdp", "Llama-3 8B, sharded weights", "4,096", "fully_shard_ce"),
    Row("fsdp_long", "Llama-3 8B, sharded weights", "8,192", "fully_shard_ce"),
    Row("fsdp_peers", "Llama-3 8B, 16 layers, sharded weights", "4,096", "fully_shard_ce"),
    Row("data_parallel", "Llama-3 8B's layers, whole weights", "8,192", "fully_shard_optim_ce"),
    Row("data_parallel_adamw", "the same with AdamW", "8,192", "fully_shard_optim_ce"),
    Row("expert_parallel", "Qwen3-30B-A3B's experts", "4,096", "hocket_graph_ce"),
    Row("expert_parallel_long", "Qwen3-30B-A3B's experts", "8,192", "hocket_ce"),
    Row("expert_parallel_2", "Qwen3-30B-A3B's experts, 8 layers", "8,192", "hocket_ce"),
    Row("shared_expert", "16B with a shared expert", "8,192", "hocket_ce"),
    Row("skinny", "narrow experts", "16,384", "hocket_ce"),
    Row("pipeline_dense_8", "Llama-3 8B in a pipeline", "4,096", "hocket", short=True),
    Row("pipeline_dense_2", "half of it on two ranks", "4,096", "hocket_ce"),
    Row("everything", "pipeline, experts and full sharding", "8,192", "hocket_ce"),
    Row("any_model", "Qwen3-MoE of transformers, 8 layers", "8,192", "transformers_plan", short=True),
)


def rows_of(words: str) -> list[Row]:
    """The rows of `all` results, of the `short` table, or of the result files that are named."""
    if words in ("all", "short"):
        return [row for row in ROWS if row.short or words == "all"]
    return [row for row in ROWS if row.file in words.split()]


def summary(rows: list[Row], results: Mapping[str, Result]) -> str:
    """A row for each shape. `results` are by the name of their file."""
    head = ["step", "tokens", "GPUs", "hocket", "fastest of the others", "speed over it (range)", "share of the bound"]
    return table(head, [_cells(row, results[row.file]) for row in rows])


def _cells(row: Row, result: Result) -> list[str]:
    (found,) = (one for one in workloads([result]) if tokens_of(one) == row.tokens)
    ours, peer = found["contenders"][row.ours], found["best_peer"]
    many, _, _, gpu, *_ = found.get("origin", origins(result)[0])["hardware"].split()  # 2 x NVIDIA H100 80GB HBM3
    gpus = f"{many} {gpu}"
    other, speed = "none runs it", "-"
    if peer:
        other = f"*{peer}*, {1e3 * found['contenders'][peer]['seconds']:,.0f} ms"
        ratio = ours["speed_over"][peer]
        speed = f"{ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})"
    bound = ours["speed_over"].get(found["bound"])
    share = f"{bound['median']:.2f}" if bound else "-"
    mine = f"*{row.ours}*, {1e3 * ours['seconds']:,.0f} ms"
    return [row.what, row.tokens, gpus, mine, other, speed, share]
