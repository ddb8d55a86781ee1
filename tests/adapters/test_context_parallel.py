"""`context_parallel` on two and four ranks against the same unmodified model of transformers on whole sequences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import hocket
from hocket.adapters.transformers import FAMILIES
from tests.helpers.ranks import run_ranks

LENGTH = 32
SIZES = dict(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=64, pad_token_id=None, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
OWN: dict[str, dict[str, Any]] = {
    "mistral": dict(sliding_window=5),
    "mixtral": dict(num_local_experts=4, sliding_window=None),
    "olmo3": dict(sliding_window=5, layer_types=["sliding_attention", "full_attention"]),
    "qwen2": dict(use_sliding_window=True, sliding_window=5, max_window_layers=1),
    "qwen3": dict(use_sliding_window=True, sliding_window=7, max_window_layers=1),
    "qwen3_moe": dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16),
}
LENGTHS = ((3, 20, 9), (13, 1, 18), (5, 27))
"""Documents of three sequences: two ranks cannot have all tokens of each sequence that they have some of."""


def model_of(kind: str, **settings: Any) -> Any:
    torch.manual_seed(1)
    config = transformers.AutoConfig.for_model(kind, **{**SIZES, **OWN.get(kind, {}), **settings})
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")


def batch_of(packed: bool, seed: int = 0) -> dict[str, Tensor]:
    """Three sequences, of documents if `packed`; some labels do not count."""
    ids = torch.randint(3, 64, (len(LENGTHS), LENGTH), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    labels[0, 4:11] = -100
    batch = {"input_ids": ids, "labels": labels}
    if packed:
        batch["position_ids"] = torch.stack([torch.cat([torch.arange(n) for n in each]) for each in LENGTHS])
    return batch


def grads_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def averaged(model: nn.Module) -> dict[str, Tensor]:
    for p in model.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
    return grads_of(model)


def _families(rank: int, kinds: tuple[str, ...], packed: bool, method: str, checkpointed: bool) -> list[str]:
    """What differs from the whole model."""
    wrong, group = [], dist.group.WORLD
    assert group is not None
    for kind in kinds:
        model, batch = model_of(kind), batch_of(packed)
        whole = model(**batch, use_cache=False)  # with a cache transformers takes no notice of documents
        whole.loss.backward()
        wanted = grads_of(model)
        model.zero_grad()
        shared = hocket.context_parallel(model, group, method=method)
        if checkpointed:
            model.train()
            model.gradient_checkpointing_enable({"use_reentrant": False})
        found = model(**batch)
        other = model(**batch_of(not packed, seed=5))  # another forward before the first one's backward
        found.loss.backward()
        del other
        grads = averaged(model)
        assert shared.shares is not None
        mine = torch.cat([torch.arange(c.start, c.stop) for c in shared.shares.chunks[rank]])
        shared.remove()
        again = model(**batch, use_cache=False)
        close: Callable[[Tensor, Tensor], bool] = lambda a, b: torch.allclose(a, b, rtol=1e-4, atol=2e-6)  # noqa: E731
        wrong += [f"{kind}: loss {found.loss} not {whole.loss}"] * (not close(found.loss, whole.loss))
        wrong += [f"{kind}: removed"] * (not close(again.loss, whole.loss))
        wrong += [f"{kind}: {name}" for name, g in wanted.items() if name not in grads or not close(grads[name], g)]
        assert wanted
        wrong += [f"{kind}: {found.logits.shape}"] * (
            found.logits.shape[1] != len(LENGTHS) * LENGTH // dist.get_world_size()
        )
        assert len(mine) == found.logits.shape[1]
    return wrong


def _sharded(rank: int) -> float:
    """The largest difference of losses under `fully_shard`, dp x cp 2 x 2, from plain training, in two steps."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    return max(_two_steps(mesh, shard_first) for shard_first in (False, True))


def _two_steps(mesh: DeviceMesh, shard_first: bool) -> float:
    model, plain, dp = model_of("llama"), model_of("llama"), mesh.get_local_rank("dp")
    if not shard_first:
        hocket.context_parallel(model, mesh["cp"])
    hocket.fully_shard(model, units=type(model.model.layers[0]))
    if shard_first:
        hocket.context_parallel(model, mesh["cp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
    worst = 0.0
    for step in range(2):
        batches = [batch_of(packed, seed=2 * step + packed) for packed in (False, True)]
        loss = model(**batches[dp]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses = torch.stack([plain(**batch, use_cache=False).loss for batch in batches])
        losses.mean().backward()
        reference.step()
        reference.zero_grad()
        worst = max(worst, abs(float(loss.detach()) - float(losses[dp].detach())))
    return worst


def test_weights_are_sharded_over_both_axes() -> None:
    assert max(run_ranks(_sharded, 4)) < 1e-4


def _refused(rank: int) -> list[str]:
    group = dist.group.WORLD
    assert group is not None
    said = []

    def refused(call: Callable[[], Any]) -> None:
        try:
            call()
        except ValueError as error:
            said.append(str(error))
        else:
            said.append("nothing")

    refused(lambda: hocket.context_parallel(nn.Linear(2, 2), group))
    refused(lambda: hocket.context_parallel(model_of("gemma2"), group))
    refused(lambda: hocket.context_parallel(model_of("llama", attention_dropout=0.1), group))
    refused(lambda: hocket.context_parallel(model_of("mixtral", output_router_logits=True), group))
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    refused(lambda: hocket.context_parallel(model_of("llama", rope_parameters=dynamic), group))
    refused(lambda: hocket.context_parallel(model_of("llama", num_key_value_heads=1), group, method="heads"))
    refused(lambda: hocket.context_parallel(model_of("llama"), group, method="ring"))
    model = model_of("llama")
    hocket.context_parallel(model, group)
    refused(lambda: hocket.context_parallel(model, group))
    batch = batch_of(False)
    refused(lambda: model(**batch, attention_mask=torch.ones(2, LENGTH)))
    refused(lambda: model(**batch, use_cache=True))
    refused(lambda: model(**batch, return_dict=False))
    refused(lambda: model(inputs_embeds=torch.zeros(2, LENGTH, 32)))
    refused(lambda: model(**{**batch, "labels": batch["labels"][:1]}))
    refused(lambda: model(**batch_of(False, seed=rank)))
    refused(lambda: model(**batch, **{"use_cache": True} if rank else {}))  # the other one must not wait for it
    refused(lambda: model.model(batch["input_ids"]))
    refused(lambda: model(batch["input_ids"][:, :31]))
    return said


def _two(rank: int) -> tuple[list[str], list[str]]:
    """All that two ranks do, in one go, since each start imports transformers."""
    wrong = _families(rank, FAMILIES, True, "gather", False) + _families(rank, ("olmo3",), False, "gather", True)
    wrong += _families(rank, ("qwen3", "mixtral"), True, "heads", True) + _families(
        rank, ("llama",), False, "heads", False
    )
    return wrong, _refused(rank)


def _four(rank: int) -> list[str]:
    """Windows and documents over chunks of several ranks."""
    return _families(rank, ("olmo3", "qwen3"), True, "gather", True)


@pytest.fixture(scope="module")
def two() -> list[tuple[list[str], list[str]]]:
    return run_ranks(_two, 2)


def test_loss_and_gradients_are_those_of_the_whole_model(two: list[tuple[list[str], list[str]]]) -> None:
    assert [wrong for wrong, _ in two] == [[], []]


def test_four_ranks_have_keys_of_all() -> None:
    assert run_ranks(_four, 4) == [[]] * 4


def test_what_would_be_wrong_is_refused_by_name(two: list[tuple[list[str], list[str]]]) -> None:
    said = [refused for _, refused in two]
    for pattern, *each in zip(
        (
            "Linear of type None", "Gemma2ForCausalLM of type gemma2", "attention_dropout", "router_logits",
            "rope_type .*dynamic", "num_key_value_heads=1", "method='ring' must be", "called on this model before",
            "attention_mask .* leave it out", "use_cache", "return_dict", "inputs_embeds",
            r"labels has shape \(1, 32\)", "different batches", r"^ranks \[1\]|^use_cache",
            "outside of a call", "31 tokens cannot be cut",
        ),
        *said,
        strict=True,
    ):  # fmt: skip
        for message in each:
            with pytest.raises(ValueError, match=pattern):
                raise ValueError(message)
