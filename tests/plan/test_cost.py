"""The cost model against known sizes of models, published figures and sums over whole programs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from hocket import recipes
from hocket.config import MeshConfig, ModelConfig, Purpose, Strategy
from hocket.model.transformer import Chunk
from hocket.predict.cost import CostTable, Pricing
from hocket.predict.hardware import H200, HARDWARE, LAPTOP, Link
from hocket.predict.part_sizes import (
    FUSED,
    STOCK,
    Formulas,
    PartSize,
    Shapes,
    model_flops_per_token,
    ranks_per_token,
    size_of,
)
from hocket.predict.part_sizes import unit_weights as weights_of
from hocket.predict.simulate import Kind, simulate
from hocket.program.lower import build_program
from hocket.program.ops import Layout, Op, Program
from hocket.program.parts import Unit
from hocket.program.shard import Sharding
from hocket.tune.choose import balanced
from tests.helpers.chunks import init_chunk
from tests.helpers.plans import planned

LLAMA = ModelConfig(vocab=128256, hidden=4096, layers=32, heads=32, kv_heads=8, head_dim=128, ffn=14336)
QWEN = ModelConfig(
    vocab=151936, hidden=2048, layers=48, heads=32, kv_heads=4, head_dim=128,
    experts=128, top_k=8, expert_ffn=768, qk_norm=True,
)  # fmt: skip
GPT_OSS = recipes.GPT_OSS_20B
FREE = replace(H200, clock=0.0)
"""As if it had all the power it could use."""
SMALL = ModelConfig(
    vocab=512, hidden=64, layers=6, heads=4, kv_heads=2, head_dim=16, ffn=160, dense_layers=(0, 3),
    experts=8, top_k=2, expert_ffn=48, shared_ffn=32,
)  # fmt: skip


def table(model: ModelConfig, mesh: MeshConfig, tokens: int, seq: int, chunks: int = 1) -> CostTable:
    return Pricing(model, layout_of(model, mesh, chunks), tokens, seq, sharding_of(mesh), H200, 2).costs()


def sharding_of(mesh: MeshConfig, strategy: Strategy = "optim_grads_params") -> Sharding:
    return Sharding(mesh.dp, mesh.dp // mesh.ep, strategy)


def layout_of(model: ModelConfig, mesh: MeshConfig, chunks: int = 1) -> Layout:
    return Layout(kinds=model.layer_kinds(), pp=mesh.pp, chunks=chunks, ep=mesh.ep, tied=model.tied)


def program_of(model: ModelConfig, mesh: MeshConfig, chunks: int, microbatches: int) -> Program:
    return build_program(layout_of(model, mesh, chunks), microbatches, planned(chunks=chunks), sharding_of(mesh))


def unit_weights(model: ModelConfig, unit: Unit, kind: str, ep: int) -> int:
    return weights_of(model, layout_of(model, MeshConfig(ep=ep)), unit, kind)


def part_size(model: ModelConfig, part: str, kind: str, seq: int, ep: int, f: Formulas = STOCK) -> PartSize:
    layout = Layout((kind or "dense",), ep=ep)
    return size_of(layout.part(part, 0 if kind else -1), Shapes(model, layout, seq, f))


@pytest.mark.parametrize(
    ("model", "parameters"),
    [
        (LLAMA, 8_030_261_248),
        (QWEN, 30_532_122_624),
        (replace(LLAMA, tied=True), 8_030_261_248 - 128256 * 4096),
        (replace(LLAMA, qkv_bias=True, o_bias=True), 8_030_261_248 + 32 * (2 * 4096 + 2 * 1024)),
        (GPT_OSS, 20_914_757_184),
        (recipes.QWEN3_NEXT_80B_A3B, 79_674_391_296),
        (replace(LLAMA, qk_norm=True, qk_norm_over="whole"), 8_030_261_248 + 32 * (4096 + 1024)),
    ],
)
def test_units_add_up_to_the_known_number_of_parameters(model: ModelConfig, parameters: int) -> None:
    total = unit_weights(model, "embed", "", 1) + (0 if model.tied else unit_weights(model, "head", "", 1))
    for kind in model.layer_kinds():
        total += unit_weights(model, "dense", kind, 1)
        total += unit_weights(model, "experts", kind, 1) if kind.startswith("moe") else 0
    assert total == parameters


@pytest.mark.parametrize(("window", "seq"), [(3, 8), (1, 5), (8, 8), (100, 8)])
def test_a_window_costs_the_pairs_of_tokens_in_it(window: int, seq: int) -> None:
    """Up to half a pair for each token: of the diagonal, as everywhere."""
    model = replace(LLAMA, window=window, full_layers=(1,))
    width = model.heads * model.head_dim
    pairs = sum(min(t + 1, window) for t in range(seq)) - 0.5 * min(window, seq) * (
        1 - window / seq if window < seq else 1
    )
    found = part_size(model, "attn", "dense_window", seq, 1).core
    assert found == pytest.approx(4 * width * pairs / seq, rel=0.5 / window)
    full = part_size(model, "attn", "dense", seq, 1).core
    assert found == full if window >= seq else found < full
    flops = model_flops_per_token(model, seq)
    assert flops == pytest.approx(model_flops_per_token(replace(model, window=0), seq) - 31 * 3 * (full - found))


def test_layers_with_a_window_take_less_time() -> None:
    """Each in its own place: so stages are balanced by what theirs take."""
    model = replace(GPT_OSS, full_layers=(22, 23))
    costs = table(model, MeshConfig(pp=2), 8192, 8192)
    seconds = [costs.of(Op("fwd", "attn", 0, 0, layer)).seconds for layer in (0, 23)]
    assert seconds[0] < seconds[1]
    layout = layout_of(model, MeshConfig(pp=2))
    sizes = balanced(layout, costs)
    assert sizes[0] > sizes[1]
    assert sizes != balanced(layout, table(replace(model, full_layers=(0, 1)), MeshConfig(pp=2), 8192, 8192))


def test_expert_parallel_ranks_share_the_experts() -> None:
    assert unit_weights(QWEN, "experts", "moe", 8) * 8 == unit_weights(QWEN, "experts", "moe", 1)
    assert unit_weights(QWEN, "dense", "moe", 8) == unit_weights(QWEN, "dense", "moe", 1)


def test_layers_cost_the_flops_and_bytes_of_the_published_tables() -> None:
    """Figures of docs on 8 GPUs: Llama 8B at 2k tokens, Qwen3-30B-A3B with ep 8 at 8k tokens of 4k sequences."""
    dense = table(LLAMA, MeshConfig(dp=8), 2048, 2048)
    flops = dense.table["fwd", "attn", "dense"].flops + dense.table["fwd", "mlp", "dense"].flops
    assert flops == pytest.approx(0.928e12, rel=1e-3)
    assert dense.table["gather", "dense", "dense"].wire_bytes == pytest.approx(382e6, rel=2e-3)
    moe = table(QWEN, MeshConfig(dp=8, ep=8), 8192, 4096)
    flops = moe.table["fwd", "attn", "moe"].flops + moe.table["fwd", "experts", "moe"].flops
    assert flops == pytest.approx(1.207e12, rel=1e-3)
    assert moe.table["fwd", "dispatch", "moe"].wire_bytes == pytest.approx(235e6, rel=2e-3)
    assert moe.table["gather", "dense", "moe"].wire_bytes == pytest.approx(33.5e6, rel=2e-3)
    assert moe.table["gather", "experts", "moe"].wire_bytes == 0


def test_one_copy_per_rank_sends_fewer_rows_with_labels_and_keeps_none_that_came_back() -> None:
    mesh, t, d = MeshConfig(dp=8, ep=8), 8192, 2048
    per_expert = table(QWEN, mesh, t, 4096).table
    layout = replace(layout_of(QWEN, mesh), per_rank=True)
    per_rank = Pricing(QWEN, layout, t, 4096, sharding_of(mesh), H200, 2).costs().table
    rows = t * ranks_per_token(QWEN, 8)
    assert rows == pytest.approx(5.34 * t, rel=1e-3)
    for verb in ("fwd", "bwd"):
        out, back = per_rank[verb, "dispatch", "moe"], per_rank[verb, "combine", "moe"]
        assert out.wire_bytes == pytest.approx(rows * (2 * d + 64) * 7 / 8, rel=1e-3)
        assert back.wire_bytes == pytest.approx(rows * 2 * d * 7 / 8, rel=1e-3)
    assert per_rank["bwd", "dispatch", "moe"].output_bytes == t * 8 * (2 * d + 64)  # as many rows as there can be
    saved = {
        part: (per_rank["fwd", part, "moe"].saved_bytes, per_expert["fwd", part, "moe"].saved_bytes)
        for part in ("experts", "unpermute")
    }
    assert saved["unpermute"][0] == 0
    assert saved["experts"][0] == saved["experts"][1]  # which apply the weights, and so keep nothing of what they make
    biased = Pricing(replace(QWEN, expert_bias=True), layout, t, 4096, sharding_of(mesh), H200, 2).costs().table
    assert biased["fwd", "experts", "moe"].saved_bytes - saved["experts"][0] == t * 8 * 2 * d


def test_times_are_flops_over_rates_plus_bytes_over_bandwidth() -> None:
    mesh, t, weights = MeshConfig(dp=8), 2048, 3 * 4096 * 14336
    cost = Pricing(LLAMA, layout_of(LLAMA, mesh), t, 2048, sharding_of(mesh), FREE, 2).costs().table
    mlp, operands = cost["fwd", "mlp", "dense"], (t * (2 * 4096 + 3 * 14336) + weights + 4096) * 2
    product = 2 * t * weights / FREE.gemm_flops + 2 / 3 * operands / FREE.kernel_bandwidth + FREE.gap
    assert cost["wgrad", "mlp", "dense"].seconds == pytest.approx(product)
    assert mlp.seconds == pytest.approx(product + mlp.memory_bytes / FREE.kernel_bandwidth)
    assert cost["bwd", "mlp", "dense"].memory_bytes == 2 * mlp.memory_bytes
    core = 2 * t * 2048 * 4096
    assert cost["fwd", "attn", "dense"].flops == 2 * t * 2 * 4096 * (4096 + 1024) + core
    assert cost["bwd", "attn", "dense"].flops == cost["fwd", "attn", "dense"].flops + 1.5 * core
    gather = cost["gather", "dense", "dense"]
    link = H200.links["gather"]
    assert gather.memory_bytes == gather.wire_bytes // (7 * 2) * (4 + 2)  # its shard is cast; 7 ranks get it in bf16
    assert gather.seconds == pytest.approx(
        link.latency + gather.wire_bytes / link.bandwidth + gather.memory_bytes / H200.memory_bandwidth
    )
    p2p = t * 4096 * 2
    assert cost["recv", "act", ""].wire_bytes == cost["recv", "grad", ""].output_bytes == p2p


def test_few_tokens_cost_reading_the_weights_and_no_op_is_quicker_than_its_kernels_start() -> None:
    few = table(LLAMA, MeshConfig(dp=2), 8, 8).table
    read = (3 * 4096 * 14336 + 4096 + 8 * (2 * 4096 + 3 * 14336)) * 2
    assert few["wgrad", "mlp", "dense"].seconds == pytest.approx(read / H200.kernel_bandwidth + H200.gap)
    assert few["bwd", "embed", ""].seconds == pytest.approx(H200.gap, rel=0.01)
    assert Link(1e-3, 1e9).seconds(0) == 0
    assert Link(1e-3, 1e9).seconds(1e6) == pytest.approx(2e-3)


def test_model_flops_are_six_per_active_weight_and_half_of_the_attention_square() -> None:
    per_layer = 2 * 4096 * (4096 + 1024) + 3 * 4096 * 14336
    head = 128256 * 4096
    assert model_flops_per_token(LLAMA, 8192) == 6 * (32 * per_layer + head) + 32 * 6 * 8192 * 4096
    active = 48 * (2 * 2048 * (4096 + 512) + 2048 * 128 + 8 * 3 * 2048 * 768) + 151936 * 2048
    assert model_flops_per_token(QWEN, 1) == 6 * active + 48 * 6 * 4096


@pytest.mark.parametrize("mesh", [MeshConfig(), MeshConfig(pp=2, dp=4, ep=2), MeshConfig(pp=3, dp=2, ep=2)])
def test_ops_of_a_program_do_the_flops_of_the_model(mesh: MeshConfig) -> None:
    """All but the backward of the attention core, where flash attention computes its scores again: 2.5 against 2."""
    tokens, seq, microbatches = 96, 32, 3
    built = program_of(SMALL, mesh, 1, microbatches)
    costs = table(SMALL, mesh, tokens, seq)
    spent = sum(costs.of(op).flops for _, _, op in built)
    again = 0.5 * part_size(SMALL, "attn", "moe", seq, 1).core * SMALL.layers
    assert spent == pytest.approx(tokens * microbatches * (model_flops_per_token(SMALL, seq) + again))


def test_every_op_of_a_program_has_a_cost_and_only_sends_and_releases_are_free() -> None:
    for mesh in (MeshConfig(pp=2, dp=4, ep=2), MeshConfig(dp=2)):
        built = program_of(SMALL, mesh, 1, 2)
        costs = table(SMALL, mesh, 128, 64)
        free = {op.verb for _, _, op in built if costs.of(op).seconds == 0}
        assert free <= {"send", "release"}
        for _, _, op in built:
            kind = SMALL.kinds()[op.layer] if op.layer >= 0 else ""
            handed = op.verb == "bwd" and part_size(SMALL, op.part, kind, 64, mesh.ep).grad
            assert (costs.of(op).output_bytes > 0) == (op.verb in ("fwd", "recv") or bool(handed))


def test_memory_held_for_the_whole_step_is_state_and_slots() -> None:
    mesh = MeshConfig(pp=2, dp=4, ep=2)
    built = program_of(SMALL, mesh, 1, 2)
    costs = table(SMALL, mesh, 128, 64)
    weights = {name: unit_weights(SMALL, name, "moe", 2) for name in ("embed", "dense", "experts", "head")}
    weights["dense"] = max(weights["dense"], unit_weights(SMALL, "dense", "dense", 2))
    for rank, mine in enumerate((("embed", "dense", "experts"), ("dense", "experts", "head"))):
        slots = sum((built.weight_slots.get(u, 0) + built.grad_slots.get(u, 0)) * weights[u] * 2 for u in mine)
        assert costs.fixed_bytes(built, rank) == costs.state_bytes[rank] + slots
    assert set(built.weight_slots) == {"embed", "dense", "experts", "head"}
    # rank 0: the embedding, layer 0 (dense), layers 1 and 2; fp32 weight and two averages
    dense = weights["embed"] + unit_weights(SMALL, "dense", "dense", 2) + 2 * unit_weights(SMALL, "dense", "moe", 2)
    assert costs.state_bytes[0] == pytest.approx((dense / 4 + 2 * weights["experts"] / 2) * 12, rel=1e-3)
    assert costs.of(Op("wgrad", "experts", 0, 0, 1)).grad_bytes == weights["experts"] / 2 * 4
    attn, mlp = (costs.of(Op("wgrad", part, 0, 0, 0)).grad_bytes for part in ("attn", "mlp"))
    assert attn == mlp == pytest.approx(unit_weights(SMALL, "dense", "dense", 2) / 4 * 4, rel=1e-3)


@pytest.mark.parametrize(("dp", "copy"), [(1, 2), (2, 0)])
def test_only_weights_that_are_held_whole_and_not_fp32_have_a_second_copy(dp: int, copy: int) -> None:
    mesh = MeshConfig(dp=dp)
    layout, sharding = layout_of(SMALL, mesh), sharding_of(mesh)
    single, half = (Pricing(SMALL, layout, 64, 64, sharding, LAPTOP, b).costs().state_bytes[0] for b in (4, 2))
    assert half * 12 == single * (12 + copy)


def test_strategies_differ_in_what_is_kept_sent_and_added_up() -> None:
    mesh, key = MeshConfig(dp=4), ("reduce", "dense", "dense")
    built = {}
    for strategy in get_args(Strategy):
        built[strategy] = Pricing(LLAMA, layout_of(LLAMA, mesh), 64, 64, sharding_of(mesh, strategy), H200, 2).costs()
    sent = {strategy: costs.table[key].wire_bytes for strategy, costs in built.items()}
    assert sent["no_shard"] == 2 * sent["optim"] == 2 * sent["optim_grads"] == 2 * sent["optim_grads_params"]
    state = {strategy: costs.state_bytes[0] for strategy, costs in built.items()}
    assert state["optim"] == state["optim_grads"] == state["optim_grads_params"]
    assert state["no_shard"] == pytest.approx(state["optim"] * 4 * 14 / 12, rel=1e-3)
    add, weights = Op("add", "dense", 0, 0, 0, slot=0), unit_weights(LLAMA, "dense", "dense", 1)
    assert [costs.of(add).grad_bytes for costs in built.values()][:2] == [0, 4 * weights]
    assert built["optim"].of(add).seconds == 0  # products do it
    wgrad = Op("wgrad", "mlp", 0, 0, 0, slot=0)
    assert built["optim"].of(wgrad).seconds > built["optim_grads"].of(wgrad).seconds


def test_adding_weight_gradients_up_costs_what_was_measured() -> None:
    """`benchmarks.weight_grads`: of 28672 x 4096 and 4,096 tokens, 1,456 us where it is added, 1,376 where written."""
    more = {}
    for strategy in ("optim", "optim_grads"):
        mesh = MeshConfig(dp=4)
        costs = Pricing(LLAMA, layout_of(LLAMA, mesh), 4096, 4096, sharding_of(mesh, strategy), FREE, 2).costs()
        more[strategy] = costs.of(Op("wgrad", "mlp", 0, 0, 0, slot=0)).seconds
    per_weight = (more["optim"] - more["optim_grads"]) / (3 * 4096 * 14336)
    assert per_weight == pytest.approx((1456e-6 - 1376e-6) / (28672 * 4096), rel=0.6)


def test_less_to_multiply_runs_at_a_higher_clock() -> None:
    """The clocks of bounds: 1.50 to 1.53 GHz of Llama-3 8B, 1.66 to 1.70 GHz of 12 of Qwen3-30B-A3B at 8,192 tokens."""
    price = {}
    moe = replace(QWEN, layers=12)
    for model, name, mesh in ((LLAMA, "mlp", MeshConfig(dp=4)), (moe, "experts", MeshConfig(dp=4, ep=4))):
        kind = model.kinds()[0]
        key = "fwd", name, kind
        slow, fast = (
            Pricing(model, layout_of(model, mesh), 8192, 8192, sharding_of(mesh), hardware, 2).costs().table[key]
            for hardware in (H200, FREE)
        )
        flops = slow.flops / H200.gemm_flops
        price[name] = H200.clock * flops / (slow.seconds - fast.seconds + flops)
    assert price["mlp"] == pytest.approx(1.51e9, rel=0.03)
    assert price["experts"] == pytest.approx(1.68e9, rel=0.03)


@pytest.mark.parametrize("name", HARDWARE)
def test_predictions_respond_to_links_as_they_must(name: str) -> None:
    chosen, mesh = HARDWARE[name], MeshConfig(pp=2, dp=4, ep=2)
    built = program_of(SMALL, mesh, 1, 4)

    def predict(links: Mapping[Kind | Purpose, Link]) -> tuple[float, float]:
        costs = Pricing(SMALL, built.layout, 4096, 64, sharding_of(mesh), replace(chosen, links=links), 2).costs()
        timeline = simulate(built, costs)
        return float(timeline.makespan), sum(float(use.exposed_total) for use in timeline.ranks)

    makespan, exposed = predict(chosen.links)
    slow = {kind: Link(10 * x.latency, x.bandwidth / 10) for kind, x in chosen.links.items()}
    free = {kind: Link(0.0, 1e18) for kind in chosen.links}
    assert predict(slow)[0] > makespan > predict(free)[0]
    assert 0 < predict(free)[1] < exposed / 10  # a reduce still adds to the main gradients


def test_kernels_move_and_keep_less_than_the_operations_of_torch() -> None:
    assert (H200.formulas, LAPTOP.formulas) == (FUSED, STOCK)
    for part, kind in (("attn", "dense"), ("attn", "moe"), ("mlp", "dense"), ("experts", "moe"), ("head", "")):
        model = LLAMA if kind == "dense" else QWEN
        stock, fused = (part_size(model, part, kind, 4096, 4, f=formulas) for formulas in (STOCK, FUSED))
        assert fused.traffic < stock.traffic
        assert fused.saved < stock.saved
        assert fused.kept <= stock.kept
        assert (fused.gemm, fused.grouped, fused.weights) == (stock.gemm, stock.grouped, stock.weights)


def test_what_kernels_keep_of_an_attention() -> None:
    """Norm: input and scaled. Heads: before norm and positions, and after. Query, key, value, output of the core."""
    d, width, kv = QWEN.hidden, QWEN.heads * QWEN.head_dim, QWEN.kv_heads * QWEN.head_dim
    assert part_size(QWEN, "attn", "dense", 4096, 1, f=FUSED).saved == 2 * d + (width + kv) + 2 * width + 2 * kv
    without = replace(QWEN, qk_norm=False)
    assert part_size(without, "attn", "dense", 4096, 1, f=FUSED).saved == 2 * d + 2 * width + 2 * kv


@pytest.mark.parametrize("queries", [0, 24])
def test_latent_attention_is_priced_by_its_own_widths(queries: int) -> None:
    """Parameters and products as torch counts them, and what torch keeps for backward, but for masks and the like."""
    model = ModelConfig(
        vocab=64, hidden=64, layers=1, heads=4, ffn=64, kv_lora_rank=40, q_lora_rank=queries, qk_nope_head_dim=24,
        qk_rope_head_dim=8, v_head_dim=16,
    )  # fmt: skip
    layer: Any = init_chunk(Chunk(model, range(1)), 0).layer(0)
    size, seq = part_size(model, "attn", "dense", 32, 1, f=STOCK), 32
    assert size.weights == sum(p.numel() for name, p in layer.named_parameters() if name.startswith("attn"))
    with FlopCounterMode(display=False) as counter:
        layer.forward_attn(torch.randn(1, seq, 64))
    counts = {str(op): count for op, count in counter.get_flop_counts()["Global"].items()}
    whole = 2 * seq * seq * model.heads * (model.key_width + model.v_head_dim)  # both halves of the square
    assert counts["aten.mm"] == 2 * seq * size.gemm
    assert 2 * seq * size.core == whole
    assert sum(counts.values()) - counts["aten.mm"] in (0, whole)  # torch does not count all kernels of CPUs
    fused = part_size(model, "attn", "dense", 32, 1, f=FUSED)
    assert fused.masked - size.masked == (32 + 512) * model.heads * (model.key_width - model.v_head_dim)


def test_the_experts_of_deepseek_v3_are_most_of_its_work() -> None:
    """6 FLOPs for each of 36.6 billion active weights of products, and those of attention at 4,096 tokens."""
    model = recipes.DEEPSEEK_V3
    flops = model_flops_per_token(model, 4096)
    attention = 3 * 4096 * 61 * 128 * (192 + 128)
    assert flops == pytest.approx(6 * (37.55e9 - 129280 * 7168) + attention, rel=2e-3)
