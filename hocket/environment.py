"""The environment of a run: its rank among workers, GPUs, cores and ports, and the variables that must be set.

The environment variables are passed in as a mapping: `launching/` and some commands read them. Processes that start
here get theirs explicitly.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import random
import re
import runpy
import signal
import socket
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from hocket.config import Config
from hocket.config.rule import Host
from hocket.machine import why_no_delta_kernels
from hocket.model.tokenizer import known_tokenizer
from hocket.problems import stop_if
from hocket.variables import WANTED, Finding, Moment, apply, refusals, survey

if TYPE_CHECKING:
    from concurrent.futures import ProcessPoolExecutor

MULTICAST_OFF = {variable.name: variable.value for variable in WANTED if variable.must}
"""Keeps NVLink multicast off. Libraries read these when they load, so they are set before torch is imported."""

HERE = "127.0.0.1", ""
"""Address of rank 0 if all ranks are on its host, and its variable: see Note: [Local runs use loopback only]."""

PORTS = range(20_000, 32_000)
"""Ports to search for a free one. They are below the range for outgoing connections, which could take the port before
rank 0 listens on it."""


@dataclass(frozen=True)
class Worker:
    """The rank of a process in a run, and where rank 0 listens."""

    rank: int
    world: int
    local_rank: int
    local_world: int
    address: str
    port: int
    address_from: str = "MASTER_ADDR"
    """The variable that set it; empty for this host."""
    port_from: str = "MASTER_PORT"
    """The variable that set it; empty for a port that was free on this host."""

    def variables(self) -> dict[str, str]:
        """The variables that `torch.distributed` reads."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
        }


def find_port() -> int:
    """A free TCP port of this host; 0 if there is none."""
    for port in random.sample(PORTS, 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            probe.listen()
            return port
    return 0


def find_worker(env: Mapping[str, str]) -> Worker | None:
    """The worker that this process is, if torchrun or Slurm started it, else None.

    Raises ValueError if the variables are incomplete or contradict each other.
    """
    if "RANK" in env or "WORLD_SIZE" in env:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
        found = {"LOCAL_RANK": env.get("RANK", ""), "LOCAL_WORLD_SIZE": env.get("WORLD_SIZE", ""), **env}
        rank, world, local_rank, local_world, master_port = (_number(found, name, "torchrun") for name in names)
        address = env.get("MASTER_ADDR") or _missing("MASTER_ADDR", "torchrun")
        at = HERE if "LOCAL_WORLD_SIZE" in env and local_world == world else (address, "MASTER_ADDR")
        return _checked(Worker(rank, world, local_rank, local_world, at[0], master_port, at[1]))
    # A batch script without srun also has SLURM_PROCID = 0; with one task it starts its own workers.
    if "SLURM_PROCID" in env and _number(env, "SLURM_NTASKS", "srun", "1") > 1:
        names = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")
        rank, world, local_rank = (_number(env, name, "srun") for name in names)
        listed = "SLURM_STEP_NODELIST" if env.get("SLURM_STEP_NODELIST") else "SLURM_JOB_NODELIST"
        nodes = env.get(listed) or _missing(listed, "srun")
        tasks = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE") or str(world)
        job = int(re.sub(r"\D", "", env.get("SLURM_JOB_ID", "")) or 0)
        local_world = tasks_here(tasks, _number(env, "SLURM_NODEID", "srun", "0"))
        address, said = env.get("MASTER_ADDR"), _number(env, "MASTER_PORT", "srun", "0")
        at = (address, "MASTER_ADDR") if address else (first_host(nodes), listed)
        at = HERE if local_world == world else at
        port = (said, "MASTER_PORT") if said else (20000 + job % 20000, "SLURM_JOB_ID")
        return _checked(Worker(rank, world, local_rank, local_world, at[0], port[0], at[1], port[1]))
    return None


def _number(env: Mapping[str, str], name: str, starter: str, default: str = "") -> int:
    text = env.get(name) or default
    if not re.fullmatch(r"\d+", text):
        _missing(name, starter, text)
    return int(text)


def _missing(name: str, starter: str, text: str = "") -> str:
    reason = "not a number" if text else "workers need it"
    without = "SLURM_PROCID" if starter == "srun" else "RANK and WORLD_SIZE"
    raise ValueError(
        f"{name} = {text or '(not set)'} (environment): {reason}; "
        f"fix: start workers with {starter}, or unset {without} to run without"
    )


def _checked(worker: Worker) -> Worker:
    if not (worker.rank < worker.world and worker.local_rank < worker.local_world <= worker.world):
        raise ValueError(
            f"RANK = {worker.rank} (environment): contradicts WORLD_SIZE = {worker.world}, "
            f"LOCAL_RANK = {worker.local_rank}, LOCAL_WORLD_SIZE = {worker.local_world}; "
            "fix: start workers with torchrun or srun"
        )
    if worker.port > 65535:
        raise ValueError(f"MASTER_PORT = {worker.port} (environment): out of range; fix: at most 65535")
    return worker


def first_host(nodes: str) -> str:
    """The first host of a Slurm node list: `gpu[03-05,07],cpu1` gives `gpu03`."""
    name = ""
    for text, ranges in re.findall(r"([^,\[\]]*)(?:\[([^\]]*)\])?", nodes):
        if not text and not ranges:
            break
        name += text + re.split(r"[,-]", ranges)[0]
        if nodes[len(name) :].startswith(",") and not ranges:
            break
    return name


def tasks_here(tasks: str, node: int) -> int:
    """Tasks on a node, from Slurm's compact list: `4(x2),3` is 4, 4, 3."""
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks):
        counts += [int(count)] * int(times or 1)
    if not counts:
        _missing("SLURM_TASKS_PER_NODE", "srun", tasks)
    return counts[min(node, len(counts) - 1)]


def prepare(env: MutableMapping[str, str], local_world: int, passed: Collection[Moment] = ()) -> list[str]:
    """Set the variables that must be set before torch is imported. The user's values stay; remarks say what they cost.

    `passed` are moments that this process has already passed, so that variables set too late are reported. Raises
    ValueError if NVLink multicast is switched on.
    """
    stop_if(stopping(env, survey(env, passed)), "variables")
    env.setdefault("OMP_NUM_THREADS", str(max(1, cores() // max(1, local_world))))
    return apply(env, passed)


def stopping(env: Mapping[str, str], findings: Sequence[Finding]) -> list[str]:
    """A line for each variable that prevents a start; `findings` are those of `survey`."""
    threads = env.get("OMP_NUM_THREADS", "1")
    if is_number_of_threads(threads):
        return refusals(findings)
    why = f"OMP_NUM_THREADS = {threads} (environment): not a number of threads"
    return [*refusals(findings), f"{why}; fix: 1 or more, or unset it"]


def is_number_of_threads(text: str) -> bool:
    """Whether a text is a valid OMP_NUM_THREADS: 1 or more."""
    return bool(re.fullmatch(r"\d*[1-9]\d*", text))


def cores() -> int:
    """CPU cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def probe(config: Config, origins: Mapping[str, str], worker: Worker | None, variables: Sequence[Finding] = ()) -> Host:
    """Describe this host. Imports torch only if it could use a GPU. `variables` are those before `prepare`."""
    found = Gpus() if config.train.device == "cpu" else find_gpus()
    tokenizer = known_tokenizer(config.data, origins) if config.data.tokenizer.strip() else None
    return Host(
        gpus=found.count,
        gpu=found.name,
        kinds=found.kinds,
        processors=found.processors,
        capability=found.capability,
        memory=found.memory,
        cores=cores(),
        workers=worker.world if worker else 0,
        local_workers=worker.local_world if worker else 0,
        tokenizer_vocab=tokenizer.vocab if tokenizer else 0,
        tokenizer_begin=tokenizer.begin if tokenizer else "",
        no_copy_engine=found.no_copy_engine,
        no_peer_memory=found.no_peer_memory,
        no_delta_kernels=why_no_delta_kernels(found.capability),
        variables=tuple(variables),
    )


@dataclass(frozen=True)
class Gpus:
    """GPUs that torch can use."""

    count: int = 0
    name: str = ""
    """Name of the first GPU."""
    kinds: tuple[str, ...] = ()
    """Distinct names."""
    processors: int = 0
    """SMs of the first GPU."""
    capability: tuple[int, int] = (0, 0)
    """Compute capability of the first GPU."""
    memory: int = 0
    """Bytes of the smallest GPU."""
    no_copy_engine: str = ""
    """Why their copy engines cannot run collectives; empty if they can."""
    no_peer_memory: str = ""
    """Why they cannot store into each other's memory; empty if they can."""


def find_gpus() -> Gpus:
    """The GPUs of this host.

    A process that has initialised CUDA cannot fork workers that use it, so a separate process queries them, and only if
    torch is built for CUDA.
    """
    _, cuda = torch_build()
    if not cuda:
        return Gpus()
    with processes(1, {}) as pool, contextlib.suppress(Exception):  # a broken driver may crash the process
        return pool.submit(_query_gpus).result()
    return Gpus()


TOOL_LIMIT = 60.0
"""Timeout of `nvidia-smi` in seconds."""


def driver_says(*words: str) -> str:
    """The output of `nvidia-smi`; empty if it is missing, fails or times out."""
    try:
        ended = subprocess.run(["nvidia-smi", *words], capture_output=True, text=True, timeout=TOOL_LIMIT, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return ended.stdout if ended.returncode == 0 else ""


@cache
def driver_names() -> tuple[str, ...]:
    """Distinct names of the driver's GPUs, without importing torch; empty without `nvidia-smi`."""
    return tuple(dict.fromkeys(driver_says("--query-gpu=name", "--format=csv,noheader").splitlines()))


def _query_gpus() -> Gpus:
    """Initialises CUDA."""
    import torch

    from hocket.runtime import shared_memory

    count = torch.cuda.device_count()
    if not count:
        return Gpus()
    every = [torch.cuda.get_device_properties(i) for i in range(count)]
    return Gpus(
        count=count,
        name=torch.cuda.get_device_name(0),
        kinds=tuple(dict.fromkeys(torch.cuda.get_device_name(i) for i in range(count))),
        processors=every[0].multi_processor_count,
        capability=torch.cuda.get_device_capability(0),
        memory=min(each.total_memory for each in every),
        no_copy_engine=shared_memory.problem(),
        no_peer_memory=shared_memory.unreachable(),
    )


@contextlib.contextmanager
def processes(count: int, variables: Mapping[str, str]) -> Iterator[ProcessPoolExecutor]:
    """A pool of processes on this host. They are killed at the end of the block, or when this process exits.

    They start without torch, and with these variables added to their parent's.
    """
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor  # slow to import, and most commands do without

    before = set(multiprocessing.active_children())
    begin = (dict(variables), os.getpid())
    pool = ProcessPoolExecutor(count, multiprocessing.get_context("spawn"), _begin, begin)
    try:
        yield pool
    finally:
        for process in set(multiprocessing.active_children()) - before:
            process.kill()
        pool.shutdown(cancel_futures=True)


def _begin(variables: Mapping[str, str], parent: int) -> None:
    os.environ.update(variables)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends them
    die_with(parent)


def die_with(parent: int) -> None:
    """Have this process killed when its parent exits for any reason (Linux)."""
    if sys.platform == "linux":
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG
        ctypes.CDLL(None, use_errno=True).prctl(set_parent_death_signal, signal.SIGKILL)
    if os.getppid() != parent:  # the parent has already exited
        os._exit(1)


def torch_build() -> tuple[str, str]:
    """(version of torch, CUDA version it was built for or empty), from its version file, without importing it."""
    package = importlib.util.find_spec("torch")
    assert package is not None, "torch is not installed"
    assert package.origin is not None
    found = runpy.run_path(str(Path(package.origin).with_name("version.py")))
    return str(found["__version__"]), found.get("cuda") or ""


def memory(root: Path = Path("/")) -> int:
    """Bytes of memory that this process and its children may use: the host's, or less in a container.

    A container's limit is that of its control group (version 1 or 2) or of a parent group. `root` is where the system's
    files are. Inside a container the group's path may be the one outside; its files are then at the top.
    """
    least = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    groups = root / "sys/fs/cgroup"
    lines = _text(root / "proc/self/cgroup").splitlines()
    for _, kinds, path in (line.split(":", 2) for line in lines if line.count(":") >= 2):
        if kinds and "memory" not in kinds.split(","):
            continue
        top, name = (groups / "memory", "memory.limit_in_bytes") if kinds else (groups, "memory.max")
        here = top / path.strip("/")
        for folder in (top, *(folder for folder in (here, *here.parents) if top in folder.parents)):
            limit = _text(folder / name).strip()  # `max`: no limit
            least = min(least, int(limit)) if limit.isdigit() else least
    return least


def available_memory(root: Path = Path("/")) -> int:
    """Bytes of `memory` that are free now, as the kernel estimates."""
    for line in _text(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return min(memory(root), 1024 * int(line.split()[1]))
    return memory(root)


def _text(path: Path) -> str:
    """The text of a system file; empty if it is missing."""
    try:
        return path.read_text()
    except OSError:
        return ""
