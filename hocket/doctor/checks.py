"""Judges what each finding of the doctor means for overlap. It is pure: a table of functions over `Found`."""

from __future__ import annotations

import functools
import re
import textwrap
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import takewhile
from typing import Any, Literal

from hocket.environment import is_number_of_threads
from hocket.variables import WANTED, Moment, survey

# -- Findings of the doctor on a host. They are plain values, so a test can make any host ------------------------------

State = Literal["ok", "costs", "stops", "unknown"]


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU, as the driver's own tool describes it. Values that the tool does not report are empty or 0."""

    name: str
    memory_mib: int = 0
    used_mib: int = 0
    clock_mhz: int = 0
    """Highest clock that applications may use."""
    max_clock_mhz: int = 0
    power_watts: float = 0.0
    """The limit that is set."""
    default_watts: float = 0.0
    ecc: str = ""
    uncorrected: int = 0
    """Memory errors since the driver was loaded that could not be corrected."""
    mig: str = ""
    compute_mode: str = ""
    slowed_by: tuple[str, ...] = ()
    """Reasons why the clock is held down now, except idleness and the limits above."""


@dataclass(frozen=True, kw_only=True)
class Port:
    """One port of a network adapter that can read and write the memory of other hosts."""

    name: str
    """Names of adapter and port, such as mlx5_0:1."""
    active: bool
    gbits: float = 0.0
    """Gigabits per second; 0 is not known."""
    kind: str = "InfiniBand"
    """Its protocol; Ethernet means RoCE."""


@dataclass(frozen=True, kw_only=True)
class Torch:
    """What torch reports about the host, asked in a process of its own."""

    version: str
    cuda: str = ""
    """Version that torch was built for; empty is a build without."""
    gpus: int = 0
    """Number of GPUs that torch can use."""
    nccl: tuple[int, ...] = ()
    triton: str = ""
    apart: tuple[tuple[int, int], ...] = ()
    """Pairs of GPUs (a, b): a cannot reach the memory of b."""
    no_copy_engine: str = ""
    """Why copy engines cannot serve collectives; empty if they can, or without GPUs."""
    error: str = ""
    """The error that torch raised instead of an answer; empty if it answered."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """Everything that the checks look at. Sizes in bytes; 0 or empty is not known."""

    env: Mapping[str, str] = field(default_factory=dict)
    passed: Collection[Moment] = ()
    python: tuple[int, ...] = ()
    torch: Torch
    gpus: tuple[Gpu, ...] = ()
    """GPUs that the driver lists, also those that torch cannot use."""
    driver: str = ""
    links: Mapping[tuple[int, int], str] = field(default_factory=dict)
    """How two GPUs are joined, in the driver's words, such as NV18 or SYS."""
    ports: tuple[Port, ...] = ()
    copies: tuple[str, ...] = ()
    """Names of everything that a gather on copy engines ran on a GPU; empty if none was tried."""
    no_probe: str = "hocket doctor was not asked to try it"
    """Why none was tried."""
    cores: int = 0
    shm: int = 0
    """Size of the shared memory of processes."""
    open_files: int = 0
    """Files and sockets that one process may hold."""
    locked: int = -1
    """Bytes that one process may lock into memory; -1 is no limit."""
    temporary: str = ""
    """Folder of temporary files."""
    temporary_free: int = 0


@dataclass(frozen=True)
class Check:
    """One judgement."""

    area: str
    name: str
    state: State
    found: str
    cost: str = ""
    """The cost of this state, or why the check has no answer."""
    fix: str = ""


# -- checks ------------------------------------------------------------------------------------------------------------

OLDEST_PYTHON, OLDEST_TORCH = (3, 11), (2, 11)
GIB, MIB = 2**30, 2**20
SHM_PER_GPU = 64 * MIB
"""Shared memory that NCCL's processes need to talk to each other, in bytes per GPU."""
OPEN_FILES = 4096
TEMPORARY = 1 * GIB
CORES_PER_GPU = 2
"""One core issues the ops of a rank. The threads of autograd and NCCL need another."""
BUSY_MIB = 2048
"""From this much used memory on, another process is taken to work on a GPU."""
KERNELS = ("ncclDevKernel", "ncclSymk", "ncclKernel")
"""Words in the names of kernels that communicate."""

Checks = Iterator[Check]
_env, _soft, _gpu, _link, _host = (
    functools.partial(Check, area) for area in ("environment", "software", "GPUs", "links", "host")
)


def environment(f: Found) -> Checks:
    """Variables that hocket sets or wants, and harmful variables."""
    wanted = {variable.name for variable in WANTED}
    for finding in survey(f.env, f.passed):
        found = finding.found or "not set, hocket sets " + finding.wanted
        if finding.state in ("ok", "set"):
            yield _env(finding.name, "ok", found)
        else:
            state = "stops" if finding.state == "refused" else "costs"
            found = f"{finding.found or 'not set'}{f', wanted {finding.wanted}' if finding.name in wanted else ''}"
            yield _env(finding.name, state, found, finding.cost, finding.fix)
    yield _threads(f)


def _threads(f: Found) -> Check:
    """Threads of a rank. There is one rank per GPU, and without GPUs at least one."""
    name, ranks, fix = "OMP_NUM_THREADS", max(1, f.torch.gpus), "unset it, and hocket divides the cores"
    if name not in f.env:
        return _env(name, "ok", "not set, hocket divides the cores among the ranks of a host")
    threads = f.env[name]
    if not is_number_of_threads(threads):
        return _env(name, "stops", threads or "(empty)", "not a number of threads: no run starts", fix)
    if f.cores and int(threads) * ranks > f.cores:
        cost = f"{ranks} ranks of {threads} threads share {f.cores} cores and take turns"
        return _env(name, "costs", threads, cost, fix)
    return _env(name, "ok", threads)


def software(f: Found) -> Checks:
    """Versions."""
    if f.python:
        text = ".".join(map(str, f.python))
        if f.python[:2] < OLDEST_PYTHON:
            yield _soft("python", "stops", text, "hocket cannot be imported", "Python 3.11 or newer")
        else:
            yield _soft("python", "ok", text)
    if f.torch.error:
        yield _soft("torch", "stops", f.torch.error, "nothing can run", "reinstall torch, or its driver")
        return
    numbers = tuple(int(part) for part in f.torch.version.split("+")[0].split(".")[:2] if part.isdigit())
    if numbers < OLDEST_TORCH:
        yield _soft("torch", "stops", f.torch.version, "it lacks what hocket calls", "torch 2.11 or newer")
    else:
        yield _soft("torch", "ok", f.torch.version + ("" if f.torch.cuda else ", without CUDA"))
    if not f.torch.gpus:
        yield _soft("NCCL", "unknown", "-", "torch uses no GPU here")
        return
    yield _soft("NCCL", "ok", ".".join(map(str, f.torch.nccl)))
    if f.torch.triton:
        yield _soft("triton", "ok", f.torch.triton)
    else:
        yield _soft("triton", "stops", "none", "hocket's GPU kernels are written in it", "install triton")


def gpus(f: Found) -> Checks:
    """What the driver and torch report about the GPUs."""
    if not f.gpus and not f.torch.gpus:
        yield _gpu("GPUs", "unknown", "none", "clocks, power, memory errors and partitions need one")
        return
    if f.torch.error:
        yield _gpu("GPUs", "unknown", f"{len(f.gpus)} listed by the driver", "torch gives no answer")
    elif f.gpus and f.torch.gpus < len(f.gpus):
        yield from _unused(f)
    elif not f.gpus:
        yield _gpu("driver's tool", "unknown", "no nvidia-smi", "clocks, power and partitions are not known")
        return
    else:
        yield _gpu("GPUs", "ok", f"{len(f.gpus)} x {f.gpus[0].name}, driver {f.driver or '?'}")
    names = sorted({f.gpus[number].name for number in _shown(f)})
    if len(names) > 1:
        yield _gpu("kinds", "costs", ", ".join(names), "all ranks wait for the slowest", "GPUs of one kind")
    for number in _shown(f):
        for state, text, cost, fix in _of_gpu(f.gpus[number]):
            yield _gpu(f"GPU {number}", state, text, cost, fix)


def _visible(f: Found) -> list[str] | None:
    """The words of CUDA_VISIBLE_DEVICES up to the first invalid one; None if the variable is not set."""
    text = f.env.get("CUDA_VISIBLE_DEVICES")
    words = () if text is None else (word.strip() for word in text.split(","))
    return None if text is None else list(takewhile(lambda word: re.match(r"\d|GPU-|MIG-", word), words))


def _shown(f: Found) -> list[int]:
    """Numbers of the driver's GPUs without those that CUDA_VISIBLE_DEVICES hides by number, which no rank uses."""
    named = _visible(f)
    if named is None or not all(word.isdecimal() for word in named):
        return list(range(len(f.gpus)))
    return [number for number in map(int, named) if number < len(f.gpus)]


def _of_gpu(g: Gpu) -> Iterator[tuple[State, str, str, str]]:
    """State, what was found, cost and fix of everything that is wrong with one GPU."""
    owner = "by the host's owner"
    if g.mig.lower() == "enabled":
        cost = "NVLink and P2P do not reach its partitions: ranks on them talk through host memory, if at all"
        yield "stops", "MIG is on", cost, f"a GPU without MIG, which is turned off {owner}"
    if 0 < g.clock_mhz < g.max_clock_mhz:
        cost = f"compute takes up to {g.max_clock_mhz / g.clock_mhz - 1:.0%} longer"
        found = f"clock held at {g.clock_mhz} of {g.max_clock_mhz} MHz"
        yield "costs", found, cost, f"nvidia-smi --reset-applications-clocks, {owner}"
    if 0 < g.power_watts < g.default_watts:
        found = f"limited to {g.power_watts:.0f} of {g.default_watts:.0f} W"
        yield "costs", found, "the clock falls under load", f"nvidia-smi -pl {g.default_watts:.0f}, {owner}"
    if g.slowed_by:
        fix = "look at cooling and power of the host"
        yield "costs", ", ".join(g.slowed_by), "it is slow, and its peers wait for it", fix
    if g.uncorrected:
        found = f"{g.uncorrected} memory errors that ECC could not correct"
        yield "stops", found, "a run dies, or computes nonsense", "another GPU, and tell the host's owner"
    if g.ecc.lower() == "disabled":
        yield "costs", "ECC is off", "a flipped bit goes unnoticed", f"nvidia-smi -e 1, {owner}"
    if g.compute_mode.lower() == "prohibited":
        yield "stops", "computing is prohibited", "no process may use it", f"nvidia-smi -c 0, {owner}"
    if g.used_mib > BUSY_MIB:
        found = f"{g.used_mib / 1024:.0f} GiB in use"
        yield "costs", found, "another process works there, and peers wait for this GPU", "wait until it is free"


def _unused(f: Found) -> Checks:
    named, visible = _visible(f), f.env.get("CUDA_VISIBLE_DEVICES")
    found = f"{f.torch.gpus} of {len(f.gpus)} can be used"
    if named is not None and f.torch.gpus >= min(len(named), len(f.gpus)):
        yield _gpu("GPUs", "ok", f"{found}: CUDA_VISIBLE_DEVICES = {visible or '(empty)'}")
    elif not f.torch.cuda:
        fix = "a torch with CUDA, as from PyPI"
        yield _gpu("GPUs", "stops", found, "torch is a build without CUDA, so all runs on CPUs", fix)
    else:
        fix = f"a driver for CUDA {f.torch.cuda}, or a torch for driver {f.driver or '(not known)'}"
        yield _gpu("GPUs", "stops", found, "torch cannot start CUDA on the others", fix)


def links(f: Found) -> Checks:
    """How GPUs reach each other, and whether copy engines move the bytes."""
    if f.torch.gpus < 2:
        yield _link("P2P, NVLink", "unknown", f"{f.torch.gpus} GPUs", "it takes two GPUs to see a link")
        yield _link("copy engine", "unknown", "-", "it takes two GPUs to see what moves the bytes")
        return
    if f.torch.apart:
        pairs = ", ".join(f"{a} to {b}" for a, b in f.torch.apart[:6])
        cost = "bytes go through host memory, far slower than NVLink, and no copy engine can serve collectives"
        yield _link("P2P", "costs", f"not from GPU {pairs}", cost, "see the host's IOMMU; runs take NCCL until then")
    else:
        yield _link("P2P", "ok", "every GPU reaches every other")
    joined = {pair: how for pair, how in f.links.items() if not f.gpus or set(pair) <= set(_shown(f))}
    slow = {pair: how for pair, how in joined.items() if not how.startswith("NV")}
    if not joined:
        yield _link("NVLink", "unknown", "no nvidia-smi", "how GPUs are joined is not known")
    elif slow:
        (a, b), how = next(iter(sorted(slow.items())))
        cost = "over PCIe a gather takes several times as long, and needs as much more compute to hide under"
        found = f"{len(slow)} of {len(joined)} pairs have none (GPU {a} and {b}: {how})"
        yield _link("NVLink", "costs", found, cost, "fewer, larger messages: more train.sequences; or such a host")
    else:
        yield _link("NVLink", "ok", f"all {len(joined)} pairs: {', '.join(sorted(set(joined.values())))}")
    yield from _copy_engine(f)


def _network(f: Found) -> Checks:
    """The network between hosts. A single host needs none, so a missing network is no finding."""
    up = [port for port in f.ports if port.active]
    if not f.ports:
        cost = "runs of one host need none; between hosts NCCL would talk over TCP, many times slower"
        yield _link("InfiniBand", "ok", "none, and no RoCE", cost)
        return
    for port in f.ports:
        if not port.active:
            cost = "between hosts NCCL has one link less, or none and talks over TCP"
            yield _link("InfiniBand", "costs", f"{port.name} is down", cost, "look at its cable and switch; see ibstat")
    slow = [port for port in up if 0 < port.gbits < max(other.gbits for other in up)]
    if slow:
        found = f"{slow[0].name} has {slow[0].gbits:g} of {max(port.gbits for port in up):g} Gb/s"
        cost = "NCCL spreads its channels evenly: all wait for the slowest link"
        yield _link("InfiniBand", "costs", found, cost, "NCCL_IB_HCA names the fast ones, or mend it")
    elif up:
        kinds = " and ".join(sorted({"RoCE" if port.kind == "Ethernet" else port.kind for port in up}))
        each = sum(port.gbits for port in up) / 8 / (f.torch.gpus or 1)
        told = f"network.link = {each:g}GB/s tells predictions for several hosts what each GPU's share carries"
        yield _link(
            "InfiniBand", "ok", f"{len(up)} ports of {up[0].gbits:g} Gb/s, {kinds}", told if f.torch.gpus else ""
        )


def _copy_engine(f: Found) -> Checks:
    if f.torch.no_copy_engine:
        cost = "collectives run on SMs, and slow down the compute that they hide under"
        fix = "what the reason asks for; runs take NCCL until then"
        yield _link("copy engine", "costs", f.torch.no_copy_engine, cost, fix)
    elif not f.copies:
        yield _link("copy engine", "unknown", "not tried", f.no_probe)
    elif kernels := sorted({name for name in f.copies if any(word in name for word in KERNELS)}):
        cost = "gathers take SMs from compute"
        fix = "report it; train.transport = nccl needs less memory until then"
        yield _link("copy engine", "costs", f"a gather ran {kernels[0][:60]}", cost, fix)
    elif any("Memcpy" in name for name in f.copies):
        yield _link("copy engine", "ok", "a gather of 16 MiB per GPU ran copies, and no kernel")
    else:
        yield _link("copy engine", "unknown", ", ".join(f.copies)[:60], "the trace shows neither copies nor NCCL")


def host(f: Found) -> Checks:
    """Cores, memory and limits."""
    if f.torch.gpus and f.cores < CORES_PER_GPU * f.torch.gpus:
        cost = "GPUs wait for hosts that issue their work by turns"
        found, fix = f"{f.cores} for {f.torch.gpus} GPUs", f"{CORES_PER_GPU} per GPU, or fewer GPUs"
        yield _host("cores", "costs", found, cost, fix)
    else:
        yield _host("cores", "ok", str(f.cores or "not known"))
    if f.torch.gpus and 0 < f.shm < SHM_PER_GPU * f.torch.gpus:
        found, wanted = f"{f.shm / MIB:.0f} MiB", SHM_PER_GPU * f.torch.gpus / MIB
        fix = f"{wanted:.0f} MiB or more: docker run --shm-size, or --ipc=host"
        yield _host("/dev/shm", "stops", found, "NCCL fails as soon as it is full, often in the first step", fix)
    elif f.shm:
        yield _host("/dev/shm", "ok", _size(f.shm))
    else:
        yield _host("/dev/shm", "unknown", "not there", "shared memory cannot be measured on this system")
    if 0 < f.open_files < OPEN_FILES and f.torch.gpus:
        cost = "each group holds sockets to its peers: a run of many groups fails at its start"
        yield _host("open files", "costs", str(f.open_files), cost, f"ulimit -n {OPEN_FILES}")
    else:
        yield _host("open files", "ok", str(f.open_files or "not known"))
    if f.locked >= 0 and any(port.active for port in f.ports):
        cost = "adapters lock the memory that they read and write: a run of several hosts fails as it begins"
        yield _host("locked memory", "costs", _size(f.locked), cost, "ulimit -l unlimited")
    else:
        yield _host("locked memory", "ok", "no limit" if f.locked < 0 else f"{_size(f.locked)}, enough for one host")
    if f.temporary_free < TEMPORARY:
        found = f"{_size(f.temporary_free)} free in {f.temporary or '(none)'}"
        cost = "compiled kernels, traces and workers' answers go there; a run fails when it is full"
        yield _host("temporary files", "costs", found, cost, "make room, or TMPDIR=another folder")
    else:
        yield _host("temporary files", "ok", f"{_size(f.temporary_free)} free in {f.temporary}")


def _size(nbytes: int) -> str:
    return f"{nbytes / GIB:.1f} GiB" if nbytes >= GIB else f"{nbytes / MIB:.2g} MiB"


AREAS: tuple[Callable[[Found], Checks], ...] = (environment, software, gpus, links, _network, host)
"""In the order of the report."""


def examine(found: Found) -> tuple[Check, ...]:
    """All judgements of a host."""
    return tuple(check for area in AREAS for check in area(found))


def exit_code(checks: tuple[Check, ...]) -> int:
    """1 if a check found a cost or something that stops a run, else 0. An impossible check is no finding."""
    return int(any(check.state in ("costs", "stops") for check in checks))


# -- The doctor's judgements as text and as JSON -----------------------------------------------------------------------

_INDENT = 11
WIDTH = 120


def to_text(checks: tuple[Check, ...]) -> str:
    """A line for each judgement, by area. Its cost and its fix stand below the line."""
    return "\n".join(_lines(checks))


def _lines(checks: tuple[Check, ...]) -> Iterator[str]:
    area = ""
    width = max(len(check.name) for check in checks)
    for check in checks:
        if check.area != area:
            yield from ([] if not area else [""])
            area = check.area
            yield area.upper()
        yield f"  {check.state:7}  {check.name:{width}}  {check.found}"
        for text in (check.cost, f"fix: {check.fix}" if check.fix else ""):
            indent = " " * _INDENT
            yield from textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=indent)
    yield ""
    yield verdict(checks)


def verdict(checks: tuple[Check, ...]) -> str:
    """The last line."""
    stops, costs, unknown = (sum(check.state == state for check in checks) for state in ("stops", "costs", "unknown"))
    rest = f"; {unknown} could not be checked" if unknown else ""
    if not stops and not costs:
        return f"nothing to mend{rest}"
    parts = [f"{stops} that stop a run"] * bool(stops) + [f"{costs} that cost time"] * bool(costs)
    return f"to mend: {' and '.join(parts)}{rest}"


def to_json(checks: tuple[Check, ...]) -> dict[str, Any]:
    """The same as JSON."""
    return {"exit_code": exit_code(checks), "checks": [asdict(check) for check in checks]}
