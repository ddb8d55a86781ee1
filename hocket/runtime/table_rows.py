"""The gradient of a table's rows, written where the reduction reads it.

Note: [Rows that nobody looked up]
Autograd makes a gradient of the whole table: it clears it, adds up rows, and hands it on to be copied. Of a large
vocabulary a microbatch looks up few rows, so that is three passes over zeros. Here rows are added up in a tensor as
long as the tokens, where the rows of one id have one place, and these sums are put into the cleared destination. They
are sums of `embedding_dense_backward`, which adds rows in the order of tokens wherever their place is: so are the bits.

Shapes: T tokens, or any leading dimensions, V rows of the table, D width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hocket.runtime.weights import put


def dense_gradient(ids_T: Tensor, g_TD: Tensor, rows: int) -> Tensor:
    """The gradient of the whole table, as autograd makes it."""
    return torch.ops.aten.embedding_dense_backward(g_TD, ids_T, rows, -1, False)


def write_rows(ids_T: Tensor, g_TD: Tensor, out_VD: Tensor, add: bool = False, scale: float = 1.0) -> None:
    """Write the gradient of the whole table, times `scale`, or add it. See `Note: [Rows that nobody looked up]`."""
    if out_VD.is_cuda and 0 < ids_T.numel() < len(out_VD):
        write_sums(ids_T, g_TD, out_VD, add, scale)
    else:
        put(dense_gradient(ids_T, g_TD, len(out_VD)), out_VD, add, scale)


def write_sums(ids_T: Tensor, g_TD: Tensor, out_VD: Tensor, add: bool, scale: float = 1.0) -> None:
    """Clear the table, and write the rows that were looked up; or add to these."""
    ids_T = ids_T.reshape(-1).long()
    rows_TD = sums_by_id(ids_T, g_TD.reshape(len(ids_T), -1))
    if scale != 1.0:
        rows_TD = rows_TD.to(out_VD.dtype) * scale
    if add:
        rows_TD = out_VD.index_select(0, ids_T).add_(rows_TD)
    else:
        out_VD.zero_()
    out_VD.index_copy_(0, ids_T, rows_TD.to(out_VD.dtype))  # tokens of one id write the same row


def sums_by_id(ids_T: Tensor, g_TD: Tensor) -> Tensor:
    """For every token the sum of the rows of all tokens with its id, [T, D]; no host waits for the number of ids."""
    order = ids_T.argsort(stable=True)
    in_order = ids_T[order]
    begins = torch.zeros_like(order)
    begins[1:] = in_order[1:] != in_order[:-1]
    place_T = torch.empty_like(order).scatter_(0, order, begins.cumsum(0))
    return dense_gradient(place_T, g_TD, len(ids_T)).index_select(0, place_T)
