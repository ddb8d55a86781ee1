"""Programs written for PyTorch's FSDP2 run with `hocket.sharding` in its place, and get the same numbers.

Each program takes what it calls from a *door*: `torch.distributed.fsdp`, or `hocket.sharding`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed.fsdp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor

import hocket
import hocket.sharding
from tests.fsdp.twin import mesh_of, naming
from tests.helpers.parity import LINEAR
from tests.helpers.ranks import run_ranks

WORLD, WIDTH, VOCAB, STEPS = 2, 12, 19, 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 31), nn.GELU(), nn.Linear(31, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))

    def mlp_only(self, x: Tensor) -> Tensor:
        return x + self.mlp(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.base(ids))

    def base(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


def new(dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    return Model().to(dtype)


def nested(door: Any, model: Any, **arguments: Any) -> Any:
    for layer in model.layers:
        door.fully_shard(layer, **arguments)
    return door.fully_shard(model, **arguments)


def batches(rank: int, count: int = STEPS) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    for _ in range(count):
        yield torch.randint(VOCAB, (4, 7), generator=generator)


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    logits = model(ids[:, :-1]).flatten(0, 1)  # on a GPU, if the model moved there; ids stay on the host
    return nn.functional.cross_entropy(logits, ids[:, 1:].flatten().to(logits.device))


def train(model: nn.Module, rank: int, clip: bool = True, foreach: bool = True) -> Iterator[Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, eps=LINEAR, foreach=foreach)
    for ids in batches(rank):
        loss = loss_of(model, ids)
        loss.backward()
        yield loss.detach()
        if clip:
            yield whole(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        optimizer.step()
        optimizer.zero_grad()


def whole(value: Any) -> Tensor:
    """Of torch's FSDP2, a number may be a DTensor."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def plain_loop(door: Any, rank: int) -> Iterator[Any]:
    model = new()
    assert nested(door, model) is model
    assert isinstance(model.layers[1], door.FSDPModule)
    yield from train(model, rank)
    yield model


def in_bf16(door: Any, rank: int) -> Iterator[Any]:
    """Every block in bf16, with casts at its boundaries; norm and head in fp32, in one unit."""
    model = new()
    low = door.MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32)
    for layer in model.layers:
        door.fully_shard(layer, mp_policy=low, reshard_after_forward=False)
    door.fully_shard([model.norm, model.head], mp_policy=door.MixedPrecisionPolicy(cast_forward_inputs=False))
    door.fully_shard(model, mp_policy=low, offload_policy=door.OffloadPolicy())
    seen = []
    model.layers[0].mlp[0].register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    yield from train(model, rank)
    assert set(seen) == {torch.bfloat16}
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    yield model


def built_in_bf16(door: Any, rank: int) -> Iterator[Any]:
    model = nested(door, new(torch.bfloat16))
    yield from train(model, rank, clip=False)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    yield model


def accumulated(door: Any, rank: int) -> Iterator[Any]:
    """Gradients of three microbatches, twice, with nothing sent before the last one."""
    model = nested(door, new(), reshard_after_forward=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
    for i, ids in enumerate(batches(rank, 6)):
        last = i % 3 == 2
        model.set_requires_gradient_sync(last)
        model.set_is_last_backward(last)
        model.set_reshard_after_backward(last)
        loss = loss_of(model, ids) / 3
        loss.backward()
        yield loss.detach()
        if last:
            optimizer.step()
            optimizer.zero_grad()
    yield model


def replicated(door: Any, rank: int) -> Iterator[Any]:
    """Replicas sum their gradients after the second of two microbatches."""
    model = nested(door, new(), mesh=mesh_of((2, 1), ("replicate", "shard")))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
    for i, ids in enumerate(batches(rank, 4)):
        model.set_requires_all_reduce(i % 2 == 1)
        loss = loss_of(model, ids)
        loss.backward()
        yield loss.detach()
        if i % 2:
            optimizer.step()
            optimizer.zero_grad()
    yield model


def told(door: Any, rank: int) -> Iterator[Any]:
    """What a program says about gathers changes no number."""
    model = nested(door, new())
    layers = list(model.layers)
    for i, layer in enumerate(layers):
        layer.set_modules_to_forward_prefetch(layers[i + 1 : i + 3])
        layer.set_modules_to_backward_prefetch(layers[max(i - 2, 0) : i][::-1])
        layer.set_force_sum_reduction_for_comms(True)
        layer.set_gradient_divide_factor(3.0)
    model.set_reshard_after_forward(False)
    model.set_reshard_after_forward(True, recurse=False)
    handle = layers[0].unshard(async_op=True)
    handle.wait()
    assert layers[0].mlp[0].weight.shape == (31, WIDTH)
    yield layers[0].mlp[0].weight.detach().clone()
    layers[0].reshard()
    model.unshard()
    model.reshard()
    yield from train(model, rank)
    layers[1].set_unshard_in_backward(True)
    model.set_reshard_after_forward(True)
    yield from train(model, rank)
    yield model


def ignoring(door: Any, rank: int) -> Iterator[Any]:
    model = new()
    own = model.layers[1].mlp[2].bias
    with torch.no_grad():
        own.fill_(rank)
    for layer in model.layers:
        door.fully_shard(layer, ignored_params={own})
    door.fully_shard(model, ignored_params={own})
    assert model.layers[1].mlp[2].bias is own
    yield from train(model, rank, clip=False, foreach=False)  # which takes tensors of one kind alone
    yield own.detach()


def another_method(door: Any, rank: int) -> Iterator[Any]:
    """`base` is called in the place of `forward`, and then the head by itself."""
    model = new()
    for layer in model.layers:
        door.fully_shard(layer)
    door.fully_shard(model.head)
    door.fully_shard(model)
    door.register_fsdp_forward_method(model, "base")
    door.register_fsdp_forward_method(model.norm, "nothing to do")
    door.share_comm_ctx([model, *model.layers])
    torch.distributed.fsdp.register_fsdp_forward_method(model.layers[0], "mlp_only")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
    for ids in batches(rank):
        loss = model.layers[0].mlp_only(model.head(model.base(ids))[..., :WIDTH]).square().mean()
        loss.backward()
        yield loss.detach()
        optimizer.step()
        optimizer.zero_grad()
    yield model


def scaled(door: Any, rank: int) -> Iterator[Any]:
    """A loss scale that overflows on one rank: no rank takes the step."""
    model = nested(door, new())
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=16.0)
    for i, ids in enumerate(batches(rank)):
        loss = loss_of(model, ids) * (torch.inf if i == 1 and rank == 1 else 1)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        yield torch.tensor(scaler.get_scale())
    yield model


def offloaded(door: Any, rank: int) -> Iterator[Any]:
    """Shards on the host, where gradients of two microbatches add up and are clipped; blocks alone, and in bf16."""
    model, policy = new(), door.CPUOffloadPolicy(pin_memory=False)
    low = door.MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32)
    for layer in model.layers:
        door.fully_shard(layer, offload_policy=policy, mp_policy=low)
    door.fully_shard(model, offload_policy=door.OffloadPolicy())
    yield from train(model, rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, eps=LINEAR, fused=True)
    for i, ids in enumerate(batches(rank, 4)):
        loss_of(model, ids).backward()
        if i % 2:
            yield whole(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]))
            optimizer.step()
            optimizer.zero_grad()
    yield model


PROGRAMS: list[Callable[[Any, int], Iterator[Any]]] = [
    *(plain_loop, in_bf16, built_in_bf16, accumulated, replicated, told, ignoring, another_method, scaled, offloaded),
]


def both(rank: int, *names: str) -> None:
    """Some programs, or all of them."""
    for program in [program for program in PROGRAMS if program.__name__ in names or not names]:
        with naming(program.__name__):
            compare(program, rank)


def compare(program: Callable[[Any, int], Iterator[Any]], rank: int) -> None:
    found = []
    for door in (torch.distributed.fsdp, hocket.sharding):
        values = list(program(door, rank))
        if isinstance(values[-1], nn.Module):
            values += get_model_state_dict(values.pop(), options=StateDictOptions(full_state_dict=True)).values()
        found.append(values)
    # A GPU chooses kernels by where tensors lie, and those round products in bf16 in other ways.
    loose = torch.cuda.is_available() and program in (in_bf16, built_in_bf16, offloaded)
    if loose:  # all together: AdamW makes a lot of a gradient that is nothing but rounding
        theirs, ours = (torch.cat([x.float().cpu().view(-1) for x in values]) for values in found)
        assert (ours - theirs).norm() <= 2e-2 * theirs.norm()
        return
    for theirs, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, check_dtype=program is not built_in_bf16)


def test_programs() -> None:
    run_ranks(both, WORLD)


def hockets_own(rank: int) -> None:
    """What torch has no counterpart for, and what is refused."""
    model = new()
    with pytest.raises(ValueError, match="reshard_after_forward=4, a number of ranks"):
        hocket.fully_shard(model, reshard_after_forward=4)
    with pytest.raises(ValueError, match="mp_policy='bf16' is no MixedPrecisionPolicy"):
        hocket.fully_shard(model, mp_policy="bf16")  # pyrefly: ignore[no-matching-overload]
    on_host = hocket.ShardOptions(offload="pinned")
    with pytest.raises(ValueError, match=r"offload_policy= and ShardOptions\(offload=\) say the same in two ways"):
        hocket.fully_shard(model, options=on_host, offload_policy=hocket.sharding.CPUOffloadPolicy())
    with pytest.raises(ValueError, match=r"offload='pinned' of a model that computes on the CPU.*pin_memory=False"):
        hocket.fully_shard(model, options=on_host)
    with pytest.raises(ValueError, match=r"offload='pinned' of a model that computes on the CPU"):
        hocket.fully_shard(model, offload_policy=hocket.sharding.CPUOffloadPolicy())
    with pytest.raises(ValueError, match="reshard_after_forward= and strategy= say the same"):
        hocket.fully_shard(model, reshard_after_forward=True, strategy="optim_grads")
    with pytest.raises(ValueError, match="a ModuleList, which is never called itself"):
        hocket.fully_shard(model.layers)
    with pytest.raises(ValueError, match=r"shard_placement_fn returned 3 for norm\.weight"):
        hocket.fully_shard(model.layers[0], shard_placement_fn=lambda param: 3)

    # Weights of the first rank, tied ones whose other holder is outside of the unit, and a call with units around.
    torch.manual_seed(rank)
    model: Any = Model()
    model.head.weight = model.embed.weight
    torch.manual_seed(0)
    plain = Model()
    plain.head.weight = plain.embed.weight
    hocket.fully_shard(model.embed, sync_module_states=True)
    nested_again = [hocket.fully_shard(model.layers[i], sync_module_states=True) for i in range(2)]
    with pytest.raises(ValueError, match="its 'embed' belongs to a sharded model already"):
        hocket.fully_shard(model, units=Block)
    hocket.fully_shard(model, sync_module_states=True)
    assert nested_again[0] is model.layers[0]
    with pytest.raises(ValueError, match="it belongs to a sharded model already"):
        hocket.fully_shard(model)
    with pytest.raises(ValueError, match=r"set_symm_mem_for_comm does not work .*copy_engine"):
        model.set_symm_mem_for_comm()
    context = hocket.sharding.context_of(model)
    assert [unit.name for unit in context.units] == ["", "embed", "layers.0", "layers.1"]
    assert isinstance(nn.Sequential(*model.layers)[0], hocket.sharding.FSDPModule)
    ours, theirs = (torch.optim.SGD(one.parameters(), lr=0.1, foreach=True) for one in (model, plain))
    for ids in zip(*(batches(one) for one in range(WORLD)), strict=True):
        loss_of(model, ids[rank]).backward()
        torch.stack([loss_of(plain, one) for one in ids]).mean().backward()
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(state[name], value)


def test_what_hocket_has_besides() -> None:
    run_ranks(hockets_own, WORLD)


BY_HAND: list[Callable[[Any, Tensor], Tensor]] = [
    lambda model, ids: model.head(model.base(ids)),  # base is no forward: its modules are called one by one
    lambda model, ids: model.head(model.norm(model.layers[0].mlp(model.embed(ids)))),  # a part of a unit
    lambda model, ids: model(ids) + model.head(model.layers[2].norm(model.embed(ids))),  # both
]


def by_hand(rank: int) -> None:
    """Modules that are no units, called outside of any forward of the model: refused, unless their unit is gathered."""
    model, plain = new(), new()
    nested(hocket.sharding, model)
    ours, theirs = (torch.optim.SGD(one.parameters(), lr=0.1, foreach=True) for one in (model, plain))
    units = [model, model.layers[0], model.layers[2]]
    for call in BY_HAND:
        for ids in zip(*(batches(one, 2) for one in range(WORLD)), strict=True):
            with pytest.raises(ValueError, match=r"a module reads a weight of .* outside of a forward of that unit"):
                call(model, ids[rank])
            assert isinstance(model.head.weight, DTensor)  # outside of a forward it is the shard
            if call is BY_HAND[-1]:  # the model's own forward ends what `unshard` began
                continue
            for unit in units:
                unit.unshard()
            call(model, ids[rank]).square().mean().backward()
            for unit in units:
                unit.reshard()
            torch.stack([call(plain, one).square().mean() for one in ids]).mean().backward()
            for optimizer in (ours, theirs):
                optimizer.step()
                optimizer.zero_grad()
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(state[name], value)


def test_modules_called_by_hand() -> None:
    run_ranks(by_hand, WORLD)


class Padded(Model):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH, padding_idx=3)
        self.register_buffer("scale", torch.ones(1), persistent=False)

    def reset(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding | nn.LayerNorm):
                module.reset_parameters()
        self.embed.weight.data.normal_(std=0.3)
        nn.init.trunc_normal_(self.head.weight, std=0.5)
        nn.init.ones_(self.scale)


def late_values(rank: int) -> None:
    """Sharded on the meta device; initial values are those of a plain model, or loaded from the first rank."""
    plain = Padded()
    torch.manual_seed(0)
    plain.reset()
    with torch.device("meta"):
        models: list[Any] = [Padded(), Padded()]
    for model in models:
        nested(hocket.sharding, model, mp_policy=hocket.sharding.MixedPrecisionPolicy(torch.bfloat16))
        with pytest.raises(ValueError, match="was sharded on the meta device and has no values: call model"):
            model(next(batches(rank)))
        hocket.sharding.context_of(model).abort()
        model.to_empty(device="cpu")
    torch.manual_seed(0)
    models[0].reset()
    nn.init.ones_(models[1].scale)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(models[1], plain.state_dict() if rank == 0 else {}, options=options)
    for model in models:
        state: dict[str, Any] = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        for name, value in plain.state_dict().items():
            assert torch.equal(state[name], value), name
        loss_of(model, next(batches(rank))).backward()


def test_values_after_sharding() -> None:
    run_ranks(late_values, WORLD)
