"""The command line: what it prints, how it starts workers, and that a run can be stopped and continued."""

from __future__ import annotations

import gzip
import importlib.metadata
import json
import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hocket.commands.options import parse
from hocket.commands.plan import Plan
from hocket.commands.train import Train
from hocket.config.load import given
from hocket.config.rule import leaf
from hocket.config.schema import changed, types
from hocket.environment import HERE, Worker, find_worker, first_host, prepare, tasks_here
from hocket.recipes import PRESETS, RECIPES, recipe
from hocket.train.signals import StopRequest
from tests.helpers.command import (
    ALONE,
    SMALL,
    alive,
    children_of,
    command,
    finish,
    hocket,
    in_a_terminal,
    start,
    text_in,
    wait_for,
)

# ------------------------------------------------------------------------------------------------------- words


def test_recipes_and_presets_are_listed_with_a_line_each(capsys):
    code, out, _ = command(capsys, "recipes")
    assert code == 0
    lines = [line.split() for line in out.splitlines() if line]
    set_by = [[setting, "="] for preset in PRESETS.values() for setting in preset.changes]
    assert [line[:2] for line in lines if line[1] == "="] == set_by
    lines = [line for line in lines if line[1] != "="]
    assert [line[0] for line in lines] == [*RECIPES, "presets,", *PRESETS]
    assert all(len(line) > 4 for line in lines if line[0] != "presets,")


@pytest.mark.parametrize("words", [("--help",), ("-h",), ("help",)])
def test_help_says_how_to_begin(capsys, words):
    code, out, _ = command(capsys, *words)
    assert code == 0
    assert "hocket train RECIPE" in out


def test_no_words_are_an_error(capsys):
    assert command(capsys)[0] == 2


@pytest.mark.parametrize("words", [("train", "--help"), ("train", "tiny", "--help"), ("plan", "tiny", "-h")])
def test_help_of_a_command_lists_settings_with_docs_and_the_defaults_of_the_recipe(capsys, monkeypatch, words):
    monkeypatch.setenv("COLUMNS", "120")
    code, out, _ = command(capsys, *words)
    assert code == 0
    assert "--overlap.ep.merge {auto,on,off}" in out
    assert "Merge the forward of one microbatch" in out
    assert "(default: 150)" in out  # steps of the recipe
    assert "--no_" not in out  # there are no such flags
    ended = [len(line) for line in (row.strip("│| ") for row in out.splitlines()) if line.endswith((",", " or"))]
    assert min(ended) > 70  # lines end where the box does, not where docstrings do


def test_help_and_mistakes_do_not_wait_for_torch():
    code = "import sys\nfrom hocket import cli\ntry: cli.main(sys.argv[1:])\nfinally: assert 'torch' not in sys.modules"
    for words in (["recipes"], ["train", "tiny", "--help"], ["train", "tiny", "--plan.x", "1"], ["plan", "tiny"]):
        program = [sys.executable, "-c", code, *words]
        ended = subprocess.run(program, capture_output=True, text=True, timeout=60, check=False)
        assert "AssertionError" not in ended.stderr, words


def test_overrides_reach_the_configuration_and_are_remembered():
    words = ["--model.hidden", "64", "--plan.layer-order=all", "--data.paths", "a", "b", "--model.tied", "True"]
    options, origins = parse(Train, "train", ["tiny", *words, "--train.betas", "0.8", "0.9"])
    config = options.config
    assert (config.model.hidden, config.plan.layer_order, config.data.paths) == (64, "all", ("a", "b"))
    assert (config.model.tied, config.train.betas) == (True, (0.8, 0.9))
    assert origins["plan.layer_order"] == "command line, --plan.layer-order"
    assert set(origins) == {
        "", "model.hidden", "plan.layer_order", "data.paths", "model.tied", "train.betas",
    }  # fmt: skip


def test_gpus_sets_the_data_parallel_ranks():
    options, origins = parse(Plan, "plan", ["qwen3_30b_a3b", "--gpus", "16"])
    assert options.config.mesh.dp == 8
    assert origins["mesh.dp"] == "command line, --gpus"


MISTAKES = [
    (["--plan.mege", "on"], "--plan.mege", "did you mean --overlap.ep.merge?"),
    (["--plan.merge", "off"], "--plan.merge", "there is no such setting; fix: did you mean --overlap.ep.merge?"),
    (["--plan.p2p_defer_laers", "1"], "--plan.p2p_defer_laers", "did you mean --overlap.pp.defer_layers?"),
    (["--hidden", "3"], "--hidden", "did you mean --model.hidden?"),
    (["--train.hidden", "3"], "--train.hidden", "did you mean --model.hidden?"),
    (["--zzzzz"], "--zzzzz", "--help lists all settings"),
    (["--train.steps", "ten"], "train.steps = ten", "not a whole number; fix: give a whole number, such as 150"),
    (["--train.steps"], "train.steps = (nothing)", "not a whole number"),
    (["--train.steps", "1", "2"], "train.steps = 1 2", "not a whole number"),
    (["--train.lr", "fast"], "train.lr = fast", "not a number"),
    (["--overlap.ep.merge", "onn"], "overlap.ep.merge = onn", "did you mean on?"),
    (["--model.tied", "yes"], "model.tied = yes", "True or False"),
    (["--train.betas", "0.9"], "train.betas = 0.9", "2 numbers"),
    (["--model.dense_layers", "a"], "model.dense_layers = a", "a list of whole numbers"),
    (["--train.profile", "a"], "train.profile = a", "a list of whole numbers"),
    (["--gpus", "x"], "--gpus = x", "a whole number"),
    (["--gpus", "3"], "gpus = 3", "mesh.pp = 2"),
    (["--gpus", "4", "--mesh.dp", "4"], "gpus = 4", "leave one of them out"),
    (["--config", "x"], "--config", "--help lists all settings"),
    (["--data.paths", "a", "--data.paths", "b"], "--data.paths = a and b", "given twice; fix: give it once"),
    (["--train.steps", "3", "--train.steps=5"], "--train.steps = 3 and 5", "given twice; fix: give it once"),
    (["--gpus", "-4"], "gpus = -4", "a multiple of 2 above 0"),
    (["stray"], "stray", "--train.steps 50"),
    (["plan.order=1f1b"], "plan.order=1f1b", "fix: --plan.order=1f1b"),
    (["-plan.order=1f1b"], "-plan.order=1f1b", "fix: --plan.order=1f1b"),
    (["--overlap.ep", "on"], "--overlap.ep", "is a section; fix: one of its settings, such as --overlap.ep.merge"),
]


@pytest.mark.parametrize(("words", "what", "fix"), MISTAKES)
def test_a_mistyped_flag_is_one_line_with_a_suggestion(capsys, words, what, fix):
    code, out, err = command(capsys, "train", "tiny", *words)
    assert (code, out) == (2, "")
    assert err.startswith(f"hocket: {what}")
    assert fix in err
    assert "(command line" in err
    assert "fix: " in err
    assert len(err.splitlines()) == 1


def test_all_mistakes_are_reported_at_once(capsys):
    _, _, err = command(capsys, "train", "tiny", "--plan.mege", "on", "--train.steps", "x")
    assert len(err.splitlines()) == 3


def test_every_setting_can_be_given_its_own_value_back():
    config = recipe("tiny")
    words = []
    for name in types():
        value = leaf(config, name)
        values = value if isinstance(value, tuple) else (value,)
        words += [f"--{name}", *map(str, values)]
    found = given(words, config, {})
    assert not found.problems
    assert [*found.origins] == [*types()]
    assert changed(config, found.settings) == config


# -------------------------------------------------------------------------------------------------------- plan


def test_a_plan_shows_choices_timeline_numbers_and_program(capsys):
    code, out, _ = command(capsys, "plan", "tiny")
    assert code == 0
    for text in ("plan.order = interleaved: 2 chunks", "rank 0 compute", "exposed", "peak memory", "fwd embed m0 c0"):
        assert text in out
    assert "more lines: --ops -1" in out
    whole = command(capsys, "plan", "tiny", "--ops", "-1")[1]
    assert whole.count("fwd dispatch") > 20
    assert "step all" in whole


def test_a_plan_as_json_and_pictures(capsys, tmp_path):
    numbers = json.loads(command(capsys, "plan", "tiny", "--json")[1])
    assert numbers["predicted"]["step_seconds"] > 0
    assert {"plan.order"} <= {choice["setting"] for choice in numbers["choices"]}
    svg, html = tmp_path / "p.svg", tmp_path / "p.html"
    code, out, err = command(capsys, "plan", "tiny", "--svg", str(svg), "--html", str(html), "--json")
    assert code == 0
    assert err.splitlines() == [f"wrote {svg}", f"wrote {html}"]
    assert json.loads(out) == numbers
    assert svg.read_text().startswith("<svg")
    assert "</html>" in html.read_text()


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--ops", "-2"], ["ops = -2", "-1 for all"]),
        (["--hardware.gpu", "h20"], ["hardware.gpu = h20", "is none of laptop, a100-sxm-40"]),
        (["--svg", "p", "--html", "p"], ["svg = p", "--html names it too"]),
        (["--html", ""], ["--html = (empty)", "names nothing", "leave it out"]),
        (["--preset="], ["--preset = (empty)", "names nothing"]),
        (["--svg"], ["--svg = (nothing)"]),
    ],
)
def test_a_bad_flag_of_plan_is_one_line(capsys, words, parts):
    code, out, err = command(capsys, "plan", "tiny", *words)
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert all(part in err for part in [*parts, "fix: "])


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--from"], ["--from = (nothing)", "a list of texts"]),
        (["--from", ""], ["--from = (empty)", "names nothing"]),
        (["--from", "."], [".", "no traces in this folder"]),
    ],
)
def test_bad_traces_of_explain_are_one_line(capsys, words, parts):
    code, out, err = command(capsys, "explain", "tiny", *words)
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert all(part in err for part in [*parts, "fix: "])


def test_a_terminal_without_some_characters_still_gets_a_plan(tmp_path):
    ended = hocket(tmp_path, "plan", "tiny", PYTHONIOENCODING="ascii")
    assert ended.code == 0
    assert "rank 0 compute" in ended.out


def test_a_picture_that_cannot_be_written_is_one_line(capsys, tmp_path):
    code, _, err = command(capsys, "plan", "tiny", "--svg", str(tmp_path / "none" / "p.svg"))
    assert code == 2
    assert "cannot be written (No such file or directory)" in err


def test_a_plan_of_a_gpu_recipe_needs_no_gpu(capsys):
    out = command(capsys, "plan", "moe_8gpu", "--ops", "0")[1]
    assert "on h200, bf16" in out


# ------------------------------------------------------------------------------------------------- environment

TORCHRUN = {
    "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "h", "MASTER_PORT": "29",
}  # fmt: skip
SLURM = {
    "SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_JOB_ID": "41234",
    "SLURM_TASKS_PER_NODE": "4(x2)", "SLURM_JOB_NODELIST": "gpu[07-08]",
}  # fmt: skip


def test_a_worker_finds_its_place():
    assert find_worker({}) is None
    assert find_worker(TORCHRUN) == Worker(5, 8, 1, 4, "h", 29)
    assert find_worker(SLURM) == Worker(5, 8, 1, 4, "gpu07", 21234, "SLURM_JOB_NODELIST", "SLURM_JOB_ID")
    assert find_worker({**SLURM, "MASTER_ADDR": "x", "MASTER_PORT": "9"}) == Worker(5, 8, 1, 4, "x", 9)
    assert find_worker({**SLURM, "SLURM_TASKS_PER_NODE": "8"}) == Worker(
        5, 8, 1, 8, *HERE[:1], 21234, "", "SLURM_JOB_ID"
    )
    assert find_worker({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}) is None  # a batch script of one task
    worker = find_worker(TORCHRUN)
    assert worker is not None
    assert worker.variables() == TORCHRUN


@pytest.mark.parametrize("name", [*TORCHRUN, "SLURM_LOCALID", "SLURM_JOB_NODELIST"])
def test_incomplete_variables_are_named(name):
    env = dict(SLURM if name.startswith("SLURM") else TORCHRUN)
    del env[name]
    if name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):  # as on one host
        env |= {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8", "LOCAL_RANK": "5"}
        here, other = Worker(5, 8, 5, 8, "127.0.0.1", 29, ""), Worker(5, 8, 5, 8, "h", 29)
        expected = other if name == "LOCAL_WORLD_SIZE" else here  # without it there may be other hosts
        assert find_worker({k: v for k, v in env.items() if k != name}) == expected
        return
    with pytest.raises(ValueError, match=rf"{name} = \(not set\) \(environment\).*fix:"):
        find_worker(env)


def test_contradicting_variables_are_refused():
    with pytest.raises(ValueError, match="contradicts"):
        find_worker({**TORCHRUN, "RANK": "8"})
    with pytest.raises(ValueError, match="MASTER_PORT = 70000"):
        find_worker({**TORCHRUN, "MASTER_PORT": "70000"})


@pytest.mark.parametrize("name", ["RANK", "SLURM_NTASKS", "SLURM_NODEID", "SLURM_TASKS_PER_NODE", "MASTER_PORT"])
def test_a_variable_that_is_no_number_is_named(name):
    env = TORCHRUN if name == "RANK" else SLURM
    with pytest.raises(ValueError, match=rf"{name} = x \(environment\): not a number; fix:"):
        find_worker({**env, name: "x"})


@pytest.mark.parametrize("threads", ["0", "many", "-1", ""])
def test_a_bad_number_of_threads_is_named(threads):
    with pytest.raises(ValueError, match=rf"OMP_NUM_THREADS = {threads} \(environment\).*fix:"):
        prepare({"OMP_NUM_THREADS": threads}, 1)


@pytest.mark.parametrize(
    ("nodes", "host"),
    [("a", "a"), ("a,b", "a"), ("n[3-5]", "n3"), ("n[03,05],m1", "n03"), ("n7,m[1-2]", "n7"), ("r[1-2]n[4-5]", "r1n4"),
     ("gpu-a-01.site.org,b", "gpu-a-01.site.org"), ("n[1-2]-ib", "n1-ib")],
)  # fmt: skip
def test_the_first_host_of_a_slurm_list(nodes, host):
    assert first_host(nodes) == host


def test_tasks_of_a_node():
    assert [tasks_here("4(x2),3", node) for node in range(3)] == [4, 4, 3]
    assert tasks_here("8", 0) == 8


def test_the_environment_is_completed_but_never_overwritten():
    env: dict[str, str] = {}
    assert prepare(env, 10**6) == []
    assert env == {
        "NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "32", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    env = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "OMP_NUM_THREADS": "7"}
    assert "CUDA_DEVICE_MAX_CONNECTIONS = 1" in prepare(env, 1)[0]
    assert (env["CUDA_DEVICE_MAX_CONNECTIONS"], env["OMP_NUM_THREADS"]) == ("1", "7")
    with pytest.raises(ValueError, match="NCCL_NVLS_ENABLE = 1"):
        prepare({"NCCL_NVLS_ENABLE": "1"}, 1)


def test_a_stop_request_is_a_flag_and_restores_the_handlers():
    before = signal.getsignal(signal.SIGTERM)
    with StopRequest() as stop:
        assert not stop
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.01)
        assert stop
        assert stop.signal == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before


# -------------------------------------------------------------------------------------------------------- runs


def losses(folder: Path, name: str = "tiny") -> list[float]:
    lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return [record["loss"] for record in map(json.loads, lines) if "loss" in record]


def test_train_starts_four_workers_and_reports(tmp_path):
    words = [*SMALL, "--data.paths", text_in(tmp_path), "--train.steps", "3"]
    ended = hocket(tmp_path, "train", *words, fresh=True)
    assert ended.code == 0, ended.err
    assert ended.err == ""
    assert "4 = pp 2 x dp 2, ep 2 inside dp" in ended.out
    assert "step 3  loss" in ended.out
    assert "unigram entropy" in ended.out
    assert len(losses(tmp_path)) == 3
    records = map(json.loads, (tmp_path / "runs/tiny/metrics.jsonl").read_text().splitlines())
    rates = [record["lr"] for record in records if "loss" in record]
    assert rates == pytest.approx([4e-3 * step / 15 for step in (1, 2, 3)]), "the warm-up of tiny, from its first step"
    meta = json.loads((tmp_path / "runs/tiny/checkpoints/latest/meta.json").read_text())
    explained = json.loads((tmp_path / "runs/tiny/explanation.json").read_text())
    assert meta["digest"] == explained["digest"]
    assert explained["heading"].startswith("4 ranks = pp 2 x dp 2")
    assert "explanation.json has what was decided" in ended.out
    again = hocket(tmp_path, "train", *words)
    assert "nothing to do" in again.out
    record = (tmp_path / "runs/tiny/explanation.json").read_bytes()
    refused = hocket(tmp_path, "train", *words, "--model.vocab", "512")
    assert (refused.code, refused.err.count("belongs to another model or optimizer")) == (2, 1)
    assert (tmp_path / "runs/tiny/explanation.json").read_bytes() == record


@pytest.mark.parametrize(
    "more",
    [pytest.param([], marks=pytest.mark.full), ["--precision.compute", "bf16", "--model.bias_rate", "0.05"]],
    ids=["fp32", "bf16"],
)
def test_a_run_continues_with_identical_losses_on_another_mesh(tmp_path, more):
    words = [*SMALL, *more, "--data.paths", text_in(tmp_path), "--train.steps", "6", "--train.save_every", "3"]
    whole = hocket(tmp_path, "train", *words, *ALONE, "--run.name", "whole")
    assert whole.code == 0, whole.err
    middle = str(tmp_path / "runs/whole/checkpoints/step-00000003")
    again = hocket(tmp_path, "train", *words, *ALONE, "--run.name", "again", "--run.resume", middle)
    assert again.code == 0, again.err
    assert losses(tmp_path, "again") == losses(tmp_path, "whole")[3:]
    two = ["--mesh.pp", "2", "--mesh.dp", "1", "--mesh.ep", "1"]
    other = hocket(tmp_path, "train", *words, *two, "--run.name", "other", "--run.resume", middle)
    assert other.code == 0, other.err
    assert losses(tmp_path, "other") == pytest.approx(losses(tmp_path, "whole")[3:], rel=1e-5)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_ends_and_the_run_can_go_on(tmp_path, number):
    words = [*SMALL, *ALONE[:2], "--mesh.dp", "2", "--data.paths", text_in(tmp_path), "--train.steps", "100000"]
    process = start(tmp_path, "train", *words)
    metrics = tmp_path / "runs/tiny/metrics.jsonl"
    wait_for(lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 3, "four steps")
    os.kill(process.pid, number)
    ended = finish(process)
    assert ended.code == 0, ended.err
    assert f"stopped by signal {int(number)}; saved in" in ended.out
    done = len(losses(tmp_path))
    saved = json.loads((tmp_path / "runs/tiny/checkpoints/latest/meta.json").read_text())
    assert saved["step"] == done


def test_versions_are_told(tmp_path):
    ended = hocket(tmp_path, "--version")
    version, number = importlib.metadata.version, platform.python_version()
    assert (ended.code, ended.out) == (0, f"hocket {version('hocket')}, torch {version('torch')}, Python {number}\n")


def test_a_closed_terminal_saves_and_ends(tmp_path):
    words = [*SMALL, *ALONE, "--data.paths", text_in(tmp_path), "--train.steps", "100000"]
    process, terminal = in_a_terminal(tmp_path, "train", *words)
    metrics = tmp_path / "runs/tiny/metrics.jsonl"
    try:
        wait_for(lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 3, "four steps")
        os.close(terminal)
        assert process.wait(40) == 0
    finally:
        process.kill()
    saved = json.loads((tmp_path / "runs/tiny/checkpoints/latest/meta.json").read_text())
    assert saved["step"] == len(losses(tmp_path)) > 0


def test_a_profiled_window_is_a_trace_and_a_window_in_the_past_is_a_remark(tmp_path):
    words = [*SMALL, *ALONE, "--data.paths", text_in(tmp_path), "--train.profile", "2", "1", "--train.steps"]
    ended = hocket(tmp_path, "train", *words, "2")
    assert "trace    runs/tiny/traces: step 2 of 1 ranks" in ended.out, ended
    assert b"fwd attn m0" in gzip.decompress((tmp_path / "runs/tiny/traces/rank0.json.gz").read_bytes())
    ended = hocket(tmp_path, "train", *words, "3")
    assert "train.profile = 2 1: no effect: these steps are done; run.name = NAME starts" in ended.out, ended


@pytest.mark.full
def test_torchrun_starts_workers(tmp_path):
    words = ["--standalone", "--nproc-per-node", "2", "-m", "hocket", "train", *SMALL, *ALONE[:2], "--mesh.dp", "2"]
    words += ["--data.paths", text_in(tmp_path), "--train.steps", "2"]
    ended = finish(start(tmp_path, *words, module="torch.distributed.run"))
    assert ended.code == 0, ended.err
    assert ended.out.count("step 2  loss") == 1
    assert len(losses(tmp_path)) == 2


def test_slurm_variables_start_workers(tmp_path):
    text = text_in(tmp_path)
    workers = []
    for rank in range(2):
        slurm = {
            "SLURM_PROCID": str(rank), "SLURM_NTASKS": "2", "SLURM_LOCALID": str(rank), "SLURM_NODEID": "0",
            "SLURM_TASKS_PER_NODE": "2", "SLURM_JOB_NODELIST": "localhost", "SLURM_JOB_ID": str(os.getpid()),
        }  # fmt: skip
        words = ["train", *SMALL, *ALONE[:2], "--mesh.dp", "2", "--data.paths", text, "--train.steps", "2"]
        workers.append(start(tmp_path, *words, **slurm))
    for rank, ended in enumerate([finish(worker) for worker in workers]):
        assert ended.code == 0, ended.err
        assert ("step 2  loss" in ended.out) == (rank == 0)


def test_no_worker_outlives_a_killed_parent(tmp_path):
    process = start(tmp_path, "train", *SMALL, "--data.paths", text_in(tmp_path), "--train.steps", "100000")
    wait_for(lambda: (tmp_path / "runs/tiny/metrics.jsonl").exists(), "a first step")
    workers = children_of(process.pid)
    assert len(workers) == 4
    process.kill()
    process.communicate(timeout=20)
    wait_for(lambda: not any(map(alive, workers)), "the end of all workers")
