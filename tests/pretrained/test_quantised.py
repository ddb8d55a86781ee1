"""Folders of quantised weights, and folders with layers that predict further tokens.

Matrices of fp8 have scales by blocks, as torch reads them. Experts of MXFP4, as gpt-oss is published, are what
transformers makes of them.
"""

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

from hocket.model.source import whole_shapes
from hocket.pretrained.folder import dequantised, mxfp4_values, scales_shape
from hocket.pretrained.weights import PretrainedFolder
from tests.helpers.command import command, hocket
from tests.pretrained.folders import change_config, ours, saved
from tests.pretrained.test_families import assert_same
from tests.pretrained.test_refusals import refused

BLOCK = 8
"""Rows and columns of a block. Sizes of the model are no multiples of it."""
CONFIG = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


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
    assert "note: 2 tensors, such as model.layers.3.eh_proj.weight, belong to layers that predict" in out
    for name, value in ours(path).named_parameters():
        assert torch.equal(value, exact.get_parameter(name))
    (tmp_path / "run.toml").unlink()
    refused(capsys, change_config(path, num_nextn_predict_layers=0), r"has model\.layers\.3\.eh_proj")


def test_so_are_those_of_qwen3_next(tmp_path: Path) -> None:
    path = saved("qwen3_next", tmp_path / "model")
    exact, file = ours(path), path / "model.safetensors"
    save_file({**load_file(file), "mtp.fc.weight": torch.ones(24, 48)}, file, {"format": "pt"})
    for name, value in ours(path).named_parameters():
        assert torch.equal(value, exact.get_parameter(name))


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


def both(folder: Path) -> tuple[Path, Path]:
    """A folder of quantised experts, and one of their values in bf16, which transformers computes."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(3)
    paths = saved("gpt_oss", folder / "plain"), saved("gpt_oss", folder / "quantised")
    plain = load_file(paths[0] / "model.safetensors")
    quantised: dict[str, Tensor] = {}
    for name, value in plain.items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            quantised[name] = value
            continue
        experts, columns, rows = value.shape
        shape = (experts, rows, columns // 32)
        blocks = torch.randint(256, (*shape, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(118, 126, shape, generator=generator, dtype=torch.uint8)
        quantised |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        plain[name] = convert_moe_packed_tensors(blocks, scales).float().contiguous()
    for path, tensors in zip(paths, (plain, quantised), strict=True):
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return paths[0], change_config(paths[1], quantization_config=MXFP4)


def test_quantised_experts_are_what_transformers_makes_of_them(tmp_path: Path) -> None:
    plain, quantised = both(tmp_path)
    assert_same(ours(plain), ours(quantised))
    folders = [PretrainedFolder(str(path)) for path in (plain, quantised)]
    for name in ("layers.1.experts.w_gate_up", "layers.1.experts.b_gate_up", "layers.2.experts.w_down"):
        shape = whole_shapes(folders[0].model)[name]
        whole = folders[0].value(name, shape)
        for folder in folders:
            assert torch.equal(folder.value(name, (3, *shape[1:]), first_expert=4), whole[4:7])


def test_all_numbers_of_four_bits() -> None:
    blocks = torch.arange(0, 256, 17, dtype=torch.uint8).view(1, 1, 16)  # of both halves the same number
    found = mxfp4_values(blocks, torch.tensor([[128]], dtype=torch.uint8))
    magnitudes = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    expected = [2 * x for x in magnitudes] + [-2 * x for x in magnitudes]
    assert found.tolist() == [[x for x in expected for _ in range(2)]]
    first = mxfp4_values(torch.full((1, 1, 16), 0x21, dtype=torch.uint8), torch.tensor([[127]], dtype=torch.uint8))
    assert first[0, :2].tolist() == [0.5, 1.0]


def test_what_is_refused_of_mxfp4(tmp_path: Path) -> None:
    _, path = both(tmp_path)
    file = path / "model.safetensors"
    tensors, name = load_file(file), "model.layers.0.mlp.experts.down_proj_"
    save_file({**tensors, f"{name}blocks": tensors[f"{name}blocks"].float()}, file)
    with pytest.raises(ValueError, match="down_proj_blocks has elements of F32; U8 are read"):
        ours(path)
    save_file({**tensors, f"{name}scales": tensors[f"{name}scales"][:, :-1].contiguous()}, file)
    with pytest.raises(ValueError, match=r"down_proj_scales has shape \[8, 63, 1\], and .*w_down needs \[8, 64, 1\]"):
        ours(path)
    save_file({key: value for key, value in tensors.items() if key != f"{name}scales"}, file)
    with pytest.raises(ValueError, match=r"lacks model\.layers\.0\.mlp\.experts\.down_proj_scales"):
        ours(path)
    change_config(path, quantization_config={"quant_method": "fp8"})
    with pytest.raises(ValueError, match="quantization_config has quant_method = fp8: only mxfp4 is read"):
        ours(path)
    assert json.loads((path / "config.json").read_text())["model_type"] == "gpt_oss"
