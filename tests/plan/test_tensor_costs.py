"""What tensor parallelism does to costs, to predictions, and what the rule makes of shapes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hocket.config import Config, DataConfig, MeshConfig, ModelConfig, PrecisionConfig, TrainConfig
from hocket.config.overlap import DIRECTIONS, ROLES, possible
from hocket.config.rule import Host
from hocket.config.schema import changed
from hocket.planning import program_of
from hocket.predict.cost import Pricing, costs_of
from hocket.predict.hardware import H200
from hocket.predict.simulate import simulate
from hocket.predict.tensor_costs import add_waits, cell_of, issued, products, seconds, splits_of
from hocket.program.parts import LayerKind
from hocket.program.stages import layout_of, sharding_of
from hocket.program.transformer import DENSE
from hocket.recipes import LLAMA3_8B
from hocket.resolve import Settings, resolve
from hocket.tune.rules import WORTH_PIECES as WORTH

LARGE = replace(LLAMA3_8B, hidden=8192, layers=2, heads=64, ffn=28672)
SMALL = ModelConfig(vocab=512, hidden=256, layers=2, heads=4, kv_heads=4, head_dim=64, ffn=512)


def settings(model: ModelConfig, tp: int, **changes: object) -> Settings:
    config = Config(
        model=model,
        mesh=MeshConfig(tp=tp),
        data=DataConfig(sequence_length=8192),
        precision=PrecisionConfig(compute="bf16"),
        train=TrainConfig(microbatches=2, device="cuda"),
    )
    return resolve(changed(config, {name.replace("__", "."): value for name, value in changes.items()}), Host(gpus=8))


def of(s: Settings) -> dict[str, float]:
    """Of a predicted step: its length, what waits for tensor-parallel peers, what computes."""
    timeline = simulate(program_of(s), costs_of(s, H200))
    use = timeline.ranks[0]
    assert use.busy + use.exposed_total + use.idle == pytest.approx(timeline.makespan)
    return {"step": float(timeline.makespan), "tp": float(use.exposed.get("tp", 0)), "busy": float(use.busy)}


def test_pieces_hide_and_what_is_left_is_exposed() -> None:
    alone, pieces = of(settings(LARGE, 1)), of(settings(LARGE, 4))
    apart = of(settings(LARGE, 4, overlap__tp__method=("off",)))
    assert alone["tp"] == 0
    assert 0 < pieces["tp"] < 0.5 * apart["tp"]
    assert pieces["step"] < apart["step"]
    assert alone["busy"] / 4.2 < apart["busy"] < alone["busy"] / 3.8  # but for norms, and little else


def test_memory_is_that_of_a_rank() -> None:
    alone, parts = (costs_of(settings(LARGE, tp), H200) for tp in (1, 4))
    assert parts.state_bytes[0] == pytest.approx(alone.state_bytes[0] / 4, rel=0.01)
    key = "fwd", "mlp", "dense"
    assert parts.table[key].saved_bytes == alone.table[key].saved_bytes // 4
    assert parts.table[key].inner_bytes == 2 * 8192 * 8192 * 2 * 3 // 4  # one gather, one sum, of three parts of four


def test_parts_wait_for_the_products_that_their_descriptions_name() -> None:
    """Kinds of layers with other names wait as long; a part that names one product less waits for one less."""
    s = settings(replace(LARGE, experts=8, shared_ffn=4096, dense_layers=(0,)), 4, overlap__tp__method=("off",))
    own, mlp = layout_of(s), DENSE.by_name["mlp"]
    types = LayerKind("d", (DENSE.parts[0], replace(mlp, products=("fc1",)))), LayerKind("m", own.by_kind["moe"].parts)
    other = replace(own, kinds=("d", "m"), types=types)
    tables = []
    for layout in (own, other):
        table = dict(Pricing(s.model, layout, s.tokens, 8192, sharding_of(s), H200, 2).costs().table)
        add_waits(table, s, H200, layout)
        tables.append(table)
    found, renamed = tables
    for verb in ("fwd", "bwd"):
        assert renamed[verb, "attn", "m"] == found[verb, "attn", "moe"]
        assert renamed[verb, "attn", "m"].inner_bytes > renamed[verb, "attn", "d"].inner_bytes > 0
        assert 0 < renamed[verb, "mlp", "d"].inner_seconds < found[verb, "mlp", "dense"].inner_seconds
        assert renamed[verb, "embed", ""] == found[verb, "embed", ""]


def test_an_imitated_network_between_tensor_parallel_ranks_is_predicted() -> None:
    off = {"overlap__tp__method": ("off",)}
    slow = {"train__transport": "slow", "train__slow": ("tp:0.5s",)}
    fast, late = of(settings(LARGE, 4, **off)), of(settings(LARGE, 4, **off, **slow))
    moves = 2 * (2 * (2 * 2 + 2 * 3) + 2 + 3)  # 2 microbatches, 2 layers: two parts forward and backward; embed; head
    assert late["tp"] - fast["tp"] == pytest.approx(moves * 0.5, rel=0.01)
    assert late["busy"] == pytest.approx(fast["busy"])


def reason(s: Settings, where: str) -> str:
    reasons = next(d.reasons for d in s.decisions if d.setting == "overlap.tp.method")
    return next(text for text in reasons if text.startswith(f"{where}: "))


def test_little_layers_are_not_cut() -> None:
    small, recorded = settings(SMALL, 4), settings(SMALL, 4, plan__graphs="on")
    ways = small.overlap.tp.named()
    assert ways["fc1_forward"] == "off"
    assert ways["fc1_backward"] == "off"  # nor is anything issued beside them
    assert recorded.overlap.tp.named()["fc1_backward"] == "bulk"  # whose host has issued everything
    slow = settings(LARGE, 4, train__transport="slow", train__slow=("1ms",)).overlap.tp.named()
    assert (slow["fc1_forward"], slow["fc1_backward"]) == ("off", "bulk")
    assert "the host might not issue pieces" in reason(small, "proj_forward")
    assert "would hide too little" in reason(recorded, "proj_forward")


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_the_rule_takes_what_its_model_finds_fastest(tp: int) -> None:
    s = settings(LARGE, tp)
    for role in ROLES:
        for direction in DIRECTIONS:
            cell, cut = cell_of(s, role, direction), possible(role, direction)[-1]
            whole = seconds(cell, "bulk" if cell.gathers_again else "off", 0, H200)
            in_time = [n for n in (2, 4, 8) if tp % n == 0 and issued(cell, cut, n, H200) <= whole]
            pieces = [takes for n in in_time if whole / (takes := seconds(cell, cut, n, H200)) >= WORTH]
            method, splits = s.overlap.tp.way(role, direction), splits_of(s, role, direction)
            taken = seconds(cell, method, splits, H200)
            assert taken >= products(cell, H200)
            assert taken == pytest.approx(min([whole, *pieces]))


def test_one_method_goes_to_those_that_can() -> None:
    s = settings(LARGE, 2, overlap__tp__method=("ring", "fc1_forward:off"))
    ways = {f"{role}_{direction}": s.overlap.tp.way(role, direction) for role in ROLES for direction in DIRECTIONS}
    assert {where for where, way in ways.items() if way == "ring"} == {"qkv_forward", "proj_backward", "fc2_backward"}
    assert set(ways.values()) == {"ring", "off"}
    assert "overlap.tp.method" not in {d.setting for d in s.decisions}  # what was set is not decided


def test_what_is_named_stays_and_the_rest_is_chosen() -> None:
    s = settings(LARGE, 2, overlap__tp__method=("fc1_forward:off",))
    assert s.overlap.tp.named().keys() == {f"{role}_{direction}" for role in ROLES for direction in DIRECTIONS}
    assert (s.overlap.tp.way("fc1", "forward"), s.overlap.tp.way("fc2", "backward")) == ("off", "ring")
    assert not any(text.startswith("fc1_forward") for d in s.decisions for text in d.reasons)
    assert resolve(s) == s
