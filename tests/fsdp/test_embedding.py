"""The gradient of a table's rows, written where it is collected: autograd's bits, for the formula of GPUs too."""

from __future__ import annotations

import pytest
import torch

from hocket.runtime.table_rows import dense_gradient, sums_by_id, write_sums

DTYPES, V, D = [torch.float32, torch.bfloat16], 50, 24
IDS = {
    "some often": lambda: torch.randint(V // 5, (3, 13)),
    "all the same": lambda: torch.full((4, 5), V - 1),
    "each once": lambda: torch.randperm(V)[:20].view(4, 5),
    "one": lambda: torch.tensor([[7]]),
    "32 bits": lambda: torch.randint(V, (2, 9), dtype=torch.int32),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ids", IDS)
def test_sums_are_those_of_the_whole_table(ids: str, dtype: torch.dtype) -> None:
    ids_T = IDS[ids]()
    g_TD = torch.randn(*ids_T.shape, D, dtype=dtype)
    wanted = dense_gradient(ids_T, g_TD, V)
    flat = ids_T.reshape(-1).long()
    assert torch.equal(sums_by_id(flat, g_TD.reshape(-1, D)), wanted[flat])
    for into in (dtype, torch.float32):
        out = torch.full((V, D), float("nan"), dtype=into)
        write_sums(ids_T, g_TD, out, add=False)
        assert torch.equal(out, wanted.to(into))
        before = out.normal_().clone()
        write_sums(ids_T, g_TD, out, add=True)
        assert torch.equal(out, before.add_(wanted))
        if into is torch.float32:
            write_sums(ids_T, g_TD, out, True, 0.3)
            assert torch.equal(out, before.add_(wanted.float() * 0.3))
