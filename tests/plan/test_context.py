"""Plans of ranks that share sequences: proved, and predicted to hide what they gather."""

from __future__ import annotations

from typing import Any

import pytest

from hocket.config import ModelConfig
from hocket.config.overlap import CONTEXT as METHOD
from hocket.explain.build import overlaps
from hocket.planning import predict, program_of
from hocket.predict.hardware import HARDWARE
from hocket.predict.part_sizes import unit_weights
from hocket.program.check import assert_valid
from hocket.program.lower import build_forward, build_program
from hocket.program.ops import Layout
from hocket.program.shard import Sharding
from tests.helpers.dryrun import dry_run
from tests.helpers.plans import planned, small
from tests.test_explain import settled

LAYOUTS: dict[str, Layout] = {
    "dense": Layout(("dense",) * 4, cp=2),
    "gathered again alone": Layout(("dense", "dense_window") * 2, cp=4, recompute=("kv:3", "attn:1")),
    "gathered again": Layout(("moe", "dense") * 2, pp=2, ep=2, cp=2, recompute=("attn", "kv:1", "mlp")),
    "heads": Layout(("dense", "dense_window"), cp=2, heads=True),
    "heads, experts": Layout(("dense", "moe", "moe_window", "moe") * 2, pp=2, chunks=2, ep=2, cp=2, heads=True),
    "heads, recomputed": Layout(("moe",) * 3, ep=4, cp=4, heads=True, recompute=("attn:1", "experts")),
    "experts": Layout(("dense", "moe", "moe_window", "moe") * 2, pp=2, chunks=2, ep=2, cp=2),
    "recomputed": Layout(("moe",) * 3, ep=4, cp=4, recompute=("attn:1", "experts")),
    "norms behind": Layout(
        ("dense",) * 4, pp=2, cp=2, types=tuple(kind.keeping_input() for kind in Layout(("dense",), cp=2).layer_types)
    ),
}


@pytest.mark.parametrize("how", [{}, dict(merge="off"), dict(defer_wgrad="off"), dict(update="next_step")], ids=str)
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_plan_is_proved(name: str, how: dict[str, Any]) -> None:
    layout, config = LAYOUTS[name], planned(**how)
    program = build_program(layout, 6, config, Sharding(4, 2))
    assert_valid(program)
    forward = build_forward(program, config, Sharding(4, 2))
    assert_valid(forward, forward_only=True)
    for seed in range(3):
        dry_run(program, seed)
        dry_run(forward, seed, forward_only=True)


@pytest.mark.parametrize(
    "model",
    [
        small(qk_norm=True, qkv_bias=True, o_bias=True, sinks=True, attn_gate=True),
        small(qk_norm=True, qk_norm_over="whole", experts=0),
        small(kv_lora_rank=12, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5),
        small(kv_lora_rank=12, q_lora_rank=20, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5),
    ],
)
def test_parts_have_the_weights_of_the_layer_that_was_cut(model: ModelConfig) -> None:
    kind = "moe" if model.experts else "dense"
    ways: list[dict[str, Any]] = [{}, {"cp": 2}, *([] if model.latent or model.sinks else [{"cp": 2, "heads": True}])]
    whole, *cut = (unit_weights(model, Layout((kind,), **way), "dense", kind) for way in ways)
    assert all(weights == whole for weights in cut)


BATCH = dict(train__sequences=1, train__microbatches=1, hardware__gpu="h200")


@pytest.mark.parametrize(
    ("changes", "method", "reason"),
    [
        (dict(mesh__cp=2, data__sequence_length=32768), "gather", "with method = heads"),
        (dict(mesh__cp=16, model__kv_heads=32, data__sequence_length=65536), "heads", "with method = gather"),
        (dict(mesh__cp=2, model__sinks=True), "gather", "sinks are weights of all heads"),
        (dict(mesh__cp=64, data__sequence_length=65536), "gather", "64 ranks cannot have as many of 32 heads each"),
    ],
)
def test_the_shorter_step_decides_what_travels(changes: dict[str, Any], method: str, reason: str) -> None:
    s = settled("llama3_8b", **{"mesh__dp": 1, **BATCH, **changes})
    decision = next(d for d in s.decisions if d.setting == METHOD)
    assert (s.overlap.cp.method, s.overlap.cp.method) == (method, decision.value)
    assert reason in decision.reason


def test_explain_tells_what_is_gathered_again_and_what_it_hides_under() -> None:
    sizes = dict(mesh__dp=1, mesh__cp=8, data__sequence_length=65536, **BATCH)
    once, again = (settled("llama3_8b", plan__recompute=parts, **sizes) for parts in ((), ("kv",)))
    rows = [[row for row in overlaps(s) if row.axis == "cp"] for s in (once, again)]
    assert [len(each) for each in rows] == [1, 2]
    assert (rows[1][1].setting, rows[1][1].state) == ("plan.recompute", "on")
    assert "keys and values are gathered" in next(d for d in again.decisions if d.setting == METHOD).reason
    before, after = (predict(s, program_of(s), HARDWARE["h200"]).ranks[0] for s in (once, again))
    assert before.peak_bytes - after.peak_bytes > 25 * 4096 * 65536  # 4 KiB a token, of most layers
    assert after.exposed["cp"] < 1.1 * before.exposed["cp"]


def test_keys_and_values_are_predicted_to_travel_under_compute() -> None:
    s = settled("llama3_8b", mesh__dp=2, mesh__cp=4, data__sequence_length=32768, train__microbatches=1)
    program = program_of(s)
    timeline = predict(s, program, HARDWARE["h200"])
    of_cp = [span for op, span in zip(program.ranks[0], timeline.spans[0], strict=True) if op.lane == "cp"]
    busy, exposed = sum(span.end - span.start for span in of_cp), timeline.ranks[0].exposed["cp"]
    assert len(of_cp) == 2 * s.model.layers
    assert 0 < busy < timeline.makespan / 10
    assert exposed < 0.02 * busy
