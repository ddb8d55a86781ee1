"""Findings of the doctor on a host. They are plain values, so a test can make any host."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal

from hocket.variables import Moment

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
