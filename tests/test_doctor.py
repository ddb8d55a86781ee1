"""The doctor: every judgement over hosts that are made up, and what it reads from the tools of a real one."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from hocket import cli
from hocket.doctor.checks import (
    AREAS,
    Check,
    Found,
    Torch,
    examine,
    exit_code,
    gpus_of,
    links_of,
    to_json,
    to_text,
    verdict,
)
from hocket.variables import HARMFUL
from tests.helpers.golden import assert_golden

FIELDS = (
    "name", "memory.total", "memory.used", "power.limit", "power.default_limit", "ecc.mode.current",
    "ecc.errors.uncorrected.volatile.total", "mig.mode.current", "compute_mode", "driver_version",
    "clocks.applications.graphics", "clocks.max.graphics", "clocks_throttle_reasons.active",
)  # fmt: skip
SMI = """NVIDIA H200, 143771, 4, 700.00, 700.00, Enabled, 0, Disabled, Default, 580.65, 1980, 1980, 0x01
NVIDIA H200, 143771, 4, 500.00, 700.00, [N/A], 2, [N/A], Default, 580.65, [N/A], 1980, 0x0000000000000048
"""
H200, H200_SICK = gpus_of(SMI, FIELDS)
HEALTHY = Found(
    python=(3, 12, 3),
    torch=Torch(version="2.11.0+cu130", cuda="13.0", gpus=4, nccl=(2, 28, 9), triton="3.6.0"),
    gpus=(H200,) * 4,
    links={(a, b): "NV18" for a in range(4) for b in range(a + 1, 4)},
    cores=32,
    shm=64 << 30,
    open_files=1 << 20,
)
LAPTOP = Found(
    python=(3, 11, 7),
    torch=Torch(version="2.13.0+cpu"),
    cores=2,
    shm=4 << 30,
    open_files=1024,
)


def torch(**changes: Any) -> Found:
    return replace(HEALTHY, torch=replace(HEALTHY.torch, **changes))


HOT = {"clocks_throttle_reasons.active": "0x40"}


def gpu(changes: dict[str, str]) -> Found:
    return replace(HEALTHY, gpus=(H200, H200 | changes, H200, H200))


SICK = replace(
    gpu({"mig.mode.current": "Enabled", "memory.used": "60000", "power.limit": "500"} | HOT),
    env={"NCCL_NVLS_ENABLE": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1", "CUDA_LAUNCH_BLOCKING": "1"},
    torch=replace(HEALTHY.torch, nccl=(2, 26, 2), no_copy_engine="NCCL 2.26.2 has no copy-engine collectives"),
    links={**HEALTHY.links, (0, 3): "SYS"},
    shm=64 << 20,
    cores=4,
)


def bad(found: Found) -> list[Check]:
    return [check for check in examine(found) if check.state in ("costs", "stops")]


def test_a_healthy_host_has_nothing_to_mend() -> None:
    assert bad(HEALTHY) == []
    assert verdict(examine(HEALTHY)) == "nothing to mend"
    assert exit_code(examine(HEALTHY)) == 0


def test_a_host_without_gpus_is_no_finding_but_says_what_it_cannot_tell() -> None:
    checks = examine(LAPTOP)
    assert exit_code(checks) == 0
    unknown = [check for check in checks if check.state == "unknown"]
    assert {check.name for check in unknown} == {"NCCL", "GPUs", "P2P, NVLink", "copy engine"}
    assert all(check.cost for check in unknown), "why it cannot be told"


CASES: list[tuple[Found, str, str, str]] = [
    (replace(HEALTHY, env={"NCCL_NVLS_ENABLE": "1"}), "NCCL_NVLS_ENABLE", "stops", "wanted 0"),
    (replace(HEALTHY, env={"CUDA_DEVICE_MAX_CONNECTIONS": "1"}), "CUDA_DEVICE_MAX_CONNECTIONS", "costs", "wanted 32"),
    (replace(HEALTHY, passed=("CUDA starts",)), "CUDA_DEVICE_MAX_CONNECTIONS", "costs", "not set, wanted 32"),
    (replace(HEALTHY, env={"OMP_NUM_THREADS": "32"}), "OMP_NUM_THREADS", "costs", "32"),
    (replace(HEALTHY, env={"OMP_NUM_THREADS": "many"}), "OMP_NUM_THREADS", "stops", "many"),
    (replace(HEALTHY, python=(3, 10, 1)), "python", "stops", "3.10.1"),
    (torch(version="2.9.1"), "torch", "stops", "2.9.1"),
    (torch(error="OSError: no libcuda", gpus=0), "torch", "stops", "no libcuda"),
    (torch(triton=""), "triton", "stops", "none"),
    (torch(gpus=3), "GPUs", "stops", "3 of 4"),
    (torch(gpus=0, cuda=""), "GPUs", "stops", "0 of 4"),
    (torch(apart=((0, 1), (1, 0))), "P2P", "costs", "0 to 1"),
    (gpu({"name": "NVIDIA H100"}), "kinds", "costs", "NVIDIA H100, NVIDIA H200"),
    (gpu({"mig.mode.current": "Enabled"}), "GPU 1", "stops", "MIG is on"),
    (gpu({"clocks.applications.graphics": "990"}), "GPU 1", "costs", "990 of 1980 MHz"),
    (gpu({"power.limit": "350.00"}), "GPU 1", "costs", "350 of 700 W"),
    (gpu({"clocks_throttle_reasons.active": "0x20"}), "GPU 1", "costs", "too hot"),
    (gpu({"ecc.errors.uncorrected.volatile.total": "3"}), "GPU 1", "stops", "3 memory errors"),
    (gpu({"ecc.mode.current": "Disabled"}), "GPU 1", "costs", "ECC is off"),
    (gpu({"compute_mode": "Prohibited"}), "GPU 1", "stops", "prohibited"),
    (gpu({"memory.used": "81920"}), "GPU 1", "costs", "80 GiB in use"),
    (replace(HEALTHY, links={**HEALTHY.links, (1, 2): "PIX"}), "NVLink", "costs", "1 of 6 pairs"),
    (torch(no_copy_engine="torch 2.11 has no MemPool"), "copy engine", "costs", "no MemPool"),
    (replace(HEALTHY, cores=6), "cores", "costs", "6 for 4 GPUs"),
    (replace(HEALTHY, shm=64 << 20), "/dev/shm", "stops", "64 MiB"),
    (replace(HEALTHY, open_files=1024), "open files", "costs", "1024"),
]


@pytest.mark.parametrize(("found", "name", "state", "words"), CASES, ids=[f"{c[1]}-{c[3]}" for c in CASES])
def test_each_thing_that_costs_is_found_alone_with_its_cost_and_a_fix(found, name, state, words) -> None:
    [check] = bad(found)
    assert (check.name, check.state) == (name, state)
    assert words in check.found
    assert check.cost
    assert check.fix
    assert exit_code(examine(found)) == 1


def test_a_clock_that_is_held_down_costs_as_much_time() -> None:
    [check] = bad(gpu({"clocks.applications.graphics": "1584"}))
    assert check.cost == "compute takes up to 25% longer"


@pytest.mark.parametrize("harm", HARMFUL, ids=lambda harm: harm.name)
def test_a_harmful_variable_is_found_and_a_harmless_value_is_not(harm) -> None:
    [check] = bad(replace(HEALTHY, env={harm.name: harm.values[0] if harm.values else "1"}))
    assert (check.name, check.state) == (harm.name, "costs")
    assert check.fix
    if harm.values:
        assert not bad(replace(HEALTHY, env={harm.name: "7"}))


def test_fewer_gpus_by_the_users_own_wish_are_no_finding() -> None:
    chosen = replace(HEALTHY, env={"CUDA_VISIBLE_DEVICES": "0,1"}, torch=replace(HEALTHY.torch, gpus=2))
    assert not bad(chosen)
    assert any("CUDA_VISIBLE_DEVICES = 0,1" in check.found for check in examine(chosen))
    busy = (H200, H200, H200 | {"memory.used": "60000"}, H200)
    assert not bad(replace(chosen, gpus=busy, links={**HEALTHY.links, (2, 3): "SYS"})), "of GPUs that no rank meets"
    assert [check.name for check in bad(replace(HEALTHY, gpus=busy))] == ["GPU 2"]


@pytest.mark.parametrize("visible", ["0,1,2,3", "GPU-8932f937,GPU-1", "1,0"])
def test_gpus_that_were_asked_for_and_cannot_be_used_are_a_finding(visible: str) -> None:
    none = replace(HEALTHY, env={"CUDA_VISIBLE_DEVICES": visible}, torch=replace(HEALTHY.torch, gpus=0))
    assert "torch cannot start CUDA" in " ".join(check.cost for check in bad(none))
    for hidden in ("", "-1", "NoDevFiles"):
        assert not [c for c in bad(replace(none, env={"CUDA_VISIBLE_DEVICES": hidden})) if c.name == "GPUs"]


def test_every_area_says_something_of_every_host() -> None:
    for found in (HEALTHY, LAPTOP, SICK):
        assert {check.area for check in examine(found)} == set(AREAS)


@pytest.mark.parametrize("name", ["healthy", "laptop", "sick"])
def test_the_report_as_text(name: str, pytestconfig: pytest.Config) -> None:
    found = {"healthy": HEALTHY, "laptop": LAPTOP, "sick": SICK}[name]
    assert_golden(f"doctor_{name}.txt", to_text(examine(found)) + "\n", pytestconfig)


def test_the_report_for_machines_has_every_judgement() -> None:
    checks = examine(SICK)
    found = json.loads(json.dumps(to_json(checks)))
    assert found["exit_code"] == 1
    assert [row["name"] for row in found["checks"]] == [check.name for check in checks]


# What tools print


def test_gpus_are_read_from_the_drivers_tool() -> None:
    wrong = [check.found for check in bad(replace(HEALTHY, gpus=(H200, H200_SICK, H200, H200)))]
    slowed = "slowed down by its hardware, too hot (hardware limit)"
    assert wrong == ["limited to 500 of 700 W", slowed, "2 memory errors that ECC could not correct"]


TOPOLOGY = """\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\x1b[0m
GPU0\t X \tNV18\tSYS\tPIX\t0-31
GPU1\tNV18\t X \tNV12\tSYS\t0-31
GPU2\tSYS\tNV12\t X \tSYS\t32-63
NIC0\tPIX\tSYS\tSYS\t X
"""


def test_links_are_read_from_the_drivers_tool() -> None:
    assert links_of(TOPOLOGY) == {(0, 1): "NV18", (0, 2): "SYS", (1, 2): "NV12"}
    assert links_of("") == {}


def test_the_command_prints_what_it_finds(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    with pytest.raises(SystemExit) as end:
        cli.main(["doctor", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert end.value.code == found["exit_code"] == 1
    assert {"NCCL_P2P_DISABLE", "torch", "cores"} <= {row["name"] for row in found["checks"]}


def test_an_unknown_option_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["doctor", "--fast"])
    assert end.value.code == 2
    assert (
        "hocket doctor (command line): unrecognized arguments: --fast; fix: hocket doctor --help"
        in capsys.readouterr().err
    )
