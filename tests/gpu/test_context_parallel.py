"""`context_parallel` on two GPUs: flash attention and NCCL, against the whole model on one of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor

import hocket
from tests.helpers.ranks import run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs"),
]
LENGTHS = (5, 1900, 700, 1, 1490)
SIZES = dict(
    vocab_size=512, hidden_size=512, intermediate_size=1024, num_hidden_layers=3, num_attention_heads=8,
    num_key_value_heads=4, head_dim=64,
)  # fmt: skip


def _trained(rank: int, kind: str, method: str, packed: bool) -> tuple[float, float, float, float]:
    """The whole model's loss, the shared one's, the norm of all gradients, and of their difference, in bf16."""
    torch.manual_seed(1)
    config: dict[str, Any] = dict(SIZES)
    if kind == "qwen3":
        config |= dict(use_sliding_window=True, sliding_window=256, max_window_layers=1)
    with torch.device("cuda", rank):
        made = transformers.AutoConfig.for_model(kind, **config)
        model = transformers.AutoModelForCausalLM.from_config(made, attn_implementation="sdpa").bfloat16()
        ids = torch.randint(0, 512, (1, sum(LENGTHS)), generator=torch.Generator("cuda").manual_seed(0))
        batch: dict[str, Tensor] = {"input_ids": ids, "labels": ids}
        if packed:
            batch["position_ids"] = torch.cat([torch.arange(n) for n in LENGTHS]).unsqueeze(0)
    whole = model(**batch, use_cache=False).loss
    whole.backward()
    wanted = {name: p.grad.float() for name, p in model.named_parameters()}
    model.zero_grad()
    group = dist.group.WORLD
    assert group is not None
    hocket.context_parallel(model, group, method=method)
    loss = model(**batch).loss
    loss.backward()
    norm = off = 0.0
    for name, p in model.named_parameters():
        grad = p.grad.float()
        dist.all_reduce(grad)
        norm += float(wanted[name].square().sum())
        off += float((grad / 2 - wanted[name]).square().sum())
    return float(whole), float(loss), norm**0.5, off**0.5


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("method", ["gather", "heads"])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_loss_and_gradients_are_those_of_the_whole_model(kind: str, method: str, packed: bool) -> None:
    for whole, loss, norm, off in run_ranks(_trained, 2, kind, method, packed, backend="nccl", timeout=200):
        assert abs(loss - whole) < 2e-3 * whole
        assert off < 0.03 * norm
