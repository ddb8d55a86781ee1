"""Parameters with FSDP2's `fsdp_pre_all_gather` and `fsdp_post_all_gather`, and `dp_mesh_dims`, beside FSDP2 itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._pytree import tree_map_only

import hocket
import hocket.sharding
from tests.fsdp.twin import mesh_of, naming
from tests.helpers.parity import LINEAR
from tests.helpers.ranks import run_ranks

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
aten = torch.ops.aten


class Rows(Tensor):
    """A weight, or rows of one, around a plain tensor; `pads` its rows itself, as FSDP2 wants it."""

    def __new__(cls, rows: Tensor, pads: bool = True) -> Any:
        return Tensor._make_wrapper_subclass(cls, rows.shape, dtype=rows.dtype, device=rows.device)

    def __init__(self, rows: Tensor, pads: bool = True) -> None:
        self.rows, self.pads = rows, pads
        self.scale: Tensor | None = None

    def __repr__(self) -> str:  # pyrefly: ignore[bad-override]
        return f"{type(self).__name__}({self.rows})"

    @classmethod
    # pyrefly: ignore[bad-override]  (the stub of torch leaves out `func`)
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        pads = next(x.pads for x in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(x, cls))
        found = func(*tree_map_only(cls, lambda x: x.rows, args), **tree_map_only(cls, lambda x: x.rows, kwargs or {}))
        kept = (
            *(aten.detach, aten.new_zeros, aten.empty_like, aten.clone, aten.copy_, aten._to_copy),
            *(aten.slice, aten.split, aten.view),
        )
        if func.overloadpacket not in kept:
            return found
        return tree_map_only(Tensor, lambda x: cls(x, pads), found)

    def padded(self, to: Tensor, whole: int, ranks: int) -> Tensor:
        if not self.pads:
            return to
        room = to.new_zeros(math.ceil(whole / ranks), *to.shape[1:])
        room.view(torch.uint8)[: len(to)] = to.view(torch.uint8)
        return room


class InBf16(Rows):
    """Sent in bf16, and computed with in the dtype of the unit."""

    def fsdp_pre_all_gather(self, mesh: Any, size: Any, stride: Any, module: nn.Module, policy: Any) -> Any:
        assert isinstance(module, nn.Linear | nn.Embedding)
        assert mesh.ndim == 1
        assert policy.param_dtype in (None, BF16)
        assert stride == (size[1], 1)
        return (self.padded(self.rows.to(BF16), size[0], mesh.size()),), None

    @torch.no_grad()
    def fsdp_post_all_gather(self, tensors: Any, said: Any, dtype: Any, *, out: Any = None) -> Any:
        (whole,) = tensors
        if out is None:
            return (made := whole.to(dtype)), (whole, made)
        out = getattr(out, "_local_tensor", out)  # of FSDP2, if tensor-parallel
        with torch.autograd._unsafe_preserve_version_counter(out):
            out.copy_(whole[: len(out)])  # FSDP2 gives padding, too
        return None


class InFloat8(Rows):
    """Sent in float8, with a scale for the whole weight, which all ranks compute or find here."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        scale = self.scale
        if scale is None:
            largest = self.rows.abs().amax() if self.rows.numel() else self.rows.new_zeros(())
            dist.all_reduce(largest, dist.ReduceOp.MAX, mesh.get_group())
            scale = torch.finfo(E4M3).max / largest.clamp(1e-12)
        return (self.padded((self.rows * scale).to(E4M3), HIDDEN if self.shape[1] == WIDTH else WIDTH, 2),), (scale,)

    def fsdp_post_all_gather(self, tensors: Any, said: Any, dtype: Any, *, out: Any = None) -> Any:
        if out is not None:
            assert out.numbers.untyped_storage().data_ptr() == tensors[0].untyped_storage().data_ptr()
            (out.scale,) = said
            return None
        return Float8(tensors[0], said[0], dtype), tensors


class Float8(Tensor):
    """What `InFloat8` makes: products dequantize it."""

    def __new__(cls, numbers: Tensor, scale: Tensor, dtype: torch.dtype) -> Any:
        return Tensor._make_wrapper_subclass(
            cls, numbers.shape, strides=numbers.stride(), dtype=dtype, device=numbers.device
        )

    def __init__(self, numbers: Tensor, scale: Tensor, dtype: torch.dtype) -> None:
        self.numbers, self.scale = numbers, scale

    @classmethod
    # pyrefly: ignore[bad-override]  (the stub of torch leaves out `func`)
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (aten.detach, aten.t, aten.view, aten.as_strided, aten.alias):
            return cls(func(args[0].numbers, *args[1:], **(kwargs or {})), args[0].scale, args[0].dtype)
        return func(*tree_map_only(cls, lambda x: x.numbers.to(x.dtype) / x.scale, args), **(kwargs or {}))


WIDTH, HIDDEN, VOCAB = 12, 31, 20


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def new(kind: Callable[[Tensor], Any]) -> Any:
    """A model whose blocks have weights of a kind."""
    torch.manual_seed(0)
    made: Any = Model()
    for block in made.blocks:
        for linear in (block.up, block.down):
            linear.weight = nn.Parameter(kind(linear.weight.detach()))
    return made


def nested(door: Any, model: Any, **arguments: Any) -> Any:
    for block in model.blocks:
        door.fully_shard(block, **arguments)
    return door.fully_shard(model, **arguments)


def loss_of(model: Any, rank: int, step: int) -> Tensor:
    ids = torch.randint(VOCAB, (4, 6), generator=torch.Generator().manual_seed(10 * step + rank))
    return nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1).float(), ids[:, 1:].flatten())


def plain(x: Any) -> Tensor:
    x = x.full_tensor() if isinstance(x, DTensor) else x
    x = x.wait() if hasattr(x, "wait") else x
    return (x.rows if isinstance(x, Rows) else x).detach().clone()


def scales(model: nn.Module) -> None:
    """All scales at once, as torchao's function computes them after a step."""
    weights: list[Any] = [p for p in model.parameters() if isinstance(p, DTensor) and isinstance(p._local_tensor, Rows)]
    assert len(weights) == 4
    largest: Any = torch.clamp(torch.stack(torch._foreach_norm(weights, ord=math.inf)), 1e-12)
    for weight, scale in zip(weights, (torch.finfo(E4M3).max / largest).to_local(), strict=True):
        weight._local_tensor.scale = scale


def train(model: Any, rank: int, microbatches: int = 1, after: Callable[[Any], None] | None = None) -> Iterator[Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, eps=LINEAR)
    for step in range(3):
        for i in range(microbatches):
            loss = loss_of(model, rank, 5 * step + i) / microbatches
            loss.backward()
            yield loss.detach()
        for p in model.parameters():
            if p.grad is not None:
                yield plain(p.grad)
        optimizer.step()
        optimizer.zero_grad()
        if after is not None:
            after(model)
    yield from (plain(p) for p in model.parameters())
    yield from map(plain, get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)).values())
    with torch.no_grad():
        yield loss_of(model, rank, 99)


Program = Callable[[Any, int], Iterator[Any]]


def simple(door: Any, rank: int, kind: Any, own: Any = None, **arguments: Any) -> Iterator[Any]:
    """`own`: a kind for hocket."""
    ours = door is hocket.sharding
    model = nested(door, new(own if ours and own else kind), **arguments)
    weight: Any = model.blocks[0].up.weight
    assert isinstance(weight, DTensor)
    assert isinstance(weight._local_tensor, Rows)
    assert weight.shape == (HIDDEN, WIDTH)
    yield from train(model, rank)


def accumulated(door: Any, rank: int) -> Iterator[Any]:
    model = nested(door, new(InBf16))
    model.set_requires_gradient_sync(False)
    loss_of(model, rank, 50).backward()
    model.set_requires_gradient_sync(True)
    yield from train(model, rank, microbatches=2)


def precomputed(door: Any, rank: int) -> Iterator[Any]:
    yield from train(nested(door, new(InFloat8)), rank, after=scales)


def tied_and_frozen(door: Any, rank: int) -> Iterator[Any]:
    """Two blocks with one weight, and one whose weight does not learn. Some other rank's rows are none."""
    model = new(InBf16)
    model.blocks[1].up.weight = model.blocks[0].up.weight
    model.blocks[0].down.weight.requires_grad_(False)
    model.embed.weight = nn.Parameter(InBf16(model.embed.weight.detach()))
    model.head.weight = model.embed.weight
    yield from train(door.fully_shard(model, reshard_after_forward=True), rank)


def on_meta(door: Any, rank: int) -> Iterator[Any]:
    with torch.device("meta"):
        model = new(InBf16)
    nested(door, model)
    model.to_empty(device="cpu")
    for p in model.parameters():
        value = torch.arange(float(p.numel())).view(p.shape).sin() / 3
        with torch.no_grad():
            p.copy_(distribute_tensor(value, p.device_mesh, p.placements))
    yield from train(model, rank)


def spmd(door: Any, rank: int, mesh: Any, dims: Any, other: int | None) -> Iterator[Any]:
    """All parameters are DTensors on the whole mesh. `other` is the axis on which blocks are divided."""
    torch.manual_seed(0)
    model: Any = Model()
    for name, module in model.named_modules():
        for key, p in list(module._parameters.items()):
            places: list[Any] = [Replicate()] * mesh.ndim
            if other is not None and ("up" in name or "down" in name):
                places[other] = Shard(1 if "down" in name else 0)
            module._parameters[key] = nn.Parameter(distribute_tensor(p, mesh, places)) if p is not None else None

    def put(x: Tensor) -> Any:
        return DTensor.from_local(x, mesh, [Replicate()] * mesh.ndim, run_check=False)

    for block in model.blocks:
        door.fully_shard(block, mesh=mesh, dp_mesh_dims=dims)
    door.fully_shard(model, mesh=mesh, dp_mesh_dims=dims)
    if dims.shard is not None and (dims.shard, dims.replicate) != ("a", "b"):  # replicas first, here; plain if whole
        yield [(tuple(p.placements), p.device_mesh.mesh.tolist()) for p in model.parameters()]
    data = sum(mesh.get_local_rank(n) * 7**i for i, n in enumerate((*dims.replicate_names, *dims.shard_names)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, eps=LINEAR)
    for step in range(3):
        ids = torch.randint(VOCAB, (4, 6), generator=torch.Generator().manual_seed(100 * step + data))
        logits = model(put(ids)).redistribute(placements=[Replicate()] * mesh.ndim).to_local()
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())
        loss.backward()
        yield loss.detach()
        yield from (plain(p.grad) for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
    yield from (plain(p) for p in model.parameters())


def tensor_parallel(door: Any, rank: int) -> Iterator[Any]:
    """A part of a weight on each of two ranks."""
    mesh = mesh_of((2, 2), ("a", "b"))
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(WIDTH, 8, bias=False))
    part = model[0].weight.detach().chunk(2)[mesh.get_local_rank("b")].clone()
    model[0].weight = nn.Parameter(DTensor.from_local(InBf16(part), mesh["b"], [Shard(0)], run_check=False))
    optimizer = torch.optim.AdamW(door.fully_shard(model, mesh=mesh["a"]).parameters(), lr=0.1, eps=LINEAR)
    for step in range(3):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + mesh.get_local_rank("a")))
        out = model(DTensor.from_local(x, mesh["b"], [Replicate()], run_check=False))
        loss = out.redistribute(placements=[Replicate()]).to_local().square().mean()
        loss.backward()
        yield loss.detach()
        optimizer.step()
        optimizer.zero_grad()


def compare(program: Program, rank: int, case: object) -> None:
    with naming(case):
        theirs, ours = (list(program(door, rank)) for door in (torch.distributed.fsdp, hocket.sharding))
        for a, b in zip(ours, theirs, strict=True):
            if isinstance(a, Tensor):
                exact = 0 if dist.get_world_size() == 2 else None  # else sums have several orders
                torch.testing.assert_close(a, b, rtol=exact, atol=exact)
            else:
                assert a == b


def programs(rank: int) -> None:
    low = torch.distributed.fsdp.MixedPrecisionPolicy(BF16, torch.float32)
    for arguments in (
        {"kind": InBf16},
        {"kind": InBf16, "own": partial(InBf16, pads=False), "reshard_after_forward": False},
        {"kind": InBf16, "mp_policy": low},
        {"kind": InBf16, "mesh": mesh_of((2, 1), ("replicate", "shard"))},
        {"kind": InBf16, "offload_policy": torch.distributed.fsdp.CPUOffloadPolicy(pin_memory=False)},
        {"kind": InFloat8},
        {"kind": InFloat8, "own": partial(InFloat8, pads=False)},
        {"kind": InFloat8, "reshard_after_forward": False},
    ):
        compare(partial(simple, **arguments), rank, arguments)
    for program in (accumulated, precomputed, tied_and_frozen, on_meta):
        compare(program, rank, program)


def test_programs_beside_fsdp2() -> None:
    run_ranks(programs, 2, timeout=80)


def meshes(rank: int) -> None:
    Dims = torch.distributed.fsdp.DataParallelMeshDims
    line, square = mesh_of((4,), ("dp",)), mesh_of((2, 2), ("a", "b"))
    for case in [
        (line, Dims(shard="dp"), None),
        (line, Dims(replicate="dp"), None),
        (square, Dims(shard="a"), 1),
        (square, Dims(shard="b"), 0),
        (square, Dims(replicate="b"), 0),
        (square, Dims(shard="b", replicate="a"), None),
        (square, Dims(shard="a", replicate="b"), None),
        (square, Dims(shard=("a", "b")), None),
    ]:
        compare(partial(spmd, mesh=case[0], dims=case[1], other=case[2]), rank, case)
    compare(tensor_parallel, rank, "tensor-parallel")
    with pytest.raises(ValueError, match=r"dp_mesh_dims=.* name its data-parallel axes, all but at most one"):
        hocket.fully_shard(nn.Linear(2, 2), mesh=line, dp_mesh_dims=Dims(shard="tp"))
    with pytest.raises(ValueError, match="parameter weight is no DTensor, and with dp_mesh_dims= all are"):
        hocket.fully_shard(nn.Linear(2, 2), mesh=line, dp_mesh_dims=Dims(shard="dp"))


@pytest.mark.skipif(not hasattr(torch.distributed.fsdp, "DataParallelMeshDims"), reason="torch 2.11 does not have it")
def test_a_mesh_of_which_axes_are_data_parallel() -> None:
    run_ranks(meshes, 4, timeout=100)


class Two(InBf16):
    def __init__(self, rows: Tensor, pads: bool = True) -> None:
        super().__init__(rows, pads)
        self.other = rows.clone()


class Half(Rows):
    def fsdp_pre_all_gather(self, mesh: Any) -> Any: ...


class Itself(Tensor):
    """Has the numbers itself, and gives one tensor."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return self.to(BF16), None

    fsdp_post_all_gather = InBf16.fsdp_post_all_gather


def hockets_own(rank: int, folder: Path) -> None:
    with pytest.raises(ValueError, match=r"blocks\.0\.up\.weight is a Two, which hocket\.fully_shard can't gather"):
        hocket.fully_shard(new(Two))
    with pytest.raises(ValueError, match=r"is a Half, which hocket\.fully_shard can't gather"):
        hocket.fully_shard(new(Half))
    with pytest.raises(ValueError, match="fsdp_pre_all_gather are divided over ranks of a process group"):
        hocket.fully_shard(new(InBf16), strategy="no_shard")

    late = new(lambda x: x)
    hocket.fully_shard(late)
    late.head.weight._local_tensor.fsdp_pre_all_gather = print
    with pytest.raises(ValueError, match=r"head\.weight got fsdp_pre_all_gather after it was sharded"):
        loss_of(late, rank, 0)

    made = [new(InBf16), new(lambda x: x.as_subclass(Itself))]
    for model in made:
        model.given = nn.ModuleList([nn.Linear(WIDTH, HIDDEN)])  # outside of the unit that has its weight
        model.given[0].weight = model.blocks[0].up.weight
        hocket.fully_shard(model.blocks[1])
        hocket.fully_shard(model)
        assert model.given[0]._parameters["weight"] is model.blocks[0].up._parameters["weight"]
    contexts = [hocket.sharding.context_of(model) for model in made]
    optimizers = [torch.optim.AdamW(model.parameters()) for model in made]
    for step in range(2):
        loss_of(made[0], rank, step).backward()
        hocket.sharding.step_and_gather(contexts[0], optimizers[0])
        optimizers[0].zero_grad()
    assert contexts[0].stats().reduces == 2 * 2  # each unit once in a backward
    hocket.checkpoint.save(contexts[0], optimizers[0], folder)
    hocket.checkpoint.load(contexts[1], optimizers[1], folder)
    with torch.no_grad():
        for model in made:
            model.blocks[0].down.weight._local_tensor.mul_(2)  # noticed, too
        assert torch.equal(*(loss_of(model, rank, 9) for model in made))
        (weight,) = (p for name, p in made[0].named_parameters() if name == "blocks.0.down.weight")
        with contexts[0].gathered():
            assert torch.equal(made[0].blocks[0].down.weight, plain(weight).to(BF16).float())
    made[0].blocks[1].reshard()
    made[0].reshard()
    assert contexts[0].stats().full_bytes == 0
    with pytest.raises(ValueError, match=r"gathered\(changed=True\), where blocks"), contexts[0].gathered(changed=True):
        pass


def test_what_hocket_does_with_them(tmp_path: Path) -> None:
    run_ranks(hockets_own, 2, tmp_path / "saved")
