"""A step without communication is a fair bound: the same ops on as many rows, the same in every step."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hocket.config import Config
from hocket.config.schema import changed
from hocket.engine import Engine
from hocket.engine.actions import Actions
from hocket.model.documents import Microbatch
from hocket.program.ops import Op
from hocket.recipes import recipe
from hocket.resolve import resolve
from hocket.runtime.blocks import Blocks, HostBlocks
from hocket.runtime.comm import RowTable
from tests.helpers.ranks import run_ranks

PRODUCTS = ("mm", "addmm", "bmm", "_grouped_mm", "_scaled_dot_product_flash_attention_for_cpu")


class Products(TorchDispatchMode):
    """Counts matrix products and attention."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0]
        if name in PRODUCTS:
            self.calls[name] += 1
        return func(*args, **(kwargs or {}))


class Watched(Actions):
    """Actions that note the rows of every all-to-all, by op."""

    rows: dict[str, tuple[int, int, list[int], list[int]]]

    def _all_to_all(self, rows: torch.Tensor, table: RowTable | HostBlocks | Blocks, room: int = 0) -> Any:
        out, pending = super()._all_to_all(rows, table, room)
        assert out is not None
        assert not isinstance(table, Blocks)
        assert len(out) == max(room, sum(table.receive))
        self.rows[self.current] = (len(rows), sum(table.receive), table.send, table.receive)
        return out, pending

    def find(self, op: Op) -> Any:
        act = super().find(op)

        def noted(op: Op, *values: Any) -> Any:
            self.current = str(op)
            return act(op, *values)

        return noted


def steps(rank: int, config: Config) -> tuple[list[dict[str, Any]], list[float], Counter[str]]:
    """Rows of all exchanges of two steps, gradient norms, and products of the last step."""
    import hocket.engine.engine

    hocket.engine.engine.Actions = Watched  # type: ignore[misc]
    engine = Engine(config, rank, torch.device("cpu"))
    engine.init_weights()
    generator = torch.Generator().manual_seed(engine.where.dp)
    shape = (config.train.sequences, config.data.sequence_length + 1)
    ids = [torch.randint(config.model.vocab, shape, generator=generator) for _ in range(config.train.microbatches)]
    batch = [Microbatch(i[:, :-1].contiguous(), i[:, 1:].contiguous()) for i in ids]
    rows, norms = [], []
    actions = engine.executor.actions
    assert isinstance(actions, Watched)
    for _ in range(2):
        actions.rows = {}
        with Products() as products:
            norms.append(float(engine.train_step(batch, 1e-3).grad_norm))
        rows.append(actions.rows)
    return rows, norms, products.calls


@pytest.mark.parametrize("copies", [pytest.param("per_expert", marks=pytest.mark.full), "per_rank"])
def test_the_bound_exchanges_as_many_rows_with_the_same_ops(copies: str) -> None:
    small = {
        "layers": 4,
        "dense_layers": (0,),
        "hidden": 32,
        "head_dim": 8,
        "ffn": 32,
        "expert_ffn": 16,
        "shared_ffn": 16,
    }
    config = changed(recipe("tiny"), {f"model.{name}": size for name, size in small.items()})
    config = changed(config, {"overlap.ep.copies": copies, "train.microbatches": 2})
    train = replace(config.train, device="cpu", sequences=2)
    real = run_ranks(steps, 4, resolve(replace(config, train=replace(train, transport="gloo"))))
    null = run_ranks(steps, 4, resolve(replace(config, train=replace(train, transport="null"))))
    for (real_rows, _, real_products), (rows, norms, products) in zip(real, null, strict=True):
        assert rows[0].keys() == real_rows[0].keys()
        assert rows[0]
        assert products == real_products
        assert rows[1] == rows[0], "frozen: the weights that routers read are gathered from nowhere"
        assert all(torch.isfinite(torch.tensor(norms)))
        for name, (sent, received, send, receive) in rows[0].items():
            assert (sent, received) == (sum(send), sum(receive))
            back = name.replace("fwd dispatch", "fwd combine").replace("bwd combine", "bwd dispatch")
            assert rows[0][back] in ((sent, received, send, receive), (received, sent, receive, send))
        forward = [row for name, row in rows[0].items() if name.startswith("fwd dispatch")]
        even = [row for name, row in real_rows[0].items() if name.startswith("fwd dispatch")]
        if copies == "per_expert":
            assert [row[0] for row in forward] == [row[0] for row in even], "every rank sends as many rows as ever"
        assert abs(sum(row[0] for row in forward) / sum(row[0] for row in even) - 1) < 0.1
        assert abs(sum(row[1] for row in forward) / sum(row[0] for row in forward) - 1) < 0.15
