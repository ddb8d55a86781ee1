"""Sharded units and slots, on one to four gloo ranks, against plain whole tensors."""

import math

import pytest
import torch
from torch import nn

from hocket.engine import Engine
from hocket.fsdp.planned.model import PlannedModel, unit_of
from hocket.model.documents import Microbatch
from hocket.program.mesh import Mesh
from hocket.program.ops import Layout, Program
from hocket.runtime.comm import make_groups
from hocket.runtime.weights import WgradQueue
from tests.helpers.parity import config
from tests.helpers.ranks import run_ranks
from tests.helpers.stats import stats_of
from tests.helpers.units import CPU, PLACES, SHAPES, SLOTS, add_grads, build, build_module, give, local_of, tensors
from tests.reference import random_batches

MESHES = [Mesh(), Mesh(dp=2), Mesh(dp=4), Mesh(dp=2, ep=2), Mesh(dp=4, ep=2), Mesh(pp=1, dp=3)]


def _gather(rank, mesh, dtype):
    model, _ = build(rank, mesh, dtype)
    whole = tensors(1)
    model.load(whole)
    assert set(model.units) == set(PLACES)
    for place, unit in model.units.items():
        slots = (0, 1, 0) if SLOTS[place[0]] > 1 else (0, 0)
        for slot in (-1,) if unit.whole else slots:
            if not unit.whole:
                unit.gather(slot).wait()
            for weight in unit.weights:
                expected = local_of(whole[weight.name], weight, model).to(dtype)
                assert torch.equal(weight.tensor(), expected), weight.name
                holder = unit.group.weight if unit.whole else model.weight_slots[place[0]].buffers[slot]
                assert weight.tensor().untyped_storage().data_ptr() == holder.untyped_storage().data_ptr()
            if not unit.whole:
                unit.release()
                assert all(weight.value is None for weight in unit.weights)
    model.assert_clean()


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gather_gives_whole_weights_in_any_slot(mesh, dtype):
    run_ranks(_gather, mesh.world, mesh, dtype)


def _bind(rank):
    """Addresses and views stay the same for the whole run; two units take turns in one slot."""
    model, _ = build(rank, Mesh(dp=2))
    model.load(tensors(1))
    a, b = model.unit("dense", 0, 0), model.unit("dense", 0, 1)
    a.gather(0).wait()
    views = [weight.tensor() for weight in a.weights]
    first = [view.clone() for view in views]
    a.release()
    b.gather(0).wait()
    b.release()
    a.gather(1).wait()
    a.release()
    a.gather(0).wait()
    assert all(weight.value is view for weight, view in zip(a.weights, views, strict=True))
    assert all(torch.equal(weight.tensor(), value) for weight, value in zip(a.weights, first, strict=True))
    assert {id(v) for v in a.grad_views(0).values()} == {id(v) for v in a.grad_views(0).values()}


def test_views_are_made_once_per_slot():
    run_ranks(_bind, 2)


def _reduce(rank, mesh, dtype):
    torch.use_deterministic_algorithms(True)  # new memory holds nan
    model, _ = build(rank, mesh, dtype)
    rounds = 3
    for i in range(rounds):
        grads = {name: value.to(dtype) for name, value in tensors(100 * i + rank).items()}
        for unit in model.units.values():
            written = [weight for weight in unit.weights if not weight.name.endswith("norm")]
            give(unit, {weight: local_of(grads[weight.name], weight, model) for weight in written}, microbatch=i)
    for unit in model.units.values():
        main_grad = unit.group.main_grad
        assert main_grad.dtype == torch.float32
        members = unit.group.groups.reduce.ranks
        covered = torch.zeros_like(main_grad, dtype=torch.bool)
        for weight in unit.weights:
            kept = unit.group.layout.local(weight.name, unit.group.position)
            mine = main_grad[kept.offset :][: len(kept)]
            covered[kept.offset :][: len(kept)] = True
            expected = torch.zeros(weight.shape)
            for i in range(rounds if not weight.name.endswith("norm") else 0):
                parts = [tensors(100 * i + r)[weight.name].to(dtype).float() for r in members]
                total = parts[0]
                for part in parts[1:]:
                    total = total + part
                expected = expected + local_of(total, weight, model) * (1 / mesh.dp)
            assert torch.equal(mine, expected.flatten()[kept.lo : kept.hi]), weight.name
        assert not main_grad[~covered].any()  # padding
    model.forget_grads()
    model.assert_clean()


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_reduce_sums_in_rank_order_divides_and_accumulates(mesh, dtype):
    run_ranks(_reduce, mesh.world, mesh, dtype)


def _missing(rank, dp):
    """Gradients, by name, of a step of a whole engine in which one weight of each layer gets none."""
    torch.use_deterministic_algorithms(True)  # new memory holds nan
    engine = Engine(config(dict(layers=2, dense_layers=(0,)), dict(dp=dp), {}, 2, "fp32"), rank, CPU)
    engine.init_weights()
    found = {}
    judge, push = engine.optimizer.judge, WgradQueue.push

    def judged(*args, **how):
        found.update((p.name, p.grad.clone()) for unit in engine.sharded.units.values() for p in unit.pieces())
        return judge(*args, **how)

    def pushed(self, weight, write):
        if not weight.name.endswith("attn_norm"):
            push(self, weight, write)

    engine.optimizer.judge, WgradQueue.push = judged, pushed
    for batches in random_batches(engine.config.model, 2, 2, dp, (2, 8)):
        engine.train_step([Microbatch(*batch[rank]) for batch in batches], 1e-2)
    return found


@pytest.mark.parametrize("dp", [1, 2])
def test_a_weight_that_gets_no_gradient_in_a_step_has_zeros(dp):
    """Whether its unit's gradients are reduced over ranks, or collected on one."""
    ranks = run_ranks(_missing, dp, dp)
    grads = [(name, grad) for found in ranks for name, grad in found.items()]
    without = [grad for name, grad in grads if name.endswith("attn_norm")]
    assert without
    assert not any(grad.any() for grad in without)
    assert all(grad.isfinite().all() for _, grad in grads)
    assert sum(bool(grad.any()) for _, grad in grads) > 10


def test_group_of_one_accumulates_exactly():
    """Sixteen microbatches on one rank: the path without communication adds each gradient once."""
    model, _ = build(0, Mesh())
    grads = tensors(3)
    for m in range(16):
        add_grads(model, grads, microbatch=m)
    for unit in model.units.values():
        for weight in unit.weights:
            kept = unit.group.layout.local(weight.name, 0)
            expected = torch.zeros(weight.shape)
            for _ in range(16):
                expected += grads[weight.name]
            assert torch.equal(unit.group.main_grad[kept.offset :][: len(kept)], expected.flatten())
    assert stats_of(model).reduced_bytes == 0


def _mistakes(rank):
    model, _ = build(rank, Mesh(dp=2))
    a, b = model.unit("dense", 0, 0), model.unit("dense", 0, 1)
    with pytest.raises(AssertionError, match="dense of layer 0 is read while it is not gathered"):
        a.assert_readable()
    with pytest.raises(AssertionError, match="dense of layer 0 is released but not gathered"):
        a.release()
    a.gather(0).wait()
    with pytest.raises(AssertionError, match="dense of layer 1 wants dense weight slot 0, which dense of layer 0 hold"):
        b.gather(0)
    with pytest.raises(AssertionError, match="wants dense weight slot 2 of 2"):
        b.gather(2)
    with pytest.raises(AssertionError, match="into slot 1 while it is still in slot 0"):
        a.gather(1)
    with pytest.raises(AssertionError, match="dense of layer 0 was never released from slot 0"):
        model.assert_clean()
    a.assert_readable()
    model.refresh()
    with pytest.raises(AssertionError, match="dense of layer 0 is read at version 0, but the weights are at version 1"):
        a.assert_readable()
    a.release()
    with pytest.raises(AssertionError, match=r"attn\.wq is read while it is not gathered"):
        a.weights[1].tensor()
    a.grad_views(0)
    with pytest.raises(AssertionError, match="dense of layer 1 wants dense gradient slot 0"):
        b.grad_views(0)
    with pytest.raises(AssertionError, match="which it does not hold"):
        b.reduce(0)
    with pytest.raises(AssertionError, match=r"wrote gradients into slots \[0\]"):
        model.assert_clean()
    a.reduce(0).wait()
    with pytest.raises(AssertionError, match="dense of layer 0 has gradients that no step has taken"):
        model.assert_clean()
    b.gather(1).wait()
    model.abort()
    model.assert_clean()
    assert a.group.grads.nbytes == 0
    b.gather(0).wait()
    b.release()
    a.grad_views(1)
    pending = a.reduce(1)
    with pytest.raises(AssertionError, match=r"reduces of dense of layer 0 in slots \[1\] were never waited for"):
        model.assert_clean()
    pending.wait()
    model.forget_grads()
    model.assert_clean()


def test_mistakes_of_a_plan_name_the_unit():
    run_ranks(_mistakes, 2)


def test_whole_units_are_never_gathered():
    model, _ = build(0, Mesh())
    assert not model.weight_slots
    with pytest.raises(AssertionError, match="held whole and never gathered"):
        model.unit("experts", 0, 1).gather(0)
    assert all(weight.tensor().is_contiguous() for weight in model.unit("experts", 0, 1).weights)


def _slots_missing(rank):
    groups = make_groups(Mesh(dp=2), rank, CPU, "gloo")
    program = Program(Layout(("dense", "moe")), 1, (), weight_slots={"embed": 1}, grad_slots=SLOTS)
    with pytest.raises(AssertionError, match="no weight slots for dense units, which 2 ranks share"):
        PlannedModel([build_module(1)], Mesh(dp=2), groups, program, torch.float32, CPU)


def test_a_program_must_have_slots_for_what_is_sharded():
    run_ranks(_slots_missing, 2)


def _pieces(rank, mesh):
    model, _ = build(rank, mesh)
    model.load(tensors(5))
    return [(p.name, p.shape, p.lo, p.hi, p.main.clone()) for unit in model.units.values() for p in unit.pieces()]


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(dp=3), Mesh(dp=4, ep=2), Mesh(dp=4, ep=4)], ids=str)
def test_pieces_of_all_ranks_are_the_whole_model_once(mesh):
    whole = tensors(5)
    found = {name: torch.full((math.prod(shape),), float("nan")) for name, shape in SHAPES.items()}
    for pieces in run_ranks(_pieces, mesh.world, mesh):
        for name, shape, lo, hi, value in pieces:
            assert shape == SHAPES[name]
            assert found[name][lo:hi].isnan().all()
            found[name][lo:hi] = value
    for name, value in whole.items():
        assert torch.equal(found[name].view(value.shape), value)


def _memory(rank):
    model, _ = build(rank, Mesh(dp=2), torch.bfloat16)
    longest = {}
    for place, unit in model.units.items():
        longest[place[0]] = max(longest.get(place[0], 0), unit.group.layout.total)
    stats = stats_of(model)
    bound = sum(SLOTS[kind] * length * 2 for kind, length in longest.items())
    assert stats.weight_slot_bytes == stats.grad_slot_bytes == bound
    total = sum(unit.group.layout.total for unit in model.units.values())
    assert stats.shard_bytes == total // 2 * 4
    full = sum(math.prod(shape) for shape in SHAPES.values())
    assert total < full + 64 * (len(SHAPES) + 2 * len(PLACES))
    model.load(tensors(1))
    unit = model.unit("experts", 0, 1)
    unit.gather(0).wait()
    unit.release()
    assert stats_of(model).gathers == 1
    assert stats_of(model).gathered_bytes == unit.group.layout.shard * 2
    add_grads(model, tensors(2))
    assert stats_of(model).shard_bytes == total // 2 * (4 + 4)
    model.forget_grads()
    assert stats_of(model).shard_bytes == total // 2 * 4


def test_memory_is_the_slots_and_the_shards():
    run_ranks(_memory, 2)


def test_names_decide_the_unit():
    assert unit_of("embed.weight", 0) == ("embed", 0, -1)
    assert unit_of("head.norm", 3) == ("head", 3, -1)
    assert unit_of("head.norm", 0, tied=True) == ("embed", 0, -1)
    assert unit_of("layers.7.experts.w_up", 1) == ("experts", 1, 7)
    assert unit_of("layers.7.shared.w_up", 1) == ("dense", 1, 7)
    with pytest.raises(AssertionError, match="no unit for parameter decoder"):
        unit_of("decoder.w", 0)


def test_a_tied_head_is_part_of_the_embedding_unit():
    weight, norm = (nn.Parameter(torch.empty(shape, device="meta")) for shape in ((4, 3), (3,)))
    embed, head = nn.ParameterDict({"weight": weight}), nn.ParameterDict({"weight": weight, "norm": norm})
    chunk = nn.ModuleDict({"embed": embed, "head": head})
    groups = make_groups(Mesh(), 0, CPU, "gloo")
    program = Program(Layout(("dense",), tied=True), 1, (), grad_slots=SLOTS)
    model = PlannedModel([chunk], Mesh(), groups, program, torch.float32, CPU)
    (unit,) = model.units.values()
    assert [weight.name for weight in unit.weights] == ["embed.weight", "head.norm"]
    assert model.unit("embed", 0) is unit
