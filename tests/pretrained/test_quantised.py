"""Folders whose matrices are fp8 with scales by blocks, and folders with layers that predict further tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", minversion="5.0", reason="needs transformers 5", exc_type=ImportError)

import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint.quantized_hf_storage import QuantizedHuggingFaceStorageReader

from hocket.pretrained.quantised import dequantised, scales_shape
from tests.helpers.command import command, hocket
from tests.pretrained.folders import change_config, ours, saved
from tests.pretrained.test_refusals import refused

BLOCK = 8
"""Rows and columns of a block. Sizes of the model are no multiples of it."""
CONFIG = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}


def in_fp8(value: Tensor, power: bool = False) -> tuple[Tensor, Tensor]:
    """A matrix in fp8, and its scales: the largest of a block becomes the largest number of fp8, or nearly."""
    scales = torch.empty(scales_shape(tuple(value.shape), (BLOCK, BLOCK)))
    quantised = torch.empty_like(value, dtype=torch.float8_e4m3fn)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            here = slice(i * BLOCK, (i + 1) * BLOCK), slice(j * BLOCK, (j + 1) * BLOCK)
            scales[i, j] = value[here].abs().max() / torch.finfo(torch.float8_e4m3fn).max
            scales[i, j] = scales[i, j].log2().ceil().exp2() if power else scales[i, j]
            quantised[here] = (value[here] / scales[i, j]).to(torch.float8_e4m3fn)
    return quantised, scales


def quantise(path: Path, power: bool = False) -> Path:
    """The folder with all matrices of layers but routers in fp8, and their scales in another file."""
    file = path / "model.safetensors"
    tensors, scales = load_file(file), {}
    for name in [name for name in tensors if name.endswith("_proj.weight") or "with_mqa" in name]:
        tensors[name], scales[f"{name}_scale_inv"] = in_fp8(tensors[name], power)
    file.unlink()
    for name, content in (("weights.safetensors", tensors), ("scales.safetensors", scales)):
        save_file(content, path / name, {"format": "pt"})
    files = {"weights.safetensors": tensors, "scales.safetensors": scales}
    index = {name: file for file, content in files.items() for name in content}
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return change_config(path, quantization_config=CONFIG)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("power", [False, True])
def test_values_are_those_of_torch(tmp_path: Path, power: bool) -> None:
    """Torch's own reader of such files, and hocket's, give the same numbers."""
    exact = ours(saved("deepseek_v3", tmp_path))
    plain = load_file(tmp_path / "model.safetensors")
    quantise(tmp_path, power)
    theirs = {name: torch.empty_like(value) for name, value in plain.items()}
    reader = QuantizedHuggingFaceStorageReader(str(tmp_path), target_dtype=torch.float32, block_size=BLOCK)
    dcp.load(theirs, storage_reader=reader)
    found = dict(ours(tmp_path).named_parameters())
    assert not all(torch.equal(value, found[name]) for name, value in exact.named_parameters())
    for i in range(3):
        assert torch.equal(found[f"layers.{i}.attn.wo"], theirs[f"model.layers.{i}.self_attn.o_proj.weight"])
        assert torch.equal(found[f"layers.{i}.attn.wkv_b"], theirs[f"model.layers.{i}.self_attn.kv_b_proj.weight"])
    for expert in range(8):
        down = theirs[f"model.layers.2.mlp.experts.{expert}.down_proj.weight"]
        assert torch.equal(found["layers.2.experts.w_down"][expert], down.t())


def test_stacked_matrices() -> None:
    values, scales = torch.randn(3, 20, 13).to(torch.float8_e4m3fn), torch.rand(3, 3, 2)
    assert scales_shape((3, 20, 13), (8, 8)) == scales.shape
    found = dequantised(values, scales, (8, 8))
    for e in range(3):
        assert torch.equal(found[e], dequantised(values[e], scales[e], (8, 8)))
    assert found[2, 17, 9] == values[2, 17, 9].float() * scales[2, 2, 1]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"quant_method": "gptq"}, "quantization_config has quant_method = gptq: only fp8 blocks of e4m3 are read"),
        ({**CONFIG, "fmt": "e5m2"}, "only fp8 blocks of e4m3 are read"),
        ({**CONFIG, "weight_block_size": None}, "weight_block_size = None: only blocks of two sizes are read"),
        ({**CONFIG, "weight_block_size": [BLOCK, 20]}, "scale_inv has shape .*, and .* needs"),
        (None, "has elements of F8_E4M3; F32, BF16, F16 are read"),
    ],
)
def test_other_kinds_are_refused(config: Any, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quantise(saved("moonlight", tmp_path / "model"))
    change_config(tmp_path / "model", quantization_config=config)
    capsys.readouterr()
    refused(capsys, tmp_path / "model", words)


def test_a_scale_that_is_missing_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = quantise(saved("moonlight", tmp_path / "model"))
    file, name = path / "scales.safetensors", "model.layers.0.self_attn.o_proj.weight_scale_inv"
    scales = load_file(file)
    index = json.loads((path / "model.safetensors.index.json").read_text())
    del scales[name], index["weight_map"][name]
    save_file(scales, file)
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    capsys.readouterr()
    refused(capsys, path, r"o_proj\.weight has elements of F8_E4M3, and .*o_proj\.weight_scale_inv is missing")


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = saved("moonlight", tmp_path / "model")
    exact, file = ours(path), path / "model.safetensors"
    more = {"model.layers.3.eh_proj.weight": torch.ones(24, 48), "model.layers.3.enorm.weight": torch.ones(24)}
    save_file({**load_file(file), **more}, file, {"format": "pt"})
    change_config(path, num_nextn_predict_layers=1)
    capsys.readouterr()
    code, out, _ = command(capsys, "import", path, tmp_path / "run.toml")
    assert code == 0
    assert out.startswith("note: 2 tensors, such as model.layers.3.eh_proj.weight, belong to layers that predict")
    for name, value in ours(path).named_parameters():
        assert torch.equal(value, exact.get_parameter(name))
    (tmp_path / "run.toml").unlink()
    refused(capsys, change_config(path, num_nextn_predict_layers=0), r"has model\.layers\.3\.eh_proj")


def test_a_quantised_model_trains_and_is_exported_whole(tmp_path: Path) -> None:
    from tests.pretrained.test_runs import words

    quantise(saved("moonlight", tmp_path / "model", vocab_size=256))
    change_config(tmp_path / "model", num_nextn_predict_layers=1)
    assert hocket(tmp_path, "import", "model", "run.toml").code == 0
    still = ["--train.steps", "1", "--train.lr", "1e-30", "--train.min_lr", "0", "--train.eval_batches", "0"]
    done = hocket(tmp_path, "train", *words(tmp_path, *still, "--model.bias_rate", "1e-30", "--mesh.dp", "2"))
    assert done.code == 0, done.err
    done = hocket(tmp_path, "export", "runs/run", "back")
    assert done.code == 0, done.err
    exact, back = ours(tmp_path / "model"), ours(tmp_path / "back")
    for name, value in exact.named_parameters():
        assert torch.equal(value, back.get_parameter(name))
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["num_nextn_predict_layers"] == 0
