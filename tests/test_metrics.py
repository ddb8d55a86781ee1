"""What a run reports, and the learning rate it reports."""

from __future__ import annotations

import io
import json
import os
import re
import resource
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from hocket.config import TrainConfig
from hocket.config.rule import Host
from hocket.config.schema import changed
from hocket.decision import Decision
from hocket.gpus import peak_flops
from hocket.recipes import recipe
from hocket.resolve import Settings, resolve
from hocket.train.metrics import REMARKS, Metrics, StepRecord
from hocket.train.trainer import learning_rate
from tests.helpers.ranks import run_ranks


def settings_in(folder: Path, gpus: bool = False) -> Settings:
    config = changed(recipe("tiny"), {"run.folder": str(folder)})
    return resolve(config, Host(gpus=4, gpu="NVIDIA H200") if gpus else Host())


def report(settings: Settings, steps: range, done: int = 0, rank: int = 0, terminal: bool = False) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=200, highlight=False, soft_wrap=True)
    with Metrics(settings, 3.0, done, rank, console) as metrics:
        metrics.header(1000, 500, "some text")
        for step in steps:
            metrics.step(StepRecord(step, 5.0 - step, 0.5, 1e-3, 0.25, 1.5))
        metrics.validation(steps.stop - 1, 2.5)
        metrics.summary()
    return out.getvalue()


def records(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_every_step_is_a_line_of_json_and_a_line_of_text(tmp_path):
    text = report(settings_in(tmp_path), range(1, 4))
    first, *_, last = records(tmp_path)
    assert first == {
        "step": 1, "loss": 4.0, "grad_norm": 0.5, "lr": 1e-3, "seconds": 0.25, "load": 1.5, "skipped": 0,
        "tokens_per_second": 16384.0,
    }  # fmt: skip
    assert last == {"step": 3, "validation_loss": 2.5, "unigram_entropy": 3.0}
    line = r"step   2  loss 3.0000  grad 0.5  lr 1.00e-03  16,384 tok/s  load 1.50  ETA \d:\d\d:\d\d"
    assert re.search(line, text)
    assert "MFU      left out: hocket knows no peak of cpu ranks" in text, "in fp32, too"
    assert "2.5000 nats per token, below the corpus's unigram entropy 3.0000" in text
    assert "\x1b" not in text


def test_only_a_run_from_scratch_is_judged_by_the_entropy(tmp_path):
    settings = changed(settings_in(tmp_path), {"model.weights": "Qwen3-0.6B"})
    assert report(settings, range(1, 4)).endswith("loss 2.5000 nats per token, with a unigram entropy of 3.0000\n")


def test_every_step_is_printed_and_kept(tmp_path):
    settings = changed(settings_in(tmp_path), {"train.steps": 8})
    printed = [line.split()[1] for line in report(settings, range(1, 9)).splitlines() if "tok/s" in line]
    assert printed == [str(step) for step in range(1, 9)]
    assert [record["step"] for record in records(tmp_path) if "loss" in record] == list(range(1, 9))


def test_a_terminal_gets_a_live_line_and_only_validations_stay(tmp_path):
    text = report(settings_in(tmp_path), range(1, 4), terminal=True)
    assert "\x1b" in text
    assert "validation loss 2.5000" in text


def opening(settings: Settings) -> list[str]:
    out = io.StringIO()
    (Path(settings.run.folder) / "metrics.jsonl").unlink(missing_ok=True)
    with Metrics(settings, 3.0, console=Console(file=out, width=200, highlight=False, soft_wrap=True)) as metrics:
        metrics.remarks("of the plan")
    return out.getvalue().splitlines()


def test_a_run_begins_with_what_is_not_as_asked_and_a_pointer_to_the_rest(tmp_path):
    """What hocket chose by itself is in the explanation: a run has twenty such choices."""
    settings = settings_in(tmp_path)
    last = f"explain  {tmp_path}/explanation.json has what was decided, and why; hocket explain {tmp_path} prints it"
    assert opening(settings) == ["note     of the plan", last]

    def said(name: str, value: int, asked: Any, fix: str = "another value") -> Decision:
        return Decision(setting=name, value=value, asked=asked, source="run.toml:3", reasons=("why",), fix=fix)

    asked = [said("plan.chunks", 2, 2), said("plan.group", 1, 4)]
    assert opening(replace(settings, decisions=(*settings.decisions, *asked))) == [
        "note     plan.group = 1 (asked for 4: run.toml:3): why; fix: another value",
        "note     plan.chunks = 2: why; fix: another value",
        "note     of the plan",
        last,
    ]
    many = opening(replace(settings, decisions=(*asked, *(said(f"plan.n{i}", i, i) for i in range(9)))))
    assert len(many) == REMARKS + 3
    assert f"note     {len(asked) + 9 - REMARKS} more settings are not done as asked, or have no effect" in many


def test_lines_wait_while_the_disk_is_full(tmp_path):
    """In a process of its own, which may write no large files for a while."""
    text, out = run_ranks(report_with_little_room, 1, tmp_path)[0], records(tmp_path)
    assert [record["step"] for record in out] == list(range(1, 9))
    (warning,) = (line for line in text.splitlines() if line.startswith("WARNING"))
    assert "metrics.jsonl cannot be written: File too large; fix: make room there, or make it writable" in warning


def report_with_little_room(rank: int, folder: Path) -> str:
    out = io.StringIO()
    with Metrics(settings_in(folder), 3.0, console=Console(file=out, width=200, soft_wrap=True)) as metrics:
        for step in range(1, 9):
            limit = 200 if 2 <= step <= 7 else resource.RLIM_INFINITY
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
            metrics.step(StepRecord(step, 5.0, 0.5, 1e-3, 0.25))
            assert metrics.path.stat().st_size <= limit or limit < 0
    return out.getvalue()


def test_lines_that_never_find_room_are_counted(tmp_path):
    out = io.StringIO()
    with Metrics(settings_in(tmp_path), 3.0, console=Console(file=out, width=200, soft_wrap=True)) as metrics:
        metrics.step(StepRecord(1, 5.0, 0.5, 1e-3, 0.25))
        assert metrics._lines is not None
        with Path("/dev/full").open("ab") as full:
            os.dup2(full.fileno(), metrics._lines._file.fileno())
        metrics.validation(1, 2.0)
    assert out.getvalue().splitlines()[-1].startswith("WARNING  run.folder = ")
    assert "metrics.jsonl cannot be written: lines missing at its end: 1; fix: make room there" in out.getvalue()


def test_attention_that_could_not_be_evened_out_is_told(tmp_path):
    out = io.StringIO()
    with Metrics(settings_in(tmp_path), 3.0, console=Console(file=out, width=200)) as metrics:
        for step, uneven in enumerate((None, 0.0, 0.02, 0.31), 1):
            metrics.step(StepRecord(step, 5.0, 0.5, 1e-3, 0.25, imbalance=uneven))
    found = records(tmp_path)
    assert "imbalance" not in found[0]
    assert [record["imbalance"] for record in found[1:]] == [0.0, 0.02, 0.31]
    assert out.getvalue().count("uneven") == out.getvalue().count("  uneven 31 %") == 1


def test_other_ranks_are_silent(tmp_path):
    assert report(settings_in(tmp_path), range(1, 3), rank=1) == ""
    assert not (tmp_path / "metrics.jsonl").exists()


def test_a_resumed_run_goes_on_behind_the_step_of_its_checkpoint(tmp_path):
    report(settings_in(tmp_path), range(1, 6))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')  # cut off by a crash
    report(settings_in(tmp_path), range(4, 6), done=3)
    assert [r["step"] for r in records(tmp_path) if "loss" in r] == [1, 2, 3, 4, 5]


def test_a_resumed_run_says_which_lines_are_lost(tmp_path):
    settings = settings_in(tmp_path)
    report(settings, range(1, 6))
    file = tmp_path / "metrics.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    whole = [line for line in lines if b'"loss"' in line]
    assert "lost" not in report(settings, range(6, 7), done=5)
    spoiled = [whole[0], b"\xb9" + whole[1], whole[2].replace(b'"step": 3', b'"step": "3"'), whole[3], whole[4]]
    file.write_bytes(b"".join(spoiled))
    said = " ".join(report(settings, range(6, 7), done=5).split())
    assert "metrics.jsonl has lost the lines of 2 steps of those up to 5, the first is 2" in said
    assert [line["step"] for line in records(tmp_path) if "loss" in line] == [1, 4, 5, 6]
    file.unlink()
    assert "the lines of 5 steps" in " ".join(report(settings, range(6, 7), done=5).split())


def test_steps_behind_a_profiled_window_carry_its_exposed_share(tmp_path):
    out = io.StringIO()
    with Metrics(settings_in(tmp_path), 3.0, console=Console(file=out, width=200)) as metrics:
        metrics.step(StepRecord(1, 5.0, 0.5, 1e-3, 0.25))
        metrics.exposed = {"replayed": 0.1234}
        metrics.step(StepRecord(2, 5.0, 0.5, 1e-3, 0.25, way="replayed"))
        for way in ("issued", "recorded"):
            metrics.step(StepRecord(3, 5.0, 0.5, 1e-3, 0.25, way=way))
    assert [r.get("exposed") for r in records(tmp_path)] == [None, 0.1234, None, None]
    assert out.getvalue().count("tok/s  exposed 12 %") == 1


def test_what_is_no_training_has_no_loss_and_says_so_on_every_line(tmp_path):
    text = report(measuring(tmp_path, train__transport="null"), range(1, 3))
    assert text.count("no communication: step ") == 3  # steps, and the validation that the trainer leaves out
    assert "grad" not in text
    assert "no communication: 2 steps in" in text
    for record in records(tmp_path)[:2]:
        assert record.keys() == {"step", "seconds", "load", "tokens_per_second", "transport", "label"}
        assert record["label"] == "no communication"


def test_an_emulated_network_is_described_link_by_link(tmp_path):
    links = ("a2a:10us", "pp_fwd:200us,25GB/s", "pp_bwd:200us,25GB/s")
    settings = measuring(tmp_path, train__transport="slow", train__slow=links)
    text = report(settings, range(1, 3))
    assert "network  emulated: 1e-05 s per operation, no limit on bytes/s, for a2a" in text
    assert "network  emulated: 0.0002 s per operation, 2.5e+10 bytes/s, for pp_fwd, pp_bwd" in text
    told = [
        line for line in text.splitlines() if line[:5] not in ("model", "corpu", "ranks", "steps", "netwo", "MFU  ")
    ]
    assert len(told) == 5
    assert all(line.startswith("emulated network: ") for line in told)
    assert {r["label"] for r in records(tmp_path)} == {"emulated network"}


def measuring(folder: Path, **changes: Any) -> Settings:
    config = changed(recipe("tiny"), {"run.folder": str(folder)})
    for name, value in changes.items():
        config = changed(config, {name.replace("__", "."): value})
    return resolve(config, Host())


def test_a_new_run_keeps_the_metrics_of_the_old_one(tmp_path):
    report(settings_in(tmp_path), range(1, 3))
    assert "are now in" in report(settings_in(tmp_path), range(1, 2))
    assert len(records(tmp_path)) == 2
    assert len((tmp_path / "metrics.jsonl.old").read_text().splitlines()) == 3


def test_gpus_report_flops_with_their_denominator(tmp_path):
    settings = settings_in(tmp_path, gpus=True)
    text = report(settings, range(1, 2))
    record = records(tmp_path)[0]
    per_gpu = 16384 * Metrics(settings, 3.0, rank=1).flops_per_token / 4
    assert record["tflops_per_gpu"] == pytest.approx(per_gpu / 1e12)
    assert record["mfu"] == pytest.approx(per_gpu / 989.4e12)
    assert text.count("989.4 TFLOP/s of one NVIDIA H200 (dense bf16)") == 1


def test_without_a_peak_there_is_no_share_of_it(tmp_path):
    config = changed(recipe("tiny"), {"run.folder": str(tmp_path), "precision.compute": "bf16"})
    text = report(resolve(config, Host()), range(1, 2))
    assert "MFU      left out: hocket knows no peak of cpu ranks" in text
    assert "mfu" not in records(tmp_path)[0]
    slice_ = resolve(changed(config, {"run.folder": str(tmp_path / "b")}), Host(gpus=4, gpu="NVIDIA H200 MIG 1g.18gb"))
    assert "left out: hocket knows no peak of NVIDIA H200 MIG 1g.18gb" in report(slice_, range(1, 2))


def test_the_time_that_is_left_is_that_of_the_steps_before(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("hocket.train.metrics.time.monotonic", lambda: now[0])
    settings, out = changed(settings_in(tmp_path), {"train.steps": 10}), io.StringIO()
    with Metrics(settings, 3.0, 4, console=Console(file=out, width=200, soft_wrap=True)) as metrics:
        for step in range(5, 11):
            now[0] += 100
            metrics.step(StepRecord(step, 5.0, 0.5, 1e-3, 0.25))
    etas = re.findall(r"ETA (.*)", out.getvalue())
    assert etas == ["0:08:20", "0:06:40", "0:05:00", "0:03:20", "0:01:40"]


def test_the_peak_of_a_gpu_is_found_by_the_longest_name():
    assert peak_flops("NVIDIA H100 PCIe") == 756e12
    assert peak_flops("NVIDIA H100 80GB HBM3") == 989.4e12
    assert peak_flops("NVIDIA GH200 480GB") == 989.4e12
    assert peak_flops("Something Else") == 0.0


def test_the_learning_rate_rises_then_follows_half_a_cosine():
    train = TrainConfig(steps=110, warmup=10, lr=1.0, min_lr=0.1)
    rates = [learning_rate(step, train) for step in range(110)]
    assert rates[:10] == pytest.approx([0.1 * (i + 1) for i in range(10)])
    assert rates[10] == 1.0
    assert rates[-1] == pytest.approx(0.1)
    assert all(a >= b for a, b in pairwise(rates[9:]))
    assert learning_rate(10 + 99 // 2, train) == pytest.approx(0.55, abs=0.01)
    assert learning_rate(500, train) == pytest.approx(0.1)
    assert learning_rate(0, TrainConfig(steps=1, warmup=0, lr=1.0, min_lr=0.1)) == 1.0
