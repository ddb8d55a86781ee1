"""Models whose parameters tensor-parallel ranks divide, as DTensors: beside a plain twin, and beside FSDP2."""

from __future__ import annotations

import copy
import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import hocket
from tests.fsdp.divided import (
    VOCABULARY,
    WIDTH,
    Block,
    Model,
    batch,
    by_hocket,
    by_torch,
    compare,
    full,
    in_one_call,
    like_fsdp2,
    loss_of,
    model,
    parallel,
    tie,
    under_fsdp2,
    whole,
)
from tests.helpers.parity import LINEAR
from tests.helpers.ranks import run_ranks


def trains(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dp, tp = mesh["dp"], mesh["tp"]
    made = like_fsdp2(parallel(model(), tp), dp)
    assert {name: tuple(p.shape) for name, p in made.named_parameters()} == {
        name: tuple(p.shape) for name, p in model().named_parameters()
    }
    compare(made, dp, by_hocket)
    compare(like_fsdp2(parallel(model(), tp), dp), dp, by_torch, microbatches=2)
    compare(under_fsdp2(parallel(model(), tp), dp), dp, by_torch)  # or the twin is wrong
    for strategy in ("no_shard", "optim"):
        compare(in_one_call(parallel(model(), tp), dp, strategy=strategy), dp, by_torch, microbatches=2, steps=2)


def test_it_trains_as_a_plain_model() -> None:
    run_ranks(trains, 4)


def trains_recomputed(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    around, inside = (parallel(model(), mesh["tp"]) for _ in range(2))
    around.recomputes = True  # by reentrant checkpoints
    for block in inside.blocks:
        assert isinstance(block, Block)
        block.recomputes = False
    for made in (around, inside):
        compare(in_one_call(made, mesh["dp"]), mesh["dp"], by_hocket, steps=2)


def test_blocks_are_computed_again() -> None:
    run_ranks(trains_recomputed, 4)


def trains_elsewhere(rank: int, shape: tuple[int, ...]) -> None:
    """On one rank for each part, and on two axes of replicas and shards."""
    names = ("replicas", "shards", "tp")[-len(shape) :]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    dp = mesh["shards"] if len(shape) == 2 else mesh["replicas", "shards"]
    made, plain = parallel(model(tied=True), mesh["tp"]), model(tied=True)
    tie(made)  # torch has made two of it
    in_one_call(made, dp)
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.1, eps=LINEAR, fused=True) for one in (made, plain)]
    for step in range(2):
        for one, optimizer in zip((made, plain), optimizers, strict=True):
            optimizer.zero_grad()
            loss_of(one, *batch(0, step, 0)).backward()  # the same tokens on all ranks
        torch.testing.assert_close(float(by_torch(made)), float(by_torch(plain)))
        for optimizer in optimizers:
            optimizer.step()
    for name, value in plain.state_dict().items():
        if name != "head.weight":
            torch.testing.assert_close(
                full(made.get_parameter(name)), value, msg=lambda text, name=name: f"{name}: {text}"
            )


def test_one_rank_for_each_part() -> None:
    run_ranks(trains_elsewhere, 2, (1, 2))


def test_replicas_of_shards_of_parts() -> None:
    run_ranks(trains_elsewhere, 4, (2, 1, 2))


def numbers(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plain, made = model(), in_one_call(parallel(model(), mesh["tp"]), mesh["dp"])
    for one in (plain, made):
        loss_of(one, *batch(0, 0, 0)).backward()
    for (name, expected), shard in zip(plain.named_parameters(), made.parameters(), strict=True):
        assert expected.grad is not None
        for x, y in ((shard, expected.detach()), (shard.grad, expected.grad)):
            assert x is not None
            assert (tuple(x.shape), x.numel(), x.ndim) == (tuple(y.shape), y.numel(), y.ndim), name
            torch.testing.assert_close(full(x), y, msg=lambda text, name=name: f"{name}: {text}")
            # torch 2.11 refuses to bring what tensor parallelism divides by rows together.
            for number in (torch.sum, torch.norm, torch.mean, torch.amax) if torch.__version__ >= "2.12" else ():
                torch.testing.assert_close(full(number(x.detach())), number(y))
    weight = made.get_parameter("blocks.0.down.weight")
    with torch.no_grad():
        torch.manual_seed(1)
        nn.init.normal_(weight)
        torch.manual_seed(1)
        drawn = nn.init.normal_(torch.empty(weight.shape, dtype=weight.dtype))
        assert torch.equal(full(weight), drawn)
    made.load_state_dict(plain.state_dict())
    assert torch.equal(full(weight), plain.get_parameter("blocks.0.down.weight"))


def test_numbers_are_those_of_the_whole() -> None:
    run_ranks(numbers, 4)


def state_of(made: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    options = StateDictOptions(full_state_dict=True)
    return [whole(made), get_optimizer_state_dict(made, optimizer, options=options)["state"]]


def saves(rank: int, folder: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    made = in_one_call(parallel(model(), mesh["tp"]), mesh["dp"])
    optimizer = torch.optim.AdamW(made.parameters(), lr=1e-2, fused=True)
    for step in range(2):
        optimizer.zero_grad()
        loss_of(made, *batch(mesh["dp"].get_local_rank(), step, 0)).backward()
        optimizer.step()
    hocket.checkpoint.save(made, optimizer, folder)
    found = state_of(made, optimizer)
    apart = init_device_mesh("cpu", (1, 4), mesh_dim_names=("dp", "tp"))
    others = [
        in_one_call(parallel(model(seed=1), mesh["tp"]), mesh["dp"], strategy="optim"),
        in_one_call(parallel(model(seed=1), apart["tp"]), apart["dp"]),
        in_one_call(model(seed=1), apart["tp"]),
    ]
    for other in others:
        optimizer = torch.optim.AdamW(other.parameters(), lr=1.0, fused=True)
        hocket.checkpoint.load(other, optimizer, folder)
        torch.testing.assert_close(state_of(other, optimizer), found, rtol=0.0, atol=0.0)


def uneven(rank: int, folder: Path) -> bool:
    """Seven rows over two tensor-parallel and three other ranks: some have none."""
    mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    linear = nn.Linear(4, 7, bias=False)
    made, wanted = nn.Sequential(linear), linear.weight.detach().clone()
    parallelize_module(made, mesh["tp"], {"0": ColwiseParallel()})
    hocket.fully_shard(made, mesh=mesh["dp"], strategy="optim_grads_params")
    hocket.checkpoint.save(made, None, folder)
    found = {"model.0.weight": torch.zeros(7, 4)}
    dcp.load(found, checkpoint_id=folder)
    return torch.equal(found["model.0.weight"], wanted)


def test_a_checkpoint_of_uneven_rows_is_whole(tmp_path: Path) -> None:
    assert run_ranks(uneven, 6, tmp_path / "saved") == [True] * 6


def test_a_checkpoint_fits_other_meshes(tmp_path: Path) -> None:
    run_ranks(saves, 4, tmp_path / "saved")


def refuses(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    made = parallel(model(), mesh["tp"])
    before = {name: id(param) for name, param in made.named_parameters()}
    for other in (None, mesh["tp"], mesh):
        with pytest.raises(ValueError, match=r"DTensor over ranks \[\d, \d\].*give it the other axis"):
            hocket.fully_shard(made, units=Block, mesh=other)
    both = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for layer, axis in zip(both, ("dp", "tp"), strict=True):
        parallelize_module(layer, mesh[axis], ColwiseParallel())
    with pytest.raises(ValueError, match="one tensor-parallel mesh beside"):
        hocket.fully_shard(both, mesh=init_device_mesh("cpu", (4, 1), mesh_dim_names=("x", "y"))["y"])
    two = nn.Linear(4, 4)
    two.weight = nn.Parameter(distribute_tensor(two.weight.detach(), mesh, [Shard(0), Replicate()]))
    with pytest.raises(ValueError, match=r"weight is a DTensor with placements .* on a mesh of 2x2 ranks"):
        hocket.fully_shard(two, mesh=mesh["dp"])
    few = parallelize_module(nn.Linear(4, 1), mesh["tp"], ColwiseParallel())
    with pytest.raises(ValueError, match="leaves nothing for some of 2 tensor-parallel ranks"):
        hocket.fully_shard(few, mesh=mesh["dp"])
    assert before == {name: id(param) for name, param in made.named_parameters()}
    early = torch.optim.SGD(made.parameters(), lr=1.0)
    in_one_call(made, mesh["dp"])
    other = parallel(model(), mesh["tp"])
    first = [weakref.ref(param) for param in other.parameters()]
    in_one_call(other, mesh["dp"])
    gc.collect()
    assert [ref() for ref in first if ref() is not None] == [], "parts that are sharded keep no memory"
    loss_of(made, *batch(0, 0, 0)).backward()
    with pytest.raises(ValueError, match="was built before"):
        early.step()


def test_what_cannot_be_right_is_refused() -> None:
    run_ranks(refuses, 4)


def from_meta(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with torch.device("meta"):
        made = parallel(Model().double(), mesh["tp"])
    made = like_fsdp2(made, mesh["dp"])
    made.to_empty(device="cpu")
    made.load_state_dict(model().state_dict())
    compare(made, mesh["dp"], by_hocket, steps=2)


def test_from_the_meta_device() -> None:
    run_ranks(from_meta, 4)


def llama_of_transformers(rank: int, folder: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 24}
    config = LlamaConfig(vocab_size=VOCABULARY, hidden_size=WIDTH, **sizes)
    made, plain = (LlamaForCausalLM(copy.deepcopy(config)).double() for _ in range(2))
    made.load_state_dict(plain.state_dict())
    columns, rows = ColwiseParallel(), RowwiseParallel()
    attention: dict[str, ParallelStyle] = {"q_proj": columns, "k_proj": columns, "v_proj": columns, "o_proj": rows}
    mlp: dict[str, ParallelStyle] = {"gate_proj": columns, "up_proj": columns, "down_proj": rows}
    for layer in made.model.layers:
        parallelize_module(layer.self_attn, mesh["tp"], attention)
        parallelize_module(layer.mlp, mesh["tp"], mlp)
        hocket.fully_shard(layer, mesh=mesh["dp"])
    hocket.fully_shard(made, mesh=mesh["dp"])
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.1, eps=LINEAR, fused=True) for one in (made, plain)]
    for step in range(2):
        all_ids, here = [batch(dp, step, 0)[0] for dp in range(2)], mesh["dp"].get_local_rank()
        loss = made(all_ids[here], labels=all_ids[here]).loss
        loss.backward()
        expected = torch.stack([plain(ids, labels=ids).loss for ids in all_ids])
        expected.mean().backward()
        torch.testing.assert_close(loss, expected[here])
        torch.testing.assert_close(float(by_torch(made)), float(by_torch(plain)))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, value in plain.named_parameters():
        torch.testing.assert_close(
            full(made.get_parameter(name)), value.detach(), msg=lambda text, name=name: f"{name}: {text}"
        )
    hocket.checkpoint.save_pretrained(made, folder / "saved", dtype=torch.float32)
    again = AutoModelForCausalLM.from_pretrained(folder / "saved", dtype=torch.float32).state_dict()
    assert all(torch.equal(value.float(), again[name]) for name, value in whole(made).items())
    for shard in made.parameters():
        nn.init.zeros_(shard)
    hocket.checkpoint.load_pretrained(made, folder / "saved")
    assert all(torch.equal(value, again[name].double()) for name, value in whole(made).items())


def test_a_model_of_transformers_with_norms_on_all_ranks(tmp_path: Path) -> None:
    run_ranks(llama_of_transformers, 4, tmp_path)


def in_other_ways(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dp, tp = mesh["dp"], mesh["tp"]
    offloaded = in_one_call(parallel(model(), tp), dp, options=hocket.ShardOptions(offload="pageable"))
    compare(offloaded, dp, by_hocket, steps=2)
    # Microbatches that are added up on each rank, then sent.
    made, plain = parallel(model(), tp), model()
    context = hocket.fully_shard(made, units=Block, mesh=dp, precision=hocket.Precision(main=None, accumulate=None))
    with context.no_sync():
        loss_of(made, *batch(dp.get_local_rank(), 0, 0)).backward()
    loss_of(made, *batch(dp.get_local_rank(), 0, 1)).backward()
    for microbatch in range(2):
        torch.stack([loss_of(plain, *batch(one, 0, microbatch)) for one in range(2)]).mean().backward()
    for shard, expected in zip(made.parameters(), plain.parameters(), strict=True):
        assert expected.grad is not None
        torch.testing.assert_close(full(shard.grad), expected.grad)
    # One tensor-parallel rank has an infinity in its part: all leave the step out.
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    optimizer = torch.optim.SGD(made.parameters(), lr=1.0)
    weight = made.get_parameter("blocks.0.up.weight")
    if rank == 1:
        local: Any = weight.grad
        local.to_local()[0] = torch.inf
    before = full(weight)
    scaler.scale(torch.zeros(()))
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(full(weight), before)
    assert scaler.get_scale() == 0.5


def test_offload_accumulation_and_grad_scaler() -> None:
    run_ranks(in_other_ways, 4)


class Experts(nn.Module):
    """Each token goes to all experts, those of other ranks too."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, WIDTH, WIDTH) / WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if not isinstance(self.weight, DTensor):
            return torch.einsum("btd,edf->btf", x, self.weight)
        mesh = self.weight.device_mesh
        tokens = DTensor.from_local(x, mesh, [Shard(0)]).redistribute(mesh, [Replicate()])
        mine = torch.einsum("btd,edf->btf", tokens.to_local(grad_placements=[Partial()]), self.weight.to_local())
        return DTensor.from_local(mine, mesh, [Partial()]).redistribute(mesh, [Shard(0)]).to_local()


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.experts = nn.Embedding(VOCABULARY, WIDTH), Experts()
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return self.head(x + self.experts(x))


def mixture() -> Mixture:
    torch.manual_seed(0)
    return Mixture().double()


def through_a_checkpoint(made: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """It has whole weights, and gives back what was saved."""
    hocket.checkpoint.save(made, optimizer, folder)
    wanted = {name: full(param) for name, param in made.named_parameters()}
    found = {f"model.{name}": torch.zeros_like(value) for name, value in wanted.items()}
    dcp.load(found, checkpoint_id=folder)
    with torch.no_grad():
        for param in made.parameters():
            param.zero_()
    hocket.checkpoint.load(made, optimizer, folder)
    for name, value in wanted.items():
        torch.testing.assert_close(found[f"model.{name}"], value, rtol=0.0, atol=0.0)
        torch.testing.assert_close(full(made.get_parameter(name)), value, rtol=0.0, atol=0.0)


def experts_divided(rank: int, folder: Path) -> None:
    """As torchtitan has it: experts over the ranks of one axis, their shards over the other; the rest over both."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "ep"))
    everyone = init_device_mesh("cpu", (4,))
    made, plain = mixture(), mixture()
    weight = made.experts.weight.detach()
    made.experts.weight = nn.Parameter(distribute_tensor(weight, mesh["ep"], [Shard(0)]))
    hocket.fully_shard(made.experts, mesh=mesh["replicas"])
    made.experts.set_gradient_divide_factor(4.0)  # pyrefly: ignore[not-callable]
    hocket.fully_shard(made, mesh=everyone)
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.1, eps=LINEAR, fused=True) for one in (made, plain)]
    for step in range(2):
        loss_of(made, *batch(rank, step, 0)).backward()
        torch.stack([loss_of(plain, *batch(one, step, 0)) for one in range(4)]).mean().backward()
        torch.testing.assert_close(float(by_hocket(made)), float(by_torch(plain)))  # torch's takes one mesh alone
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    found = whole(made)
    for name, value in plain.named_parameters():
        torch.testing.assert_close(found[name], value.detach(), msg=lambda text, name=name: f"{name}: {text}")
        torch.testing.assert_close(full(made.get_parameter(name)), found[name], rtol=0.0, atol=0.0)
    through_a_checkpoint(made, optimizers[0], folder)
    alike = mixture()
    alike.experts.weight = nn.Parameter(distribute_tensor(weight, mesh["ep"], [Replicate()]))
    hocket.fully_shard(alike.experts, mesh=mesh["replicas"])
    with pytest.raises(ValueError, match=r"weight is a DTensor over ranks .* give it the other axis"):
        hocket.fully_shard(alike, mesh=everyone)


def test_experts_that_are_divided_as_dtensors(tmp_path: Path) -> None:
    run_ranks(experts_divided, 4, tmp_path / "saved")


class MixtureOfBoth(Mixture):
    """Also a block whose products tensor-parallel ranks divide."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.block(self.embed(ids))
        return self.head(x + self.experts(x))


def tensors_and_experts(rank: int, folder: Path) -> None:
    """DTensors on two meshes: experts over data-parallel ranks, products over tensor-parallel ones."""
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("replicas", "ep", "tp"))
    torch.manual_seed(0)
    plain = MixtureOfBoth().double()
    made = copy.deepcopy(plain)
    weight = made.experts.weight.detach()
    made.experts.weight = nn.Parameter(distribute_tensor(weight, mesh["ep"], [Shard(0)]))
    parallelize_module(made.block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    hocket.fully_shard(made.experts, mesh=mesh["replicas"])
    made.experts.set_gradient_divide_factor(2.0)  # pyrefly: ignore[not-callable]
    hocket.fully_shard(made, mesh=mesh["ep"])
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.1, eps=LINEAR, fused=True) for one in (made, plain)]
    for step in range(2):
        loss_of(made, *batch(mesh["ep"].get_local_rank(), step, 0)).backward()
        torch.stack([loss_of(plain, *batch(one, step, 0)) for one in range(2)]).mean().backward()
        torch.testing.assert_close(float(by_hocket(made)), float(by_torch(plain)))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, value in plain.named_parameters():
        found = full(made.get_parameter(name))
        torch.testing.assert_close(found, value.detach(), msg=lambda text, name=name: f"{name}: {text}")
    through_a_checkpoint(made, optimizers[0], folder)


def test_tensor_and_expert_parallel_meshes_in_one_model(tmp_path: Path) -> None:
    run_ranks(tensors_and_experts, 4, tmp_path / "saved")
