"""What cannot be imported or exported: one line, and nothing is written."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", minversion="5.0", reason="needs transformers 5", exc_type=ImportError)

from safetensors.torch import load_file, save_file

from hocket import recipes
from hocket.config import ModelConfig
from hocket.config.load import read
from hocket.config.rule import show
from hocket.model.source import whole_shapes
from hocket.pretrained.families import FAMILIES, REFUSED, family_for
from hocket.pretrained.weights import PretrainedFolder
from tests.helpers.command import command
from tests.pretrained.folders import change_config, saved

CONFIGS: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"model_type": "mamba"}, r"model_type = mamba: needs a table of its own: there is llama, mistral,"),
    ("llama", {"model_type": ["llama"]}, r"model_type = \['llama'\]: needs a table of its own"),
    *(("llama", {"model_type": name}, rf"model_type = {name}: needs {needs}") for name, needs in REFUSED.items()),
    (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 8.0}},
        "dynamic: only default",
    ),
    (
        "llama",
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0}},
        "have no low_freq",
    ),
    ("llama", {"rope_parameters": None, "rope_theta": 1e4, "rope_scaling": {"type": "yarn"}}, "yarn have no factor"),
    (
        "llama",
        {"rope_parameters": {"rope_theta": 1e4, "factor": 2.0}},
        "factor of rope_.*= default has no such",
    ),
    (
        "llama",
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "low_freq_factor": 1.0}},
        "low_freq_factor of rope_parameters: rope_type = yarn has no such key",
    ),
    (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": "2"}},
        "factor of rope_parameters = '2': not a number",
    ),
    (
        "llama",
        {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        "= 0.5: only 1.0 is there",
    ),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5: config.json of llama has no such key"),
    (
        "llama",
        {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}, "rope_theta": 1e4},
        "full_attention of",
    ),
    ("glm4_moe", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.3}}, "3 of 10 elements of a head"),
    (
        "glm4_moe",
        {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": "x"}},
        "= 'x': not a share",
    ),
    ("minimax_m2", {"rotary_dim": 12}, "rotary_dim = 12: partial_rotary_factor = 0.6 is another"),
    ("minimax_m2", {"rotary_dim": 4}, "rotary_dim = 4: partial_rotary_factor = 0.6 is another number of 10 elements"),
    ("minimax_m2", {"attn_type_list": [1, 0, 1]}, r"attn_type_list = \[1, 0, 1\]: only 1 is there"),
    ("smollm3", {"no_rope_layers": [1, 0]}, r"no_rope_layers = \[1, 0\]: not a list of 0 or 1 for each of 3 layers"),
    ("olmoe", {"clip_qkv": 8.0}, "clip_qkv = 8.0: only None is there"),
    ("olmoe", {"head_dim": 10}, "head_dim = 10: config.json of olmoe has no such key"),
    ("olmo2", {"num_hidden_layers": 4}, "lacks model.layers.3.mlp.down_proj.weight"),
    ("llama", {"rope_parameters": None}, "config.json has no rope_theta, neither by itself nor in rope_parameters"),
    ("llama", {"hidden_size": None}, "config.json has no hidden_size"),
    ("llama", {"hidden_size": "24"}, "hidden_size = '24': not a whole number"),
    ("llama", {"num_attention_heads": 0, "head_dim": None}, "num_attention_heads = 0: model.heads is at least 1"),
    ("llama", {"num_hidden_layers": 10**9}, "num_hidden_layers = 1000000000: model.layers is at most 1024"),
    ("llama", {"rope_parameters": [1]}, r"rope_parameters = \[1\]: not a table of keys"),
    ("llama", {"rope_parameters": {"rope_theta": "1e4"}}, "rope_theta = '1e4': not a number"),
    ("llama", {"tie_word_embeddings": 1}, "tie_word_embeddings = 1: not True or False"),
    ("qwen3_moe", {"mlp_only_layers": 3}, "mlp_only_layers = 3: not a list of whole numbers"),
    ("qwen3_moe", {"decoder_sparse_step": -1}, "decoder_sparse_step = -1: model.layers is at least 1"),
    ("llama", {"hidden_act": "gelu"}, "hidden_act = gelu: only silu is there"),
    ("llama", {"attention_bias": True}, r"lacks model\.layers\.0\.self_attn\.k_proj\.bias, .* and 10 more"),
    ("llama_biases", {"attention_bias": False}, r"has model\.layers\.0\.self_attn\.k_proj\.bias, .* which no param"),
    ("llama", {"mlp_bias": True}, "mlp_bias = True: only False is there"),
    ("qwen2", {"attention_bias": True}, "attention_bias = True: config.json of qwen2 has no such key"),
    ("qwen2", {"use_mrope": True}, "use_mrope = True: only False is there"),
    ("llama", {"logit_scale": 0.5}, "logit_scale = 0.5: config.json of llama has no such key"),
    ("llama", {"attention_dropout": 0.1}, "attention_dropout = 0.1: there is no dropout"),
    ("llama", {"rope_interleaved": True}, "rope_interleaved = True: a rotary pair is half a head apart"),
    ("llama", {"quantization_config": "fp8"}, "quantization_config = 'fp8': not a table of keys"),
    ("llama", {"quantization_config": {}}, "quantization_config has quant_method = None: only fp8 blocks"),
    ("llama", {"quantization_config": {"quant_method": "mxfp4"}}, "quant_method = mxfp4: only fp8 blocks of e4m3 are"),
    ("mistral", {"sliding_window": 0}, "sliding_window = 0: a token attends to itself at least"),
    ("mistral", {"sliding_window": -1}, "sliding_window = -1: model.window is at least 0"),
    ("mistral", {"sliding_window": "8"}, "sliding_window = '8': not a whole number"),
    (
        "mistral",
        {"sliding_window": 8, "layer_types": ["full_attention"] * 3},
        "layer_types = .*: sliding_window = 8 is that of all layers",
    ),
    (
        "gpt_oss",
        {"layer_types": ["sliding_attention"]},
        "layer_types = .*: not a list of full_attention or sliding_attention for each of 3 layers",
    ),
    (
        "gpt_oss",
        {"layer_types": ["chunked_attention"] * 3},
        "layer_types = .*: not a list of full_attention or sliding_attention for",
    ),
    (
        "olmo3",
        {"rope_parameters": {"full_attention": {"rope_theta": 1e4}, "sliding_attention": {"rope_theta": 2e4}}},
        "with a base of 20000.0, and others have 10000.0: only the same one is there",
    ),
    (
        "olmo3",
        {"rope_parameters": None, "rope_theta": 1e4},
        "with a base of 500000.0, and others have 10000.0: only the same one is there",
    ),
    ("gpt_oss", {"swiglu_limit": "7"}, "swiglu_limit = '7': not a number"),
    ("gpt_oss", {"quantization_config": {"quant_method": "fp8"}}, "has quant_method = fp8: only mxfp4 is read"),
    (
        "llama",
        {"layer_types": ["full_attention", "sliding_attention"]},
        "layer_types = .*: not a list of full_attention for each of 3 layers",
    ),
    (
        "qwen3",
        {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
        "layer_types = .*: sliding_window = None is that of all layers",
    ),
    ("qwen3", {"use_sliding_window": 1}, "use_sliding_window = 1: not True or False"),
    ("smollm3", {"use_sliding_window": True}, "use_sliding_window = True: only False is there"),
    ("glm4_moe", {"n_group": 2}, "n_group = 2: only 1 is there"),
    ("glm4_moe", {"first_k_dense_replace": None}, "first_k_dense_replace = None: not a whole number"),
    ("deepseek_v2", {"topk_method": "softmax"}, "topk_method = softmax: only group_limited_greedy is there"),
    ("deepseek_v2", {"topk_method": "greedy"}, "topk_method = greedy: not with model.route_groups = 4"),
    ("deepseek_v2", {"scoring_func": "sigmoid"}, "scoring_func = sigmoid: only softmax is there"),
    ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob = True: only False is there"),
    ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func = softmax: only sigmoid is there"),
    ("deepseek_v3", {"topk_method": "greedy"}, "topk_method = greedy: only noaux_tc is there"),
    ("deepseek_v3", {"rope_interleave": False}, "rope_interleave = False: only True is there"),
    ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq = 2: only 1 is there"),
    ("deepseek_v3", {"attention_bias": True}, "attention_bias = True: only False is there"),
    ("deepseek_v3", {"num_key_value_heads": 2}, "num_key_value_heads = 2: only model.heads = 6 is there"),
    ("deepseek_v3", {"kv_lora_rank": 0}, "kv_lora_rank = 0: only latent attention is there"),
    ("deepseek_v3", {"n_group": None}, "config.json has no n_group"),
    ("deepseek_v3", {"q_lora_rank": None}, r"lacks model\.layers\.0\.self_attn\.q_proj\.weight"),
    ("moonlight", {"kv_lora_rank": 12}, r"with_mqa\.weight has shape \[20, 24\], and .* needs \[18, 24\]"),
    (
        "glm4_moe_lite",
        {"mlp_layer_types": ["dense"]},
        "mlp_layer_types = .*: not a list of dense or sparse for each of 3",
    ),
    ("mistral", {"num_hidden_layers": 4}, r"lacks model.layers.3.input_layernorm.weight, .* and 7 more"),
    ("mistral", {"num_hidden_layers": 2}, r"has model.layers.2.input_layernorm.weight, .* and 7 more, which no param"),
    ("mistral", {"intermediate_size": 30}, r"gate_proj.weight has shape \[28, 24\], and .* needs \[30, 24\]"),
]


def refused(capsys: pytest.CaptureFixture[str], path: Path, words: str) -> None:
    target = path.parent / "run.toml"
    code, out, err = command(capsys, "import", path, target)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert err.startswith(f"hocket: {show(str(path))} (command line): ")
    with pytest.raises(ValueError, match=words):
        raise ValueError(err)
    assert not target.exists()


@pytest.mark.parametrize(("case", "changes", "words"), CONFIGS)
def test_configurations(
    case: str, changes: dict[str, Any], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = saved(case, tmp_path / "model")
    capsys.readouterr()
    refused(capsys, change_config(path, **changes), words)


Tensors = dict[str, torch.Tensor]
TENSORS: list[tuple[Callable[[Tensors], object], str]] = [
    (lambda t: t.pop("model.norm.weight"), r"lacks model\.norm\.weight"),
    (lambda t: t.update(more=torch.ones(2)), r"has more, which no parameter takes"),
    (lambda t: t.update({"model.norm.weight": torch.ones(5)}), r"model\.norm\.weight has shape \[5\], and head\.norm"),
    (lambda t: t.update({"model.norm.weight": torch.ones(24).to(torch.float8_e4m3fn)}), "has elements of F8_E4M3; F32"),
    # Half of one form of the experts, half of the other.
    (lambda t: t.update({"model.layers.2.mlp.experts.down_proj": torch.ones(8, 24, 20)}), r"has model\.layers\.2\.mlp"),
    (lambda t: t.pop("model.layers.2.mlp.experts.3.up_proj.weight"), r"lacks model\.layers\.2\.mlp\.experts\.3\.up_"),
]


@pytest.mark.parametrize(("change", "words"), TENSORS)
def test_tensors(
    change: Callable[[Tensors], object], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = saved("qwen3_moe", tmp_path / "model") / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    capsys.readouterr()
    refused(capsys, file.parent, words)


def test_a_tensor_serves_one_parameter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rules of other families would take the norm after attention for the one that is missing."""
    file = saved("olmo2", tmp_path / "model") / "model.safetensors"
    tensors = load_file(file)
    tensors.pop("model.layers.1.post_feedforward_layernorm.weight")
    save_file(tensors, file)
    capsys.readouterr()
    refused(capsys, file.parent, r"lacks a tensor for layers\.1\.")


def test_keys_that_say_nothing_are_ignored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = {"is_llama_config": True, "rope_interleaved": False, "unsloth_version": "1", "unsloth_fixed": True}
    path = change_config(saved("llama", tmp_path / "model"), **keys, **{"transformers.js_config": {"dtype": "q4"}})
    assert command(capsys, "import", path, tmp_path / "run.toml")[0] == 0


def test_a_folder_without_a_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, target = saved("llama", tmp_path / "model"), tmp_path / "run.toml"
    code, out, _ = command(capsys, "import", path, target)
    assert code == 0
    assert f"note: {path} has no tokenizer.json: a run" in out
    assert "[data]" not in target.read_text()
    words = ["plan", target, "--model.vocab", "256", "--train.microbatches", "2"]
    code, _, err = command(capsys, *words)
    assert code == 2
    assert "a token would be a byte, and " in err
    assert "fix: the folder or file of that tokenizer, or data.tokenizer = bytes (by name, if they are meant)" in err
    assert command(capsys, *words, "--data.tokenizer", "bytes")[0] == 0


def test_a_tokenizer_that_names_no_end_of_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, target = saved("llama", tmp_path / "model"), tmp_path / "run.toml"
    capsys.readouterr()
    change_config(path, eos_token_id=None)
    (path / "generation_config.json").write_text("{}")
    (path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0, "b": 1}}}))
    refused(capsys, path, r"not known which token ends a text.*; fix: data\.eos = that token .*--data\.eos '</s>'$")
    assert command(capsys, "import", path, target, "--data.eos", "c")[0] == 2
    assert command(capsys, "import", path, target, "--data.eos", "b")[0] == 0
    assert 'eos = "b"' in target.read_text()


def test_old_frequencies_are_ignored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = saved("llama", tmp_path / "model") / "model.safetensors"
    save_file({**load_file(file), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(5)}, file)
    assert command(capsys, "import", file.parent, tmp_path / "run.toml")[0] == 0


def test_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = saved("qwen3", tmp_path / "model", max_shard_size="20KB")
    capsys.readouterr()
    first, second, *_ = sorted(path.glob("*.safetensors"))
    content = first.read_bytes()
    first.write_bytes(content[:-10])
    refused(capsys, path, f"{first} is truncated or damaged")
    first.unlink()
    refused(capsys, path, f"{first} cannot be read")
    first.write_bytes(second.read_bytes())
    refused(capsys, path, f"model.safetensors.index.json does not say that .* is in {first.name}")
    first.write_bytes(content)
    tensors = load_file(second)
    lost = sorted(tensors)[0]
    save_file({name: value for name, value in tensors.items() if name != lost}, second)
    refused(capsys, path, f"{second.name} lacks {lost}, which model.safetensors.index.json says is there")
    (path / "model.safetensors.index.json").write_text("{")
    refused(capsys, path, r"index\.json cannot be read")
    for damaged in ("[" * 10**5, "{", '{"weight_map": []}', "[]"):
        (path / "model.safetensors.index.json").write_text(damaged)
        refused(capsys, path, r"index\.json cannot be read")
    for damaged, reason in (("[" * 10**5, "brackets are too deep"), ("[", "Expecting value"), ("\ufffe", "Expecting")):
        (path / "config.json").write_text(damaged)
        refused(capsys, path, rf"config\.json is no whole JSON \({reason}")
    (path / "config.json").unlink()
    refused(capsys, path, r"config\.json cannot be read \(No such file")


@pytest.mark.parametrize("name", ["{}", "../other/{}", "shards/../../{}", "", ".", "a\0b"])
def test_weights_outside_of_the_folder(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = saved("llama", tmp_path / "model")
    other = saved("llama", tmp_path / "other") / "model.safetensors"
    (path / "model.safetensors").unlink()
    named = name.format(other if name == "{}" else other.name)
    index = {"weight_map": dict.fromkeys(load_file(other), named)}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    capsys.readouterr()
    refused(capsys, path, r"index\.json names files that are not in its folder, such as ")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_are_not_finite(dtype: torch.dtype, tmp_path: Path) -> None:
    file = saved("llama", tmp_path / "model") / "model.safetensors"
    tensors = {name: value.to(dtype) for name, value in load_file(file).items()}
    tensors["model.layers.1.mlp.up_proj.weight"][3, 1:4] = torch.tensor([float("nan"), float("inf"), float("-inf")])
    tensors["model.norm.weight"][0] = float("nan")
    save_file(tensors, file)
    said = f"model.layers.1.mlp.up_proj.weight in {file} has elements that are not finite (3)"
    folder = PretrainedFolder(str(file.parent))
    with pytest.raises(ValueError, match=re.escape(f"{said}; fix: download it again, ")):
        folder.value("layers.1.mlp.w_gate_up", whole_shapes(folder.model)["layers.1.mlp.w_gate_up"])


def test_weights_may_be_links_and_in_folders_below(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, blobs = saved("llama", tmp_path / "snapshot"), tmp_path / "blobs"
    blobs.mkdir()
    for file in list(path.iterdir()):  # as Hugging Face's cache keeps them
        (path / file.name).symlink_to(file.rename(blobs / file.name))
    assert command(capsys, "import", path, tmp_path / "links.toml")[0] == 0
    (path / "shards").mkdir()
    (path / "model.safetensors").rename(path / "shards" / "a.safetensors")
    index = {"weight_map": dict.fromkeys(load_file(blobs / "model.safetensors"), "shards/a.safetensors")}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert command(capsys, "import", path, tmp_path / "below.toml")[0] == 0


def test_no_folder_and_a_file_that_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refused(capsys, tmp_path / "nothing", "cannot be read")
    assert "the following arguments are required: FILE.toml" in command(capsys, "import", tmp_path)[2]
    (tmp_path / "run.toml").write_text("")
    path = saved("llama", tmp_path / "model")
    assert "is there already" in command(capsys, "import", path, tmp_path / "run.toml")[2]
    assert (tmp_path / "run.toml").read_text() == ""


def test_a_folders_name_sets_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = saved("llama", tmp_path / 'a "b" # \u2028[train] 😀')
    (path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"</s>": 0}}}))
    assert command(capsys, "import", path, tmp_path / "run.toml", "--data.eos", "</s>")[0] == 0
    said = {entry.name: entry.value for entry in read(str(tmp_path / "run.toml"))}
    assert (said["model.weights"], said["data.tokenizer"]) == (str(path), str(path / "tokenizer.json"))
    assert {name.partition(".")[0] for name in said} == {"model", "data"}
    path = path.rename(tmp_path / "model\n[train]\nsteps = 7")
    (tmp_path / "run.toml").unlink()
    refused(capsys, path, r"model\\n\[train\]\\nsteps = 7 .* has a character that cannot be shown; fix: rename the")


def test_models_without_a_family() -> None:
    with pytest.raises(ValueError, match=r"no family computes it: the nearest is qwen2_moe, with .*shared_gate = True"):
        family_for(recipes.TINY)
    found = {
        name: family_for(getattr(recipes, name.upper())) for name in ("llama3_8b", "mixtral_8x7b", "qwen3_30b_a3b")
    }
    assert found == {"llama3_8b": "llama", "mixtral_8x7b": "mixtral", "qwen3_30b_a3b": "qwen3_moe"}
    latent = ("deepseek_v2_lite", "moonlight_16b", "deepseek_v3", "kimi_k2")
    found = {name: family_for(getattr(recipes, name.upper())) for name in latent}
    assert found == {name: "deepseek_v2" if "v2" in name else "deepseek_v3" for name in latent}
    assert family_for(ModelConfig(qk_norm=True)) == "qwen3"
    assert not FAMILIES.keys() & REFUSED.keys()


@pytest.mark.parametrize("change", [{"model_type": "evil\nname"}, {"bad\nkey": 1}, {"bad": "two\nlines"}])
def test_a_foreign_line_break_makes_no_second_line(
    change: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = change_config(saved("llama", tmp_path / "model"), **change)
    capsys.readouterr()
    code, _, err = command(capsys, "import", path, tmp_path / "run.toml")
    assert (code, err.count("\n")) == (2, 1)
