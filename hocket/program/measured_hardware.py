"""Rates that were measured on a host's own GPUs and kept in a file: what takes the place of the table's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, get_args

from hocket.files import json_in
from hocket.gpus import GpuName
from hocket.program.hardware import HARDWARE, Hardware, Link
from hocket.program.schedule import KINDS

VERSION = 1
"""Of the file."""
RATES = ("gemm_flops", "attention_fwd_flops", "attention_bwd_flops", "memory_bandwidth", "kernel_bandwidth")
"""Fields of `Hardware` that are measured. At the clock that a long load leaves, so no limit of power is asked for."""


@dataclass(frozen=True, kw_only=True)
class MeasuredHardware:
    """What `hocket doctor --measure` found, of one rank and between the ranks of one host."""

    device: str
    """The GPU's name in the driver's words."""
    gpu: GpuName
    """The table's GPU whose other figures are kept."""
    gpus: int
    """On which links were measured."""
    date: str
    versions: Mapping[str, str]
    rates: Mapping[str, float]
    """Per second, by the name of the field of `Hardware`."""
    links: Mapping[str, tuple[float, float]]
    """Kind of communication -> seconds of latency, bytes per second."""

    def to_json(self) -> str:
        return json.dumps({"version": VERSION, **asdict(self)}, indent=1)

    def applied(self, source: str) -> Hardware:
        """The table's GPU with these rates and links. `source` is the file."""
        base = HARDWARE[self.gpu]
        links = {kind: Link(*self.links[kind]) if kind in self.links else link for kind, link in base.links.items()}
        origin = f"measured on {self.device}, {self.date} ({source}); latencies of kernels and the host as on an H200"
        rates: dict[str, Any] = dict(self.rates)
        if "gemm_flops" in rates:
            rates |= {"clock": 0.0, "power": 0.0, "wave_flops": base.wave_flops * rates["gemm_flops"] / base.gemm_flops}
        return replace(base, origin=origin, links=links, **rates)


@cache
def read(path: str) -> MeasuredHardware:
    """What a file says. Raises ValueError if it cannot be read or is no such file."""
    try:
        return _parsed(path)
    except ValueError as error:
        fix = "a file of hocket doctor --measure, or the name of a GPU"
        raise ValueError(f"hardware.gpu = {path}: {error}; fix: {fix}") from None


def _parsed(path: str) -> MeasuredHardware:
    """The same. Raises ValueError with the reason."""
    try:
        fields = json_in(path)
    except OSError as error:
        raise ValueError(f"it cannot be read: {error.strerror}") from None
    except ValueError:
        raise ValueError("it is no JSON") from None
    if not isinstance(fields, dict) or fields.pop("version", None) != VERSION:
        raise ValueError(f"it is not of version {VERSION} of what hocket doctor --measure writes")
    try:
        found = MeasuredHardware(**fields)
        links = {str(kind): (float(latency), float(rate)) for kind, (latency, rate) in found.links.items()}
        rates = {str(name): float(rate) for name, rate in found.rates.items()}
    except (TypeError, ValueError, AttributeError):
        raise ValueError("it lacks what hocket doctor --measure writes") from None
    wrong = [name for name in rates if name not in RATES] + [kind for kind in links if kind not in KINDS]
    if wrong or found.gpu not in get_args(GpuName):
        raise ValueError(f"it names {(wrong or [found.gpu])[0]}, which this hocket does not know")
    if any(rate <= 0 for rate in rates.values()) or any(low < 0 or rate <= 0 for low, rate in links.values()):
        raise ValueError("it has a rate that is not above 0")
    return replace(found, rates=rates, links=links)


def kept_file(device: str) -> Path:
    """Where the rates of a GPU are kept, by its name in the driver's words."""
    name = "".join(letter if letter.isalnum() else "-" for letter in device.lower())
    return Path.home() / ".cache" / "hocket" / f"hardware-{name}.json"
