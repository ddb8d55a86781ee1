"""Environment variables that decide whether communication overlaps: the values that hocket wants, and costs of others.

A library reads each variable once, at its own time. A value that is set later has no effect, and no library says so. So
`survey` compares the wanted values with the values found, and with what has already happened in this process. It is
pure: the environment is passed in as a value.

Note: [Who sets what]
hocket sets missing variables before torch is imported: in the process that forks the workers, or in each worker of
torchrun and Slurm. Values that the user has set stay, and hocket reports their cost. The exception is NVLink multicast:
no setting leaves it on, and a user who turns it on gets an error instead of a changed value.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hocket.problems import stop_if

Moment = Literal["threads start", "CUDA starts", "groups are made"]
State = Literal["ok", "set", "late", "kept", "refused"]


@dataclass(frozen=True)
class Variable:
    """A variable for which hocket wants a value."""

    name: str
    value: str
    read: Moment
    """The only time at which its value is read."""
    cost: str
    """The cost of another value."""
    must: bool = False
    """Whether hocket refuses to start with another value."""


@dataclass(frozen=True)
class Harm:
    """A variable that costs overlap when it is set at all, or to certain values."""

    name: str
    values: tuple[str, ...]
    """Values that cost overlap; empty means any."""
    cost: str
    fix: str = ""
    """Empty means: unset it."""


@dataclass(frozen=True)
class Finding:
    """One variable: the wanted value, the found value, and the consequence."""

    name: str
    wanted: str
    found: str
    """Empty if it was not set."""
    state: State
    """`set`: was missing, hocket sets it; `late`: set after it was read; `kept`: the user's value."""
    cost: str = ""
    fix: str = ""

    def __str__(self) -> str:
        found = self.found or "(not set)"
        return f"{self.name} = {found} (environment): {_WORDS[self.state]}; {self.cost}; fix: {self.fix}"


_WORDS: Mapping[State, str] = {
    "ok": "as wanted",
    "set": "set by hocket",
    "late": "set too late: its reader has started before",
    "kept": "is kept",
    "refused": "NVLink multicast must be off",
}

_MULTICAST = "memory of all ranks is mapped a second time for it, and hocket uses none of that"

WANTED: tuple[Variable, ...] = (
    Variable("NCCL_NVLS_ENABLE", "0", "groups are made", _MULTICAST, must=True),
    Variable("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1", "groups are made", _MULTICAST, must=True),
    Variable("NVSHMEM_DISABLE_NVLS", "1", "groups are made", _MULTICAST, must=True),
    Variable(
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "32",
        "CUDA starts",
        "streams share that many queues, and below 32 less overlaps: communication of one lane waits for compute "
        "of another that was launched before",
    ),
)
"""In the order of reports. hocket's order of ops never relies on the order of launches, so it never needs
CUDA_DEVICE_MAX_CONNECTIONS=1."""

HARMFUL: tuple[Harm, ...] = (
    Harm("CUDA_LAUNCH_BLOCKING", ("1",), "every launch waits until its kernel has ended: nothing overlaps"),
    Harm("TORCH_NCCL_BLOCKING_WAIT", ("1",), "the host stops at every wait for a collective: nothing is queued ahead"),
    Harm("NCCL_BLOCKING_WAIT", ("1",), "the host stops at every wait for a collective: nothing is queued ahead"),
    Harm(
        "TORCH_DISTRIBUTED_DEBUG", ("DETAIL",), "every collective is preceded by one that compares ranks", "INFO or OFF"
    ),
    Harm("PYTORCH_NO_CUDA_MEMORY_CACHING", ("1",), "every tensor is allocated by the driver, which stops the device"),
    Harm("NCCL_LAUNCH_ORDER_IMPLICIT", ("1",), "NCCL orders the launches of all groups: lanes wait for each other"),
    Harm("NCCL_P2P_DISABLE", ("1",), "GPUs of one host talk through host memory, many times slower than NVLink"),
    Harm("NCCL_P2P_LEVEL", ("LOC", "0"), "GPUs of one host talk through host memory, many times slower than NVLink"),
    Harm("NCCL_SHM_DISABLE", ("1",), "ranks of one host talk through the network"),
    Harm("NCCL_IB_DISABLE", ("1",), "hosts talk over TCP, many times slower than over InfiniBand or RoCE"),
    Harm("NCCL_NET", ("SOCKET",), "hosts talk over TCP, many times slower than over InfiniBand or RoCE"),
    Harm("NCCL_MAX_CTAS", (), "it overrules how many SMs each group may take"),
    Harm("NCCL_MIN_CTAS", (), "it overrules how many SMs each group may take"),
    Harm("NCCL_MAX_NCHANNELS", (), "it overrules how many SMs each group may take"),
    Harm("NCCL_MIN_NCHANNELS", (), "it overrules how many SMs each group may take"),
    Harm("NCCL_ALGO", (), "NCCL no longer chooses by size and by what links there are"),
    Harm("NCCL_PROTO", (), "NCCL no longer chooses by size and by what links there are"),
)
"""Variables that hocket never sets, and the cost if the user has set them."""

_NO_COPIES = ("NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL")
"""Variables by which a user forbids peer access between GPUs."""


def passed(modules: Mapping[str, Any]) -> frozenset[Moment]:
    """Moments that this process has already passed, by its loaded modules. Imports nothing."""
    found: set[Moment] = set()
    torch = modules.get("torch")
    if torch is not None:
        found.add("threads start")
        if torch.cuda.is_initialized():
            found.add("CUDA starts")
        if "torch.distributed" in modules and torch.distributed.is_available() and torch.distributed.is_initialized():
            found.add("groups are made")
    return frozenset(found)


def survey(env: Mapping[str, str], passed: Collection[Moment] = ()) -> list[Finding]:
    """Findings about all wanted variables, then about harmful ones. Changes nothing."""
    return [*_wanted(env, passed), *_harmful(env)]


def _wanted(env: Mapping[str, str], passed: Collection[Moment]) -> Iterator[Finding]:
    for v in WANTED:
        found = env.get(v.name, "")
        state: State = "ok"
        fix = ""
        if found and found != v.value:
            state, fix = ("refused" if v.must else "kept"), f"{v.name}={v.value}, or unset it"
        elif not found and v.read in passed:
            state, fix = "late", f"{v.name}={v.value} in the shell, before Python starts"
        elif not found:
            state = "set"
        yield Finding(v.name, v.value, found, state, v.cost if fix else "", fix)


def _harmful(env: Mapping[str, str]) -> Iterator[Finding]:
    for harm in HARMFUL:
        found = env.get(harm.name, "")
        if found and (not harm.values or found.upper() in harm.values):
            yield Finding(harm.name, "", found, "kept", harm.cost, harm.fix or f"unset {harm.name}")


def no_copies(findings: Sequence[Finding]) -> str:
    """Why the findings rule out copy engines; empty if they do not."""
    return "; ".join(f"{f.name} = {f.found} (environment): {f.cost}" for f in findings if _forbids_copies(f))


def _forbids_copies(finding: Finding) -> bool:
    return finding.name in _NO_COPIES and finding.state == "kept"


def refusals(findings: Sequence[Finding]) -> list[str]:
    """A line for each finding that prevents a start."""
    must = {v.name for v in WANTED if v.must}
    return [str(each) for each in findings if each.name in must and each.state in ("refused", "late")]


def apply(env: MutableMapping[str, str], passed: Collection[Moment] = ()) -> list[str]:
    """Set missing variables, and return remarks on unwanted values.

    Raises ValueError if NVLink multicast is switched on, or can no longer be switched off.
    """
    findings = survey(env, passed)
    stop_if(refusals(findings), "variables")
    for finding in findings:
        if finding.state == "set":
            env[finding.name] = finding.wanted
    return [str(finding) for finding in findings if finding.state in ("kept", "late")]
