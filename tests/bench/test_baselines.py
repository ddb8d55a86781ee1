"""The committed benchmarks make sense, and their tables can be made."""

from __future__ import annotations

import pytest

from benchmarks import eight_gpus
from benchmarks.aim_tables import expert_aims
from benchmarks.baselines import PRESETS, words
from benchmarks.bench import variants
from benchmarks.bench.command import Bench, changes, check, chosen, for_bench
from benchmarks.bench.contender import CONTENDERS
from benchmarks.bench.report import BOUNDS
from benchmarks.contender_tables import contenders, host_cost, settings, shared_memory
from benchmarks.sharding_tables import OURS, PEER, PEER_FP32, aims
from hocket.commands.options import parse
from hocket.config.rule import Host
from hocket.resolve import resolve


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("gpus", [4, 8])
def test_presets_are_commands_that_work_on_gpus(name, gpus):
    options, origins = parse(Bench, "bench", words(name, gpus, []))
    settings = resolve(for_bench(options, origins), Host(gpus=gpus), origins)
    names = chosen(options.against, settings)
    check(tuple(name for name in names if not CONTENDERS[name].package), settings, origins)
    own = {one.name: changes(one.name, one.words, settings) for one in variants.read(options.variant)}
    assert set(own) <= set(variants.settled((*names, *own), own, for_bench(options, origins), settings.host, origins))
    assert settings.world == gpus
    assert settings.precision.compute == "bf16"
    assert settings.train.clip == 0
    assert any(CONTENDERS[name].ours and not CONTENDERS[name].bound for name in names)
    assert set(BOUNDS) & set(names)
    whole = name in ("pipeline_peers", "dense_fp8", "expert_routing") or "adamw" in name
    assert options.optimizer == ("on" if whole else "off")
    assert options.compile == ("on" if name.endswith("compiled") else "off")
    if name.startswith("expert"):
        assert settings.mesh.ep == gpus
        assert settings.overlap.ep.merge == "on"


def test_steps_of_eight_gpus_are_predicted_for_commands_that_there_are():
    """Every step can be settled, and each named preset measures it; one small step is simulated."""
    found = list(eight_gpus.steps())
    assert {each.mesh.world for _, each, _ in found} == {4, 8}
    assert all(words.split()[0] in PRESETS for words, _ in eight_gpus.RUNS)
    name, dense, optimizer = next(each for each in found if each[0] == "fsdp")
    row = eight_gpus.predicted(name, dense, optimizer)
    assert 0.5 * row.step < row.bound < row.step
    assert set(row.hidden) == {"gather", "reduce"}
    assert all(0.5 < share <= 1 for share in row.hidden.values())
    assert row.tokens_per_second == pytest.approx(2048 / row.step)


def test_what_follows_a_preset_wins():
    options, _ = parse(Bench, "bench", words("fsdp", 4, ["--lengths", "64", "--out", "x.json", "--blocks", "2"]))
    assert (options.lengths, options.out, options.blocks) == ((64,), "x.json", 2)
    options, _ = parse(Bench, "bench", words("fsdp", 4, []))
    assert options.lengths == (2048, 4096)
    assert options.out.endswith("benchmarks/results/fsdp.json")
    options, _ = parse(Bench, "bench", words("fsdp", 4, ["--seconds", "540", "--resume", "--commit", "abc"]))
    assert (options.seconds, options.resume, options.commit) == (540, True, "abc")


def test_contenders_by_name_leave_the_variants_of_a_preset_out():
    assert "--variant" in words("expert_adamw", 2, [])
    assert "--variant" not in words("expert_adamw", 2, ["--against", "fsdp2_tuned"])
    assert words("expert_adamw", 2, ["--against", "fsdp2_tuned", "--variant", "x"])[-2:] == ["--variant", "x"]


def test_a_result_becomes_a_table():
    row = {"seconds": 0.5, "tflops_per_gpu": 400.0, "mfu": 0.404, "noise": 0.004}
    row |= {"peak_bytes": 2**32, "resident_bytes": 2**31}
    row |= {"blocks": [{"clock_mhz": 1700.0}, {"clock_mhz": 1800.0}], "off_clock": [True, True]}
    ratio = {"median": 0.9, "low": 0.88, "high": 0.91}
    slow = {"seconds": 0.7, "blocks": [{"clock_mhz": 1500.0}] * 2}
    rows = {"bound": {**row, "speed_over": {"fsdp2": ratio}}}
    rows["fsdp2"] = {**row, **slow, "speed_over": {"bound": ratio}}
    config = {"train": {"sequences": 2}, "data": {"sequence_length": 2048}}
    found = {"bound": "bound", "best_peer": "fsdp2", "config": config, "contenders": rows}
    text = contenders({"workloads": [found]})
    shown = "400 (40%) | 1 | 1 | 0.900 (0.880 to 0.910) | 0.4% | 1,750* | 4, 2 held |"
    assert f"| 4,096: bound | 500.0 ms | {shown}" in text
    shown = "400 (40%) | 0.900 (0.880 to 0.910) | 0.83 | 1 | 0.4% | 1,500* | 4, 2 held |"
    assert f"| 4,096: fsdp2 | 700.0 ms | {shown}" in text


def test_settings_that_are_nearly_those_of_another_are_shown_as_differences():
    first = {"units": "each layer", "transport": "nccl", "reduce": "bf16", "staging": "2"}
    third = {**first, "units": "root", "reduce": "fp32", "staging": "1"}
    all_settings = {"a": first, "b": {**first, "reduce": "fp32"}, "c": third}
    gate = {"curves": {"a": [1.0, 0.5]}, "layers": 4, "worst": 0.0, "tolerance": 0.01, "fall": 0.5}
    rows = {name: {"settings": found} for name, found in all_settings.items()}
    text = settings({"workloads": [{"contenders": rows, "gate": gate}] * 2})
    assert "\nb: as a, but\n    reduce: fp32\nc\n    units: root\n    transport: nccl\n" in text
    assert text.count("gate: ") == 1


def test_an_aim_is_met_missed_or_left_open_by_noise():
    def row(median: float) -> dict[str, object]:
        ratio = {"median": median, "low": median - 0.002, "high": median + 0.002}
        return {"peak_bytes": 10, "speed_over": dict.fromkeys(("bound", PEER, PEER_FP32, "megatron_fsdp"), ratio)}

    def workload(length: int, median: float) -> dict[str, object]:
        config = {"train": {"sequences": 1}, "data": {"sequence_length": length}}
        return {"config": config, "best_peer": "megatron_fsdp", "contenders": {OURS: row(median), PEER: row(1.0)}}

    short = {"workloads": [workload(2048, 0.9), workload(4096, 0.9291)]}
    text = aims(short, {"workloads": [workload(8192, 0.9601)]}, {"workloads": [workload(4096, 1.05)]})
    share = "0.900, aim 0.87: met | 0.929, aim 0.93: missed, within noise | 0.960, aim 0.96: met, within noise"
    assert f"| share of the bound | {share} |" in text
    assert "| speed over megatron-fsdp, 16 layers | not measured | 1.050, aim 1.10: missed | not measured |" in text
    assert text.count("1.00, aim at most 1.05: met") == 3


def test_what_the_host_costs_is_a_table():
    step = {"bound": 0.1, "fully_shard": 0.1034, "fully_shard_null": 0.1017}
    rows = {name: {"seconds": seconds, "host_seconds": seconds / 2} for name, seconds in step.items()}
    config = {"model": {"layers": 32}, "train": {"microbatches": 1, "sequences": 1}, "data": {"sequence_length": 256}}
    text = host_cost({"workloads": [{"bound": "bound", "config": config, "contenders": rows}]})
    assert "| bound | 100.0 ms | 50.0 ms | - |" in text
    assert "| fully_shard | 103.4 ms | 51.7 ms | 100 us |" in text
    assert "| fully_shard_null | 101.7 ms | 50.9 ms | 50 us |" in text


def test_a_measurement_that_was_interrupted_becomes_no_table():
    with pytest.raises(ValueError, match="was interrupted"):
        contenders({"workloads": [{"complete": False}], "command": "hocket bench"})


def test_aims_of_experts_are_those_of_the_fastest_beside_the_slower_bound():
    def row(seconds: float, **over: float) -> dict[str, object]:
        ratios = {name: {"median": ratio, "low": ratio - 0.01, "high": ratio + 0.01} for name, ratio in over.items()}
        return {"seconds": seconds, "speed_over": ratios}

    rows = {
        "bound": row(0.8),
        "exchanges": row(0.9),
        "ep_sync": row(1.8),
        "hocket": row(1.2, bound=0.7, exchanges=0.75),
    }
    rows["hocket_ce"] = row(1.0, bound=0.8, exchanges=0.9, ep_sync=1.8)
    config = {"train": {"sequences": 4}, "data": {"sequence_length": 4096}}
    found = {"command": "python -m benchmarks.baselines skinny --gpus 4", "hardware": "4 x NVIDIA H200"}
    text = expert_aims({**found, "workloads": [{"config": config, "contenders": rows}]})
    figures = "1,000.0 ms | 0.900, aim 0.88: met | ep_sync: 1.800, aim 1.50: met |"
    assert f"| narrow experts, 16,384 tokens, 4 GPUs | *hocket_ce* | {figures}" in text


def test_memory_of_shared_sequences_stands_beside_that_of_whole_ones():
    def of(cp: int, length: int, gib: int) -> dict[str, object]:
        config = {"run": {"name": "llama3_8b"}, "mesh": {"cp": cp}, "data": {"sequence_length": length}}
        return {"config": config, "contenders": {"hocket": {"peak_bytes": gib * 2**30}}}

    text = shared_memory({"workloads": [of(2, 32768, 45), of(2, 131072, 99)]}, {"workloads": [of(1, 32768, 90)]})
    assert text.count("\n") == 2
    assert "| llama3_8b, 32,768 tokens | 2 | 90 GiB | 45 GiB | 0.50 |" in text
