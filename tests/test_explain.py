"""`hocket explain`: what is hidden under what, what did not take effect, what it will cost, all without a GPU."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import shlex
from pathlib import Path
from typing import Any

import pytest

from hocket.commands.explain import Explain, settle
from hocket.commands.options import parse
from hocket.config.rule import Host
from hocket.config.schema import changed, digest
from hocket.decision import Decision
from hocket.environment import prepare
from hocket.explain.build import FILE, explain, record, simulated
from hocket.explain.explanation import Explanation, Overlap, Predicted, Times, to_text
from hocket.machine import host_for_plan
from hocket.planning import predict, program_of
from hocket.predict.hardware import hardware_of
from hocket.program.mesh import P2P_SMS, PURPOSES, SMS, Mesh
from hocket.recipes import recipe
from hocket.resolve import Settings, resolve
from hocket.variables import survey
from tests.helpers.calls import calls
from tests.helpers.command import command
from tests.helpers.golden import assert_golden


def settled(name: str = "tiny", **changes: Any) -> Settings:
    config = changed(recipe(name), {key.replace("__", "."): value for key, value in changes.items()})
    gpus = config.mesh.world if config.precision.compute == "bf16" else 0
    return resolve(config, Host(gpus=gpus), {"": f"recipe {name}", **dict.fromkeys(_dotted(changes), "run.toml:6")})


def _dotted(changes: dict[str, Any]) -> list[str]:
    return [key.replace("__", ".") for key in changes]


def explained(name: str = "tiny", env: dict[str, str] | None = None, **changes: Any) -> Explanation:
    return explain(settled(name, **changes), survey(env or {}))


def row(found: Explanation, what: str) -> Any:
    return next(overlap for overlap in found.overlaps if overlap.what == what)


GATHERS, ROWS = "weights gathered", "rows to experts and back"

RUN = Explanation(
    name="run",
    recipe="llama3_8b",
    steps=100,
    heading="8 ranks = pp 2 x dp 4, ep 1 inside dp, cuda, bf16, nccl",
    digest="0123456789ab",
    overlaps=(
        Overlap(
            axis="dp",
            what=GATHERS,
            under="the layers before, 2 passes ahead",
            state="on",
            setting="overlap.dp.prefetch",
            source="run.toml:6",
            why="each unit once a step",
            kind="gather",
        ),
        Overlap(axis="pp", what="activations sent", under="other microbatches", state="on", setting="",
                source="always", why="lanes and groups of their own", kind="pp"),
        Overlap(axis="pp", what="gradients sent", under="", state="off", setting="overlap.defer_wgrad",
                source="command line, --overlap.defer_wgrad", why="weight gradients are not deferred"),
        Overlap(axis="ep", what=ROWS, under="", state="n/a", setting="model.experts", source="recipe llama3_8b",
                why="the model has no experts"),
    ),
    predicted=Predicted(
        hardware="h200", step=1.25, compute=1.0, idle=0.15,
        kinds={"gather": Times(seconds=0.3, exposed=0.05), "pp": Times(seconds=0.1, exposed=0.05)},
        note="simulated with 10 and 12 microbatches, and continued to 64",
    ),
    decisions=(
        Decision(setting="train.device", value="cuda", reasons=("8 GPUs for 8 ranks on this host",)),
        Decision(setting="overlap.ep.merge", value="off", asked="on", source="run.toml:9",
                 reasons=("the model has no experts", "mesh.ep is 1"), fix="set model.experts and mesh.ep = 2"),
        Decision(setting="plan.group", value=4, asked=4, source="run.toml:10",
                 reasons=("no effect with plan.order = 1f1b, plan.chunks = 1",), fix="leave it out"),
    ),
    units=(
        dict(unit="embed", count=1, elements=525336576, padding=0.0, members=4, nbytes=1050673152),
        dict(unit="layer", count=32, elements=218112000, padding=0.0002, members=4, nbytes=436224000),
    ),
    groups=(
        dict(purpose="gather_dense", members=4, count=2, lanes=("gather",), moved_by="copy engines, no SM"),
        dict(purpose="pp_fwd", members=2, count=8, lanes=("send_act", "recv_act"), moved_by="NCCL, at most 4 SMs"),
        dict(purpose="control", members=8, count=1, lanes=(), moved_by="NCCL, at most 16 SMs"),
    ),
    memory=(
        dict(rank=0, state=12 << 30, slots=2 << 30, peak=40 << 30, arrivals=256 << 20, fits=True),
        dict(rank=1, state=13 << 30, slots=2 << 30, peak=160 << 30, arrivals=256 << 20, fits=False),
    ),
    environment=tuple(survey({"CUDA_DEVICE_MAX_CONNECTIONS": "1", "NCCL_P2P_DISABLE": "1"})),
    check=("hocket bench run --against hocket_null",),
)  # fmt: skip


def test_the_explanation_as_text(pytestconfig: pytest.Config) -> None:
    assert_golden("explain.txt", to_text(RUN) + "\n", pytestconfig)


@pytest.mark.parametrize(("layers", "state"), [(1, "on"), (0, "off")])
def test_sends_of_gradients_are_hidden_by_what_stands_behind_them(layers: int, state: str) -> None:
    found = row(explained(mesh__pp=2, overlap__pp__defer_layers=layers), "gradients sent")
    assert (found.state, found.setting) == (state, "overlap.pp.defer_layers")
    assert found.under == ("weight gradients after them" if state == "on" else "")


def test_a_run_that_was_asked_for_much_says_what_it_got() -> None:
    found = explained(overlap__dp__prefetch=0, overlap__ep__merge="off")
    assert row(found, GATHERS).state == "off"
    assert "overlap.dp.prefetch is 0" in row(found, GATHERS).why
    assert (row(found, ROWS).state, row(found, ROWS).setting) == ("on", "overlap.defer_wgrad")
    assert "weight gradients" in row(found, ROWS).under
    found = explained(overlap__ep__merge="off", overlap__defer_wgrad="off")
    assert (row(found, ROWS).state, row(found, ROWS).source, row(found, ROWS).why) == ("off", "run.toml:6", "as asked")


def test_the_commands_that_check_an_explanation_are_of_the_same_run(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my.toml").write_text('recipe = "tiny"\npreset = "memory"\ntrain.steps = 7\n')
    for words in (
        ["tiny", "--preset", "debug", "--gpus", "8", "--train.betas", "0.5", "0.6", "--run.folder", "a b"],
        ["my.toml", "--recipe", "moe_8gpu", "--mesh.pp", "1"],
        ["my.toml", "--overlap.dp.prefetch", "3"],
    ):
        options, origins = parse(Explain, "explain", words)
        settings, _ = settle(options.config, origins)
        bench, train = explain(settings, ()).check
        for line, rest in ((bench, "--against hocket_null"), (train, "--profile &&")):
            said = shlex.split(line.partition(f" {rest}")[0])[2:]
            again, origins = parse(Explain, "explain", said)
            assert digest(settle(again.config, origins)[0]) == digest(settings)
            assert again.config.run.name == options.config.run.name
        folder = f"{settings.run.folder}-traced"  # a trace replaces nothing of the run
        assert again.config.run.folder == folder
        assert train.endswith(shlex.join(["hocket", "trace", folder]))


@pytest.mark.parametrize("name", ["tiny", "moe_8gpu", "llama3_8b"])
def test_every_row_that_is_not_on_says_why(name: str) -> None:
    for overlap in explained(name).overlaps:
        assert overlap.state == "on" or overlap.why, overlap
        assert bool(overlap.under) == (overlap.state == "on")
        assert overlap.source


def test_predicted_times_are_those_of_the_plan() -> None:
    settings = settled()
    timeline = predict(settings, program_of(settings), hardware_of(settings))
    found, _ = simulated(settings)
    exposed = sum(float(use.exposed_total) for use in timeline.ranks) / len(timeline.ranks)
    assert found.step == float(timeline.makespan)
    assert sum(times.exposed for times in found.kinds.values()) == pytest.approx(exposed)
    assert found.compute + exposed + found.idle == pytest.approx(found.step)
    assert all(0 <= times.exposed <= times.seconds for times in found.kinds.values())


def test_long_steps_are_continued_from_shorter_ones_and_the_longest_are_not_simulated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    long = settled(train__microbatches=40)
    monkeypatch.setattr("hocket.explain.build.MOST_OPS", 20 * 8 * 20)
    found, step = simulated(long)
    whole = predict(long, program_of(long), hardware_of(long))
    assert step is not None
    assert step.program.microbatches < 20
    assert "continued to 40" in found.note
    assert found.step == pytest.approx(float(whole.makespan), rel=0.005)
    monkeypatch.setattr("hocket.explain.build.LONGEST_OPS", 1000)
    nothing, none = simulated(long)
    assert none is None
    assert nothing.step == 0
    assert "not simulated" in nothing.note
    assert "not simulated" in to_text(explain(long, ()))


def test_a_prediction_for_several_hosts_says_what_network_it_goes_by() -> None:
    one, two = (changed(recipe("llama3_8b"), {"mesh.dp": ranks}) for ranks in (8, 16))
    assert "hosts" not in simulated(resolve(one, host_for_plan(one)))[0].note
    found = explain(resolve(two, host_for_plan(two)), ())
    assert "16 ranks on 2 hosts" in found.predicted.note
    assert found.heading.split(", ")[2] == "8 on each host"
    text = to_text(found)
    assert "(assumed, not set: network." in " ".join(text.split())
    assert all(len(line) <= 120 for line in text.partition("PREDICTED STEP")[2].partition("UNITS")[0].splitlines())


def test_a_prediction_says_what_fp8_would_gain_where_it_can_be_had() -> None:
    notes = []
    for settings in ({}, {"precision.compute": "fp8"}, {"hardware.gpu": "a100-sxm"}, {"model.hidden": 4100}):
        config = changed(recipe("llama3_8b"), settings)
        notes.append(simulated(resolve(config, host_for_plan(config)))[0].note)
    assert "precision.compute = fp8 makes compute 1.4" in notes[0]
    assert not any("fp8" in note for note in notes[1:]), "in fp8 already, no such products, a width that they lack"


def test_what_was_asked_for_and_did_not_happen_is_a_section_of_its_own() -> None:
    unmet = Decision(
        setting="overlap.ep.merge", value="off", asked="on", source="run.toml:6", reasons=("a", "b"), fix="mesh.ep = 2"
    )
    idle = Decision(
        setting="plan.group", value=4, asked=4, source="run.toml:7", reasons=("no effect",), fix="leave it out"
    )
    found = dataclasses.replace(explained(), decisions=(unmet, idle))
    text = to_text(found)
    assert "NOT DONE AS ASKED\n  overlap.ep.merge = off (asked for on: run.toml:6): a; b; fix: mesh.ep = 2" in text
    assert "WITHOUT EFFECT\n  plan.group = 4 (run.toml:7): no effect; fix: leave it out" in text
    assert (found.unmet, found.without_effect) == ((unmet,), (idle,))


def test_the_digest_is_of_what_a_step_does_and_nothing_else() -> None:
    settings = settled()
    assert digest(settings) == digest(settled(run__name="other", run__folder="elsewhere"))
    assert digest(settings) == explained().digest
    others = [settled(train__lr=1e-3), settled(overlap__dp__prefetch=3), settled(data__skip_empty=True)]
    assert len({digest(other) for other in (settings, *others)}) == 4


def test_units_groups_and_memory_are_those_of_the_run() -> None:
    found = explained("moe_8gpu")
    units = {unit["unit"]: unit for unit in found.units}
    assert (units["layer"]["count"], units["layer, all but its experts"]["count"]) == (1, 15)
    assert units["experts of one ep rank"]["elements"] == 8 * 3 * 2048 * 1024
    assert {group["purpose"]: (group["members"], group["count"]) for group in found.groups} == {
        "gather_dense": (4, 2), "reduce_dense": (4, 2), "a2a": (4, 2), "pp_fwd": (2, 8), "pp_bwd": (2, 8),
        "control": (8, 1),
    }  # fmt: skip
    assert all(0 < m["state"] < m["peak"] and m["fits"] for m in found.memory)
    assert not explained("moe_8gpu", train__sequences=512).memory[0]["fits"]


def test_units_of_tensor_parallel_ranks_are_parts() -> None:
    whole, part = (explained("llama3_8b", mesh__dp=2, mesh__tp=tp) for tp in (1, 4))
    (mine,) = [unit for unit in part.units if unit["unit"] == "layer of one tp rank"]
    (all_of_it,) = [unit for unit in whole.units if unit["unit"] == "layer"]
    assert mine["elements"] == pytest.approx(all_of_it["elements"] / 4, rel=1e-3)
    moved = {group["purpose"]: group["moved_by"] for group in part.groups}
    assert moved["tp"].startswith("copy engines, piece by piece")


def test_groups_know_what_moves_them() -> None:
    placed = explained("moe_8gpu", overlap__ep__splits="device", overlap__ep__copies="per_expert")
    assert {group["purpose"]: group["moved_by"] for group in placed.groups}["a2a"].startswith("kernels that store")
    known = explained("moe_8gpu", train__transport="copy_engine", overlap__ep__splits="host")
    moved = {group["purpose"]: group["moved_by"] for group in known.groups}
    assert moved["gather_dense"] == moved["a2a"] == moved["pp_fwd"] == "copy engines, no SM"
    by_nccl = {group["purpose"]: group["moved_by"] for group in explained("moe_8gpu", train__transport="nccl").groups}
    assert by_nccl["pp_fwd"] == f"NCCL, at most {P2P_SMS} SMs"
    assert moved["control"] == f"NCCL, at most {SMS} SMs"


@pytest.mark.parametrize("mesh", [(2, 4, 2, 1), (1, 4, 4, 2), (3, 2, 1, 2), (2, 2, 2, 1), (2, 2, 4, 2)], ids=str)
@pytest.mark.parametrize("order", ["interleaved", "zb_v"])
def test_groups_are_counted_as_they_are_made(mesh: tuple[int, ...], order: str) -> None:
    sizes: dict[str, Any] = dict(zip(("mesh__pp", "mesh__dp", "mesh__ep", "mesh__tp"), mesh, strict=True))
    turning = order == "zb_v" and mesh[0] > 1
    found = explained("tiny", plan__order=order if turning else "auto", train__microbatches=6, model__layers=6, **sizes)
    made = Mesh(**dict(zip(("pp", "dp", "ep", "tp"), mesh, strict=True)), turning=turning)
    assert {group["purpose"]: group["count"] for group in found.groups} == {
        purpose: len(groups) for purpose in PURPOSES if (groups := made.groups(purpose)) and len(groups[0]) > 1
    }


def test_a_thousand_gpus_are_no_more_work_than_sixteen() -> None:
    """To choose settings for, and to explain."""
    counts, found = [], []
    for replicas in (8, 512):
        sizes = {"mesh.dp": replicas, "mesh.ep": 8, "train.microbatches": 4}
        late = {"overlap.pp.defer_layers": "attn:1", "overlap.pp.defer_head": 0}  # else either tries another number
        config = changed(recipe("qwen3_30b_a3b"), {**sizes, **late})
        host = host_for_plan(config)
        counts.append(calls(lambda c=config, h=host: found.append(explain(resolve(c, h), survey({})))))
    assert found[1].heading.startswith("1024 ranks")
    assert "on 64 hosts" in found[1].predicted.note
    assert counts[1] < 1.25 * counts[0], counts


def test_every_product_of_tensor_ranks_has_its_row() -> None:
    rows = [
        o
        for o in explained("llama3_8b", mesh__tp=2, overlap__tp__method=("fc1_forward:off",)).overlaps
        if o.axis == "tp"
    ]
    assert len(rows) == 8
    off = next(overlap for overlap in rows if overlap.what == "MLP's input, forward")
    assert (off.state, off.source) == ("off", "run.toml:6")
    assert all(overlap.why for overlap in rows if overlap.source == "auto")


# A run


def test_a_run_records_the_explanation_that_the_command_prints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = dataclasses.replace(settled(), host=Host(variables=tuple(survey({"NCCL_P2P_DISABLE": "1"}))))
    record(settings, tmp_path)
    kept = json.loads((tmp_path / FILE).read_text())
    assert [path.name for path in tmp_path.iterdir()] == [FILE]
    _, out, _ = command(capsys, "explain", "tiny", "--json")
    printed = json.loads(out)
    assert "NCCL_P2P_DISABLE" in kept.pop("text")
    assert kept["digest"] == printed["digest"]
    assert {key for key in kept if kept[key] != printed[key]} <= {"environment", "decisions", "overlaps", "groups"}
    assert kept["environment"][-1]["name"] == "NCCL_P2P_DISABLE"


def test_the_explanation_of_a_run_is_printed_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(settled(), tmp_path)
    for name in (tmp_path, tmp_path / FILE):
        assert command(capsys, "explain", str(name)) == (0, f"{to_text(explain(settled(), ()))}\n", "")
    found = command(capsys, "explain", str(tmp_path), "--json")[1]
    assert json.loads(found) == json.loads(json.dumps(explain(settled(), ()).as_json()))


@pytest.mark.parametrize("said", ["", "[" * 100_000, "[]", "{}", json.dumps({"name": "tiny", "digest": "1"})])
def test_an_explanation_that_is_damaged_or_old_is_one_line(tmp_path: Path, capsys: Any, said: str) -> None:
    (tmp_path / FILE).write_text(said)
    code, out, err = command(capsys, "explain", str(tmp_path))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert f"{tmp_path / FILE} (command line): damaged, or written by another version of hocket; fix: " in err


def test_a_run_without_an_explanation_and_words_that_do_not_go_with_one_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (tmp_path, tmp_path / FILE):
        code, _, err = command(capsys, "explain", str(name))
        assert (code, err.count("\n")) == (2, 1)
        assert f"{FILE} (command line): cannot be read (No such file or directory); fix: the folder of a run" in err
    code, _, err = command(capsys, "explain", str(tmp_path), "--train.lr", "1", "--json")
    assert (code, err.count("\n")) == (2, 1)
    assert err.startswith(f"hocket: --train.lr 1 (command line): {tmp_path} is a run's")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    assert command(capsys, "explain", "tiny")[1].startswith("tiny: 4 ranks"), (
        "a recipe comes before a folder of its name"
    )


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"run.folder = .*: cannot be written \(No such file or directory\); fix: "):
        record(settled(), tmp_path / "nowhere")


def test_what_cannot_be_kept_leaves_nothing_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(ValueError, match="No space left on device"):
        record(settled(), tmp_path)
    assert list(tmp_path.iterdir()) == []


# The command


def test_json_is_the_same_object(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = command(capsys, "explain", "moe_8gpu", "--json", "--overlap.dp.prefetch", "1")
    found = json.loads(out)
    assert code == 0
    assert {field.name for field in dataclasses.fields(Explanation)} == set(found)
    assert found["digest"] == explained("moe_8gpu", overlap__dp__prefetch=1).digest
    gathers = next(overlap for overlap in found["overlaps"] if overlap["what"] == GATHERS)
    assert gathers["source"] == "command line, --overlap.dp.prefetch"


IMPOSSIBLE = ("tiny", "--overlap.ep.merge", "off", "--overlap.ep.merge_ends", "on")


def test_what_a_run_would_refuse_is_explained_all_the_same_and_the_exit_code_says_so(capsys: Any) -> None:
    code, out, err = command(capsys, "explain", *IMPOSSIBLE)
    assert code == 1
    assert "NOT DONE AS ASKED\n  overlap.ep.merge_ends = off (asked for on: command line" in out
    assert err.startswith("hocket: a run would not start: overlap.ep.merge_ends = on (command line")


@pytest.mark.parametrize(("name", "value"), [("NCCL_NVLS_ENABLE", "1"), ("OMP_NUM_THREADS", "all")])
def test_variables_with_which_no_run_starts_have_the_verdict_of_one(capsys: Any, monkeypatch: Any, name, value) -> None:
    monkeypatch.setenv(name, value)
    code, out, err = command(capsys, "explain", "tiny", "--json")
    assert code == 1
    assert err.startswith(f"hocket: a run would not start: {name} = {value} (environment): ")
    with pytest.raises(ValueError, match=f"{name} = {value}") as error:
        prepare(dict(os.environ), 1)
    assert json.loads(out)["refused"] == [str(error.value)]
    assert [line.split(": ", 2)[2] for line in err.splitlines()] == [str(error.value)]


def test_what_cannot_be_explained_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = command(capsys, "explain", "tiny", "--mesh.ep", "3")
    assert (code, out) == (2, "")
    assert "mesh.ep = 3" in err


def test_help_and_a_missing_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = command(capsys, "explain", "--help")
    assert code == 0
    assert "--overlap.ep.merge" in out
    assert command(capsys, "explain")[0] == 2
    assert "--gpus N" in command(capsys, "explain", "--from-megatron", "--help")[1]
