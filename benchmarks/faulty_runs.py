"""Small runs of `hocket train` for `benchmarks.faults`: as forks, and in networks whose link can be cut."""

from __future__ import annotations

import ctypes
import os
import random
import shlex
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.record import ROOT

STEPS, EVERY, RANKS, LIMIT = 40, 5, 2, 5.0
"""Steps of a run, and between its checkpoints; its ranks; `train.hang_timeout`."""
WORDS = (
    "tiny --model.layers 2 --model.dense_layers 0 --model.hidden 16 --model.heads 2 --model.kv_heads 1 "
    "--model.head_dim 8 --model.ffn 16 --model.expert_ffn 16 --model.shared_ffn 16 --model.experts 4 "
    "--data.sequence_length 8 --train.sequences 1 --train.microbatches 2 --mesh.pp 1 --mesh.ep 1 --plan.chunks 1 "
    f"--mesh.dp {RANKS} --train.eval_every 0 --train.eval_batches 1 --train.steps {STEPS} --train.save_every {EVERY} "
    f"--train.keep 3 --train.hang_timeout {LIMIT:g} --train.warmup 5 --overlap.ep.merge off --data.paths text "
    "--data.cache cache --run.name run"
)
TORCHRUN = ["--standalone", "--nproc-per-node", str(RANKS)]
PATIENCE = 120.0
"""Seconds after which a run hangs."""
TOLD = "hocket: "


def words_with(more: str) -> list[str]:
    """The words of a run, some of which are others than usual."""
    recipe, *usual = shlex.split(WORDS)
    others = shlex.split(more)
    pairs = {**dict(zip(usual[::2], usual[1::2], strict=True)), **dict(zip(others[::2], others[1::2], strict=True))}
    return [recipe, *(word for pair in pairs.items() for word in pair)]


class Run:
    """`hocket train`, or `torchrun`, in a folder, as a fork of this process."""

    def __init__(
        self, folder: Path, words: list[str], network: str = "", command: str = "hocket", **variables: str
    ) -> None:
        self._log = folder / f"log{len(list(folder.glob('log*')))}"
        self._log.touch()
        self.pid = os.fork()
        if not self.pid:
            _become(folder, self._log, words if command == "torchrun" else ["train", *words], network, variables)
        self.code: int | None = None

    def over(self) -> bool:
        if self.code is None and (ended := os.waitpid(self.pid, os.WNOHANG))[0]:
            self.code = os.waitstatus_to_exitcode(ended[1])
        return self.code is not None

    def until(self, condition: Callable[[], bool]) -> bool:
        """Wait for something, or the end of the run. Returns whether it came; kills a run that hangs."""
        deadline = time.monotonic() + PATIENCE
        while not condition():
            if self.over():
                return condition()
            if time.monotonic() > deadline:
                self.kill()
                return False
            time.sleep(0.002)
        return True

    def end(self) -> int:
        """The exit code; that of SIGKILL if it hangs."""
        self.until(self.over)
        assert self.code is not None
        return self.code

    def kill(self) -> None:
        """End the launcher. Its ranks go with it."""
        if not self.over():
            os.kill(self.pid, signal.SIGKILL)
            ranks = self.ranks()
            self.code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            while any(Path(f"/proc/{rank}").exists() for rank in ranks):
                time.sleep(0.002)

    def ranks(self) -> list[int]:
        """Processes of ranks, in their order."""
        try:
            return sorted(map(int, Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()))
        except OSError:
            return []

    @property
    def text(self) -> str:
        """What it has said."""
        return self._log.read_text(errors="replace")

    def one_line(self) -> bool:
        """Whether a line tells of its end, with a fix."""
        return any(line.startswith(TOLD) and "fix: " in line for line in self.text.splitlines())


def _become(folder: Path, log: Path, words: list[str], network: str, variables: dict[str, str]) -> None:
    """Be a command, in a group of processes and, by its name, a network of its own."""
    from torch.distributed.run import main as torchrun

    from hocket.cli import main as hocket

    os.setsid()
    if network:
        new_network = 0x40000000  # CLONE_NEWNET
        assert ctypes.CDLL(None).setns(os.open(f"/var/run/netns/{network}", os.O_RDONLY), new_network) == 0
    os.chdir(folder)
    file = os.open(log, os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.environ.update(variables)
    try:
        hocket(words) if words[0] == "train" else torchrun(words)
        os._exit(0)
    except SystemExit as ended:
        sys.stdout.flush()
        os._exit(ended.code if isinstance(ended.code, int) else 1)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


@dataclass(frozen=True)
class Way:
    """How a run is started. Its outcome depends on `mesh` alone."""

    mesh: str = ""
    torchrun: bool = False


PLAIN, UNDER_TORCHRUN = Way(), Way(torchrun=True)
WAYS = {
    "under torchrun": UNDER_TORCHRUN,
    "in a pipeline": Way("--mesh.pp 2 --mesh.dp 1 --train.microbatches 4"),
    "with tensor parallelism": Way("--mesh.tp 2 --mesh.dp 1 --model.kv_heads 2"),
    "with context parallelism": Way("--mesh.cp 2 --mesh.dp 1"),
    "with expert parallelism": Way("--mesh.ep 2"),
}


@dataclass
class Trial:
    """One run with a fault, in a folder that has the text and its cache already."""

    folder: Path
    chance: random.Random
    way: Way = PLAIN
    restarts: int = 2
    mend: Callable[[], object] = lambda: None
    """What ends the fault."""
    close: Callable[[], object] = lambda: None
    """What is left to be done when the folder goes."""

    def start(self) -> Run:
        words, restarts = words_with(self.way.mesh), str(self.restarts)
        if not self.way.torchrun:
            return Run(self.folder, [*words, "--restarts", restarts])
        words = [*TORCHRUN, "--max-restarts", restarts, "-m", "hocket", "train", *words]
        return Run(self.folder, words, command="torchrun", PYTHONPATH=str(ROOT))

    def begun(self) -> Run:
        """A run at a random moment behind its first checkpoint."""
        run, step = self.start(), self.chance.randrange(EVERY + 1, STEPS - EVERY)
        run.until(lambda: len(self.newest()) > 0 and self.lines() >= step)
        time.sleep(0.05 * self.chance.random())
        return run

    def lines(self) -> int:
        file = self.folder / "runs/run/metrics.jsonl"
        return file.read_bytes().count(b"\n") if file.exists() else 0

    def newest(self) -> list[Path]:
        """Checkpoints, the newest first."""
        folder = self.folder / "runs/run/checkpoints"
        return sorted((path for path in folder.glob("step-*") if not path.suffix), reverse=True)

    def some(self, files: list[Path]) -> Path:
        return self.chance.choice(sorted(files))


class Link:
    """Two networks of this machine, which root may make, and a link between them that can be cut."""

    def __init__(self) -> None:
        self.names = [f"hocket-{os.getpid()}-{side}" for side in range(RANKS)]
        for name in self.names:
            _ip("netns", "add", name)
        ends = [("name", "link0", "netns", self.names[0]), ("name", "link1", "netns", self.names[1])]
        _ip("link", "add", *ends[0], "type", "veth", "peer", *ends[1])
        for side, name in enumerate(self.names):
            _ip("-n", name, "addr", "add", f"10.99.0.{side + 1}/24", "dev", f"link{side}")
            _ip("-n", name, "link", "set", "lo", "up")
            self.put("up", side)

    def put(self, state: str, side: int = 0) -> None:
        """The link, or its end on one side, `up` or `down`."""
        _ip("-n", self.names[side], "link", "set", f"link{side}", state)

    def worsen(self) -> None:
        """Packets take a millisecond longer from now on, and one of two hundred is lost."""
        for side, name in enumerate(self.names):
            words = ["tc", "-n", name, "qdisc", "add", "dev", f"link{side}", "root"]
            subprocess.run([*words, "netem", "delay", "1ms", "loss", "0.5%"], check=True, capture_output=True)

    def start(self, folder: Path, port: int) -> list[Run]:
        """A rank on each side, as torchrun would start them."""
        words = [*shlex.split(WORDS), "--network.ranks_per_host", "1"]
        every = {"WORLD_SIZE": str(RANKS), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "10.99.0.1"}
        every["MASTER_PORT"] = str(port)
        return [
            Run(folder, words, name, **every, RANK=str(side), GLOO_SOCKET_IFNAME=f"link{side}")
            for side, name in enumerate(self.names)
        ]

    def close(self) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def why_no_disk(place: Path) -> str:
    """Why file systems of a few MB cannot be made here; empty if they can."""
    try:
        mount(place)
    except (OSError, subprocess.CalledProcessError) as error:
        return f"no file systems can be mounted: {error}"
    unmount(place)
    return ""


def mount(place: Path) -> None:
    """Make a folder that is a small file system. Raises OSError or CalledProcessError."""
    place.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(place)], check=True, capture_output=True)


def unmount(place: Path) -> None:
    subprocess.run(["umount", "--lazy", str(place)], check=False, capture_output=True)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def why_no_link(worse: bool = False) -> str:
    """Why networks, or `worse` links between them, cannot be made here; empty if they can."""
    try:
        link = Link()
    except (OSError, subprocess.CalledProcessError) as error:
        return f"no network namespaces: {error}"
    try:
        if worse:
            link.worsen()
    except (OSError, subprocess.CalledProcessError):
        return "this kernel has no netem, which delays and loses packets"
    finally:
        link.close()
    return ""
