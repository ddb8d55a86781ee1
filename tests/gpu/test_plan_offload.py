"""On a GPU, what parts keep in the host's memory: the bits of a sequential step, with late lanes too; less memory."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hocket.config.schema import changed
from hocket.engine import Engine
from hocket.model.documents import Microbatch
from hocket.predict.cost import costs_of
from hocket.predict.hardware import hardware_of
from hocket.predict.simulate import host_bytes, simulate
from hocket.recipes import PLAIN
from hocket.runtime.lanes import CudaLanes
from tests.gpu.test_documents import CUDA, packed
from tests.gpu.test_parity import BASE, restart, run
from tests.helpers.plans import planned

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
ALONE = changed(BASE, {"mesh.pp": 1, "mesh.dp": 1, "mesh.ep": 1, "plan.chunks": 1})
PARTS = ("attn", "experts", "mlp")


def whole(ids: Tensor) -> Microbatch:
    return Microbatch(ids[:, :-1].contiguous().to(CUDA), ids[:, 1:].contiguous().to(CUDA))


def steps(count: int, make: Callable[[Tensor], Microbatch] = packed) -> list[list[Microbatch]]:
    generator = torch.Generator().manual_seed(0)
    return [[make(torch.randint(512, (2, 257), generator=generator)) for _ in range(6)] for _ in range(count)]


@pytest.mark.parametrize("offload", [PARTS, ("attn:3",), ("experts:7", "mlp")])
@pytest.mark.parametrize("late", [False, True])
def test_a_step_keeps_the_bits_of_a_sequential_one(offload: tuple[str, ...], late: bool) -> None:
    torch.use_deterministic_algorithms(True)
    alone = changed(ALONE, {"data.packing": "on"})
    found: list[list[Tensor]] = []
    for config in (changed(alone, {"plan.order": "sequential", **PLAIN}), planned(alone, offload=offload)):
        engine = Engine(config, 0, CUDA)
        if late and config.plan.offload:
            draws = random.Random(1)
            lanes = engine.lanes
            assert isinstance(lanes, CudaLanes)
            lanes.delays = [draws.choice((0, 0, 0, 200_000, 2_000_000)) for _ in range(997)]
        found.append(run(engine, steps(3)))
        engine.close()
    assert all(bool(torch.isfinite(value).all()) for value in found[0])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_replayed_steps_keep_the_bits_of_issued_ones() -> None:
    torch.use_deterministic_algorithms(True)
    dense = changed(ALONE, {"model.dense_layers": tuple(range(8)), "overlap.ep.merge": "off", "data.packing": "off"})
    found: list[list[Tensor]] = []
    for graphs in ("off", "on"):
        engine = Engine(planned(dense, offload=("attn", "mlp"), graphs=graphs), 0, CUDA)
        assert engine.replays == (graphs == "on")
        restart(engine)
        losses = [engine.train_step(batch, 1e-2).loss.clone() for batch in steps(6, whole)]
        found.append([*losses, *(unit.group.main.clone() for unit in engine.sharded.units.values())])
        engine.close()
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_large_tensors_come_back_in_time() -> None:
    """Also with deterministic algorithms, under which torch fills new memory."""
    torch.use_deterministic_algorithms(True)
    sizes: dict[str, Any] = {"layers": 4, "dense_layers": (), "hidden": 2048, "expert_ffn": 768, "vocab": 512}
    c = changed(ALONE, {f"model.{name}": value for name, value in sizes.items()})
    c = changed(c, {"data.sequence_length": 8192, "train.microbatches": 2})
    generator = torch.Generator().manual_seed(0)
    batches = [[whole(torch.randint(512, (2, 8193), generator=generator)) for _ in range(2)] for _ in range(3)]
    found: list[list[Tensor]] = []
    for offload in ((), PARTS[:2]):
        engine = Engine(planned(c, order="sequential", merge="off", offload=offload), 0, CUDA)
        found.append(run(engine, batches))
        engine.close()
    assert len(set(map(float, found[0][:3]))) == 3, "it learns"
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def peaks(offload: tuple[str, ...]) -> tuple[int, int]:
    """(real, predicted) most bytes of a step of ten layers of 8,192 tokens."""
    sizes: dict[str, Any] = {"layers": 10, "dense_layers": (), "hidden": 1024, "expert_ffn": 512, "vocab": 512}
    c = changed(ALONE, {f"model.{name}": value for name, value in sizes.items()})
    c = changed(c, {"data.sequence_length": 4096, "train.microbatches": 2, "plan.offload": offload})
    engine = Engine(planned(c, order="sequential", merge="off"), 0, CUDA)
    engine.init_weights()
    generator = torch.Generator().manual_seed(0)
    batch = [whole(torch.randint(512, (2, 4097), generator=generator)) for _ in range(2)]
    engine.train_step(batch, 1e-3)
    torch.cuda.synchronize()
    gc.collect()  # of engines before
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    engine.train_step(batch, 1e-3)
    torch.cuda.synchronize()
    real = torch.cuda.max_memory_allocated() - before
    costs = costs_of(engine.config, hardware_of(engine.config))
    assert host_bytes(engine.program, 0, costs) > 0 or not offload
    engine.close()
    return real, simulate(engine.program, costs).ranks[0].peak_bytes - costs.fixed_bytes(engine.program, 0)


@pytest.mark.parametrize("offload", [("attn:9",), ("attn:9", "experts:9")])
def test_memory_falls_as_predicted(offload: tuple[str, ...]) -> None:
    torch.use_deterministic_algorithms(False)
    kept, away = peaks(()), peaks(offload)
    assert kept[0] - away[0] == pytest.approx(kept[1] - away[1], rel=0.15)
    assert kept[1] - away[1] > 0.1 * kept[1]
