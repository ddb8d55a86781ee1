"""What programs read of a sharded parameter and of a module's state, beside the unsharded ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.nn.utils import parametrizations
from transformers import LlamaConfig, LlamaForCausalLM

import hocket
from hocket.fsdp.sharded_parameter import ShardedParameter
from tests.fsdp.elements import here, local
from tests.helpers.ranks import run_ranks

WIDTH = 8


def made() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 13), nn.LayerNorm(13), nn.Linear(13, WIDTH))


def data(step: int, rank: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def train(
    model: nn.Module, plain: nn.Module, rank: int, optimizer: Callable[[nn.Module], torch.optim.Optimizer]
) -> None:
    """Three steps of a sharded model and of a whole one that sees the data of both ranks; losses are compared."""
    ours, theirs = optimizer(model), optimizer(plain)
    for step in range(3):
        buffers = {name: value.clone() for name, value in plain.named_buffers()}
        for other in (1 - rank, rank):
            for name, value in plain.named_buffers():
                value.copy_(buffers[name])
            wanted = plain(data(step, other)).square().mean()
            (wanted / 2).backward()
        loss = model(data(step, rank)).square().mean()
        loss.backward()
        torch.testing.assert_close(loss, wanted, msg=lambda text: f"loss of step {step}: {text}")  # noqa: B023
        for one in (ours, theirs):
            one.step()
            one.zero_grad()


def by_ndim(model: nn.Module) -> torch.optim.Optimizer:
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    assert len(decayed) == 2
    groups = [{"params": decayed, "weight_decay": 3.0}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.05, foreach=True)


def decays(rank: int) -> None:
    model, plain = made(), made()
    ctx = hocket.fully_shard(model, units=nn.Linear)
    train(model, plain, rank, by_ndim)
    with ctx.gathered():
        for name, whole in plain.named_parameters():
            torch.testing.assert_close(model.get_parameter(name), whole, msg=name)


def test_weight_decay_goes_by_dimensions() -> None:
    run_ranks(decays, 2)


def looks(rank: int) -> None:
    model, plain = made(), made()
    hocket.fully_shard(model, units=nn.Linear)
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in plain.parameters())
    for (name, shard), whole in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert isinstance(shard, ShardedParameter)
        assert shard.shape == shard.size() == whole.shape, name
        assert (shard.ndim, shard.dim(), len(shard), shard.size(-1)) == (whole.ndim,) * 2 + (len(whole), whole.size(-1))
        assert torch.equal(local(shard), here(shard, whole)), name
        assert str(tuple(whole.shape)) in repr(shard)
        with pytest.raises(ValueError, match=r"of which this rank has .* use to_local"):
            shard.data_ptr()


def test_a_shard_has_the_shape_of_its_weight() -> None:
    run_ranks(looks, 2)


def states(rank: int) -> None:
    model, plain = made(), made()
    ctx = hocket.fully_shard(model, units=nn.Linear)
    mine = {name: value.clone() for name, value in model.state_dict().items()}
    with ctx.gathered():
        whole, full = model.state_dict(), get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    for name, value in plain.state_dict().items():
        assert torch.equal(whole[name], value), name
        found = full[name]
        assert isinstance(found, Tensor)
        assert torch.equal(found, value), name
    doubled = {name: 2 * value for name, value in plain.state_dict().items()}
    plain.load_state_dict(doubled)
    for state in (doubled, {name: 2 * value for name, value in mine.items()}):
        model.load_state_dict({name: torch.zeros_like(value) for name, value in mine.items()})
        assert not model(data(0, 0)).any()
        assert not any(model.load_state_dict(state))
        torch.testing.assert_close(model(data(0, 0)), plain(data(0, 0)))
    with pytest.raises(ValueError, match=r"0.weight is \(3,\) in the state dict, and neither the weight"):
        model.load_state_dict({**doubled, "0.weight": torch.zeros(3)})


def test_state_dicts_are_whole_while_weights_are_gathered() -> None:
    run_ranks(states, 2)


def pretrained(rank: int, folder: Path) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2
    )
    model = LlamaForCausalLM(config)
    wanted = {name: value.clone() for name, value in model.state_dict().items()}
    ctx = hocket.fully_shard(model, units=type(model.model.layers[0]))
    with ctx.gathered():
        model.save_pretrained(folder, is_main_process=rank == 0)
    if rank:
        return
    found = LlamaForCausalLM.from_pretrained(folder).state_dict()
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


def test_save_pretrained_saves_whole_weights(tmp_path: Path) -> None:
    run_ranks(pretrained, 2, tmp_path)


NORMS = {
    "weight_norm": nn.utils.weight_norm,
    "spectral_norm": nn.utils.spectral_norm,
    "parametrized weight_norm": parametrizations.weight_norm,
    "parametrized spectral_norm": parametrizations.spectral_norm,
}


def normed(rank: int, kind: str, units: type[nn.Module] | None) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Sequential(NORMS[kind](nn.Linear(WIDTH, WIDTH)), nn.Tanh()) for _ in range(3)))

    model, plain = build(), build()
    hocket.fully_shard(model, units=units)
    train(model, plain, rank, lambda one: torch.optim.SGD(one.parameters(), lr=0.1, foreach=True))
    model.eval()
    plain.eval()
    with torch.no_grad():
        torch.testing.assert_close(model(data(0, 0)), plain(data(0, 0)))


@pytest.mark.parametrize("units", [nn.Sequential, nn.Linear, None], ids=["blocks", "layers", "root"])
@pytest.mark.parametrize("kind", NORMS)
def test_norms_of_weights(kind: str, units: type[nn.Module] | None) -> None:
    run_ranks(normed, 2, kind, units)
