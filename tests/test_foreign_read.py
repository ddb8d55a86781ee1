"""How settings of other systems are read: words of a shell, lines of Python, files; nothing that is given gets lost."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from hocket.commands.plan import resolve_for_plan
from hocket.foreign import read
from hocket.foreign.entry import RECIPES, file_of
from hocket.foreign.systems import BRIDGE, DEEPSPEED, MEGATRON, SYSTEMS, TORCHTITAN
from hocket.foreign.translate import System, translate
from hocket.foreign.write import to_toml
from hocket.recipes import RECIPES as HOCKETS
from hocket.recipes import recipe
from hocket.settings.schema import changed


def test_flags_are_read_as_they_stand_in_scripts() -> None:
    text = """CUDA_DEVICE_MAX_CONNECTIONS=1 torchrun --nproc-per-node 8 pretrain_gpt.py \\
        --tensor-model-parallel-size 2 --lr=3e-4 --sequence-parallel --recompute-modules mlp moe"""
    assert read.flags(text) == [
        ("CUDA_DEVICE_MAX_CONNECTIONS", 1),
        ("--nproc-per-node", 8),
        ("--tensor-model-parallel-size", 2),
        ("--lr", 3e-4),
        ("--sequence-parallel", True),
        ("--recompute-modules", ["mlp", "moe"]),
    ]


def test_keys_and_files_are_read_with_their_sections(tmp_path: Path) -> None:
    assert read.keys("+ddp.bucket_size=1024 model.x=[mlp,'moe'] comm_overlap.align=null loose") == [
        ("ddp.bucket_size", 1024),
        ("model.x", ["mlp", "moe"]),
        ("comm_overlap.align", None),
        ("loose", "says nothing: settings look like name=value"),
    ]
    (tmp_path / "a.json").write_text('{"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}')
    (tmp_path / "a.toml").write_text("[parallelism]\ntensor_parallel_degree = 4\n")
    assert read.file(str(tmp_path / "a.json")) == [
        ("zero_optimization.stage", 3),
        ("zero_optimization.offload_param.device", "cpu"),
    ]
    assert read.flags_or_file(str(tmp_path / "a.toml")) == [("parallelism.tensor_parallel_degree", 4)]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be read"),
        ("{", "a file of the format"),
        ("[1]", "holds no settings"),
        ("{'a': 1}", "fix: "),
        ("[" * 100_000, "fix: "),
    ],
)
def test_a_file_that_says_nothing_is_one_line(tmp_path: Path, content: str | None, words: str) -> None:
    path = tmp_path / "ds.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=r"ds.json \(command line\): ") as error:
        read.file(str(path))
    assert words in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("words", "pairs"),
    [
        ("--lr 3e-4 \u2013bf16 \u2014\u2014fp16", [("--lr", 3e-4), ("--bf16", True), ("--fp16", True)]),
        ("--seed -1 --x \u201ca b\u201d", [("--seed", -1), ("--x", "a b")]),
        ("python -m torch.distributed.run --nproc-per-node 8 train.py --lr 1", [("--nproc-per-node", 8), ("--lr", 1)]),
    ],
)
def test_flags_are_read_as_they_stand_on_web_pages(words: str, pairs: read.Pairs) -> None:
    assert read.flags(words) == pairs


@pytest.mark.parametrize(
    ("words", "stray"),
    [
        ("--lr 3e-4 - --bf16", "-"),
        ("--lr 3e-4 -bf16", "-bf16"),
        ("bf16 --lr 3e-4", "bf16"),
        ("tp_comm_overlap=True --lr 3e-4", "tp_comm_overlap=True"),
        ("train.py config.yaml --lr 3e-4", "config.yaml"),
        ("--lr 3e-4 --", "--"),
    ],
)
def test_a_word_that_belongs_to_no_flag_is_not_lost(words: str, stray: str) -> None:
    found = translate(MEGATRON, read.flags(words), 8)
    assert [(row.written, row.answer.words) for row in found.of("not known")] == [
        (stray, "belongs to no flag: settings look like --name value")
    ]
    assert found.settings["train.lr"] == 3e-4
    assert not found.complete


PYTHON = """
from megatron.bridge.recipes.llama import llama3_8b_pretrain_config

cfg = llama3_8b_pretrain_config()
cfg.model.tensor_model_parallel_size = 4  # ranks of one layer
cfg.comm_overlap = CommOverlapConfig(
    tp_comm_overlap=True,
)
cfg.model.recompute_modules = ["mlp", "moe"]
cfg.ddp.overlap_grad_reduce = true
"""


def test_lines_of_python_are_read_as_they_stand_in_the_manual_of_bridge() -> None:
    assert read.keys(PYTHON) == [
        ("recipe", "llama3_8b_pretrain_config"),
        ("cfg.model.tensor_model_parallel_size", 4),
        ("cfg.comm_overlap.tp_comm_overlap", True),
        ("cfg.model.recompute_modules", ["mlp", "moe"]),
        ("cfg.ddp.overlap_grad_reduce", True),
    ]
    found = translate(BRIDGE, read.keys(PYTHON), 8)
    assert not found.lacking
    assert (found.settings["recipe"], found.settings["overlap.tp.method"]) == ("llama3_8b", "auto")


@pytest.mark.parametrize(
    ("words", "stray"),
    [
        ("tp_comm_overlap", ["tp_comm_overlap"]),
        ("model.tensor_model_parallel_size 4 a=1", ["a 1", "model.tensor_model_parallel_size", "4"]),
        ("model.num_layers= a=1", ["model.num_layers = a = 1"]),
        ("-", ["-"]),
        ("cfg.x = f(3)\npretrain(cfg)", ["cfg.x = f(3)"]),
        ("def main():\n    cfg.x = 1", ["def main(): ..."]),
        ("cfg.x += 1", ["cfg.x += 1"]),
        ("cfg = A(**more)", ["**more"]),
    ],
)
def test_a_word_without_a_value_is_not_lost(words: str, stray: list[str]) -> None:
    found = translate(BRIDGE, read.keys(words), 8)
    assert [row.written for row in found.of("not known")] == stray


def test_spaces_around_an_equals_sign_do_not_matter() -> None:
    assert read.keys("+model.a = 4 ddp.b =true") == [("model.a", 4), ("ddp.b", True)]


def test_what_another_program_fills_in_is_asked_for_and_the_rest_is_translated() -> None:
    pairs = [("bf16.enabled", "auto"), ("train_batch_size", "auto"), ("gradient_clipping", 0.5)]
    found = translate(DEEPSPEED, [*pairs, ("zero_optimization.reduce_bucket_size", "auto")], 8)
    assert [row.name for row in found.of("not there")] == ["bf16.enabled", "train_batch_size"]
    assert "fills it in" in found.of("not there")[0].answer.words
    assert found.of("not needed")[-1].name == "zero_optimization.reduce_bucket_size"
    assert found.settings["train.clip"] == 0.5


@pytest.mark.parametrize(
    ("system", "pairs", "name"),
    [
        (TORCHTITAN, [("model.name", "llama3"), ("model.flavor", "70B")], "llama3_1_70b"),
        (TORCHTITAN, [("model.name", "qwen3"), ("model.flavor", "30B-A3B")], "qwen3_30b_a3b"),
        (TORCHTITAN, [("model.name", "llama4"), ("model.flavor", "17bx16e")], None),
        (TORCHTITAN, [("model.flavor", "8B")], None),
        (BRIDGE, [("--recipe", "qwen3_600m_pretrain_config")], "qwen3_0_6b"),
        (BRIDGE, [("recipe", "nemotronh_4b_pretrain_config")], None),
    ],
)
def test_a_model_by_name_is_the_recipe_that_has_it(system: System, pairs: read.Pairs, name: str | None) -> None:
    found = translate(system, pairs, 8)
    assert found.settings.get("recipe") == name
    assert bool(found.lacking) == (name is None) == bool(found.of("not there"))


@pytest.mark.parametrize("system", ["torchtitan", "bridge"])
def test_recipes_of_the_tables_exist_and_can_run(system: str) -> None:
    """Without settings they are as `tests/test_planned.py` plans all of them."""
    for found in file_of(system)[RECIPES].values():
        if isinstance(found, str):
            assert found in HOCKETS
        else:
            settings = dict(found)
            resolve_for_plan(changed(recipe(settings.pop("recipe")), settings), {"": "here"})


@pytest.mark.parametrize("name", ["--exit-on", "--log-dir", "--vocab-file", "--swi", "--data-parallel-size"])
def test_names_that_are_like_none_get_no_suggestion(name: str) -> None:
    (row,) = translate(MEGATRON, [(name, "x")], 8).of("not known")
    assert "did you mean" not in row.answer.words


def test_a_comment_of_the_file_stays_a_comment() -> None:
    pairs: read.Pairs = [("optimizer.type\n[train]\nlr = 1e9", "x"), ("--master-addr", "a\nb"), ("--lr", 1.0)]
    text = to_toml(translate(MEGATRON, pairs, 8, "tiny\nlr = 5"))
    assert tomllib.loads(text)["train"] == {"lr": 1.0}


SCRIPT = """#!/bin/bash
# a "script" with --comments
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS=8; NODES=${NODES:-2}
MODEL_ARGS=(
    --num-layers 4
    --moe-layer-freq "([0]*1+[1]*3)" # (one is dense)
)
TRAINING="
    --lr 1e-4 \\
    --bf16
"
torchrun --nproc-per-node $GPUS --nnodes "$NODES" pretrain_gpt.py \\
    ${MODEL_ARGS[@]} $TRAINING --save $1/last --train-iters ${STEPS:-7} 2>&1 | tee log.txt
"""


def test_a_script_is_read_with_its_variables_and_without_its_comments(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(SCRIPT)
    pairs = read.flags_or_file(str(path))
    strays = [name for name, value in pairs if isinstance(value, read.Stray)]
    assert [pair for pair in pairs if not isinstance(pair[1], read.Stray)] == [
        ("CUDA_DEVICE_MAX_CONNECTIONS", 1),
        ("--nproc-per-node", 8),
        ("--nnodes", 2),
        ("--num-layers", 4),
        ("--moe-layer-freq", "([0]*1+[1]*3)"),
        ("--lr", 1e-4),
        ("--bf16", True),
        ("--save", "$1/last"),
        ("--train-iters", 7),
    ]
    assert strays == ["2>&1", "|", "tee", "log.txt"]
    found = translate(MEGATRON, pairs)
    assert found.settings["mesh.dp"] == 16
    assert found.settings["model.dense_layers"] == (0,)


def test_what_a_script_leaves_open_is_asked_for() -> None:
    found = translate(MEGATRON, read.flags("--num-layers $LAYERS --data-path $DATA --save $1 --bf16"), 8)
    open_ = {row.name for row in found.of("not there") if "give its value" in row.answer.words}
    assert open_ == {"--num-layers", "--data-path"}
    assert not {"model.layers", "data.paths"} & found.settings.keys()


@pytest.mark.parametrize(
    "words",
    ["--job.config_file {} --training.steps 9", "CONFIG_FILE={} NGPU=4 ./run_train.sh --training.steps 9", "{}"],
)
def test_a_file_that_a_flag_names_is_read_and_flags_stand_above_it(tmp_path: Path, words: str) -> None:
    path = tmp_path / "a.toml"
    path.write_text('[model]\nname = "llama3"\nflavor = "8b"\n[training]\nsteps = 5\nseq_len = 64\n')
    system, reader = SYSTEMS["torchtitan"]
    found = translate(system, reader(words.format(path)), 0)
    assert found.settings["recipe"] == "llama3_1_8b"
    assert found.settings["data.sequence_length"] == 64
    assert found.settings["train.steps"] == (9 if "9" in words else 5)
    assert ("mesh.dp" in found.settings) == ("NGPU" in words)


def test_the_same_name_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--adam-beta1 = 0.8 \(Megatron-LM\): it is 0.9, too; fix: leave one of them"):
        translate(MEGATRON, read.flags("--adam-beta1 0.9 --adam-beta1 0.8"), 8)
    translate(TORCHTITAN, [("job.dump_folder", "a"), ("job.description", "b")], 8)
    path = tmp_path / "ds.json"
    path.write_text('{"gradient_clipping": 1, "gradient_clipping": 2}')
    with pytest.raises(ValueError, match=r"gradient_clipping is there twice"):
        read.file(str(path))


def test_whole_numbers_of_json_may_have_an_exponent(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"zero_optimization": {"sub_group_size": 1e9}, "optimizer": {"params": {"lr": 1e-3}}}')
    pairs = read.file(str(path))
    assert pairs == [("zero_optimization.sub_group_size", 10**9), ("optimizer.params.lr", 1e-3)]
    assert translate(DEEPSPEED, pairs, 8).settings["train.lr"] == 1e-3


def test_python_is_read_as_examples_have_it() -> None:
    text = """
        >>> if __name__ == "__main__":
        ...     cfg = llama3_8b_pretrain_config()
        ...     cfg.model.vocab_size = 8192  # small
        ...     cfg.tokenizer.vocab_size = cfg.model.vocab_size
        ...     cfg.train.train_iters: int = 10
        ...     pretrain(cfg, forward_step)
    """
    found = translate(BRIDGE, read.keys(text), 8)
    assert found.complete
    assert (found.settings["model.vocab"], found.settings["train.steps"]) == (8192, 10)


def test_what_torchtitan_does_where_nothing_is_said() -> None:
    model: read.Pairs = [("model.name", "llama3"), ("model.flavor", "8B")]
    found = translate(TORCHTITAN, model, 8).settings
    assert (found["train.schedule"], found["train.min_lr_ratio"], found["train.warmup"]) == ("linear", 0.0, 200)
    assert translate(TORCHTITAN, [*model, ("lr_scheduler.decay_ratio", 0.5)], 8).settings["train.schedule"] == "wsd"
    fp8 = translate(TORCHTITAN, [*model, ("model.converters", ["float8"])], 8)
    assert fp8.settings["precision.compute"] == "fp8"
    total: read.Pairs = [("training.local_batch_size", 4), ("training.global_batch_size", 100)]
    assert not translate(TORCHTITAN, [*model, *total], 8).complete
