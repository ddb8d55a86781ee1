"""Settings of Megatron-LM, Megatron Bridge, torchtitan and DeepSpeed in hocket's words."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket.foreign import read
from hocket.foreign.entry import Given
from hocket.foreign.megatron import BRIDGE_ALIASES, BRIDGE_OWN
from hocket.foreign.systems import BRIDGE, DEEPSPEED, MEGATRON, SYSTEMS, TORCHTITAN
from hocket.foreign.translate import System, fitting, translate
from hocket.foreign.write import to_toml
from hocket.problems import problems_of
from hocket.settings.schema import types
from hocket.typed import is_a
from tests.helpers.command import command
from tests.helpers.golden import assert_golden

SAMPLES: dict[type, Any] = {bool: True, int: 2, float: 0.5, str: "x", list: ["x"], object: "x"}
VALUES: dict[str, list[Any]] = {
    "--num-layers-per-virtual-pipeline-stage": [2],
    "--distributed-backend": ["nccl", "mpi"],
    **{name: ["fp32", "bf16"] for name in ("--exp-avg-dtype", "--exp-avg-sq-dtype")},
    "--fp8-format": ["e4m3", "hybrid", "x"],
    "--rope-type": ["rope", "yarn"],
    "--lr-warmup-fraction": [0.5],
    "--lr-decay-iters": [100, 50],
    "--split": ["99,1,0", "98"],
    "--data-path": ["text", [0.5, "a", 0.5, "b"]],
    "--optimizer": ["adam", "muon", "sgd"],
    "--attention-dropout": [0.0, 0.1],
    "--hidden-dropout": [0.0, 0.1],
    "--tokenizer-type": ["HuggingFaceTokenizer", "NullTokenizer"],
    "model.converters": [["float8"], ["mx"], []],
    "config": ["llama3_8b", "llama3_debugmodel"],
    "training.global_batch_size": [16, 15, -1],
    "validation.steps": [4, -1],
    **{f"lr_scheduler.{name}": [0.0, 0.1] for name in ("min_lr_factor", "lr_min")},
    "--data-parallel-sharding-strategy": ["no_shard", "optim", "optim_grads", "optim_grads_params", "x"],
    "--moe-token-dispatcher-type": ["alltoall", "flex", "allgather"],
    "--moe-router-score-function": ["softmax", "sigmoid", "x"],
    "--moe-router-load-balancing-type": ["aux_loss", "none", "seq_aux_loss", "global_aux_loss", "sinkhorn"],
    "lr_scheduler.decay_type": ["linear", "sqrt"],
    "--lr-decay-style": ["constant", "WSD", "inverse-square-root"],
    "--lr-wsd-decay-style": ["minus_sqrt", "exponential"],
    "--moe-layer-freq": [2, "[0]*2+[1]*6", "[0]*7"],
    "--recompute-granularity": ["full", "selective"],
    "--recompute-modules": [["core_attn"], ["mlp", "moe", "moe_act"], ["layernorm"]],
    "--global-batch-size": [32, 33],
    "--context-parallel-size": [1, 2],
    "--rotary-percent": [1.0, 0.5, 0.01],
    "--rotary-seq-len-interpolation-factor": [2.0],
    "--moe-router-dtype": ["fp32", "fp64"],
    "--cuda-graph-impl": ["none", "local", "x"],
    "parallelism.pipeline_parallel_schedule": ["1F1B", "Interleaved1F1B", "ZBVZeroBubble", "DualPipeV", "GPipe"],
    "parallelism.fsdp_reshard_after_forward": ["default", "always", "never"],
    "parallelism.data_parallel_shard_degree": [-1, 1, 4],
    "parallelism.expert_parallel_comm_backend": ["standard", "deepep"],
    "training.mixed_precision_param": ["bfloat16", "float32"],
    "training.mixed_precision_reduce": ["float32", "bfloat16"],
    "activation_checkpoint.mode": ["none", "selective", "full"],
    "zero_optimization.stage": [0, 1, 2, 3, 4],
    "optimizer.type": ["AdamW", "Lion"],
    "optimizer.params.betas": [[0.9, 0.95]],
    "communication_data_type": [None, "bf16", "fp32"],
    "mixed_precision": ["bf16_mixed", "fp16_mixed", "bf16_with_fp8_current_scaling_mixed"],
    "parallelism.enable_async_tensor_parallel": [True, False],
    **{f"tp_comm_{name}": [True, False] for name in ("overlap_ag", "overlap_rs", "bulk_dgrad")},
    "--overlap-moe-expert-parallel-comm": [True, False],
    "--overlap-grad-reduce": [True, False],
}
"""Values to look up where one of the type's says too little."""
ROUND = Given(
    {
        "--num-layers": 8,
        "--kv-channels": 64,
        "--pipeline-model-parallel-size": 2,
        "--micro-batch-size": 1,
        "--tensor-model-parallel-size": 2,
        "--train-iters": 100,
        "--rotary-scaling-factor": 40.0,
        "validation.enable": True,
        "training.local_batch_size": 1,
        "parallelism.tensor_parallel_degree": 2,
    },
    gpus=16,
)
"""What else is given while one name is looked up."""


def answers(system: System) -> str:
    """Every name of a table, with what each of its values is in hocket."""
    lines = []
    for row in system.entries:
        for name in row.names:
            for value in VALUES.get(name, [SAMPLES[row.takes]]):
                answer = fitting(row.rule(value, Given({**ROUND.values, name: value}, ROUND.gpus)))
                settings = ", ".join(f"{key} = {value!r}" for key, value in answer.settings.items())
                lines.append(f"{name} {value}: {answer.state}: {'; '.join(filter(None, (settings, answer.words)))}")
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("system", [MEGATRON, BRIDGE, TORCHTITAN, DEEPSPEED], ids=lambda system: system.name)
def test_every_name_of_a_table_has_the_answer_it_should_have(system: System, pytestconfig: pytest.Config) -> None:
    text = answers(System(system.name, BRIDGE_OWN) if system is BRIDGE else system)
    assert_golden(f"foreign_{system.name.lower().replace(' ', '_')}.txt", text, pytestconfig)


@pytest.mark.parametrize("system", [MEGATRON, BRIDGE, TORCHTITAN, DEEPSPEED], ids=lambda system: system.name)
def test_tables_name_settings_that_exist_say_why_and_have_no_name_twice(system: System) -> None:
    known = system.known()
    assert len(known) == len(set(known))
    for row in system.entries:
        for name in row.names:
            for value in VALUES.get(name, [SAMPLES[row.takes]]):
                answer = fitting(row.rule(value, ROUND))
                assert set(answer.settings) <= {"recipe", *types()}, name
                assert bool(answer.settings) == (answer.state == "becomes"), name
                assert answer.settings or answer.words, name


def test_the_keys_of_bridge_are_flags_of_megatron() -> None:
    flags = set(MEGATRON.known())
    assert set(BRIDGE_ALIASES.values()) <= flags
    for key, flag in (
        ("model.tensor_model_parallel_size", "--tensor-model-parallel-size"),
        ("comm_overlap.tp_comm_overlap", "--tp-comm-overlap"),
        ("ddp.overlap_grad_reduce", "--overlap-grad-reduce"),
        ("comm_overlap.overlap_p2p_comm", "--overlap-p2p-communication"),
        ("model.virtual_pipeline_model_parallel_size", "--num-virtual-stages-per-pipeline-rank"),
        ("env_vars.NCCL_NVLS_ENABLE", "NCCL_NVLS_ENABLE"),
    ):
        assert BRIDGE.spelled(key) == flag
        assert flag in flags


# What goes together


def settings(words: str, gpus: int = 0, system: System = MEGATRON) -> dict[str, Any]:
    return dict(translate(system, read.flags(words), gpus).settings)


def words_of(text: str, name: str, gpus: int = 0) -> str:
    """The words on one flag among others."""
    return next(row.answer.words for row in translate(MEGATRON, read.flags(text), gpus).rows if row.name == name)


def test_ranks_microbatches_and_stages_follow_from_several_flags() -> None:
    text = (
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 4 --num-layers 32 --micro-batch-size 2 "
        "--num-layers-per-virtual-pipeline-stage 4 --global-batch-size 256 --num-attention-heads 32 --hidden-size 4096"
    )
    found = settings(text, gpus=64)
    assert found == {
        "mesh.tp": 2, "mesh.cp": 1, "mesh.pp": 4, "mesh.dp": 8, "mesh.ep": 1, "model.layers": 32, "plan.chunks": 2,
        "train.sequences": 2, "train.microbatches": 16, "model.heads": 32, "model.hidden": 4096, "model.kv_heads": 32,
        "model.head_dim": 128, "model.tied": True, "overlap.dp.strategy": "no_shard", "model.ffn": 16384,
        "model.norm_eps": 1e-5, "model.rope_theta": 10000.0, "train.weight_decay": 0.01, "train.betas": (0.9, 0.999),
        "train.clip": 1.0, "train.min_lr": 0.0, "train.schedule": "linear", "train.warmup": 0, "model.init_std": 0.02,
    }  # fmt: skip


def test_numbers_that_no_setting_can_have_are_not_there() -> None:
    text = "--tensor-model-parallel-size 0 --pipeline-model-parallel-size 2 --clip-grad nan"
    found = translate(MEGATRON, read.flags(text), 8)
    words = {row.name: row.answer.words for row in found.of("not there")}
    assert words["--tensor-model-parallel-size"] == "mesh.tp is at least 1, not 0"
    assert words["--clip-grad"] == "train.clip is at least 0, not nan"
    assert "cannot be split into 0" in words["(--gpus)"]


def test_what_does_not_divide_is_said_and_not_rounded() -> None:
    assert "cannot be split into 32" in words_of(
        "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 8", "(--gpus)", 8
    )
    assert "needs --gpus" in words_of("--global-batch-size 8", "--global-batch-size")
    assert "cannot be split over 8 data ranks" in words_of("--global-batch-size 9", "--global-batch-size", 8)
    layers = "--num-layers 30 --pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 4"
    assert "needs --num-layers, a multiple of" in words_of(layers, "--num-layers-per-virtual-pipeline-stage")


def test_first_and_last_stage_of_another_size() -> None:
    text = "--num-layers 30 --pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers {} "
    both = text + "--decoder-last-pipeline-num-layers 7"
    assert settings(both.format(7))["plan.layers_per_stage"] == (7, 8, 8, 7)
    assert settings(text.format(6))["plan.layers_per_stage"] == (6, 8, 8, 8)
    assert "plan.layers_per_stage" not in settings(text.format(7))


@pytest.mark.parametrize(
    ("text", "layers"),
    [
        ("3", (1, 2, 4, 5)),
        ("[0]*2+[1]*4", (0, 1)),
        ("([0]*1+[1]*1)*3", (0, 2, 4)),
        ("[1,0,1,1,1,1]", (1,)),
        ("([0]*2+[1]*4)", (0, 1)),
        ("[1]*9999999999", None),
        ("[2]*6", None),
        ("f(6)", None),
    ],
)
def test_patterns_of_moe_layers(text: str, layers: tuple[int, ...] | None) -> None:
    found = settings(f"--num-layers 6 --moe-layer-freq {text}")
    assert found.get("model.dense_layers") == layers


def test_a_distributed_optimizer_is_no_default() -> None:
    assert settings("--bf16")["overlap.dp.strategy"] == "no_shard"
    assert settings("--bf16 --use-distributed-optimizer")["overlap.dp.strategy"] == "optim"
    fsdp = "--use-torch-fsdp2 --torch-fsdp2-no-reshard-after-forward"
    assert settings(fsdp)["overlap.dp.strategy"] == "optim_grads"


def test_torchtitan_shards_by_itself_and_cuts_a_batch_only_in_a_pipeline() -> None:
    batch = "--training.local_batch_size 8 --parallelism.pipeline_parallel_microbatch_size 2"
    flat = settings(batch, 8, TORCHTITAN)
    deep = settings(f"{batch} --parallelism.pipeline_parallel_degree 2", 8, TORCHTITAN)
    assert (flat["train.sequences"], flat["train.microbatches"], flat["mesh.dp"]) == (8, 1, 8)
    assert (deep["train.sequences"], deep["train.microbatches"], deep["mesh.dp"]) == (2, 4, 4)
    assert (flat["overlap.dp.strategy"], deep["overlap.dp.strategy"]) == ("optim_grads_params", "optim_grads")


def test_tensor_settings_without_tensor_ranks_are_not_needed() -> None:
    for system, text in (
        (MEGATRON, "--tp-comm-overlap --tp-comm-overlap-rs-dgrad --disable-tp-comm-overlap-ag"),
        (TORCHTITAN, "--parallelism.enable_async_tensor_parallel False --parallelism.tensor_parallel_degree 1"),
    ):
        found = translate(system, read.flags(text), 8)
        assert not any(name.startswith("overlap.tp") for name in found.settings)
    assert settings("--tp-comm-overlap --tensor-model-parallel-size 2")["overlap.tp.method"] == "auto"


def test_names_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"--use-torch-fsdp2 .*becomes overlap.dp.strategy = optim_grads_params, and .*fix"
    ):
        settings("--use-distributed-optimizer --use-torch-fsdp2")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "--tensor-model-parallel-size two",
            "--tensor-model-parallel-size = two (Megatron-LM): not a whole number; fix: ",
        ),
        ("--tensor-model-parallel-size", "--tensor-model-parallel-size = (nothing) (Megatron-LM): not a whole number"),
        ("--bf16 yes", "--bf16 = yes (Megatron-LM): takes no value; fix: leave out yes"),
        ("--lr high --clip-grad low", "--clip-grad = low (Megatron-LM): not a number"),
    ],
)
def test_values_of_a_wrong_type_are_refused_all_at_once(text: str, words: str) -> None:
    with pytest.raises(ValueError, match="fix: ") as error:
        settings(text)
    assert words in str(error.value)
    assert len(problems_of(error.value)) == text.count("--")


def test_unknown_names_are_reported_with_a_suggestion_and_nothing_else_is_lost() -> None:
    found = translate(MEGATRON, read.flags("--overlap-grad-reduc --vocab-file x --bf16"))
    assert [(row.name, row.answer.words) for row in found.of("not known")] == [
        ("--overlap-grad-reduc", "did you mean --overlap-grad-reduce?"),
        ("--vocab-file", "nothing about parallelism, overlap, precision or recomputation"),
    ]
    assert found.settings["precision.compute"] == "bf16"
    assert not found.complete


NAMES = sorted(name for name in MEGATRON.known() if name.startswith("--"))


@given(st.lists(st.sampled_from(NAMES), unique=True, max_size=8), st.sampled_from([0, 8, 64]), st.data())
def test_whatever_is_given_appears_once_and_what_it_becomes_can_be_read_back(names, gpus, data) -> None:
    rows = {name: next(row for row in MEGATRON.entries if name in row.names) for name in names}
    pairs = [(n, data.draw(st.sampled_from(VALUES.get(n, [SAMPLES[r.takes]])))) for n, r in rows.items()]
    try:
        found = translate(MEGATRON, pairs, gpus)
    except ValueError:  # see test_names_that_contradict_each_other_are_refused
        answers = [rows[name].rule(value, Given(dict(pairs), gpus)).settings for name, value in pairs]
        assert len({key for a in answers for key in a}) < sum(map(len, answers))
        return
    assert [row.name for row in found.rows if row.given] == names
    tree = tomllib.loads(to_toml(found))
    for setting, value in found.settings.items():
        leaf: Any = tree
        for part in setting.split("."):
            leaf = leaf[part]
        assert (tuple(leaf) if isinstance(leaf, list) else leaf) == value
        assert is_a(value, types()[setting])


# The command


FLAGS = "--pipeline-model-parallel-size 2 --overlap-moe-expert-parallel-comm --expert-model-parallel-size 4 --bf16"


def test_the_command_prints_a_translation(capsys, pytestconfig: pytest.Config) -> None:
    code, out, _ = command(
        capsys, "explain", "--from-megatron", f"{FLAGS} --fp4-format e2m1 --overlap-grad-reduce", "--gpus", "8"
    )
    assert code == 1
    assert_golden("explain_from_megatron.txt", out, pytestconfig)


def test_the_command_writes_toml_and_json_and_says_when_nothing_is_missing(capsys, tmp_path: Path) -> None:
    target = tmp_path / "run.toml"
    words = ["explain", "--from-megatron", FLAGS, "--gpus=8", "--toml", str(target), "--json"]
    code, _, err = command(capsys, *words)
    assert code == 2
    assert "no whole model (model.layers, model.hidden, model.heads, model.vocab); fix: add --recipe NAME" in err
    assert not target.exists()
    code, out, _ = command(capsys, *words, "--recipe", "moe_8gpu")
    assert code == 0
    written = tomllib.loads(target.read_text())
    assert (written["recipe"], written["mesh"]) == ("moe_8gpu", {"cp": 1, "dp": 4, "ep": 4, "pp": 2, "tp": 1})
    assert json.loads(out)["settings"]["overlap.ep.merge"] == "on"


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        ("--recompute-method block --recompute-num-layers 4", ["mlp:4", "attn:4"]),
        ("--recompute-method uniform --recompute-num-layers 1", ["mlp", "attn"]),
        ("--recompute-method uniform --recompute-num-layers 4", []),
    ],
)
def test_megatron_recomputes_some_layers_of_a_stage(flags: str, parts: list[str]) -> None:
    given = read.flags(f"--num-layers 8 --recompute-granularity full {flags}")
    assert sorted(translate(MEGATRON, given).settings.get("plan.recompute", ())) == sorted(parts)


COUNTED = "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split"


@pytest.mark.parametrize(
    ("flags", "chunks", "sizes"),
    [
        (COUNTED, None, (1, 2, 2, 1)),
        (f"{COUNTED} --num-layers-per-virtual-pipeline-stage 1", 2, (0, 1, 1, 1, 1, 1, 1, 0)),
        (COUNTED.split()[0], None, None),
        ("--pipeline-model-parallel-layout E|(t|)*6L", 2, (0, 1, 1, 1, 1, 1, 1, 0)),
        ("--pipeline-model-parallel-layout Et*2|t,t|t|tL", 1, (2, 2, 1, 1)),
        ("--pipeline-model-parallel-layout Et|(t|)*4tL", None, None),
        ("--pipeline-model-parallel-layout Et*2|t||tttL", None, None),
        ("--pipeline-model-parallel-layout Et*5|t|m|L", None, None),
        ("--pipeline-model-parallel-layout E(t|)*999999999L", None, None),
    ],
)
def test_stages_of_megatron(flags: str, chunks: int | None, sizes: tuple[int, ...] | None) -> None:
    words = flags.replace("layout ", "layout '") + "'" * ("layout" in flags)
    given = read.flags(f"--num-layers 6 --pipeline-model-parallel-size 4 {words}")
    found = translate(MEGATRON, given).settings
    assert found.get("plan.layers_per_stage") == sizes
    if sizes is not None and chunks is not None:
        assert found["plan.chunks"] == chunks


MIXTURE = (
    "--attention-dropout 0 --hidden-dropout 0.0 "
    "--num-layers 8 --hidden-size 256 --ffn-hidden-size 512 --num-attention-heads 4 --num-query-groups 2 --swiglu "
    "--normalization RMSNorm --position-embedding-type rope --disable-bias-linear --vocab-size 1024 "
    "--untie-embeddings-and-output-weights --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 128 "
    "--moe-layer-freq [0]*2+[1]*6 --moe-grouped-gemm --pipeline-model-parallel-size 2 --expert-model-parallel-size 4 "
    "--num-virtual-stages-per-pipeline-rank 2 --overlap-moe-expert-parallel-comm --delay-wgrad-compute --bf16 "
    "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --micro-batch-size 1 "
    "--global-batch-size 64 --seq-length 512 --recompute-granularity full --recompute-method uniform "
    "--recompute-num-layers 1 --moe-token-dispatcher-type alltoall --overlap-p2p-backward-on-comm-stream"
)
DENSE = (
    "--parallelism.pipeline_parallel_degree 2 --parallelism.pipeline_parallel_schedule Interleaved1F1B "
    "--training.local_batch_size 8 --parallelism.pipeline_parallel_microbatch_size 1 --training.seq_len 512"
)
LLAMA = "--model.name=llama3 --model.flavor 8B"


@pytest.mark.parametrize(
    ("words", "rows"),
    [
        (["--from-megatron", MIXTURE], ("rows to experts and back", "the other half", "run.toml:")),
        (
            ["--from-torchtitan", f"{DENSE} --activation_checkpoint.mode none {LLAMA}"],
            ("weights gathered", "8 ranks"),
        ),
    ],
)
def test_what_is_written_can_be_explained(capsys, tmp_path: Path, words: list[str], rows: tuple[str, ...]) -> None:
    target = tmp_path / "run.toml"
    code, out, err = command(capsys, "explain", *words, "--gpus", "8", "--toml", str(target))
    assert code == 0, out + err
    code, out, err = command(capsys, "explain", str(target))
    assert code == 0, err
    for text in rows:
        assert text in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--from-megatron"], "--from-megatron (command line): its value is missing"),
        (
            ["--from-fairscale", "x"],
            "explain --from-fairscale (command line): nothing translates this system; fix: one of",
        ),
        (
            ["--from-megatron", "--bf16", "--from-bridge", "a=1"],
            "--from-bridge (command line): --from-megatron is given, too",
        ),
        (["--from-megatron", "--bf16", "--gpus", "all"], "gpus = all (command line, --gpus): not a number of ranks"),
        (["--from-megatron", "--bf16", "--gpus", "0"], "gpus = 0 (command line, --gpus): not a number of ranks"),
        (["--from-megatron", "--bf16", "--json=off"], "--json (command line): takes no value; fix: leave out off"),
        (["--from-megatron", "pretrain_gpt.py"], "(command line, --from-megatron): holds no settings of Megatron-LM"),
        (["--from-torchtitan", "nope.json"], "nope.json (command line): cannot be read"),
        (["--from-bridge", "import torch"], "(command line, --from-bridge): holds no settings"),
        (
            ["--from-megatron", "--bf16", "--recipe", "moe_8gp"],
            "recipe = moe_8gp (command line, --recipe): ",
        ),
        (["--from-deepspeed", "ds.json", "--toml", "run.toml"], "run.toml (command line, --toml): no model is named"),
        (["--from-megatron", "--bf16", "--gpus", "²"], "gpus = ² (command line, --gpus): not a number of ranks"),
        (["--from-megatron", "--bf16 'x"], "No closing quotation"),
        (["--from-megatron", "--bf16", "--from-megatron", "--fp16"], "given twice"),
    ],
)
def test_a_mistake_is_one_line(capsys, tmp_path, monkeypatch, words: list[str], message: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("ds.json").write_text('{"gradient_clipping": 1}')
    code, _, err = command(capsys, "explain", *words)
    assert code == 2
    assert message in err
    assert len(err.splitlines()) == 1


def test_all_systems_can_be_named() -> None:
    assert set(SYSTEMS) == {"megatron", "bridge", "torchtitan", "deepspeed"}
