"""Groups on several hosts: where their ranks are, what their links carry, and what is chosen because of that."""

from __future__ import annotations

from collections import Counter
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.config import Config, MeshConfig, Purpose, Strategy
from hocket.config.rule import Host
from hocket.config.schema import changed
from hocket.explain.build import simulated, units
from hocket.machine import host_for_plan
from hocket.planning import adapter_seconds, as_json, network, predict, program_of, report
from hocket.predict.cost import CostTable, costs_of
from hocket.predict.hardware import H200, HARDWARE, STEP, Spread, across_hosts, hardware_of, hosts_of, spread_of
from hocket.predict.simulate import ends_step, simulate
from hocket.program.mesh import Mesh
from hocket.program.ops import Program
from hocket.recipes import recipe
from hocket.resolve import Settings, resolve
from hocket.sizes import duration
from tests.helpers.calls import calls

PURPOSES: tuple[Purpose, ...] = get_args(Purpose)


def settled(name: str, host: Host | None = None, **changes: Any) -> Settings:
    config = changed(recipe(name), {key.replace("__", "."): value for key, value in changes.items()})
    return resolve(config, host or host_for_plan(config))


# ------------------------------------------------------------------------------------------------ where ranks are


@st.composite
def meshes(draw: st.DrawFn) -> tuple[MeshConfig, int]:
    pp, shard, tp, copies = (draw(st.integers(1, n)) for n in (5, 24, 5, 3))
    cp = draw(st.sampled_from([n for n in range(1, shard + 1) if shard % n == 0]))
    ep = draw(st.sampled_from([n for n in range(1, shard * tp + 1) if shard * tp % n == 0]))
    mesh = MeshConfig(pp=pp, dp=shard // cp * copies, cp=cp, ep=ep, tp=tp, shard=shard if copies > 1 else 0)
    return mesh, draw(st.sampled_from([n for n in range(1, mesh.world + 1) if mesh.world % n == 0]))


@settings(max_examples=150, deadline=None)
@given(meshes(), st.booleans())
def test_groups_are_on_the_hosts_on_which_their_ranks_are(drawn: tuple[MeshConfig, int], turning: bool) -> None:
    m, each = drawn
    mesh = Mesh(**vars(m), turning=turning)
    for purpose in PURPOSES:
        groups = mesh.groups(purpose)
        found = spread_of(m, purpose, each)
        if not groups:
            assert found == Spread(1, 1, 1)
            continue
        counts = [Counter(rank // each for rank in group) for group in groups]
        widest = max(map(len, counts)), min(min(count.values()) for count in counts)
        assert (found.ranks, found.hosts, found.fewest) == (len(groups[0]), *widest), purpose


def test_where_sixty_thousand_ranks_are_is_known_at_once() -> None:
    mesh = MeshConfig(pp=8, dp=8192, ep=128)
    spread_of.cache_clear()
    assert calls(lambda: [spread_of(mesh, purpose, 8) for purpose in PURPOSES]) < 2 * mesh.world
    assert spread_of(mesh, "a2a", 8) == Spread(128, 16, 8)
    assert spread_of(mesh, "gather_experts", 8) == Spread(64, 64, 1)


# ------------------------------------------------------------------------------------------------ links


def test_weights_that_a_host_shares_are_gathered_inside_of_it() -> None:
    """Only the sum over replicas crosses hosts, with 8 bytes per element of a shard, once a step."""
    wide = settled("llama3_8b", mesh__pp=1, mesh__dp=64, plan__chunks=1, train__microbatches=4)
    narrow = settled("llama3_8b", mesh__pp=1, mesh__dp=64, mesh__shard=8, plan__chunks=1, train__microbatches=4)
    assert across_hosts(wide)["gather_dense"] == Spread(64, 8, 8)
    assert {"gather_dense", "reduce_dense"}.isdisjoint(across_hosts(narrow))
    assert across_hosts(narrow)["replicas"] == Spread(8, 8, 1)
    assert hardware_of(narrow).link("replicas").bandwidth < hardware_of(wide).link("reduce_dense").bandwidth
    before, after = (costs_of(c, hardware_of(c)) for c in (wide, narrow))
    key = "dense", "dense"
    assert after.table["gather", *key].seconds < before.table["gather", *key].seconds
    assert after.state_bytes[0] == pytest.approx(8 * before.state_bytes[0], rel=0.01)
    alone = costs_of(changed(narrow, {"mesh.dp": 8, "mesh.shard": 0}), H200).table["reduce", *key].seconds
    kept = after.table["update", *key].output_bytes
    sums = hardware_of(narrow).link("replicas").seconds(2 * kept * 7 / 8)
    assert after.table["reduce", *key].seconds == alone
    assert after.table["reduce", *key].once_seconds == pytest.approx(sums)


def test_the_sum_over_replicas_ends_a_step() -> None:
    """Nothing computes beside most of it where the network is slow, and each rank's adapter carries all of it."""
    sizes = {"mesh__pp": 1, "mesh__dp": 16, "plan__chunks": 1, "model__layers": 4, "train__microbatches": 4}
    found = settled("llama3_8b", **sizes, mesh__shard=8, network__link="1GB/s")
    program, costs = program_of(found), costs_of(found, hardware_of(found))
    times, counted = predict(found, program, hardware_of(found)), len(found.model.kinds()) + 2
    kept = sum(costs.of(op).once_bytes for op in program.ranks[0] if ends_step(op, program))
    assert sum(ends_step(op, program) for op in program.ranks[0]) == counted
    assert adapter_seconds(found, program, costs) == pytest.approx(kept / 1e9, rel=1e-3)
    assert times.ranks[0].exposed["reduce"] > 0.8 * kept / 1e9


def test_links_of_one_host_are_those_of_the_hardware() -> None:
    for name in ("tiny", "llama3_8b", "moe_8gpu"):
        for bandwidth in ("auto", "1GB/s"):
            found = settled(name, network__link=bandwidth)
            assert hardware_of(found) is HARDWARE[hardware_of(found).name]
            assert network(found) == ""
    config = recipe("llama3_8b")
    assert hardware_of(config) is H200, "what is open is on one host"


def test_rings_have_the_adapters_of_all_their_ranks_and_others_their_own() -> None:
    """Two stages on four hosts: dp 16 of each on two; experts over 8 ranks, or over 16."""
    base: dict[str, Any] = {"mesh__pp": 2, "mesh__dp": 16, "network__link": "40GB/s,5us", "model__layers": 8}
    found = settled("qwen3_30b_a3b", **base, mesh__ep=8)
    links, usual = hardware_of(found), H200.links
    assert hosts_of(found) == 4
    assert across_hosts(found).keys() == set(PURPOSES) - {"a2a", "tp", "cp", "replicas"}
    assert links.link("gather_dense").bandwidth == usual["gather"].bandwidth, "8 adapters carry more than NVLink"
    assert links.link("gather_dense").latency == pytest.approx(usual["gather"].latency + 5e-6 + 8 * STEP)
    assert links.link("reduce_experts").bandwidth == 40e9, "of each pair, one is on either host"
    assert links.link("reduce_experts").latency == pytest.approx(usual["reduce"].latency + 5e-6)
    assert links.link("a2a") == usual["a2a"]
    assert links.link("pp_fwd") == links.link("pp_bwd")
    assert (links.link("pp_fwd").bandwidth, links.link("control").bandwidth) == (40e9, 8 * 40e9)
    assert links.link("control").latency == pytest.approx(usual["reduce"].latency + 4 * 5e-6), "up a tree and down"
    three = hardware_of(settled("llama3_8b", mesh__dp=24)).link("control")
    assert three.latency == pytest.approx(usual["reduce"].latency + 4 * 10e-6), "as high as that of four"
    wide = hardware_of(settled("qwen3_30b_a3b", **base, mesh__ep=16)).link("a2a")
    assert wide.bandwidth == pytest.approx(40e9 * 15 / 8), "half of the peers are on the other host"
    assert wide.latency == pytest.approx(usual["a2a"].latency + 5e-6)
    slow = hardware_of(settled("qwen3_30b_a3b", **base | {"network__link": "100Gb/s,5us"}, mesh__ep=8))
    assert slow.link("gather_dense").bandwidth == 8 * 12.5e9


def test_tokens_of_tensor_parallel_ranks_cross_hosts_too() -> None:
    found = settled("llama3_8b", mesh__dp=1, mesh__tp=8, network__ranks_per_host=4, network__link="10GB/s")
    assert hardware_of(found).links["tp"].bandwidth == 40e9
    assert hardware_of(found).copies.bandwidth == 10e9
    assert found.overlap.tp.way("fc1", "forward") == "off", "pieces are copied inside of a host"
    inside = settled("llama3_8b", mesh__dp=2, mesh__tp=4, network__ranks_per_host=4, network__link="10GB/s")
    assert hardware_of(inside).links["tp"] == H200.links["tp"]


FAST_TO_SLOW = ("400GB/s", "48GB/s", "1GB/s")


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("llama3_8b", {"mesh.pp": 2, "mesh.dp": 6, "mesh.tp": 2}),
        ("qwen3_30b_a3b", {"mesh.pp": 2, "mesh.dp": 16, "mesh.ep": 8, "mesh.tp": 1}),
        ("tiny", {"mesh.pp": 2, "mesh.dp": 4, "mesh.ep": 2}),
    ],
)
def test_more_hosts_are_never_cheaper(name: str, mesh: dict[str, Any]) -> None:
    """With the same choices: hosts that are cut into equal pieces; each op alone, and the step."""
    config = changed(recipe(name), mesh)
    found = resolve(config, Host(gpus=config.mesh.world if config.precision.compute == "bf16" else 0))
    program = program_of(found)
    for bandwidth in FAST_TO_SLOW:
        assert_never_cheaper(found, program, bandwidth)


def assert_never_cheaper(found: Settings, program: Program, bandwidth: str) -> None:
    world, tables = found.mesh.world, dict[int, CostTable]()
    seconds: dict[int, float] = {}
    for each in (n for n in range(world, 0, -1) if world % n == 0):
        ways = {"network.ranks_per_host": each, "network.link": f"{bandwidth},1us"}
        there = changed(found, ways)
        costs = tables[each] = costs_of(there, hardware_of(there))
        seconds[each] = float(simulate(program, costs).makespan)
        for larger in (n for n in tables if n % each == 0):
            for key, cost in tables[larger].table.items():
                assert costs.table[key].seconds >= cost.seconds, (key, larger, each)
                assert costs.table[key].wire_bytes == cost.wire_bytes
            assert seconds[each] >= seconds[larger] * (1 - 1e-9)
    assert tables[world] == costs_of(found, HARDWARE[hardware_of(found).name]), "one host costs what it did"
    assert seconds[1] > seconds[world]


# ------------------------------------------------------------------------------------------------ choices


def exposed(found: Settings) -> float:
    kinds = as_json(found, program_of(found), hardware_of(found))["predicted"]["ranks"][0]["exposed"]
    return float(kinds["gather"] + kinds["reduce"])


def test_sharded_weights_hide_less_behind_a_slow_network() -> None:
    """Two hosts as fast as one, of which eight adapters are; then slower and slower ones."""
    times = [exposed(settled("llama3_8b", mesh__dp=16, network__link=way)) for way in FAST_TO_SLOW]
    assert times[0] <= times[1] < times[2]
    assert times[2] > 10 * times[0]


def test_less_is_shared_out_over_a_slow_network() -> None:
    open_ = {"mesh__dp": 16, "train__microbatches": 4, "overlap__dp__strategy": "auto", "model__layers": 8}
    fast, slow = (settled("llama3_8b", **open_, network__link=way) for way in ("400GB/s", "1GB/s"))
    ways = get_args(Strategy)
    assert ways.index(slow.overlap.dp.strategy) < ways.index(fast.overlap.dp.strategy)
    (why,) = (d.reason for d in slow.decisions if d.setting == "overlap.dp.strategy")
    assert "instead of" in why


@pytest.mark.parametrize(("tp", "ep", "whole"), [(1, 8, True), (1, 16, False), (2, 8, True), (2, 16, False)])
def test_rows_are_stored_into_memory_of_one_host_only(tp: int, ep: int, whole: bool) -> None:
    small = changed(recipe("qwen3_30b_a3b"), {"model.layers": 4, "mesh.pp": 1, "mesh.dp": 16, "plan.chunks": 1})
    config = changed(small, {"mesh.ep": ep, "mesh.tp": tp})
    found = resolve(config, host_for_plan(config))
    config = changed(config, {"overlap.ep.splits": "device"})
    assert ("a2a" not in across_hosts(found)) == whole
    assert found.train.transport == "nccl"
    if whole:
        assert resolve(config, host_for_plan(config)).overlap.ep.splits == "device"
    else:
        assert found.overlap.ep.splits == "host"
        with pytest.raises(ValueError, match="are not all on one"):
            resolve(config, host_for_plan(config))


def test_a_published_step_of_two_hosts_is_of_the_predicted_size() -> None:
    """NVIDIA's Megatron Bridge, Qwen3-30B-A3B on 16 H100s in bf16, experts over two hosts by plain all-to-alls.

    Its skill page on expert parallelism, of July 2026, has 41.25 s for 1,024 sequences of 4,096, and 31.31 s with the
    all-to-alls beside compute. GPUs and network take less; with links as inside of one host it would be far off.
    """
    sizes = {"mesh__pp": 1, "mesh__dp": 16, "mesh__ep": 16, "plan__chunks": 1, "data__sequence_length": 4096}
    way = {"train__microbatches": 64, "overlap__ep__copies": "per_expert", "model__routing": "even"}
    for merge, published in (("off", 41.25), ("on", 31.31)):
        found = settled("qwen3_30b_a3b", **sizes, **way, overlap__ep__merge=merge)
        assert found.batch == 1024
        short = changed(found, {"train.microbatches": 8})
        on_one = changed(short, {"network.ranks_per_host": 16})
        tables = (costs_of(each, hardware_of(each)) for each in (short, on_one))
        far, close = (8 * float(simulate(program_of(short), costs).makespan) for costs in tables)
        assert 0.6 < far / published < 1
        assert close / published < 0.5


# ------------------------------------------------------------------------------------------------ what is said


def test_who_crosses_hosts_at_what_rate_is_said_and_who_said_so() -> None:
    unset = settled("llama3_8b", mesh__dp=16)
    text = network(unset)
    assert "8 ranks on a host" in text
    assert "(assumed, not set: network.link)" in text
    assert "gather_dense" in text
    assert "16 ranks on 2 hosts at 316 GB/s" in text
    half_set = network(settled("llama3_8b", mesh__dp=16, network__link="5GB/s"))
    assert "after 10us (assumed, no time in network.link)" in half_set
    assert "at 40 GB/s" in half_set
    assert "granted" not in network(settled("llama3_8b", mesh__dp=16, network__link="5GB/s,2us"))
    assert as_json(unset, program_of(unset), hardware_of(unset))["network"].startswith(text)
    told = " ".join(report(unset, program_of(unset), hardware_of(unset), 100, 0).split())
    assert text in told
    assert network(resolve(unset)) == text, "resolving again forgets nothing"


def test_how_long_an_adapter_is_busy_is_told_and_that_predictions_leave_out_who_shares_it() -> None:
    """Gradients alone: both hosts get each other's half, 1 / 8 of it through each adapter of a host."""
    sizes = {"mesh__dp": 16, "overlap__dp__strategy": "no_shard", "model__layers": 2}
    found = settled("llama3_8b", **sizes, network__link="10MB/s,0us")
    step, program = simulated(found)
    assert program is not None
    weights = sum(row["count"] * row["elements"] for row in units(found))
    assert program.adapter == pytest.approx(2 * weights * 15 / 16 * 2 / 8 / 10e6, rel=1e-3)
    assert f"a rank's adapter is busy for {duration(program.adapter)}" in step.note
    assert "longer than the step" not in step.note
    slow = {"network__link": "1MB/s", "network__ranks_per_host": 1}
    shared = settled("qwen3_30b_a3b", mesh__pp=2, mesh__dp=8, **slow)
    note = simulated(shared)[0].note
    assert "longer than the step: lanes share it" in note
    assert as_json(shared, program_of(shared), hardware_of(shared))["network"] == note, "hocket plan says the same"
    assert "adapter is" not in simulated(settled("llama3_8b", mesh__dp=8))[0].note


def test_hosts_are_what_the_launcher_started_or_what_is_said() -> None:
    found = settled("llama3_8b", Host(gpus=4, workers=16, local_workers=4), mesh__dp=16)
    assert found.network.ranks_per_host == 4
    assert settled("llama3_8b", mesh__dp=12).network.ranks_per_host == 6, "all hosts have the same number"
    assert settled("llama3_8b", mesh__dp=72, network__ranks_per_host=72).network.link == "auto", "one host"
    halves = settled("llama3_8b", mesh__dp=8, network__ranks_per_host=4)
    assert halves.host == Host(gpus=8, workers=8, local_workers=4, tokenizer_vocab=256)
    assert across_hosts(halves)["gather_dense"] == Spread(8, 2, 4)
    assert Config().network.ranks_per_host == "auto"
