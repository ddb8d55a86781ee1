"""`hocket doctor`: is this host fit for overlap, and what does each problem cost?

`look` queries nvidia-smi, torch in a separate process, and the system; unavailable values stay empty. `examine` judges
them, row by row, and reads nothing itself, so a test can construct any host.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import resource
import shutil
import sys
import textwrap
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal, NamedTuple

from hocket.environment import TOOL_LIMIT, cores, driver_says, is_number_of_threads, processes, torch_build
from hocket.variables import Moment, survey

# -- Findings about a host ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Torch:
    """torch's report about the host."""

    version: str
    cuda: str = ""
    """CUDA version that torch was built for; empty for a build without CUDA."""
    gpus: int = 0
    """Number of GPUs that torch can use."""
    nccl: tuple[int, ...] = ()
    triton: str = ""
    apart: tuple[tuple[int, int], ...] = ()
    """Pairs of GPUs (a, b) in which a cannot access the memory of b."""
    no_copy_engine: str = ""
    """Why copy engines cannot run collectives; empty if they can, or without GPUs."""
    error: str = ""
    """The error that torch raised instead of an answer; empty if it answered."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """All findings to judge. Sizes in bytes; 0 or empty means unknown."""

    env: Mapping[str, str] = field(default_factory=dict)
    passed: Collection[Moment] = ()
    python: tuple[int, ...] = ()
    torch: Torch
    gpus: tuple[Mapping[str, str], ...] = ()
    """GPUs that the driver lists, also those that torch cannot use: values by the driver's field names."""
    links: Mapping[tuple[int, int], str] = field(default_factory=dict)
    """The link between two GPUs in the driver's words, such as NV18 or SYS."""
    cores: int = 0
    shm: int = 0
    """Size of the processes' shared memory."""
    open_files: int = 0
    """Files and sockets that one process may open; -1 means no limit."""


_ASKED = (
    "name", "memory.total", "memory.used", "power.limit", "power.default_limit", "ecc.mode.current",
    "ecc.errors.uncorrected.volatile.total", "mig.mode.current", "compute_mode", "driver_version",
)  # fmt: skip
_NEWER = ("clocks.applications.graphics", "clocks.max.graphics", "clocks_throttle_reasons.active")
"""Fields that drivers rename from time to time; if a driver does not know one of a query, the query fails."""


def look(env: Mapping[str, str], passed: Collection[Moment]) -> Found:
    """Collect all findings about this host."""
    return Found(
        env=dict(env),
        passed=passed,
        python=tuple(sys.version_info[:3]),
        torch=_torch(),
        gpus=gpus_of(_asked((*_ASKED, *_NEWER)), (*_ASKED, *_NEWER)) or gpus_of(_asked(_ASKED), _ASKED),
        links=links_of(driver_says("topo", "-m")),
        cores=cores(),
        shm=shutil.disk_usage("/dev/shm").total if Path("/dev/shm").exists() else 0,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],  # RLIM_INFINITY is -1
    )


def _asked(fields: Sequence[str]) -> str:
    return driver_says(f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits")


def gpus_of(text: str, fields: Sequence[str]) -> tuple[dict[str, str], ...]:
    """GPUs from nvidia-smi's output for these fields, one line per GPU."""
    return tuple(dict(zip(fields, map(str.strip, line.split(",")), strict=False)) for line in text.splitlines())


def links_of(text: str) -> dict[tuple[int, int], str]:
    """The link of each pair of GPUs, from the matrix of `nvidia-smi topo -m`."""
    found = {}
    for line in re.sub(r"\x1b\[[\d;]*m", "", text).splitlines():
        words = line.split()
        if words and re.fullmatch(r"GPU\d+", words[0]) and "X" in words[1:]:
            a = int(words[0].removeprefix("GPU"))
            found.update({(b, a): how for b, how in enumerate(words[1 : a + 1])})
    return found


def _torch() -> Torch:
    """Torch's report, from a separate process, since it may crash or hang. A build without CUDA needs no process."""
    version, cuda = torch_build()
    if not cuda:
        return Torch(version=version)
    try:
        with processes(1, {}) as pool:
            return pool.submit(_ask).result(TOOL_LIMIT)
    except Exception as error:  # a broken driver may crash the process
        return Torch(version=version, cuda=cuda, error=f"{type(error).__name__}: {error}")


def _ask() -> Torch:
    """Initialises CUDA."""
    import torch

    from hocket.runtime.shared_memory import problem

    count, triton = torch.cuda.device_count(), importlib.util.find_spec("triton")
    found = Torch(
        version=torch.__version__,
        cuda=torch.version.cuda or "",
        gpus=count,
        triton=importlib.import_module("triton").__version__ if triton else "",
    )
    if not count:
        return found
    reach = torch.cuda.can_device_access_peer
    apart = tuple((a, b) for a in range(count) for b in range(count) if a != b and not reach(a, b))
    nccl, no_copy_engine = tuple(torch.cuda.nccl.version()[:3]), problem() if count > 1 else ""
    return replace(found, nccl=nccl, apart=apart, no_copy_engine=no_copy_engine)


# -- Their meaning for overlap -----------------------------------------------------------------------------------------

State = Literal["ok", "costs", "stops", "unknown"]


class Row(NamedTuple):
    """One question about a host, with its answer."""

    name: str
    state: State
    """The state if something is wrong."""
    wrong: str
    """What is wrong, or why there is no answer; empty if nothing is."""
    right: str
    """The finding if nothing is wrong; empty: nothing to report."""
    cost: str
    """What the problem costs, or why the question has no answer."""
    fix: str = ""


@dataclass(frozen=True)
class Check:
    """One judgement, as it is reported."""

    area: str
    name: str
    state: State
    found: str
    cost: str = ""
    fix: str = ""


Rows = Iterator[Row]
OLDEST_PYTHON, OLDEST_TORCH = (3, 11), (2, 11)
GIB, MIB = 2**30, 2**20
SHM_PER_GPU = 64 * MIB
"""Shared memory that NCCL's processes need to communicate, in bytes per GPU."""
OPEN_FILES = 4096
CORES_PER_GPU = 2
"""One core issues the ops of a rank. The threads of autograd and NCCL need another."""
BUSY_MIB = 2048
"""From this much used memory, another process is assumed to work on a GPU."""
SLOWED = {
    0x08: "slowed down by its hardware", 0x20: "too hot (software limit)", 0x40: "too hot (hardware limit)",
    0x80: "not enough power from the host",
}  # fmt: skip
"""Bits of the driver's reasons for a reduced clock, except idleness and limits set by an administrator."""


def environment(f: Found) -> Rows:
    """Variables that hocket sets or wants, and harmful variables."""
    for each in survey(f.env, f.passed):
        right = (each.found or f"not set, hocket sets {each.wanted}") if each.state in ("ok", "set") else ""
        found = f"{each.found or 'not set'}{f', wanted {each.wanted}' if each.wanted else ''}"
        state: State = "stops" if each.state == "refused" else "costs"
        yield Row(each.name, state, "" if right else found, right, each.cost, each.fix)
    threads, ranks = f.env.get("OMP_NUM_THREADS", ""), max(1, f.torch.gpus)  # one rank per GPU
    state, wrong, cost = "costs", "", f"{ranks} ranks of {threads} threads share {f.cores} cores and take turns"
    if "OMP_NUM_THREADS" in f.env and not is_number_of_threads(threads):
        state, wrong, cost = "stops", threads or "(empty)", "not a number of threads: no run starts"
    elif threads and f.cores and int(threads) * ranks > f.cores:
        wrong = threads
    right = threads or "not set, hocket divides the cores among the ranks of a host"
    yield Row("OMP_NUM_THREADS", state, wrong, right, cost, "unset it, and hocket divides the cores")


def software(f: Found) -> Rows:
    """Versions."""
    python, t = ".".join(map(str, f.python)), f.torch
    old = python if f.python and f.python[:2] < OLDEST_PYTHON else ""
    yield Row("python", "stops", old, python, "hocket cannot be imported", "Python 3.11 or newer")
    if t.error:
        yield Row("torch", "stops", t.error, "", "nothing can run", "reinstall torch, or its driver")
        return
    numbers = tuple(int(part) for part in t.version.split("+")[0].split(".")[:2] if part.isdigit())
    old, right = t.version if numbers < OLDEST_TORCH else "", t.version + ("" if t.cuda else ", without CUDA")
    yield Row("torch", "stops", old, right, "it lacks what hocket calls", "torch 2.11 or newer")
    yield Row("NCCL", "unknown", "" if t.gpus else "-", ".".join(map(str, t.nccl)), "torch uses no GPU here")
    if t.gpus:
        missing = "" if t.triton else "none"
        yield Row("triton", "stops", missing, t.triton, "hocket's GPU kernels are written in it", "install triton")


def gpus(f: Found) -> Rows:
    """The driver's and torch's reports about the GPUs."""
    if not f.gpus:
        lacks = ("driver's tool", "no nvidia-smi") if f.torch.gpus else ("GPUs", "none")
        why = "clocks, power and partitions are not known"
        why = why if f.torch.gpus else "clocks, power, memory errors and partitions need one"
        yield Row(lacks[0], "unknown", lacks[1], "", why)
        return
    driver, used = f.gpus[0].get("driver_version", ""), f"{f.torch.gpus} of {len(f.gpus)} can be used"
    named = _visible(f)
    if f.torch.error:
        yield Row("GPUs", "unknown", f"{len(f.gpus)} listed by the driver", "", "torch gives no answer")
    elif f.torch.gpus >= len(f.gpus):
        yield Row("GPUs", "ok", "", f"{len(f.gpus)} x {f.gpus[0]['name']}, driver {driver or '?'}", "")
    elif named is not None and f.torch.gpus >= min(len(named), len(f.gpus)):
        yield Row("GPUs", "ok", "", f"{used}: CUDA_VISIBLE_DEVICES = {f.env['CUDA_VISIBLE_DEVICES'] or '(empty)'}", "")
    elif not f.torch.cuda:
        fix = "a torch with CUDA, as from PyPI"
        yield Row("GPUs", "stops", used, "", "torch is a build without CUDA, so all runs on CPUs", fix)
    else:
        fix = f"a driver for CUDA {f.torch.cuda}, or a torch for driver {driver or '(not known)'}"
        yield Row("GPUs", "stops", used, "", "torch cannot start CUDA on the others", fix)
    kinds = sorted({f.gpus[number]["name"] for number in _shown(f)})
    several = ", ".join(kinds) if len(kinds) > 1 else ""
    yield Row("kinds", "costs", several, "", "all ranks wait for the slowest", "GPUs of one kind")
    for number in _shown(f):
        yield from _of_gpu(f"GPU {number}", f.gpus[number])


def _of_gpu(name: str, g: Mapping[str, str]) -> Rows:
    """Possible problems of one GPU. Values that the tool does not report, such as [N/A], count as no problem."""

    def number(of: str) -> float:
        return float(g[of]) if re.fullmatch(r"\d+(\.\d+)?", g.get(of, "")) else 0.0

    def noted(of: str, value: str, words: str) -> str:
        return words if g.get(of, "").lower() == value else ""

    owner, reasons = "by the host's owner", g.get("clocks_throttle_reasons.active", "")
    clock, top = number("clocks.applications.graphics"), number("clocks.max.graphics")
    watts, usual = number("power.limit"), number("power.default_limit")
    errors, busy = number("ecc.errors.uncorrected.volatile.total"), number("memory.used")
    bits = int(reasons, 16) if re.fullmatch(r"0x[0-9a-fA-F]+", reasons) else 0
    slowed = ", ".join(words for bit, words in SLOWED.items() if bits & bit)
    held = f"clock held at {clock:.0f} of {top:.0f} MHz" if 0 < clock < top else ""
    limited = f"limited to {watts:.0f} of {usual:.0f} W" if 0 < watts < usual else ""
    broken = f"{errors:.0f} memory errors that ECC could not correct" if errors else ""
    in_use = f"{busy / 1024:.0f} GiB in use" if busy > BUSY_MIB else ""
    mig, off = noted("mig.mode.current", "enabled", "MIG is on"), noted("ecc.mode.current", "disabled", "ECC is off")
    prohibited = noted("compute_mode", "prohibited", "computing is prohibited")
    rows: tuple[tuple[State, str, str, str], ...] = (
        ("stops", mig, "NVLink and P2P do not reach its partitions: ranks on them talk through host memory, if at all",
         f"a GPU without MIG, which is turned off {owner}"),
        ("costs", held, f"compute takes up to {top / max(clock, 1) - 1:.0%} longer",
         f"nvidia-smi --reset-applications-clocks, {owner}"),
        ("costs", limited, "the clock falls under load", f"nvidia-smi -pl {usual:.0f}, {owner}"),
        ("costs", slowed, "it is slow, and its peers wait for it", "look at cooling and power of the host"),
        ("stops", broken, "a run dies, or computes nonsense", "another GPU, and tell the host's owner"),
        ("costs", off, "a flipped bit goes unnoticed", f"nvidia-smi -e 1, {owner}"),
        ("stops", prohibited, "no process may use it", f"nvidia-smi -c 0, {owner}"),
        ("costs", in_use, "another process works there, and peers wait for this GPU", "wait until it is free"),
    )  # fmt: skip
    yield from (Row(name, state, wrong, "", cost, fix) for state, wrong, cost, fix in rows)


def _visible(f: Found) -> list[str] | None:
    """The words of CUDA_VISIBLE_DEVICES up to the first invalid one; None if the variable is not set."""
    text = f.env.get("CUDA_VISIBLE_DEVICES")
    words = () if text is None else (word.strip() for word in text.split(","))
    return None if text is None else list(takewhile(lambda word: re.match(r"\d|GPU-|MIG-", word), words))


def _shown(f: Found) -> list[int]:
    """Numbers of the driver's GPUs, except those that CUDA_VISIBLE_DEVICES hides by number, which no rank uses."""
    named = _visible(f)
    if named is None or not all(word.isdecimal() for word in named):
        return list(range(len(f.gpus)))
    return [number for number in map(int, named) if number < len(f.gpus)]


def links(f: Found) -> Rows:
    """How GPUs reach each other, whether copy engines can move the bytes, and the network between hosts."""
    if f.torch.gpus < 2:
        yield Row("P2P, NVLink", "unknown", f"{f.torch.gpus} GPUs", "", "it takes two GPUs to see a link")
        yield Row("copy engine", "unknown", "-", "", "it takes two GPUs to see what moves the bytes")
    else:
        pairs = ", ".join(f"{a} to {b}" for a, b in f.torch.apart[:6])
        cost = "bytes go through host memory, far slower than NVLink, and no copy engine can serve collectives"
        fix, apart = "see the host's IOMMU; runs take NCCL until then", f"not from GPU {pairs}" if pairs else ""
        yield Row("P2P", "costs", apart, "every GPU reaches every other", cost, fix)
        joined = {pair: how for pair, how in f.links.items() if not f.gpus or set(pair) <= set(_shown(f))}
        slow = sorted((pair, how) for pair, how in joined.items() if not how.startswith("NV"))
        wrong = f"{len(slow)} of {len(joined)} pairs have none" if slow else ""
        wrong += f" (GPU {slow[0][0][0]} and {slow[0][0][1]}: {slow[0][1]})" if slow else ""
        cost = "over PCIe a gather takes several times as long, and needs as much more compute to hide under"
        fix = "fewer, larger messages: more train.sequences; or such a host"
        right = f"all {len(joined)} pairs: {', '.join(sorted(set(joined.values())))}"
        if joined:
            yield Row("NVLink", "costs", wrong, right, cost, fix)
        else:
            yield Row("NVLink", "unknown", "no nvidia-smi", "", "how GPUs are joined is not known")
        cost, none = "collectives run on SMs, and slow down the compute that they hide under", f.torch.no_copy_engine
        fix = "what the reason asks for; runs take NCCL until then"
        yield Row("copy engine", "costs", none, "serves collectives; a run tries it before it begins", cost, fix)


def host(f: Found) -> Rows:
    """Cores, memory and limits."""
    n = f.torch.gpus
    few = f"{f.cores} for {n} GPUs" if f.cores < CORES_PER_GPU * n else ""
    cost, fix = "GPUs wait for hosts that issue their work by turns", f"{CORES_PER_GPU} per GPU, or fewer GPUs"
    yield Row("cores", "costs", few, str(f.cores or "not known"), cost, fix)
    if not f.shm:
        yield Row("/dev/shm", "unknown", "not there", "", "shared memory cannot be measured on this system")
    else:
        small = f"{f.shm / MIB:.0f} MiB" if f.shm < SHM_PER_GPU * n else ""
        fix = f"{SHM_PER_GPU * n / MIB:.0f} MiB or more: docker run --shm-size, or --ipc=host"
        cost = "NCCL fails as soon as it is full, often in the first step"
        yield Row("/dev/shm", "stops", small, _size(f.shm), cost, fix)
    few = str(f.open_files) if 0 < f.open_files < OPEN_FILES and n else ""
    cost = "each group holds sockets to its peers: a run of many groups fails at its start"
    right = "no limit" if f.open_files < 0 else str(f.open_files or "not known")
    yield Row("open files", "costs", few, right, cost, f"ulimit -n {OPEN_FILES}")


def _size(nbytes: int) -> str:
    return f"{nbytes / GIB:.1f} GiB" if nbytes >= GIB else f"{nbytes / MIB:.2g} MiB"


AREAS: Mapping[str, Callable[[Found], Rows]] = {
    "environment": environment, "software": software, "GPUs": gpus, "links": links, "host": host,
}  # fmt: skip
"""In report order."""


def examine(found: Found) -> tuple[Check, ...]:
    """All judgements of a host."""
    checks = []
    for area, rows in AREAS.items():
        for name, state, wrong, right, cost, fix in rows(found):
            if wrong:
                checks.append(Check(area, name, state, wrong, cost, fix))
            elif right:
                checks.append(Check(area, name, "ok", right))
    return tuple(checks)


def exit_code(checks: tuple[Check, ...]) -> int:
    """1 if something costs time or stops a run, else 0. Unanswered questions do not count."""
    return int(any(check.state in ("costs", "stops") for check in checks))


# -- The judgements as text and as JSON --------------------------------------------------------------------------------

_INDENT = 11 * " "
WIDTH = 120


def to_text(checks: tuple[Check, ...]) -> str:
    """A line for each judgement, by area, followed by its cost and its fix."""
    lines, area, width = list[str](), "", max(len(check.name) for check in checks)
    for check in checks:
        if check.area != area:
            lines += [*([""] if area else []), check.area.upper()]
            area = check.area
        lines.append(f"  {check.state:7}  {check.name:{width}}  {check.found}")
        for text in (check.cost, f"fix: {check.fix}" if check.fix else ""):
            lines += textwrap.wrap(text, WIDTH, initial_indent=_INDENT, subsequent_indent=_INDENT)
    return "\n".join([*lines, "", verdict(checks)])


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
