"""Which hardware plans are priced for where `hardware` is `auto`, and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from hocket.config import Config
from hocket.gpus import GPUS, GpuName, gpu_named, is_slice, nearest
from hocket.program.hardware import MeasuredHardware, hardware_of, kept_file, read_measured
from hocket.settings.decision import Choice
from hocket.settings.rule import Host
from hocket.settings.schema import changed, problem

GPU, MEASURED = "hardware.gpu", "hardware.measured"
_NONE = "hocket doctor --measure has kept no file for what is priced"


def choose_hardware(c: Config, h: Host, origins: Mapping[str, str]) -> Iterator[Choice]:
    """The GPU, and the file of its measured rates. Raises ValueError if a file that was named cannot serve."""
    named, asked = c.hardware.measured, c.hardware.gpu
    file = read_measured(named) if named not in ("auto", "off") else None
    gpu, reason = (asked, "as set") if asked != "auto" else _gpu_of(c, h, file)
    if file and file.gpu != gpu:
        why = f"it was measured on {file.device}, and rates are asked for of {gpu} ({reason})"
        raise ValueError(problem(MEASURED, named, origins, why, f"{GPU} = {file.gpu}, another file, or off"))
    kept = named
    if named == "auto":
        kept = _kept(h, gpu)
        yield MEASURED, kept, f"hocket doctor --measure kept it for {h.kinds[0]}" if kept != "off" else _NONE
    if asked == "auto":
        yield GPU, gpu, f"{reason}; rates {origin_of(changed(c, {GPU: gpu, MEASURED: kept}))}"


def origin_of(c: Config) -> str:
    """Where the rates come from that a configuration is priced with, in words."""
    return hardware_of(c).origin


def _gpu_of(c: Config, h: Host, file: MeasuredHardware | None) -> tuple[GpuName | str, str]:
    """A value of `hardware.gpu`, and why. `file` was named by the user."""
    if c.precision.compute == "fp32":
        return "laptop", "the run computes in fp32, and rates of GPUs are those of bf16"
    if not h.kinds:
        if file:
            return file.gpu, f"{MEASURED} is of {file.device}"
        return "h200", f"no GPU here has a name, so an H200 is taken for granted; {GPU} names another one"
    if file and file.device in h.kinds:
        return file.gpu, f"this host has {file.device}"
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
    """The file that was kept for the GPUs of this host, if all ranks are on it and these are priced; else off."""
    if len(h.kinds) != 1 or h.local_workers != h.workers or not kept_file(h.kinds[0]).is_file():
        return "off"
    path = str(kept_file(h.kinds[0]))
    return path if read_measured(path).gpu == gpu else "off"
