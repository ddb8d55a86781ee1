"""Settings that mean nothing are refused by name, with their value and a fix, before anything is changed."""

import re
from typing import Any

import pytest
import torch
from torch import nn

import hocket
from tests.fsdp.models import Block, Chain, Stack
from tests.fsdp.twin import mesh_of
from tests.helpers.ranks import run_ranks

OPTIONS = {
    "prefetch": [(-1, "prefetch=-1"), (True, "prefetch=True"), (1.5, "prefetch=1.5"), ("lots", "lots"), ("5", "5")],
    "staging": [(0, "staging=0"), (2.0, "staging=2.0")],
    "bucket": [
        (0, "bucket=0 must be"),
        ("128M params", "bucket='128M params' must be a number"),
        (True, "bucket=True"),
    ],
    "transport": [("mpi", "transport='mpi' is not one of")],
    "driver": [("magic", "driver='magic' is not one of hooks, manual")],
    "device": [("gpu", "device='gpu' is no place for shards"), ("meta", "'meta'"), (3, "device=3"), ([], "device=[]")],
}
CASES = [(name, value, words) for name, pairs in OPTIONS.items() for value, words in pairs]


@pytest.mark.parametrize(("name", "value", "words"), CASES)
def test_options(name, value, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        hocket.ShardOptions(**{name: value})


CALLS = {
    "strategy": (dict(strategy="zero3"), "strategy='zero3' is not one of no_shard, optim, optim_grads"),
    "nothing": (dict(units=nn.Conv2d), "chooses nothing of the Stack"),
    "no one": (dict(units=lambda name, module: False), "chooses nothing"),
    "a name": (dict(units="Block"), "units='Block' is no class, predicate or list of modules"),
    "a number": (dict(units=3), "units=3 is no class"),
    "a single module": (dict(units=Block()), "is no class, predicate or list"),
    "an empty list": (dict(units=[]), "units=[] chooses nothing"),
    "mesh": (dict(mesh=(2,)), "mesh=(2,) is no DeviceMesh"),
    "precision": (dict(precision=torch.bfloat16), "precision=torch.bfloat16 is no Precision"),
    "options": (dict(options={"staging": 2}), "options={'staging': 2} is no ShardOptions"),
    "no function": (dict(place=3), "place=3 is no function"),
    "no module": (dict(units=[3]), "units has 3, which is no module"),
    "a stranger": (dict(units=[Block()]), "units has a Block that is no part of the Stack"),
    "a list": (dict(units=nn.ModuleList), "'blocks', a ModuleList, which is never called itself"),
    "nccl": (dict(options=hocket.ShardOptions(transport="nccl")), "transport='nccl' moves bytes between GPUs"),
    "copy engine": (dict(options=hocket.ShardOptions(transport="copy_engine")), "transport='copy_engine'"),
    "place": (dict(place=lambda name, param: "there"), "place returned 'there' for first.weight"),
    "divide": (
        dict(place=lambda name, param: hocket.sharding.Placement(None, 0.0) if name == "first.weight" else None),
        "divide=0.0 must be above 0",
    ),
}


@pytest.mark.parametrize(("arguments", "words"), CALLS.values(), ids=CALLS)
def test_arguments(arguments, words):
    model = Stack()
    before = dict(model.named_parameters())
    with pytest.raises(ValueError, match=re.escape(words)):
        hocket.fully_shard(model, **arguments)
    after = dict(model.named_parameters())
    assert before.keys() == after.keys()
    assert all(before[name] is after[name] for name in before)
    hocket.fully_shard(model, units=Block)


PLACEMENTS = [
    ((3, None), "mesh=3"),
    ((None, "4"), "divide='4'"),
    ((None, float("inf")), "divide=inf"),
    ((None, True), "divide=True"),
    ((None, None, 3), "part=3"),
    ((None, None, [0, 1]), "part=[0, 1]"),
    ((None, None, (0.5, 2)), "part=(0.5, 2)"),
    ((None, None, (2, 2)), "part=(2, 2)"),
]


@pytest.mark.parametrize(("arguments", "words"), PLACEMENTS)
def test_placements(arguments, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        hocket.sharding.Placement(*arguments)


@pytest.mark.parametrize("module", ["model", None, nn.Linear, [nn.Linear]])
def test_no_module(module):
    with pytest.raises(ValueError, match="is no Module: give one"):
        hocket.fully_shard(module)


@pytest.mark.parametrize("max_norm", [-1.0, float("nan"), "1", None])
def test_a_norm_that_is_none(max_norm):
    model = Stack()
    hocket.fully_shard(model)
    with pytest.raises(ValueError, match=r"max_norm=.* must be a number"):
        hocket.clip_grad_norm_(model, max_norm)
    with pytest.raises(ValueError, match="is no module: give a sharded model"):
        hocket.clip_grad_norm_(list(model.parameters()), 1.0)  # pyrefly: ignore[bad-argument-type]


def test_a_module_without_parameters():
    with pytest.raises(ValueError, match="Identity has no parameters"):
        hocket.fully_shard(nn.Identity())


def test_parameters_on_several_devices():
    model = Chain(Block(), Block())
    model.blocks[1].to("meta")
    hocket.fully_shard(model, units=Block)  # what is on the meta device goes where the rest is
    model = Chain(Block().to("meta"))
    with pytest.raises(ValueError, match=r"meta device: say where they go with ShardOptions\(device=...\)"):
        hocket.fully_shard(model, units=Block)


def test_meta_parameters_that_nothing_initialises():
    model = nn.Linear(2, 2, device="meta")
    hocket.fully_shard(model, options=hocket.ShardOptions(device="cpu"))
    with pytest.raises(
        ValueError, match=r"weight was sharded on the meta device and has no values: call model\.to_empty"
    ):
        model(torch.ones(1, 2))


def test_unit_of_a_stranger():
    with pytest.raises(ValueError, match="this Linear is no unit of a sharded model"):
        hocket.sharding.unit_of(nn.Linear(2, 2))


def three_axes(rank: int) -> None:
    with pytest.raises(ValueError, match=r"3 axes.*one axis or two"):
        hocket.fully_shard(Stack(), mesh=mesh_of((1, 1, 2), ("a", "b", "c")))


def test_a_mesh_of_three_axes():
    run_ranks(three_axes, 2)


def unfindable_outputs(rank: int) -> None:
    """An output in which tensors can't be found: its weights would be gone in backward."""

    class Hiding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

        def forward(self, x: torch.Tensor) -> Any:
            return iter([self.block(x)])

    model = Hiding()
    ctx = hocket.fully_shard(model, units=Block)
    with pytest.raises(ValueError, match="returned a list_iterator, in which tensors can't be found"):
        model(torch.randn(2, 11))
    ctx.abort()


def test_outputs_without_findable_tensors():
    run_ranks(unfindable_outputs, 2)
