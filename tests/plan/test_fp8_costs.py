"""What products in fp8 are predicted to take and to hold, beside what they took on an H200."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hocket.config import ModelConfig
from hocket.config.rule import Host
from hocket.config.schema import changed
from hocket.explain.build import simulated
from hocket.predict.cost import CostTable, Pricing, costs_of
from hocket.predict.hardware import H200
from hocket.predict.part_sizes import Fp8
from hocket.program.ops import Layout, Op
from hocket.program.shard import Sharding
from hocket.recipes import recipe
from hocket.resolve import resolve
from tests.helpers.plans import planned

MEASURED: dict[str, Any] = json.loads(
    (Path(__file__).resolve().parents[2] / "benchmarks/results/fp8_products.json").read_text()
)
ALL = ("forward", "dgrad", "wgrad")
DENSE = ModelConfig(hidden=4096, heads=32, kv_heads=8, head_dim=128, ffn=14336, layers=1, experts=0)
WIDE, NARROW = (
    ModelConfig(
        hidden=2048, heads=32, kv_heads=4, head_dim=64, layers=1, experts=64, expert_ffn=width, top_k=8, dense_layers=()
    )
    for width in (1536, 768)
)


def costs(model: ModelConfig, tokens: int, fp8: Fp8 | None) -> CostTable:
    layout = Layout(kinds=model.layer_kinds())
    return Pricing(model, layout, tokens, tokens, Sharding(2, 2), H200, 2, fp8=fp8).costs()


def milliseconds(table: CostTable, parts: Sequence[str]) -> float:
    """Of the parts of a layer, forward, backward and weight gradients."""
    found = [c for (verb, part, _), c in table.table.items() if verb in ("fwd", "bwd", "wgrad") and part in parts]
    return 1e3 * sum(float(cost.seconds) for cost in found)


@pytest.mark.parametrize(
    ("what", "model", "tokens", "within"),
    [
        (("dense layer", "2048", "attn", "mlp"), DENSE, 2048, 0.08),
        (("dense layer", "8192", "attn", "mlp"), DENSE, 8192, 0.08),
        (("experts", "wide", "experts"), WIDE, 8192, 0.08),
        (("experts", "narrow", "experts"), NARROW, 8192, 0.08),
        (("MoE layer", "wide", "attn", "experts", "unpermute"), WIDE, 8192, 0.12),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, tuple) else "",
)
@pytest.mark.parametrize(("way", "casts"), [("fp8", 1.0), ("fp8, weights cast before", 0.0)], ids=["each", "once"])
def test_layers_take_what_they_took(
    what: tuple[str, ...], model: ModelConfig, tokens: int, within: float, way: str, casts: float
) -> None:
    """Narrow MoE layers are left out: they took up to a third longer, and a remark says that they may lose."""
    kind, name, *parts = what
    took = next(entry["milliseconds"] for entry in MEASURED[kind] if entry["name"] == f"{name} {way}")
    assert milliseconds(costs(model, tokens, Fp8(ALL, casts=casts)), parts) == pytest.approx(took, rel=within)


def test_only_the_products_that_are_named_and_the_layers_between_are_faster() -> None:
    model = replace(DENSE, layers=8)
    plain, all_of_them = costs(model, 8192, None), costs(model, 8192, Fp8(ALL))
    some, ends = costs(model, 8192, Fp8(("forward",))), costs(model, 8192, Fp8(ALL, ends=(1, 1)))
    for verb in ("fwd", "bwd", "wgrad"):
        key = (verb, "mlp", "dense")
        own, fast = (float(table.table[key].seconds) for table in (plain, all_of_them))
        assert own / fast > 1.3
        if verb != "fwd":  # a clock that runs slower for fewer products in fp8 is all that differs
            assert float(some.table[key].seconds) == pytest.approx(own, rel=0.1)
        assert fast < float(ends.table[key].seconds) < own
    assert plain.table["fwd", "head", ""].flops == all_of_them.table["fwd", "head", ""].flops
    assert plain.table["fwd", "mlp", "dense"].flops == all_of_them.table["fwd", "mlp", "dense"].flops


def test_memory_is_that_of_casts_and_of_what_is_kept() -> None:
    plain, fast = costs(DENSE, 8192, None), costs(DENSE, 8192, Fp8(ALL))
    weights = 218_112_000
    assert fast.slot_bytes[0]["dense"][0] - plain.slot_bytes[0]["dense"][0] == 2 * weights
    kept = [table.of(Op("bwd", "mlp", 0, 0, 0)).saved_bytes for table in (plain, fast)]
    assert 2 * kept[1] == kept[0], "gradients that wait for weight gradients, a byte each"


def test_a_plan_prices_its_precision() -> None:
    config = changed(replace(planned(), model=DENSE), {"precision.compute": "bf16", "data.sequence_length": 8192})
    fast = changed(config, {"precision.compute": "fp8"})
    key = ("fwd", "mlp", "dense")
    assert float(costs_of(fast, H200).table[key].seconds) < float(costs_of(config, H200).table[key].seconds)


def test_what_is_gathered_in_fp8_moves_half_and_is_cast_once() -> None:
    wide, eight = costs(DENSE, 2048, Fp8(ALL)), costs(DENSE, 2048, Fp8(ALL, gathered=("dense",)))
    weights = 218_112_000
    gathers = [table.table["gather", "dense", "dense"] for table in (wide, eight)]
    assert gathers[0].wire_bytes == 2 * gathers[1].wire_bytes
    assert wide.slot_bytes[0]["dense"][0] - eight.slot_bytes[0]["dense"][0] == 2 * weights
    assert eight.state_bytes[0] - wide.state_bytes[0] == weights // 2, "the cast shard of one of two ranks"
    for verb in ("fwd", "bwd"):
        assert float(eight.table[verb, "mlp", "dense"].seconds) < float(wide.table[verb, "mlp", "dense"].seconds)
    assert float(eight.table["step", "all", ""].seconds) > float(wide.table["step", "all", ""].seconds)
    head = ("gather", "head", "")
    assert wide.table[head].wire_bytes == eight.table[head].wire_bytes


def test_auto_gathers_in_fp8_where_that_is_shorter() -> None:
    """Gathers take longer than layers of few tokens. Where no product is in fp8, or no weight is gathered, bf16."""
    host = Host(gpus=2, gpu="NVIDIA H200", capability=(9, 0))
    few = changed(recipe("llama3_8b"), {"precision.compute": "fp8", "mesh.dp": 2, "data.sequence_length": 2048})
    found = resolve(few, host)
    decision = next(d for d in found.decisions if d.setting == "precision.gather")
    assert (found.precision.gather, found.overlap.dp.update) == ("fp8", "end")
    assert "with gather = bf16" in decision.reason
    for changes in ({"precision.compute": "bf16"}, {"overlap.dp.strategy": "no_shard"}):
        assert resolve(changed(few, changes), host).precision.gather == "bf16"
    assert (
        resolve(changed(few, {"overlap.dp.update": "next_step", "plan.graphs": "off"}), host).precision.gather == "bf16"
    )


def test_an_explanation_says_what_fp8_would_save() -> None:
    host = Host(gpus=2, gpu="NVIDIA H200", capability=(9, 0))
    dense = changed(recipe("llama3_8b"), {"mesh.dp": 2, "train.microbatches": 4})
    notes = [simulated(resolve(changed(dense, {"precision.compute": way}), host))[0].note for way in ("bf16", "fp8")]
    assert ["precision.compute = fp8 makes compute" in note for note in notes] == [True, False]
