"""Weights in MXFP4, as gpt-oss is published: what transformers makes of them, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", minversion="5.0", reason="needs transformers 5", exc_type=ImportError)

from safetensors.torch import load_file, save_file

from hocket.model.source import whole_shapes
from hocket.pretrained import mxfp4
from hocket.pretrained.convert import PretrainedFolder
from tests.pretrained.folders import change_config, ours, saved
from tests.pretrained.test_families import assert_same

CONFIG = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


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
    return paths[0], change_config(paths[1], quantization_config=CONFIG)


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
    found = mxfp4.values(blocks, torch.tensor([[128]], dtype=torch.uint8))
    magnitudes = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    expected = [2 * x for x in magnitudes] + [-2 * x for x in magnitudes]
    assert found.tolist() == [[x for x in expected for _ in range(2)]]
    first = mxfp4.values(torch.full((1, 1, 16), 0x21, dtype=torch.uint8), torch.tensor([[127]], dtype=torch.uint8))
    assert first[0, :2].tolist() == [0.5, 1.0]


def test_what_is_refused(tmp_path: Path) -> None:
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
    with pytest.raises(ValueError, match=r"quantization_config: of quantised weights .* mxfp4 are read, not of fp8"):
        ours(path)
    assert json.loads((path / "config.json").read_text())["model_type"] == "gpt_oss"
