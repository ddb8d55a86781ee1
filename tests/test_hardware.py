"""Hardware by the GPU's name: the table, what is chosen, files of measured rates, and plans that differ by it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, get_args

import pytest

from hocket import machine
from hocket.commands import doctor
from hocket.config.rule import Host
from hocket.config.schema import changed
from hocket.doctor.measure import LARGE, LINKED, SMALL, as_hardware, measure
from hocket.environment import Gpus
from hocket.gpus import GPUS, GpuName, gpu_named, nearest, peak_flops
from hocket.machine import host_for_plan
from hocket.planning import predict, program_of, report
from hocket.predict.hardware import H200, HARDWARE, hardware_of, measured_file
from hocket.recipes import recipe
from hocket.resolve import Settings, resolve

DEVICES = {
    "NVIDIA A100-SXM4-80GB": "a100-sxm", "NVIDIA A100-SXM4-40GB": "a100-sxm-40", "NVIDIA A100 80GB PCIe": "a100-pcie",
    "NVIDIA A100-PCIE-40GB": "a100-pcie-40", "NVIDIA H100 80GB HBM3": "h100-sxm", "NVIDIA H100 PCIe": "h100-pcie",
    "NVIDIA H100 NVL": "h100-nvl", "NVIDIA H800": "h800", "NVIDIA GH200 480GB": "gh200", "NVIDIA H200": "h200",
    "NVIDIA H200 NVL": "h200-nvl", "NVIDIA B200": "b200", "NVIDIA B300 SXM6 AC": "b300", "NVIDIA GB200": "gb200",
    "NVIDIA GB300": "gb300", "AMD Instinct MI300X": "mi300x", "NVIDIA L40S": "l40s",
    "NVIDIA GeForce RTX 4090": "rtx4090", "NVIDIA GeForce RTX 5090": "rtx5090",
}  # fmt: skip


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))


def decided(settings: Settings, name: str = "hardware.gpu") -> str:
    return next(str(d) for d in settings.decisions if d.setting == name)


def on(host: Host, name: str = "llama3_8b", **changes: Any) -> Settings:
    return resolve(changed(recipe(name), {key.replace("__", "."): value for key, value in changes.items()}), host)


# ---------------------------------------------------------------------------------------------- the table


def test_every_gpu_is_found_by_the_name_its_driver_gives() -> None:
    assert {device: gpu_named(device) for device in DEVICES} == DEVICES
    assert set(DEVICES.values()) == set(GPUS) == set(get_args(GpuName))
    assert all(peak_flops(device) == GPUS[gpu].flops for device, gpu in DEVICES.items() if gpu in GPUS)
    for unknown in ("NVIDIA H20", "NVIDIA L40", "Tesla V100-SXM2-16GB", "", "CPU"):
        assert gpu_named(unknown) is None
        assert peak_flops(unknown) == 0
    assert peak_flops("NVIDIA H200 MIG 1g.18gb") == 0


def test_the_h200_is_what_was_measured_and_others_are_scaled_from_it() -> None:
    assert HARDWARE["h200"] is H200
    assert (H200.gemm_flops, H200.peak_flops, H200.clock, H200.processors) == (930e12, 989.4e12, 1.98e9, 132)
    h100, b200, mi300x = HARDWARE["h100-sxm"], HARDWARE["b200"], HARDWARE["mi300x"]
    same = ("gemm_flops", "attention_fwd_flops", "wave_flops", "links", "clock", "power", "gap")
    assert all(getattr(h100, name) == pytest.approx(getattr(H200, name)) for name in same if name != "links")
    assert h100.links == H200.links
    assert h100.memory_bandwidth / H200.memory_bandwidth == pytest.approx(3.35 / 4.8)
    assert h100.memory == pytest.approx(79 * 2**30, rel=0.01)
    assert b200.links["gather"].bandwidth == 2 * H200.links["gather"].bandwidth
    assert b200.gemm_flops / b200.peak_flops == pytest.approx(930 / (132 * 4096 * 1.98e9 / 1e12), rel=1e-3)
    assert mi300x.links["pp"].bandwidth < 64e9 < mi300x.links["gather"].bandwidth
    assert len({hardware.origin for hardware in HARDWARE.values()}) == 3


def test_data_sheets_agree_with_themselves() -> None:
    """The printed rate comes out at a clock that the GPU can have, and none reaches what its sheet does not promise."""
    for name, gpu in GPUS.items():
        assert 1e9 < gpu.sheet_clock < 2.6e9, name
        assert not gpu.clock or gpu.sheet_clock <= 1.002 * gpu.clock, name
        assert HARDWARE[name].memory_bandwidth < gpu.memory_bandwidth
        assert HARDWARE[name].link("a2a").bandwidth < gpu.link


# ---------------------------------------------------------------------------------------------- the choice


@pytest.mark.parametrize(
    ("kinds", "gpu", "words"),
    [
        ((), "h200", "no GPU here has a name, so an H200 is taken for granted"),
        (("NVIDIA H200",), "h200", "this host has NVIDIA H200; rates measured on a host of eight"),
        (("NVIDIA B200",), "b200", "this host has NVIDIA B200; rates scaled from its data sheet"),
        (("NVIDIA H20",), "h100-sxm", "NVIDIA H20 is not in the table of GPUs, and h100-sxm is the nearest"),
        (("AMD Instinct MI325X",), "mi300x", "hocket doctor --measure times it"),
        (("NVIDIA H200 MIG 1g.18gb",), "h200", "a slice of a GPU"),
        (("NVIDIA H200", "NVIDIA A100-SXM4-80GB"), "a100-sxm", "GPUs of several kinds (NVIDIA H200, NVIDIA A100-SXM4"),
    ],
)
def test_the_hosts_gpu_is_priced_and_said_once(kinds: tuple[str, ...], gpu: str, words: str) -> None:
    host = Host(gpus=8, kinds=kinds, memory=80 * 2**30, processors=132, capability=(9, 0))
    settings = on(host)
    assert settings.hardware.gpu == gpu
    assert words in decided(settings)
    assert sum("rates " in str(d) for d in settings.decisions) == 1
    assert hardware_of(settings) is HARDWARE[gpu]
    assert resolve(settings) == settings


def test_a_gpu_that_was_asked_for_wins_and_the_prediction_says_where_its_rates_come_from() -> None:
    settings = on(Host(gpus=8, kinds=("NVIDIA H200",)), hardware__gpu="b200", train__microbatches=2)
    assert hardware_of(settings).name == "b200"
    assert not [d for d in settings.decisions if d.setting == "hardware.gpu"]
    assert "on b200, bf16; rates scaled from its data sheet" in report(
        settings, program_of(settings), hardware_of(settings), 100, 0
    )
    assert hardware_of(on(Host(), "tiny")).name == "laptop"


def test_fp32_has_the_rates_of_fp32_units() -> None:
    """As the data sheets have them, which print rates of fp32 at the highest clock."""
    sheets: dict[GpuName, float] = {"a100-sxm": 19.5e12, "h200": 66.9e12, "rtx4090": 82.6e12, "mi300x": 163.4e12}
    for name, flops in sheets.items():
        found, gpu = (
            hardware_of(changed(recipe("llama3_8b"), {"precision.compute": "fp32", "hardware.gpu": name})),
            GPUS[name],
        )
        assert found.peak_flops * gpu.full_clock / gpu.sheet_clock == pytest.approx(flops, rel=0.01)
        assert found.gemm_flops / HARDWARE[name].gemm_flops == pytest.approx(found.peak_flops / gpu.flops)


def test_a_strategy_that_takes_as_long_says_what_it_saves() -> None:
    found = resolve(changed(recipe("llama3_8b"), {"overlap.dp.strategy": "auto"}), host_for_plan(recipe("llama3_8b")))
    (reason,) = next(d.reasons for d in found.decisions if d.setting == "overlap.dp.strategy")
    assert (
        ", as with strategy = optim_grads_params, and move 52 GiB instead of 104 GiB, in 12 GiB more memory" in reason
    )


def test_saves_without_checkpoints_are_told() -> None:
    found = resolve(changed(recipe("tiny"), {"train.keep": (0,), "train.device": "cpu"}), Host())
    (reason,) = next(d.reasons for d in found.decisions if d.setting == "train.save_every")
    assert reason == "no effect with train.keep = 0"


def test_the_nearest_gpu_is_of_the_vendor_then_the_architecture_then_the_size() -> None:
    assert nearest("NVIDIA X", 24 * 2**30, 80, (8, 9)) == "rtx4090"
    assert nearest("NVIDIA X", 180 * 2**30, 148, (10, 1)) == "b200"
    assert nearest("AMD Instinct MI250X", 64 * 2**30, 110, (9, 0)) == "mi300x"
    assert nearest("NVIDIA X", 0, 0, (0, 0)) in GPUS


def test_hosts_of_plans_are_as_large_as_the_gpus_links_reach() -> None:
    config = changed(recipe("llama3_8b"), {"mesh.dp": 64})
    assert host_for_plan(config).local_workers == 8
    assert host_for_plan(changed(config, {"hardware.gpu": "gb200"})).local_workers == 0, "all on one NVLink"


# ---------------------------------------------------------------------------------------------- plans


THREE = ("a100-sxm", "h200", "b200")
SOME: tuple[tuple[str, tuple[str, ...], dict[str, Any]], ...] = (
    ("llama3_8b", THREE, {"plan.recompute": ("auto",), "data.sequence_length": 8192, "train.sequences": 2}),
    ("qwen3_30b_a3b", THREE[:2], {}),
    ("moe_8gpu", THREE, {}),
)


def test_decisions_differ_where_gpus_do() -> None:
    found: dict[str, list[dict[str, Any]]] = {}
    for name, gpus, changes in SOME:
        for gpu in gpus:
            config = changed(recipe(name), {**changes, "hardware.gpu": gpu})
            settings = resolve(config, host_for_plan(config))
            found.setdefault(name, []).append({d.setting: d.value for d in settings.decisions})
    a100, h200, b200 = found["llama3_8b"]
    assert (a100["plan.recompute"], h200["plan.recompute"], b200["plan.recompute"]) == (("mlp:16",), (), ()), "memory"
    assert (a100["plan.graphs"], b200["plan.graphs"]) == ("off", "off")
    a100, h200 = found["qwen3_30b_a3b"]
    assert (a100["train.transport"], h200["train.transport"]) == ("nccl", "copy_engine"), "its buffers need room"
    assert (a100["overlap.pp.defer_head"], h200["overlap.pp.defer_head"]) == (0, 6)
    a100, h200, b200 = found["moe_8gpu"]
    assert (a100["plan.graphs"], h200["plan.graphs"], b200["plan.graphs"]) == ("off", "off", "on"), "hosts are late"


def test_faster_gpus_are_never_slower() -> None:
    settings = on(Host(gpus=8), train__microbatches=2)
    program = program_of(settings)
    seconds = [
        float(predict(settings, program, HARDWARE[gpu]).makespan)
        for gpu in ("rtx4090", "a100-sxm", "h100-pcie", "h100-sxm", "h200", "b200")
    ]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[1] > 1.8 * seconds[4] > 3 * seconds[5]


# ---------------------------------------------------------------------------------------------- measured files


def kept(device: str = "NVIDIA H20", **changes: Any) -> Path:
    """What a measurement of two GPUs leaves behind."""
    gpus = Gpus(count=2, name=device, kinds=(device,), memory=96 * 2**30, processors=78, capability=(9, 0))
    transfers = {(kind, size): 20e-6 + size / 300e9 for kind in LINKED for size in (SMALL, LARGE)}
    rates = {"gemm_flops": 130e12, "attention_fwd_flops": 1e14, "attention_bwd_flops": 9e13}
    rates |= {"memory_bandwidth": 3.6e12, "kernel_bandwidth": 3.2e12}
    rates["gemm_flops"] = 130 * 10**12  # a whole number, as others write it
    found = as_hardware(gpus, transfers, rates, "2026-01-02")
    file = measured_file(device)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(json.loads(found.to_json()) | changes))
    return file


def test_a_kept_file_is_used_on_its_host_and_a_named_one_anywhere() -> None:
    file, host = kept(), Host(gpus=8, kinds=("NVIDIA H20",), memory=96 * 2**30, processors=78, capability=(9, 0))
    here = on(host)
    assert here.hardware.gpu == str(file)
    assert "measured on NVIDIA H20, 2026-01-02" in decided(here)
    found = hardware_of(here)
    assert (found.gemm_flops, found.kernel_bandwidth, found.clock) == (130e12, 3.2e12, 0.0)
    assert found.links["gather"].bandwidth == pytest.approx(300e9)
    assert found.links["gather"].latency == pytest.approx(20e-6)
    assert found.links["tp"] == HARDWARE[hardware_of(here).name].links["tp"], "not measured"
    assert on(dataclasses.replace(host, workers=8, local_workers=4)).hardware.gpu in GPUS, "other hosts"
    assert on(host, hardware__gpu="b200").hardware.gpu == "b200"
    assert hardware_of(on(Host(gpus=8), hardware__gpu=str(file))).gemm_flops == 130e12


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"version": 7}, "it is not of version 1"),
        ({"rates": {"speed": 1}}, "it names speed, which this hocket does not know"),
        ({"rates": {"gemm_flops": 0}}, "a rate that is not above 0"),
        ({"gpu": "h20"}, "gpu = 'h20': not one of"),
        ({"links": {"gather": 3}}, "links.gather = 3: not"),
    ],
)
def test_a_file_that_cannot_serve_is_one_line(changes: dict[str, Any], words: str) -> None:
    file = kept(**changes)
    with pytest.raises(ValueError, match=words) as caught:
        on(Host(gpus=8), hardware__gpu=str(file))
    assert f"hardware.gpu = {file}" in str(caught.value)
    assert "fix: " in str(caught.value)


def test_a_file_for_a_run_in_fp32_and_one_that_is_not_there_are_refused() -> None:
    with pytest.raises(ValueError, match="it was measured on NVIDIA H20 in bf16, and the run computes in fp32"):
        on(Host(gpus=8), hardware__gpu=str(kept()), precision__compute="fp32")
    with pytest.raises(ValueError, match="cannot be read"):
        on(Host(gpus=8), hardware__gpu="nowhere.json")


@pytest.mark.parametrize(
    ("capability", "triton", "installed", "words"),
    [
        ((9, 0), "3.3.1", ("fla", "triton"), ""),
        ((9, 0), "3.4.0", ("fla", "triton"), "wrong on Hopper with triton 3.4.0"),
        ((9, 0), "3.6.0+git1234", ("fla", "triton"), "wrong on Hopper"),
        ((9, 0), "3.7.0", ("fla", "triton"), "right from 3.7.1 on"),
        ((9, 0), "3.7.1", ("fla", "triton"), ""),
        ((9, 0), "3.6.0", ("fla", "triton", "tilelang"), ""),
        ((8, 0), "3.6.0", ("fla", "triton"), ""),
        ((9, 0), "3.6.0", ("triton",), "fla-core is not installed"),
        ((8, 0), "", ("fla",), "fla-core is not installed"),
    ],
)
def test_where_kernels_of_delta_nets_are_right(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], triton: str, installed: tuple[str, ...], words: str
) -> None:
    monkeypatch.setattr(machine, "find_spec", lambda name: name if name in installed else None)
    monkeypatch.setattr(machine.metadata, "version", {"triton": triton}.__getitem__)
    why = machine.why_no_delta_kernels(capability)
    assert words in why
    assert bool(why) == bool(words)


def test_hosts_that_cannot_be_measured_say_why() -> None:
    for gpus, words in (
        (Gpus(), "no usable GPU"),
        (Gpus(count=2, name="A", kinds=("A", "B")), "several kinds: A, B"),
        (Gpus(count=2, name="NVIDIA H200 MIG 1g.18gb", kinds=("NVIDIA H200 MIG 1g.18gb",)), "slices"),
    ):
        with pytest.raises(ValueError, match=words):
            measure(gpus, {})
    with pytest.raises(ValueError, match="--json: not allowed with argument --measure"):
        doctor.run(["--measure", "--json"])
