"""Finds what the doctor judges: asks the driver's tool, torch in a process of its own, and the operating system.

Whatever cannot be asked stays empty; nothing here fails because a tool is missing or slow.
"""

from __future__ import annotations

import contextlib
import json
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from hocket.doctor.checks import Found, Gpu, Port, Torch
from hocket.doctor.measure import Request, run
from hocket.environment import cores, torch_build
from hocket.variables import Moment

LIMIT = 60.0
"""Seconds for a tool to answer."""
PROBE_LIMIT = 90.0

_ESSENTIAL = (
    "name", "memory.total", "memory.used", "power.limit", "power.default_limit", "ecc.mode.current",
    "ecc.errors.uncorrected.volatile.total", "mig.mode.current", "compute_mode", "driver_version",
)  # fmt: skip
_NEWER = ("clocks.applications.graphics", "clocks.max.graphics", "clocks_throttle_reasons.active")
"""Fields that drivers rename from time to time; a driver that does not know one answers nothing at all."""
_SLOWED = {
    0x08: "slowed down by its hardware", 0x20: "too hot (software limit)", 0x40: "too hot (hardware limit)",
    0x80: "not enough power from the host",
}  # fmt: skip


def look(env: Mapping[str, str], passed: Collection[Moment], probe: bool) -> Found:
    """Everything that can be found here. `probe` also tries a gather on copy engines, which takes seconds."""
    gpus, driver = _gpus()
    torch = _torch()
    copies: tuple[str, ...] = ()
    no_probe = "hocket doctor was not asked to try it"
    if probe and torch.gpus > 1 and not torch.no_copy_engine:
        copies, no_probe = _copies(torch.gpus, env)
    temporary = tempfile.gettempdir()
    return Found(
        env=dict(env),
        passed=passed,
        python=tuple(sys.version_info[:3]),
        torch=torch,
        gpus=gpus,
        driver=driver,
        links=links_of(_output(["nvidia-smi", "topo", "-m"])),
        ports=ports_in(Path("/sys/class/infiniband")),
        copies=copies,
        no_probe=no_probe,
        cores=cores(),
        shm=_size_of("/dev/shm"),
        open_files=_limit(resource.RLIMIT_NOFILE),
        locked=_limit(resource.RLIMIT_MEMLOCK),
        temporary=temporary,
        temporary_free=shutil.disk_usage(temporary).free,
    )


def ports_in(folder: Path) -> tuple[Port, ...]:
    """Ports of network adapters, from the folder in which the kernel describes them."""
    found = []
    for port in sorted(folder.glob("*/ports/*")):
        state, rate, kind = (_line(port / name) for name in ("state", "rate", "link_layer"))
        speed = re.match(r"[\d.]+", rate)
        found.append(
            Port(
                name=f"{port.parent.parent.name}:{port.name}",
                active="ACTIVE" in state,
                gbits=float(speed[0]) if speed else 0.0,
                kind=kind or "InfiniBand",
            )
        )
    return tuple(found)


def _line(file: Path) -> str:
    with contextlib.suppress(OSError):
        return file.read_text().strip()
    return ""


def _size_of(folder: str) -> int:
    with contextlib.suppress(OSError):
        return shutil.disk_usage(folder).total
    return 0


def _limit(kind: int) -> int:
    soft, _ = resource.getrlimit(kind)
    return -1 if soft == resource.RLIM_INFINITY else soft


def _output(command: Sequence[str]) -> str:
    """The output of a tool; empty if the tool is missing, fails or takes too long."""
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return ended.stdout if ended.returncode == 0 else ""


def _gpus() -> tuple[tuple[Gpu, ...], str]:
    """The GPUs that the driver lists, and its version."""
    for fields in ((*_ESSENTIAL, *_NEWER), _ESSENTIAL):
        text = _output(["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"])
        if text:
            return gpus_of(text, fields)
    return (), ""


def gpus_of(text: str, fields: Sequence[str]) -> tuple[tuple[Gpu, ...], str]:
    """GPUs and the driver's version from what nvidia-smi prints for these fields, a line for each GPU."""
    found, driver = [], ""
    for line in text.splitlines():
        row = dict(zip(fields, (word.strip() for word in line.split(",")), strict=False))
        driver = row.get("driver_version", "")
        reasons = row.get("clocks_throttle_reasons.active", "")
        bits = int(reasons, 16) if re.fullmatch(r"0x[0-9a-fA-F]+", reasons) else 0
        found.append(
            Gpu(
                name=row["name"],
                memory_mib=int(_number(row, "memory.total")),
                used_mib=int(_number(row, "memory.used")),
                clock_mhz=int(_number(row, "clocks.applications.graphics")),
                max_clock_mhz=int(_number(row, "clocks.max.graphics")),
                power_watts=_number(row, "power.limit"),
                default_watts=_number(row, "power.default_limit"),
                ecc=row.get("ecc.mode.current", ""),
                uncorrected=int(_number(row, "ecc.errors.uncorrected.volatile.total")),
                mig=row.get("mig.mode.current", ""),
                compute_mode=row.get("compute_mode", ""),
                slowed_by=tuple(words for bit, words in _SLOWED.items() if bits & bit),
            )
        )
    return tuple(found), driver


def _number(row: Mapping[str, str], field: str) -> float:
    """A number, 0 for the tool's ways to say that there is none."""
    text = row.get(field, "")
    return float(text) if re.fullmatch(r"\d+(\.\d+)?", text) else 0.0


def links_of(text: str) -> dict[tuple[int, int], str]:
    """How each pair of GPUs is joined, from the matrix of `nvidia-smi topo -m`."""
    found = {}
    for line in re.sub(r"\x1b\[[\d;]*m", "", text).splitlines():
        words = line.split()
        if words and re.fullmatch(r"GPU\d+", words[0]) and "X" in words[1:]:
            a = int(words[0].removeprefix("GPU"))
            found.update({(a, b): how for b, how in enumerate(words[1 : a + 1])})
    return {(b, a): how for (a, b), how in found.items()}


_ASK = """
import importlib.util, json, sys
found = {}
try:
    import torch
    count = torch.cuda.device_count()
    found = dict(version=torch.__version__, cuda=torch.version.cuda or "", gpus=count)
    if count:
        from hocket.runtime.shared_memory import problem
        found["nccl"] = list(torch.cuda.nccl.version())
        found["no_copy_engine"] = problem() if count > 1 else ""
        reach = torch.cuda.can_device_access_peer
        found["apart"] = [(a, b) for a in range(count) for b in range(count) if a != b and not reach(a, b)]
    if importlib.util.find_spec("triton"):
        import triton
        found["triton"] = triton.__version__
except Exception as error:
    found = dict(version=found.get("version", ""), error=f"{type(error).__name__}: {error}")
sys.stdout.write("\\n" + json.dumps(found))
"""


def _torch() -> Torch:
    """What torch says, asked in a process of its own, which may crash or hang. A build without CUDA need not be."""
    version, cuda = torch_build()
    if not cuda:
        return Torch(version=version)
    text = _output([sys.executable, "-c", _ASK])
    if not text:
        return Torch(version=version, cuda=cuda, error=f"no answer from a process that imports torch {version}")
    fields: dict[str, Any] = json.loads(text.splitlines()[-1])
    apart = tuple((a, b) for a, b in fields.pop("apart", ()))
    nccl = tuple(fields.pop("nccl", ()))
    return Torch(nccl=nccl, apart=apart, **fields)


def _copies(gpus: int, env: Mapping[str, str]) -> tuple[tuple[str, ...], str]:
    """Names of what a gather on copy engines runs, and why there are none."""
    request = Request(world=gpus, device="cuda", transport="copy_engine", dtype="bf16", names=True)
    try:
        return run(request, {**env, "OMP_NUM_THREADS": "1"}, PROBE_LIMIT).names, ""
    except ValueError as error:
        return (), str(error).split("; fix:")[0]
