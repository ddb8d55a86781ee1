"""Flags of Megatron-LM and keys of Megatron Bridge as hocket's settings."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from hocket.commands.megatron import LACKING, NEEDLESS, TABLE, UNKNOWN, Translation, pairs, table
from hocket.config.schema import flat, types
from hocket.typed import is_a
from tests.helpers.command import command
from tests.helpers.golden import assert_golden


def settings(text: str, gpus: int = 8) -> dict[str, Any]:
    """What a text becomes, without what stands there for any."""
    found = Translation(text, gpus).settings
    return {name: value for name, (value, source) in found.items() if source[0] != "("}


def notes(text: str, title: str, gpus: int = 8) -> list[str]:
    return Translation(text, gpus).notes.get(title, [])


def test_every_row_of_the_table_gives_settings_that_exist_and_values_that_they_can_have() -> None:
    known = table({"tensor_model_parallel_size": "2"})
    names = re.findall(r"(\S+)(?= (?:\S+ )*(?:->|=>|\.\.|!!) )", TABLE.replace("; ", "\n"))
    assert len(names) == len(set(names)) >= 120, "no name stands twice"
    for name, (sign, said) in known.items():
        key, _, value = name.partition("=")
        if sign == "=>":
            found = settings(f"{key}={value} --tensor-model-parallel-size 2")
            assert set(found) - {"mesh.tp"} == {each.partition("=")[0] for each in said.split()}, name
        elif sign == "->":
            assert said in types(), name
        assert said, name


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("--tensor-model-parallel-size 2 --tp-comm-overlap", {"mesh.tp": 2, "overlap.tp.method": ("auto",)}),
        ("--tp-comm-overlap", {}),
        ("--num-virtual-stages-per-pipeline-rank=2", {"plan.chunks": 2}),
        ("--overlap-moe-expert-parallel-comm", {"overlap.ep.merge": "on"}),
        ("--delay-wgrad-compute", {"overlap.defer_wgrad": "on"}),
        ("overlap_moe_expert_parallel_comm=false", {"overlap.ep.merge": "off"}),
        ("--use-distributed-optimizer", {"overlap.dp.strategy": "optim"}),
        ("--use-torch-fsdp2", {"overlap.dp.strategy": "optim_grads_params"}),
        ("--use-torch-fsdp2 --torch-fsdp2-no-reshard-after-forward", {"overlap.dp.strategy": "optim_grads"}),
        (
            "--use-distributed-optimizer --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads",
            {"overlap.dp.strategy": "optim_grads"},
        ),
        ("--bf16 --fp8-format hybrid", {"precision.compute": "fp8"}),
        ("--first-last-layers-bf16", {"precision.fp8": ("but_first:1", "but_last:1")}),
        ("--recompute-modules mlp moe core_attn", {"plan.recompute": ("mlp", "experts")}),
        ("--recompute-modules mlp moe --moe-layer-recompute", {"plan.recompute": ("mlp", "experts")}),
        ("--overlap-p2p-wgrad-delayed-layer-number 2", {"overlap.pp.defer_layers": 2}),
    ],
)  # fmt: skip
def test_flags_become_settings(text: str, found: dict[str, Any]) -> None:
    assert settings(text) == found


@pytest.mark.parametrize(
    ("text", "wire"),
    [
        ("--bf16", "fp32"),
        ("--bf16 --grad-reduce-in-bf16", "bf16"),
        ("--bf16 --accumulate-allreduce-grads-in-fp32", "fp32"),
        ("--bf16 --ddp-reduce-scatter-with-fp32-accumulation", None),
        ("--seq-length 8", None),
        ("mixed_precision=bf16_mixed", "fp32"),
        ("mixed_precision=bf16_mixed ddp.grad_reduce_in_fp32=false", "auto"),
    ],
)
def test_megatron_reduces_in_fp32_by_itself(text: str, wire: str | None) -> None:
    assert Translation(text, 8).settings.get("precision.wire", (None,))[0] == wire


def test_what_is_not_given_is_what_megatron_does_and_no_recipe_adds_ranks() -> None:
    found = {name: value for name, (value, _) in Translation("--pipeline-model-parallel-size 2", 8).settings.items()}
    assert found == {
        "mesh.pp": 2, "mesh.dp": 4, "mesh.tp": 1, "mesh.cp": 1, "mesh.ep": 1, "plan.chunks": 1,
        "overlap.dp.strategy": "no_shard",
    }  # fmt: skip
    assert notes("--pipeline-model-parallel-size 3", LACKING) == [
        "mesh.dp: 8 ranks cannot be split over 3, the other axes"
    ]
    assert notes("--bf16", LACKING, 0) == ["mesh.dp: it needs --gpus N"]
    assert settings("comm_overlap.data_parallel_size=4", 0)["mesh.dp"] == 4


@pytest.mark.parametrize(
    ("text", "title", "line"),
    [
        ("--overlap-grad-reduce", NEEDLESS, "--overlap-grad-reduce: each communication has a lane"),
        ("--fp4-format e2m1", LACKING, "--fp4-format e2m1: precision.compute is "),
        ("--cp-comm-type p2p", LACKING, "--cp-comm-type p2p: keys and values are gathered, or heads exchanged"),
        ("--recompute-granularity full", LACKING, "--recompute-granularity full: plan.recompute names parts"),
        ("--recompute-modules mlp layernorm", LACKING, "--recompute-modules mlp layernorm: plan.recompute names parts"),
        ("--moe-expert-capacity-factor 1.5", LACKING, "--moe-expert-capacity-factor 1.5: no row is ever dropped"),
        ("--fp8 none", NEEDLESS, "--fp8 none: it is off without it"),
        ("use_distributed_optimizer=False", NEEDLESS, "use_distributed_optimizer False: it is off without it"),
        ("--overlap-grad-reduc", UNKNOWN, "--overlap-grad-reduc: did you mean overlap_grad_reduce?"),
        ("--vocab-file x", UNKNOWN, "--vocab-file x"),
        ("loose --seq-length 3", UNKNOWN, "loose"),
        ("--context-parallel-size $CP", LACKING, "--context-parallel-size $CP: its value is set elsewhere"),
    ],
)
def test_what_becomes_nothing_is_named(text: str, title: str, line: str) -> None:
    assert notes(text, title)[0].startswith(line)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("--tensor-model-parallel-size two", "-size two (Megatron): mesh.tp is a whole number; fix: "),
        ("--tensor-model-parallel-size", "--tensor-model-parallel-size (Megatron): mesh.tp is a whole number; fix: "),
        ("--tensor-model-parallel-size 0", "mesh.tp is at least 1; fix: "),
        ("--bf16 yes", "--bf16 yes (Megatron): takes no value; fix: leave out yes"),
        ("--bf16 -fp16", "--bf16 -fp16 (Megatron): takes no value; fix: leave out -fp16"),
        (
            "--tensor-model-parallel-size 2 --tp-comm-overlap-rs-dgrad --disable-tp-comm-bulk-dgrad",
            "--disable-tp-comm-bulk-dgrad (Megatron): becomes overlap.tp.method = qkv_backward:off",
        ),
        ("--seq-length 2 --seq-length 3", "--seq-length = 3 (Megatron): it is 2, too; fix: leave one out"),
        ("--use-distributed-optimizer --use-torch-fsdp2", "--use-torch-fsdp2 (Megatron): becomes overlap.dp.strategy"),
        ("--micro-batch-size many --context-parallel-size x", "context-parallel-size x (Megatron): mesh.cp is a whole"),
        (" ".join(f"--stage{n}" for n in range(2000)), "2000 settings (Megatron): not 1 to 1000; fix: "),
    ],
)  # fmt: skip
def test_values_that_cannot_be_are_refused(text: str, words: str) -> None:
    with pytest.raises(ValueError, match="fix: ") as error:
        Translation(text, 8)
    assert words in str(error.value)
    assert len(str(error.value).splitlines()) == (3 if "many" in text else 1)  # with a heading above two


def test_flags_and_keys_are_read_as_they_are_typed() -> None:
    assert pairs("+ddp.bucket_size = 1024 model.x=[mlp,'moe'] loose --a=b --c 1 2") == [
        ("+ddp.bucket_size", ["1024"]), ("model.x", ["mlp", "moe", "loose"]), ("--a", ["b"]), ("--c", ["1", "2"]),
    ]  # fmt: skip
    assert pairs("--a 1 \\\n    --b") == [("--a", ["1"]), ("--b", [])]
    with pytest.raises(ValueError, match="No closing quotation; fix: "):
        pairs("--a 'b")


FLAGS = "--pipeline-model-parallel-size 2 --overlap-moe-expert-parallel-comm --expert-model-parallel-size 4 --bf16"


def test_the_command_prints_a_file_that_can_be_explained(capsys, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    more = f"{FLAGS} --fp4-format e2m1 --overlap-grad-reduce"
    code, out, _ = command(capsys, "explain", "--from-megatron", more, "--gpus", "8")
    assert code == 1
    assert_golden("explain_from_megatron.txt", out, pytestconfig)
    code, out, _ = command(capsys, "explain", f"--from-megatron={FLAGS}", "--gpus=8")
    assert code == 0
    target = tmp_path / "run.toml"
    target.write_text(out)
    for name, value in flat(tomllib.loads(out)).items():
        assert is_a(value, types()[name]), name
    code, out, err = command(capsys, "explain", target, "--recipe", "moe_8gpu")
    assert code == 0, err
    assert "rows to experts and back" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--from-megatron"], "hocket explain (command line): argument --from-megatron: expected one argument; fix: "),
        (["--from-fairscale", "x"], "explain --from-fairscale (command line): nothing translates this system; fix: "),
        (
            ["--from-megatron", "--bf16", "--gpus", "all"],
            "hocket explain (command line): argument --gpus: invalid int value: 'all'",
        ),
        (["--from-megatron", "--bf16", "--gpus", "-8"], "mesh.dp is at least 1"),
        (["--from-megatron", "--bf16", "--json"], "hocket explain (command line): unrecognized arguments: --json"),
        (["--from-megatron", "--bf16", "--from-megatron", "--fp16"], "given twice"),
    ],
)
def test_a_mistake_is_one_line(capsys, tmp_path, monkeypatch, words: list[str], message: str) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = command(capsys, "explain", *words)
    assert (code, len(err.splitlines())) == (2, 1), err
    assert message in err
