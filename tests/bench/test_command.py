"""`hocket bench` as a user types it."""

from __future__ import annotations

import json
import re
import signal
import socket
from pathlib import Path

import pytest

from benchmarks.bench.command import check, chosen
from benchmarks.bench.contender import CONTENDERS, Entry, why_not
from benchmarks.bench.gate import NumericsError
from benchmarks.bench.run import Bench, Session
from hocket import cli
from hocket.config import Config, MeshConfig, ModelConfig, TrainConfig
from hocket.resolve import resolve
from tests.bench.setup import CPU, workload
from tests.helpers.command import ALONE, SMALL, finish, hocket, start, wait_for
from tests.helpers.ranks import run_ranks

QUICK = ["--blocks", "2", "--steps", "1", "--gate_steps", "3"]
SLOW = ["--train.transport", "slow", "--train.slow", "1ms"]
LITTLE = ["--model.layers", "2", "--train.microbatches", "2"]


def failure(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The message of a command that makes no sense."""
    with pytest.raises(SystemExit) as end:
        cli.main(["bench", *words])
    assert end.value.code == 2
    return capsys.readouterr().err


def test_nothing_goes_beside_the_list() -> None:
    with pytest.raises(
        ValueError, match=r"^tiny --gpus 2 \(command line\): no effect beside --list; fix: hocket bench --l"
    ):
        cli.run(["bench", "tiny", "--list", "--gpus", "2"])


def test_the_list_names_every_contender(capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["bench", "--list"])
    assert end.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(CONTENDERS)
    assert all(len(line.split()) >= 3 for line in lines)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["tiny", "--against", "fdsp2"], "against = fdsp2 .* no such contender; fix: did you mean fsdp2"),
        (["tiny", "--against", "xyz"], "against = xyz .* fix: hocket bench --list"),
        (["tiny", "--against", "ddp,ddp"], "against = ddp .* twice"),
        (["tiny", "--blocks", "0"], "blocks = 0 .*--blocks.* out of range; fix: 1 or more"),
        (
            ["tiny", "--steps", "0", "--gate_steps", "-1"],
            "2 settings (.|\n)* steps = 0(.|\n)*gate_steps = -1",
        ),
        (["tiny", "--lengths", "16", "0"], "lengths = 16 0 .* out of range"),
        (["tiny", "--lengths", "16", "16"], "lengths = 16 16 .* names one twice; fix: name each once"),
        (
            ["tiny", "--lengths", "1000000000"],
            r"length = 1000000000 \(command line, --lengths\): out",
        ),
        (
            ["tiny", "--lengths", "8", "--data.sequence_length", "16"],
            "data.sequence_length = 16 .* --lengths sets it",
        ),
        (["tiny", "--seconds", "-1"], "seconds = -1.* out of range; fix: 0"),
        (["tiny", "--resume"], "resume = on .* no file to continue; fix: name it with --out"),
        (["tiny", "--lengths", "long"], "lengths = long .* not a list of whole numbers"),
        (["tiny", "--optimizer", "maybe"], "optimizer = maybe .* one of on, off"),
        (["tiny", "--out", "/"], "out = / .*it is a folder"),
        (["tiny", "--out", "missing/folder/x.json"], "out = missing/folder/x.json .*no such folder"),
        (["tiny", "--train.clip", "2"], "train.clip = 2.0 .* contenders clip differently; fix: leave it out"),
        (["tiny", "--against", "fsdp2"], "against = fsdp2 .* knows no pipeline, and mesh.pp = 2"),
        (["tiny", "--against", "hocket_null", "--train.transport", "null"], "train.transport = null .* hocket alone"),
        (["tiny", *ALONE, "--against", "ddp", *SLOW], "train.transport = slow .* ddp would run"),
        (["tiny", *ALONE, "--against", "ddp", "--model.bias_rate", "0.1"], "model.bias_rate = 0.1 .* balance biases"),
        (
            ["tiny", *ALONE, "--plan.chunks", "1", "--against", "ddp", "--model.tied", "True"],
            "model.tied = True .* cannot tie",
        ),
        (["tiny", *ALONE, "--against", "ep_sync"], "against = ep_sync .* needs experts on several ranks"),
        (["tiny", "--mesh.pp", "1", "--against", "ddp,bound"], "against = ddp .* mesh.ep = 2; fix: mesh.ep = 1"),
        (["tiny", *ALONE, "--against", "megatron_fsdp"], "against = megatron_fsdp .* needs GPUs; fix: leave it out"),
        (["--against", "ddp"], "the recipe is missing"),
        (["tiny", "--variant", "plain"], "variant = plain .* not a name and settings; fix: such as"),
        (["tiny", "--variant", "a --plan.group 0", "--variant", "b --plan.group 2"], "--variant .*given twice; fix"),
        (["tiny", "--variant", "ddp --plan.group 0"], "variant = ddp .* name of another contender"),
        (
            ["tiny", "--variant", "a --plan.group 0", "a --plan.group 2"],
            "a is the name .* fix: another",
        ),
        (["tiny", "--variant", "a-b --plan.group 0"], "a-b is no name; fix: letters, digits and _"),
        (["tiny", "--variant", "a --preset memory"], r"--preset \(--variant a\): is of the whole benchmark"),
        (
            ["tiny", "--variant", "far --train.transport slow"],
            r"slow \(--variant far\): .* another network; fix",
        ),
        (["tiny", "--variant", "odd --plan.oder 1f1b"], r"--plan.oder \(--variant odd\).* did you mean --plan.order"),
        (["tiny", "--variant", "odd --plan.order 2f2b"], r"plan.order = 2f2b \(--variant odd.*give one of"),
        (["tiny", "--variant", "big --model.layers 9"], r"model.layers \(--variant big\): .*not do the same step"),
        (["tiny", "--variant", "free --train.transport null"], r"null \(--variant free\).* --against hocket_null"),
        (["tiny", "--variant", "-x --plan.graphs off"], r"-x --plan.* begins like a flag; fix: --variant=-x --plan"),
        (["tiny", *ALONE, "--variant", "few --overlap.pp.defer_layers 1"], "overlap.pp.defer_layers .*variant few"),
    ],
)
def test_mistakes_are_one_line_before_anything_starts(capsys, words, message):
    assert re.search(message, failure(capsys, *words))


def disagree(rank: int) -> None:
    CONTENDERS["half"] = Entry("tests.bench.setup:half_gradients", "gradients off by a factor", model="whole")
    work = workload(1)
    session = Session(Bench(("hocket", "half"), ()), rank, CPU, print)
    session.run(work, lambda measured: None)


def test_contenders_that_disagree_are_not_timed(capsys):
    with pytest.raises(NumericsError, match="half does not compute what hocket computes"):
        run_ranks(disagree, 1)
    out = capsys.readouterr().out
    assert "WORKLOAD" in out
    assert "measure" not in out


def resolved(**mesh: int) -> Config:
    return resolve(Config(model=ModelConfig(experts=4), mesh=MeshConfig(**mesh), train=TrainConfig(device="cpu")))


def test_missing_and_other_versions_of_packages_are_named(monkeypatch):
    monkeypatch.setitem(CONTENDERS, "absent", Entry("a:b", "x", package="no-such-package==1.2"))
    monkeypatch.setitem(CONTENDERS, "older", Entry("a:b", "x", package="numpy==0.0.1"))
    monkeypatch.setitem(CONTENDERS, "here", Entry("a:b", "x", package="numpy"))
    assert "no-such-package is not installed; fix: pip install no-such-package==1.2" in why_not("absent", resolved())
    assert "written for numpy==0.0.1, and " in why_not("older", resolved())
    assert why_not("here", resolved()) == ""


def test_without_a_choice_what_fits_takes_part():
    for mesh in (dict(), dict(dp=2), dict(dp=2, ep=2), dict(pp=2)):
        config = resolved(**mesh)
        names = chosen("", config)
        check(names, config, {})  # pyrefly: ignore
        assert {"hocket", "hocket_null"} <= set(names)
    assert chosen("bound, ddp", resolved()) == ("hocket", "bound", "ddp")
    assert chosen("bound,hocket", resolved()) == ("bound", "hocket")


@pytest.mark.full
def test_a_benchmark_from_start_to_result(tmp_path: Path):
    mesh = ["--mesh.pp", "1", "--plan.chunks", "1", "--gpus", "2", "--optimizer", "off"]
    at = SMALL.index("--data.sequence_length")
    small = [*SMALL[:at], *SMALL[at + 2 :]]  # --lengths sets it
    words = [*small, *mesh, *QUICK, *LITTLE, "--lengths", "8", "16", "--out", "result.json", "--commit", "abc"]
    words += ["--variant", "plain --overlap.ep.merge off --overlap.defer_wgrad off"]
    done = hocket(tmp_path, "bench", *words)
    assert done.code == 0, done.err
    assert done.out.count("same losses over 3 steps of 2 layers and sequences of 8") == 1, "once for all lengths"
    assert done.out.count("round 2 of 2, ms: bound ") == 2
    assert "units: each layer; embedding and head in the root" in done.out, "settings of peers are printed"
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["commit"] == "abc"
    assert result["command"].startswith("python -m hocket bench tiny")
    assert "result.json" not in result["command"]
    assert [w["config"]["data"]["sequence_length"] for w in result["workloads"]] == [8, 16]
    for found in result["workloads"]:
        assert list(found["contenders"]) == ["bound", "ep_sync", "hocket", "hocket_null", "plain"]
        overlap = {name: found["contenders"][name]["settings"]["overlap"] for name in ("hocket", "plain")}
        assert "ep.merge = on" in overlap["hocket"]
        assert "ep.merge = off" in overlap["plain"]
        assert found["gate"]["worst"] <= found["gate"]["tolerance"]
        assert found["complete"]
        assert {"build", "warm-up", "measure"} <= set(found["phases"])
        for row in found["contenders"].values():
            assert row["settings"]
            assert row["seconds"] > 0
            assert len(row["blocks"]) == 2
    assert not (tmp_path / "runs" / "tiny").exists(), "the folder of training runs stays alone"
    again = [*words[: words.index("--lengths")], "--lengths", "16", "32", *words[words.index("--out") :]]
    done = hocket(tmp_path, "bench", *again, "--resume", "--seconds", "0.001")
    assert done.code == 0, done.err
    assert done.out.count("measured already: it stays in result.json") == 1
    assert done.out.count("the time is up: --resume measures what is left") == 1
    assert "round" not in done.out
    assert json.loads((tmp_path / "result.json").read_text()) == result


@pytest.mark.full
def test_contenders_can_be_measured_with_nothing_beside_them(tmp_path: Path):
    against = ["--against", "bound,hocket", "--alone", "--out", "result.json"]
    done = hocket(tmp_path, "bench", *SMALL, *ALONE, *LITTLE, *QUICK, *against)
    assert done.code == 0, done.err
    assert done.out.count("build ") == 4, "each of two, for each of two rounds"
    (found,) = json.loads((tmp_path / "result.json").read_text())["workloads"]
    assert found["complete"]
    assert [len(row["blocks"]) for row in found["contenders"].values()] == [2, 2]
    assert all(row["settings"] for row in found["contenders"].values())


def test_what_was_measured_before_an_interruption_stays(tmp_path: Path):
    words = [*SMALL, *ALONE, *LITTLE, "--plan.chunks", "1", "--gate_steps", "2", "--blocks", "100000", "--steps", "1"]
    process = start(tmp_path, "bench", *words, "--against", "bound", "--out", "result.json")
    wait_for((tmp_path / "result.json").exists, "the first round")
    process.send_signal(signal.SIGTERM)
    done = finish(process)
    assert done.code == 128 + signal.SIGTERM
    assert done.err.splitlines()[-1] == "hocket: ended"
    (found,) = json.loads((tmp_path / "result.json").read_text())["workloads"]
    assert not found["complete"]
    assert len(found["contenders"]["bound"]["blocks"]) == len(found["contenders"]["hocket"]["blocks"]) > 0


@pytest.mark.full
def test_torchrun_starts_a_benchmark(tmp_path: Path):
    """By its variables, that is: `test_cli` starts one."""
    words = [*SMALL, "--mesh.pp", "1", "--plan.chunks", "1", "--mesh.dp", "2", "--mesh.ep", "1", *QUICK]
    words += LITTLE
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    ranks = [
        start(tmp_path, "bench", *words, "--against", "ddp", RANK=str(rank), LOCAL_RANK=str(rank), **place)
        for rank in range(2)
    ]
    for rank, done in enumerate([finish(process) for process in ranks]):
        assert done.code == 0, done.err
        assert done.out.count("RESULT") == (rank == 0), "only rank 0 prints"
