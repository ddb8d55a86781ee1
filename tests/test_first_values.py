"""First values by scheme, and what they do to a model's first step."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from hocket import recipes
from hocket.config import Config, ModelConfig
from hocket.model.source import init_tensor
from hocket.model.transformer import Chunk
from hocket.resolve import resolve
from tests.helpers.chunks import init_chunk

SMALL = replace(recipes.QWEN3_30B_A3B, vocab=512, hidden=64, layers=4, experts=16, top_k=2, expert_ffn=64, aux_loss=0.0)
"""Qwen3-30B-A3B with its heads, but few layers, 64 wide, and few experts."""


def first_step(config: ModelConfig) -> tuple[float, float, float]:
    """Mean cosine between hidden states of tokens, the worst layer's load, and the gradient's norm."""
    model = init_chunk(Chunk(config, range(config.layers)), seed=0)
    ids = torch.randint(config.vocab, (2, 257), generator=torch.Generator().manual_seed(1))
    x, loads = model.embed(ids[:, :-1]), []  # pyrefly: ignore[not-callable]
    for layer in model.layers.values():
        load = layer.forward_attn(x)[-1].load_E.float()  # pyrefly: ignore
        loads.append((load.max() / load.mean()).item())
        x = layer(x)
    states = F.normalize(x.detach().flatten(0, 1), dim=-1)
    alike = (states.sum(0).square().sum() - len(states)) / (len(states) * (len(states) - 1))
    model.loss(x, ids[:, 1:]).backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return alike.item(), max(loads), math.sqrt(sum(grad.square().sum().item() for grad in grads))


def test_tokens_stay_apart_where_embeddings_are_large() -> None:
    alike, load, grad_norm = first_step(SMALL)
    alike_drowned, load_drowned, grad_norm_drowned = first_step(replace(SMALL, init="gpt2"))
    assert alike < 0.02 < 0.3 < alike_drowned
    assert load < 2 < 4 < load_drowned
    assert grad_norm < 0.7 < 1.4 < grad_norm_drowned


@pytest.mark.parametrize("tied", [False, True])
def test_values_of_torchtitan(tied: bool) -> None:
    config = replace(SMALL, hidden=256, layers=3, tied=tied)
    deep = [0.02 / math.sqrt(2 * (i + 1)) for i in range(3)]
    for name, shape, first, second in [
        ("embed.weight", (512, 256), 1 / 16 if tied else 1.0, None),
        ("head.weight", (512, 256), 1 / 16, None),
        ("layers.1.attn.wq", (300, 256), 0.02, None),
        ("layers.1.attn.wo", (256, 300), deep[1], None),
        ("layers.2.router.weight", (64, 256), deep[2], None),
        ("layers.0.mlp.w_gate_up", (400, 256), 0.02, deep[0]),
        ("layers.2.experts.w_gate_up", (4, 256, 200), 0.02, deep[2]),
        ("layers.2.experts.w_down", (4, 100, 256), deep[2], None),
    ]:
        value = init_tensor(name, shape, config, 0)
        halves = value.chunk(2, -1 if "experts" in name else 0)
        assert halves[0].std().item() == pytest.approx(first, rel=0.03), name
        assert halves[1].std().item() == pytest.approx(second or first, rel=0.03), name


def test_explanations_name_the_source() -> None:
    said = {d.setting: d for d in resolve(Config(model=SMALL)).decisions}["model.init"]
    assert said.value == "torchtitan"
    assert not said.unmet
    assert said.reason.startswith("standard deviations are 0.02, but embed.weight 1, head.weight 0.125,")
    assert "torchtitan/models/common/param_init.py" in said.reason
