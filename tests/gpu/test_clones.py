"""Clones of hot experts on devices: rows divided by a kernel, and steps whose ranks have more even rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hocket.config import Config
from hocket.engine import Engine
from hocket.kernels.usable import formulas
from hocket.model.microbatch import Microbatch
from hocket.parallel.clones import ClonedExperts
from hocket.parallel.routing import placed
from hocket.program.cloning import choose, fullest
from hocket.settings.schema import changed
from tests.gpu.test_parity import EXPERTS
from tests.helpers.ranks import run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
STEPS = 4


@pytest.mark.parametrize(("ranks", "experts", "seats"), [(2, 128, 1), (8, 128, 2), (3, 6, 4)])
def test_rows_are_divided_as_the_formula_divides_them(ranks: int, experts: int, seats: int) -> None:
    draw = torch.Generator().manual_seed(experts)
    cloned = ClonedExperts(experts, ranks, seats)
    for turn in range(6):
        weights = torch.rand(experts, generator=draw) ** 4 + 1e-3
        chosen_TK = torch.multinomial(weights.expand(4096, -1), 2, generator=draw).cuda()
        routing = placed(chosen_TK, experts)
        found = cloned.divided(routing)
        with formulas():
            wanted = cloned.divided(routing)
        for name in ("inverse_R", "counts_E", "counted_E"):
            assert torch.equal(getattr(found, name), getattr(wanted, name)), (turn, name)
        cloned.choose(choose(routing.counts_E.tolist(), ranks, seats))


def trained(rank: int, config: Config) -> dict[str, Any]:
    """Losses, and rows that came to this rank behind the first step."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    engine = Engine(config, rank, device)
    engine.init_weights()
    rows: list[int] = []
    split = engine.executor.actions._split

    def counted(op: Any) -> Any:
        splits = split(op)
        rows.append(int(splits.counts_PL.sum()))
        return splits

    engine.executor.actions._split = counted  # type: ignore[method-assign]
    generator, losses = torch.Generator().manual_seed(rank), []
    shape = (config.train.sequences, config.data.sequence_length + 1)
    for _ in range(STEPS):
        ids = [(torch.rand(shape, generator=generator) ** 6 * 60).long().to(device) for _ in range(6)]
        batch = [Microbatch(i[:, :-1].contiguous(), i[:, 1:].contiguous()) for i in ids]
        losses.append(engine.agree(engine.train_step(batch, 1e-3).loss).loss)
        engine.assert_clean()
    return {"losses": losses, "rows": rows[len(rows) // STEPS :]}


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
@pytest.mark.parametrize("settings", [{}, {"overlap.ep.copies": "per_rank"}], ids=str)
def test_ranks_get_more_even_rows_and_train_alike(settings: dict[str, Any]) -> None:
    config, uneven = changed(EXPERTS, settings), {}
    ranks = {n: run_ranks(trained, 2, changed(config, {"overlap.ep.clones": n}), backend="nccl") for n in (0, 2)}
    assert ranks[2][0]["losses"][0] == ranks[0][0]["losses"][0], "the first step has no clones"
    assert ranks[2][0]["losses"] == pytest.approx(ranks[0][0]["losses"], rel=2e-2)
    for clones, found in ranks.items():
        each = [fullest(rows) for rows in zip(*(rank["rows"] for rank in found), strict=True)]
        uneven[clones] = sum(each) / len(each)
    assert uneven[2] < 1 + 0.6 * (uneven[0] - 1), uneven
