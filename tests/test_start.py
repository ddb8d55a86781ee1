"""Workers that start: settings that ranks do not share, and signals while workers are forked."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from hocket.config.schema import changed
from hocket.decision import Decision
from hocket.environment import prepare
from hocket.launching.parent import start_workers
from hocket.launching.worker import Job
from hocket.recipes import recipe
from hocket.resolve import Settings, resolve
from tests.helpers.command import ALONE, SMALL, end_all, finish, start, text_in, wait_for
from tests.helpers.ranks import server_environment
from tests.test_bad_input import one_message


@pytest.mark.parametrize(
    ("steps", "here", "told"),
    [
        ("3", "2", ["train.steps = 3 ", "train.steps = 4 "]),
        # Hosts with another number of ranks each: prices of links differ, and so may plans.
        ("4", "1", ["network.ranks_per_host = 1 ", "network.ranks_per_host = auto "]),
    ],
)
def test_ranks_that_go_by_other_settings_are_refused(tmp_path: Path, steps: str, here: str, told: list[str]) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    two = [*SMALL, *ALONE[:2], "--mesh.dp", "2", "--data.paths", text_in(tmp_path), "--train.steps"]
    ranks = [
        start(tmp_path, "train", *two, steps, RANK="0", LOCAL_RANK="0", LOCAL_WORLD_SIZE=here, **place),
        start(tmp_path, "train", *two, "4", RANK="1", **place),
    ]
    for i, process in enumerate(ranks):
        one_message(finish(process), told[i], f"rank {1 - i} has ", "fix: the same command and files on all hosts")


def listening(processes: set[int]) -> set[str]:
    """Local addresses, as the kernel writes them, on which these processes and those below them wait for others."""
    parents = dict[int, int]()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    while below := {child for child, parent in parents.items() if parent in processes} - processes:
        processes = processes | below
    files = [file.readlink().name for number in processes for file in Path(f"/proc/{number}/fd").iterdir()]
    rows = [row.split() for kind in ("tcp", "tcp6") for row in Path(f"/proc/net/{kind}").read_text().splitlines()[1:]]
    return {row[1].partition(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in files}


@pytest.mark.skipif(sys.platform != "linux", reason="reads the kernel's table of sockets")
@pytest.mark.parametrize("way", ["hocket", "torchrun", "slurm"])
def test_ranks_of_one_host_listen_on_its_loopback_interface_alone(tmp_path: Path, way: str) -> None:
    words = [*SMALL, *ALONE[:2], "--mesh.dp", "2", "--data.paths", text_in(tmp_path), "--train.steps", "100000"]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    ranks: list[dict[str, str]] = [{}]
    if way == "torchrun":
        place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": socket.gethostname(), "MASTER_PORT": port}
        ranks = [{"RANK": str(i), "LOCAL_RANK": str(i), **place} for i in range(2)]
    if way == "slurm":
        place = {"SLURM_NTASKS": "2", "SLURM_TASKS_PER_NODE": "2", "SLURM_JOB_NODELIST": "far", "MASTER_PORT": port}
        ranks = [{"SLURM_PROCID": str(i), "SLURM_LOCALID": str(i), **place} for i in range(2)]
    processes = [start(tmp_path, "train", *words, **rank) for rank in ranks]  # type: ignore[arg-type]
    metrics = tmp_path / "runs" / "tiny" / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.stat().st_size > 0, "a step")
    found = listening({process.pid for process in processes})
    end_all()
    assert found == {"0100007F"}  # 127.0.0.1


def ask_while_forking(folder: Path) -> None:
    """A run that SIGTERM reaches when its worker exists, and its parent has not noted that yet. Ends the process."""
    fork = os.fork

    def fork_and_ask() -> int:
        pid = fork()
        if pid:
            os.kill(os.getpid(), signal.SIGTERM)
        return pid

    os.fork = fork_and_ask
    (folder / "logs").mkdir()
    os._exit(start_workers(settings_of_one(folder), Job(wait, "")))


def settings_of_one(folder: Path) -> Settings:
    alone = {"mesh.pp": 1, "mesh.dp": 1, "mesh.ep": 1, "plan.chunks": 1, "run.folder": str(folder)}
    return resolve(changed(recipe("tiny"), alone))


def wait(settings: Settings, rank: int, device: object) -> None:
    time.sleep(5)


def exit_code(target: Callable[[Path], None], folder: Path) -> int | None:
    """How a process that calls this, and ends itself, has ended."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.helpers.preload"])
    process = context.Process(target=target, args=(folder,))
    with server_environment():
        process.start()
    process.join(20)
    return process.exitcode


def test_a_signal_while_workers_are_forked_reaches_them(tmp_path: Path) -> None:
    assert exit_code(ask_while_forking, tmp_path) == 128 + signal.SIGTERM


def copy_without_gpus(folder: Path) -> None:
    """A run for which copy engines were chosen, where there are none. Ends the process."""
    (folder / "logs").mkdir()
    prepare(os.environ, 2)  # as a command does before it starts workers
    two = {"mesh.pp": 1, "mesh.dp": 2, "mesh.ep": 1, "plan.chunks": 1, "run.folder": str(folder)}
    settings = resolve(changed(recipe("tiny"), two))
    chosen = Decision(setting="train.transport", value="copy_engine", reasons=("a mistake",))
    decisions = tuple(chosen if each.setting == chosen.setting else each for each in settings.decisions)
    copying = replace(changed(settings, {"train.transport": "copy_engine"}), decisions=decisions)
    os._exit(start_workers(copying, Job(note_transport, "")))


def note_transport(settings: Settings, rank: int, device: object) -> None:
    (Path(settings.run.folder) / f"rank{rank}").write_text(settings.train.transport)


def test_workers_that_find_no_copies_do_their_job_without(tmp_path: Path) -> None:
    assert exit_code(copy_without_gpus, tmp_path) == 0
    assert [(tmp_path / f"rank{rank}").read_text() for rank in (0, 1)] == ["gloo", "gloo"]
