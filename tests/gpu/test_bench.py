"""On GPUs contenders agree in bf16, are timed, and their clocks are read."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from benchmarks.bench.contender import Resting, load
from benchmarks.bench.workload import batches
from hocket.config.schema import changed
from tests.bench.setup import workload
from tests.helpers.command import finish, start

WORDS = [
    "tiny", "--mesh.pp", "1", "--plan.chunks", "1", "--precision.compute", "bf16", "--model.hidden", "512",
    "--model.vocab", "1024", "--data.sequence_length", "256", "--blocks", "2", "--steps", "2", "--out", "x.json",
]  # fmt: skip
DENSE = ["--model.experts", "0", "--model.dense_layers", "--overlap.ep.merge", "off"]
CASES = {
    "dense": [*DENSE, "--mesh.ep", "1", "--against", "bound,ddp,fsdp2,fsdp2_fp32,fsdp2_tuned,fsdp2_tuned_fp32"],
    "compiled": [*DENSE, "--mesh.ep", "1", "--against", "bound,fsdp2_tuned", "--compile", "on"],
    "no optimizer": ["--mesh.ep", "2", "--against", "bound,bound_graph,ep_sync,hocket_null", "--optimizer", "off"],
    "experts": ["--mesh.ep", "2", "--against", "bound,bound_graph,ep_sync,fsdp2_tuned,hocket_sequential,hocket_null"],
}


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", CASES)
def test_contenders_agree_and_are_timed(tmp_path: Path, case: str):
    gpus = min(4, torch.cuda.device_count() // 2 * 2)
    if not gpus:
        pytest.skip("needs two GPUs")
    done = finish(start(tmp_path, "bench", *WORDS, "--gpus", str(gpus), *CASES[case], fresh=True), timeout=280)
    print(done.out)
    assert done.code == 0, done.err
    (found,) = json.loads((tmp_path / "x.json").read_text())["workloads"]
    assert found["gate"]["worst"] <= found["gate"]["tolerance"]
    assert 0.02 < found["gate"]["fall"] < 0.5, "the gate has seen something, and no more than it should"
    for row in found["contenders"].values():
        assert row["peak_bytes"] > row["resident_bytes"] >= 0
        assert all(block["clock_mhz"] is None or 100 < block["clock_mhz"] < 5000 for block in row["blocks"])
    assert found["contenders"]["bound"]["seconds"] > 0


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", [True, False], ids=["updated", "as they are"])
def test_the_bound_as_a_graph_is_the_bound(optimizer: bool):
    device, work = torch.device("cuda", 0), workload(2, 2, moe=True, optimizer=optimizer)
    work = dataclasses.replace(work, config=changed(work.config, {"precision.compute": "bf16"}))
    issued, graph = (load(name)(work, 0, device) for name in ("bound", "bound_graph"))
    for seed in range(6):
        microbatches = batches(work, 0, seed, device)
        assert graph.step(microbatches).item() == pytest.approx(issued.step(microbatches).item(), rel=1e-3)
        if seed == 3:  # recorded in the third step
            assert isinstance(graph, Resting)
            graph.rest()
    graph.close()
    issued.close()
