"""All mistakes that a user can make: one clear message, a non-zero exit code, and no process left behind."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hocket.environment import Worker
from hocket.launching.parent import Child, explain
from hocket.launching.worker import free_port, port_in_use, rendezvous_failed
from hocket.recipes import recipe
from hocket.resolve import resolve
from hocket.runtime.hangs import STATE
from tests.helpers.command import (
    ALONE,
    SMALL,
    Finished,
    Process,
    alive,
    children_of,
    finish,
    hocket,
    start,
    text_in,
    wait_for,
)


def one_message(ended: Finished, *parts: str, code: int = 2) -> None:
    """The command failed with one line that names what it should."""
    assert ended.code == code, ended
    lines = ended.err.splitlines()
    assert len(lines) == 1, ended.err
    assert lines[0].startswith("hocket: ")
    assert "fix: " in lines[0]
    for part in parts:
        assert part in lines[0]
    assert "Traceback" not in ended.out


SETTINGS = [
    (["--plan.mrge", "on"], ["--plan.mrge", "command line", "did you mean --overlap.ep.merge?"]),
    (["--train.steps", "many"], ["train.steps = many", "command line, --train.steps"]),
    (["--model.kv_heads", "3"], ["model.heads = 2", "command line, --model.heads", "model.kv_heads = 3"]),
    (["--model.experts", "3"], ["model.experts = 3", "mesh.ep = 2"]),
    (
        ["--mesh.pp", "4", "--train.microbatches", "4"],
        ["mesh.pp = 4", "8 virtual stages, too many for model.layers = 4"],
    ),
    (["--mesh.dp", "3"], ["mesh.dp = 3", "does not divide"]),
    (["--mesh.dp", "65536"], ["mesh.dp = 65536 (command line, --mesh.dp)", "131072 processes", "ranks for each core"]),
    (["--train.microbatches", "1", "--overlap.ep.merge", "off"], ["train.microbatches = 1", "on mesh.pp = 2 ranks"]),
    (["--train.device", "cuda"], ["train.device = cuda", "command line"]),
    (["--data.paths", "no/such"], ["data.paths = no/such", "command line", "no such file or folder"]),
    (["--data.paths", "*.none"], ["data.paths = *.none", "the pattern matches nothing"]),
    (["--data.paths", "nothing"], ["data.paths = nothing", "no files in it"]),
    (["--data.paths", "empty.txt"], ["data.paths = empty.txt", "the corpus is empty: no text in 1 files"]),
    (["--data.paths", "binary"], ["data.paths = binary", "holds no text (binary: with bytes 0"]),
    (["--data.paths", "short.txt"], ["data.paths = short.txt", "training split", "a batch takes 4"]),
    (["--data.paths", "none.toml", "text"], ["each source names its own text"]),
    (["--data.validation", "no/such"], ["data.validation = no/such", "no such file or folder"]),
    (["--data.validation", "short.txt", "0.1"], ["data.validation = short.txt 0.1", "one share"]),
    (["--data.chat_template", "none"], ["data.chat_template = none", "there is no such file"]),
    (["--data.tokenizer", "none.model"], ["data.tokenizer = none.model", "cannot be read", "save_pretrained(folder)"]),
    (["--data.tokenizer", "none.json"], ["data.tokenizer = none.json", "cannot be read"]),
    (["--data.cache", "/dev/null/x"], ["data.cache = /dev/null/x", "cannot be written"]),
    (["--run.folder", "/dev/null/x"], ["run.folder = /dev/null/x", "cannot be written"]),
    (["--run.folder", "taken"], ["run.folder = taken", "cannot be written"]),
    (["--run.folder", "logged"], ["run.folder = logged", "logged/logs/rank1.log cannot be written (Is a directory)"]),
    (["--model.hidden", "18"], ["model.hidden = 18", "a multiple of 4"]),
    (["--run.resume", "no/such"], ["run.resume = no/such", "no/such does not exist"]),
]


@pytest.mark.parametrize(("words", "parts"), SETTINGS)
def test_a_bad_setting_is_one_message(tmp_path, words, parts):
    (tmp_path / "nothing").mkdir()
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "logs").write_text("not a folder")
    (tmp_path / "logged/logs/rank1.log").mkdir(parents=True)
    (tmp_path / "empty.txt").touch()
    (tmp_path / "binary").write_bytes(b"\0\1")
    (tmp_path / "short.txt").write_text("hello")
    paths = [] if "--data.paths" in words else ["--data.paths", text_in(tmp_path)]
    one_message(hocket(tmp_path, "train", *SMALL, *paths, *words), *parts)
    assert not list(tmp_path.glob("runs/*/checkpoints/*"))


def test_processes_and_mesh_must_agree(tmp_path):
    worker = {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    ended = hocket(tmp_path, "train", *SMALL, "--data.paths", text_in(tmp_path), **worker)
    one_message(ended, "mesh.dp = 2", "recipe tiny", "is 4 ranks, but 3 processes were started")


def test_multicast_that_was_switched_on_is_refused(tmp_path):
    ended = hocket(tmp_path, "train", *SMALL, NCCL_NVLS_ENABLE="1")
    one_message(ended, "NCCL_NVLS_ENABLE = 1 (environment)")


def test_a_port_in_use(tmp_path):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        slurm = {
            "SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0", "SLURM_TASKS_PER_NODE": "2",
            "SLURM_JOB_NODELIST": "127.0.0.1",
        }  # fmt: skip
        two = [*SMALL, *ALONE[:2], "--mesh.dp", "2", "--data.paths", text_in(tmp_path)]
        ended = hocket(tmp_path, "train", *two, MASTER_PORT=str(port), **slurm)
        one_message(ended, f"MASTER_PORT = {port} (environment): another process listens on that port")
        torchrun = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        ended = hocket(tmp_path, "train", *two, **torchrun)
        one_message(ended, f"MASTER_PORT = {port} (environment): another process listens on that port")


@pytest.mark.parametrize(
    ("came_from", "words"),
    [
        ("", "port 4711 was free, and another process has taken it since; fix: start again"),
        ("MASTER_PORT", "MASTER_PORT = 4711 (environment): another process listens on that port; fix: name another"),
        ("SLURM_JOB_ID", "port 4711 (from SLURM_JOB_ID): another process listens on that port; fix: name a free"),
    ],
)
def test_a_port_is_named_by_what_it_came_from(came_from, words):
    assert port_in_use(Worker(0, 2, 0, 1, "n7", 4711, "", came_from)).startswith(words)


def test_where_ranks_did_not_meet_is_named_by_what_it_came_from():
    def told(address_from: str, port_from: str) -> str:
        worker = Worker(1, 2, 0, 1, "n7", 4711, address_from, port_from)
        return rendezvous_failed(resolve(recipe("tiny")), worker).partition(": ")[0]

    assert told("SLURM_JOB_NODELIST", "SLURM_JOB_ID") == (
        "n7 (the first of SLURM_JOB_NODELIST), port 4711 (from SLURM_JOB_ID)"
    )
    assert told("MASTER_ADDR", "MASTER_PORT") == "MASTER_ADDR = n7 (environment), MASTER_PORT = 4711 (environment)"
    assert told("", "") == "this host, port 4711"


def test_no_port_is_free(monkeypatch):
    monkeypatch.setattr("hocket.launching.worker.find_port", lambda: 0)
    with pytest.raises(ValueError, match=r"there is no free port on this host .*; fix: "):
        free_port()


def run_of_one(folder: Path, *words: str) -> Finished:
    return hocket(folder, "train", *SMALL, *ALONE, "--data.paths", text_in(folder), "--train.steps", "2", *words)


def test_checkpoints_of_another_model_and_corrupt_ones(tmp_path):
    assert run_of_one(tmp_path).code == 0
    other = run_of_one(tmp_path, "--model.hidden", "32")
    one_message(
        other, "run.resume = auto", "another model", "model.hidden was 16 and is 32", "embed.weight is 256 x 16"
    )
    path = tmp_path / "runs/tiny/checkpoints/step-00000002"
    data = next(path.glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:-1])
    corrupt = run_of_one(tmp_path)
    one_message(corrupt, "run.resume = auto", "runs/tiny/checkpoints/step-00000002", "is damaged", "checksum")


def test_a_checkpoint_that_cannot_be_written_is_one_message(tmp_path):
    (tmp_path / "runs/tiny").mkdir(parents=True)
    (tmp_path / "runs/tiny/checkpoints").symlink_to("/dev/null/x")
    ended = hocket(tmp_path, "train", *SMALL, "--data.paths", text_in(tmp_path), "--train.steps", "1")
    one_message(ended, "run.folder = runs/tiny", "no place for checkpoints: [Errno")


@contextlib.contextmanager
def standing_still(workers: list[int]) -> Iterator[None]:
    for worker in workers:
        os.kill(worker, signal.SIGSTOP)
    yield
    for worker in workers:
        os.kill(worker, signal.SIGCONT)


def test_a_run_goes_on_when_a_save_is_refused_and_ends_with_one_message_when_the_last_one_is(tmp_path):
    process, workers = running(tmp_path, *ALONE[:2], "--mesh.dp", "2", "--train.save_every", "2")
    folder, away = tmp_path / "runs/tiny/checkpoints", tmp_path / "runs/tiny/away"

    def steps() -> int:
        return len((tmp_path / "runs/tiny/metrics.jsonl").read_text().splitlines())

    wait_for(lambda: (folder / "latest").exists(), "a checkpoint")
    with standing_still(workers):
        folder.rename(away)
        folder.symlink_to("/dev/null/x")
        done = steps()
    wait_for(lambda: steps() > done + 3, "steps after a save that was refused")
    with standing_still(workers):
        folder.unlink()
    wait_for(lambda: (folder / "latest").exists(), "a checkpoint after one that was refused")
    with standing_still(workers):
        shutil.rmtree(folder)
        folder.symlink_to("/dev/null/x")
    process.send_signal(signal.SIGTERM)
    ended = finish(process)
    assert ended.code == 2
    last = ended.err.splitlines()[-1]
    assert re.fullmatch(r"hocket: run.folder = runs/tiny .*: the checkpoint of step \d+ \(.* [KM]iB\) cannot .*", last)
    warnings = [line for line in ended.out.splitlines() if line.startswith("WARNING  run.folder = runs/tiny")]
    assert warnings
    assert all("the run goes on, and saves again after step" in line for line in warnings)
    assert not any(map(alive, workers))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_killed_worker_ends_the_run_and_all_others(tmp_path, number):
    process = start(tmp_path, "train", *SMALL, "--data.paths", text_in(tmp_path), "--train.steps", "100000")
    wait_for(lambda: (tmp_path / "runs/tiny/metrics.jsonl").exists(), "a first step")
    workers = sorted(children_of(process.pid))
    assert len(workers) == 4
    os.kill(workers[2], number)
    ended = finish(process, timeout=30)
    first = ended.err.splitlines()[0]
    assert ended.code == 1
    assert f"hocket: rank 2 (process {workers[2]}) was ended by {number.name}" in first
    assert "fix: see runs/tiny/logs/rank2.log" in first
    assert sum(line.startswith("hocket:") for line in ended.err.splitlines()) == 1
    assert not any(map(alive, workers))


def running(folder: Path, *words: str) -> tuple[Process, list[int]]:
    """A run of four ranks that has done a step, and its workers."""
    text = text_in(folder)
    process = start(folder, "train", *SMALL, "--data.paths", text, "--train.steps", "100000", *words)
    wait_for(lambda: (folder / "runs/tiny/metrics.jsonl").exists(), "a first step")
    return process, sorted(children_of(process.pid))


def test_a_hang_is_reported_by_every_rank_that_waits(tmp_path):
    process, workers = running(tmp_path, "--train.hang_timeout", "2")
    os.kill(workers[2], signal.SIGSTOP)
    ended = finish(process, timeout=30)
    first, *lines = ended.err.splitlines()
    assert ended.code == 1, ended
    cause = "hocket: no progress for 2 s: rank 2 has not .*, and did not say what it does. ranks 0, 1, 3 waited; "
    assert re.match(cause, first), first
    assert f"rank 2 (process {workers[2]}) said nothing and was ended. fix: see runs/tiny/logs" in first
    for rank in (0, 1, 3):
        assert any(line.startswith(f"  | rank {rank}: stuck for ") for line in lines)
    assert sum(line.startswith("  |   is at op ") for line in lines) >= 1
    assert any(re.match(r"  \|   waits for .* for ranks? (\d, )*2\b", line) for line in lines), lines
    assert sum(line.startswith("  |   exchanges known to be over: ") for line in lines) >= 1
    assert not any(STATE in line for line in lines)
    assert not any(map(alive, workers))


def test_a_second_signal_ends_even_workers_that_cannot_answer(tmp_path):
    process, workers = running(tmp_path)
    os.kill(workers[2], signal.SIGSTOP)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    ended = finish(process)
    assert ended.code == 130
    assert ended.err.splitlines()[-1] == "hocket: ended without saving"
    assert not any(map(alive, workers))


def test_two_runs_do_not_share_a_folder(tmp_path):
    process, _ = running(tmp_path, *ALONE)
    before = (tmp_path / "runs/tiny/metrics.jsonl").read_text()
    second = hocket(tmp_path, "train", *SMALL, "--data.paths", text_in(tmp_path), "--run.resume", "off")
    one_message(second, "run.folder = runs/tiny", "another run is writing there")
    assert (tmp_path / "runs/tiny/metrics.jsonl").read_text().startswith(before)
    process.send_signal(signal.SIGTERM)
    assert finish(process).code == 0


def test_a_run_that_diverges_skips_steps_then_ends_and_saves_nothing(tmp_path):
    wild = ["--train.lr", "1e20", "--train.warmup", "0", "--train.save_every", "1", "--train.steps", "9"]
    ended = run_of_one(tmp_path, *wild)
    one_message(ended, "train.lr = 1e+20 (command line, --train.lr): step 7 has loss nan", "on rank 0; fix: a lower")
    records = [json.loads(line) for line in (tmp_path / "runs/tiny/metrics.jsonl").read_text().splitlines()]
    assert [(r["step"], r["loss"] is None, r["skipped"]) for r in records if "loss" in r] == [
        (1, False, 0), *((step, True, step - 1) for step in range(2, 8))
    ]  # fmt: skip
    assert [p.name for p in (tmp_path / "runs/tiny/checkpoints").glob("step-*")] == ["step-00000001"]


def test_a_run_without_communication_touches_no_training_run(tmp_path):
    assert run_of_one(tmp_path).code == 0
    folder = tmp_path / "runs/tiny"
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    words = ["--mesh.dp", "2", "--train.transport", "null", "--train.save_every", "1"]
    for more in ([], ["--run.resume", "off"]):
        ended = run_of_one(tmp_path, *words, *more)
        assert ended.code == 0, ended
        told = [line for line in ended.out.splitlines() if "step 1 " in line or "steps in" in line]
        assert len(told) == 2
        assert all(line.startswith("no communication: ") for line in told)
        assert "bound on speed, no training" in ended.out
        assert not re.search("loss |entropy|saved in", ended.out)
    assert {path: path.read_bytes() for path in before} == before
    records = [json.loads(line) for line in (tmp_path / "runs/tiny-null/metrics.jsonl").read_text().splitlines()]
    assert records
    for record in records:
        assert (record["transport"], record["label"]) == ("null", "no communication")
        assert not {"loss", "grad_norm", "validation_loss"} & record.keys()
    assert not (tmp_path / "runs/tiny-null/checkpoints").exists()
    (folder / "metrics.jsonl").unlink()
    ended = run_of_one(tmp_path, *words, "--run.folder", "runs/tiny")
    one_message(ended, "run.folder = runs/tiny (command line, --run.folder): a training run has left")


def test_the_cause_is_told_from_its_consequences(capsys, tmp_path):
    children = []
    for rank, (when, text) in enumerate([(3.0, "Connection closed by peer"), (2.0, "the cause"), (4.0, "too")]):
        read, write = os.pipe()
        os.write(write, json.dumps({"kind": "crash", "text": text, "time": when}).encode())
        os.close(write)
        children.append(Child(rank, 100 + rank, read, tmp_path / "none", "", status=1 << 8))
    assert explain(children) == 1
    assert "rank 1 (process 101) failed with the cause" in capsys.readouterr().err


def test_a_run_goes_on_when_nobody_reads_any_more(tmp_path):
    words = [*SMALL, *ALONE, "--data.paths", text_in(tmp_path), "--train.steps", "30"]
    process = start(tmp_path, "train", *words)
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=40) == 0
    assert (tmp_path / "runs/tiny/checkpoints/step-00000030").is_dir()


@pytest.mark.parametrize("same_size", [pytest.param(False, marks=pytest.mark.full), True])
def test_ranks_that_find_different_text_are_refused(tmp_path, same_size):
    text_in(tmp_path)
    (tmp_path / "one.txt").write_text("other text " * 300)
    if same_size:  # as under other paths, which put documents into another order
        shutil.rmtree(tmp_path / "text")
        (tmp_path / "text").write_text("text other " * 300)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    words = [*SMALL, *ALONE[:2], "--mesh.dp", "2", "--data.paths"]
    ranks = [start(tmp_path, "train", *words, path, RANK=str(i), **place) for i, path in enumerate(["text", "one.txt"])]
    for process, path in zip(ranks, ["text", "one.txt"], strict=True):
        one_message(finish(process), f"data.paths = {path}", "ranks find different text, or in another order: this one")


def test_ranks_that_do_not_meet_say_so(tmp_path):
    worker = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}
    words = [*ALONE[:2], "--mesh.dp", "2", "--train.hang_timeout", "1", "--data.paths", text_in(tmp_path)]
    ended = hocket(tmp_path, "train", *SMALL, *words, **worker)
    assert ended.code == 2
    assert "hocket: MASTER_ADDR = 127.0.0.1 (environment), MASTER_PORT = 9 (environment): rank 1 of 2 did" in ended.err
    assert "Traceback" not in ended.err


def test_tracebacks_are_for_those_who_ask(tmp_path):
    ended = hocket(tmp_path, "train", *SMALL, "--data.paths", "none", HOCKET_DEBUG="1")
    assert ended.code == 2
    assert "Traceback" in ended.err
    assert ended.err.splitlines()[-1].startswith("hocket: data.paths = none")
