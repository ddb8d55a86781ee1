"""Which hardware plans are priced for where `hardware` is `auto`, and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from hocket.config import Config
from hocket.gpus import GPUS, GpuName, gpu_named, is_slice, nearest
from hocket.program.hardware import hardware_of, kept_file, read_measured
from hocket.settings.decision import Choice
from hocket.settings.rule import Host
from hocket.settings.schema import changed, problem

GPU = "hardware.gpu"


def choose_hardware(c: Config, h: Host, origins: Mapping[str, str]) -> Iterator[Choice]:
    """The GPU, or the file of its measured rates. Raises ValueError if a file that was named cannot serve."""
    asked = c.hardware.gpu
    if asked != "auto":
        if asked.endswith(".json") and (file := read_measured(asked)) and c.precision.compute == "fp32":
            why = f"it was measured on {file.device} in bf16, and the run computes in fp32"
            raise ValueError(problem(GPU, asked, origins, why, f"{GPU} = laptop, or precision.compute = bf16"))
        return
    gpu, reason = _gpu_of(c, h)
    if kept := _kept(h, gpu):
        gpu, reason = kept, f"hocket doctor --measure kept it for {h.kinds[0]}"
    yield GPU, gpu, f"{reason}; rates {origin_of(changed(c, {GPU: gpu}))}"


def origin_of(c: Config) -> str:
    """Where the rates come from that a configuration is priced with, in words."""
    return hardware_of(c).origin


def _gpu_of(c: Config, h: Host) -> tuple[GpuName | str, str]:
    """The name of a GPU, and why."""
    if c.precision.compute == "fp32":
        return "laptop", "the run computes in fp32, and rates of GPUs are those of bf16"
    if not h.kinds:
        return "h200", f"no GPU here has a name, so an H200 is taken for granted; {GPU} names another one"
    found = {device: _one(device, h) for device in h.kinds}
    device = min(found, key=lambda each: GPUS[found[each][0]].flops)
    gpu, reason = found[device]
    if len(found) > 1:
        reason = f"this host has GPUs of several kinds ({', '.join(found)}), and all wait for the slowest: {reason}"
    return gpu, reason


def _one(device: str, h: Host) -> tuple[GpuName, str]:
    """The table's GPU for one of this host, and why."""
    gpu = gpu_named(device)
    if gpu is None:
        gpu = nearest(device, h.memory, h.processors, h.capability)
        why = f"{device} is not in the table of GPUs, and {gpu} is the nearest one by architecture and size"
        return gpu, f"{why}; hocket doctor --measure times it"
    if is_slice(device):
        why = f"{device} is a slice of a GPU, and the whole one is priced: steps take longer"
        return gpu, f"{why}; hocket doctor --measure times it"
    return gpu, f"this host has {device}"


def _kept(h: Host, gpu: str) -> str:
    """The file that was kept for the GPUs of this host, if all ranks are on it and these are priced; else nothing."""
    if len(h.kinds) != 1 or h.local_workers != h.workers or not kept_file(h.kinds[0]).is_file():
        return ""
    path = str(kept_file(h.kinds[0]))
    return path if read_measured(path).gpu == gpu else ""
