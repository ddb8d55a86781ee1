"""Gated delta nets (Yang et al. 2024, "Gated Delta Networks"): attention with a memory of constant size.

Every value head has a memory M, of width of a key x width of a value. At each token

    M = exp(g) M,  then  M = M + k (b (v - k M))  and the head's output is  q M / sqrt(width of a key)

with b the sigmoid of a projection of the token, and g = -exp(a_log) softplus(projection + dt). Queries, keys and values
are projections of the token, convolved over the last few tokens, then SiLU; queries and keys are then normalized to
length 1. Each key head serves a group of neighbouring value heads. Outputs are normed per head, multiplied by SiLU of
another projection, and projected.

Rows of `w_qkvz` and `w_ba`, and channels of `conv`, are grouped by key head; within a head come queries, keys, values,
gates z, or projections for b, then for g. So each tensor-parallel rank has some key heads and their value heads.

Every document begins with an empty memory, and the convolution does not cross documents.

Note: [Chunks of a delta rule]
A loop over tokens is slow, so `chunked_rule` loops over chunks of tokens (section 3.3 there). With G the cumulative
sums of g within the chunk, token i adds to the memory b_i times (value i minus the memory's current value for key i).
That is a triangular system of equations for all tokens of a chunk. Its solution is linear in the memory at the chunk's
start. Documents that begin inside a chunk only zero the factors between tokens of different documents.

Shapes: B sequences, S sequence length, D hidden, C tokens of a chunk, G key heads, H value heads, K width of a key, V
width of a value, N chunks.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hocket.config import ModelConfig
from hocket.layers.functional import causal_convolution, decay, shift
from hocket.layers.linears import WHOLE, Linears, new_weight
from hocket.layers.norms import rms_norm
from hocket.machine import why_no_delta_kernels
from hocket.model.documents import Documents, has_flash

CHUNK = 64
EPS = 1e-6
"""Added to the squared length of queries and keys."""


class DeltaNet(nn.Module):
    """A gated delta net, without norm and residual."""

    def __init__(self, config: ModelConfig, linears: Linears = WHOLE) -> None:
        super().__init__()
        c = self.config = config
        self.linears = linears
        self.key_heads, self.heads = c.delta_key_heads // linears.size, c.delta_heads // linears.size
        each = self.heads // self.key_heads
        self.widths = [c.delta_key_dim, c.delta_key_dim, each * c.delta_value_dim]
        """Per key head: queries, keys, values."""
        values = self.heads * c.delta_value_dim
        self.w_qkvz = new_weight(self.key_heads * sum(self.widths) + values, c.hidden)
        self.w_ba = new_weight(2 * self.heads, c.hidden)
        self.conv = new_weight(self.key_heads * sum(self.widths), c.delta_conv)
        self.dt = new_weight(self.heads)
        self.a_log = new_weight(self.heads)
        self.o_norm = new_weight(c.delta_value_dim)
        self.w_out = new_weight(c.hidden, values)

    def forward(self, h_BSD: Tensor, documents: Documents | None = None) -> Tensor:
        """The memory's output for each token, from earlier tokens of its sequence and document: in the shape of `h`."""
        c, each = self.config, self.heads // self.key_heads
        made, ba = self.linears.columns("qkv", h_BSD, (self.w_qkvz, self.w_ba))
        batch, seq, _ = made.shape
        made_BSGX = made.view(batch, seq, self.key_heads, -1)
        inputs_BSGX, z_BSGX = made_BSGX.split([sum(self.widths), each * c.delta_value_dim], -1)
        b_BSGX, a_BSGX = ba.view(batch, seq, self.key_heads, -1).split([each, each], -1)
        position_BS = None if documents is None else documents.position_T.view(batch, seq)
        mixed = F.silu(causal_convolution(inputs_BSGX.flatten(2), self.conv, position_BS))
        q, k, v = mixed.view(batch, seq, self.key_heads, -1).split(self.widths, -1)
        v_BSHV = v.reshape(batch, seq, self.heads, -1)
        g_BSH = decay(F.softplus(shift(a_BSGX.flatten(2).float(), self.dt)), self.a_log)
        b_BSH = b_BSGX.flatten(2).sigmoid()
        o_BSHV = self._remembered(q, k, v_BSHV, g_BSH, b_BSH, documents)
        o_BSHV = rms_norm(o_BSHV, self.o_norm, c.norm_eps)
        z_BSHV = z_BSGX.reshape(o_BSHV.shape)
        o_BSHV = (o_BSHV * F.silu(z_BSHV.float())).to(o_BSHV.dtype)
        return self.linears.row("proj", o_BSHV.flatten(2), self.w_out)

    def _remembered(
        self, q_BSGK: Tensor, k_BSGK: Tensor, v_BSHV: Tensor, g_BSH: Tensor, b_BSH: Tensor, documents: Documents | None
    ) -> Tensor:
        """The rule over all tokens, by kernels if available: [B, S, H, V]."""
        if has_flash(q_BSGK) and has_kernels():
            return _by_kernels(q_BSGK, k_BSGK, v_BSHV, g_BSH, b_BSH, documents)
        starts_BS = None if documents is None else documents.position_T.view(g_BSH.shape[:2]) == 0
        return chunked_rule(q_BSGK, k_BSGK, v_BSHV, g_BSH, b_BSH, starts_BS)


@cache
def has_kernels() -> bool:
    """Whether flash-linear-attention's kernels support this GPU, in bf16."""
    return not why_no_delta_kernels(torch.cuda.get_device_capability())


def _by_kernels(
    q_BSGK: Tensor, k_BSGK: Tensor, v_BSHV: Tensor, g_BSH: Tensor, b_BSH: Tensor, documents: Documents | None
) -> Tensor:
    """The rule by flash-linear-attention's kernels. With documents, on one sequence of all tokens."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # pyrefly: ignore[missing-import]

    given, ends = tuple(x.contiguous() for x in (q_BSGK, k_BSGK, v_BSHV, g_BSH, b_BSH)), None
    if documents is not None:
        given, ends = tuple(x.flatten(0, 1).unsqueeze(0) for x in given), documents.ends
    o_BSHV, _ = chunk_gated_delta_rule(*given, use_qk_l2norm_in_kernel=True, cu_seqlens=ends)
    return o_BSHV.view(v_BSHV.shape)


def chunked_rule(
    q_BSGK: Tensor,
    k_BSGK: Tensor,
    v_BSHV: Tensor,
    g_BSH: Tensor,
    b_BSH: Tensor,
    starts_BS: Tensor | None = None,
) -> Tensor:
    """The memory's output at every token, [B, S, H, V]: see the note above.

    Normalizes queries and keys to length 1. `starts` marks the first tokens of documents; every sequence begins with an
    empty memory. All sums are fp32.
    """
    seq, dtype, each = q_BSGK.shape[1], q_BSGK.dtype, v_BSHV.shape[2] // q_BSGK.shape[2]
    q, k = (_unit(x).repeat_interleave(each, 2) for x in (q_BSGK, k_BSGK))
    chunk = min(CHUNK, seq)
    given = (q * q.shape[-1] ** -0.5, k, v_BSHV, g_BSH.unsqueeze(-1), b_BSH.unsqueeze(-1))
    q_BHNCK, k_BHNCK, v_BHNCV, g_BHNC1, b_BHNC1 = (_in_chunks(x, chunk) for x in given)
    sum_BHNC1 = g_BHNC1.cumsum(3)
    between_BHNCC = sum_BHNC1 - sum_BHNC1.transpose(3, 4)
    later_CC = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).triu(1)
    from_state, to_state, through = sum_BHNC1, sum_BHNC1[..., -1:, :] - sum_BHNC1, sum_BHNC1[..., -1:, :]
    if starts_BS is not None:
        number_B1NC1 = _in_chunks(starts_BS[..., None, None], chunk).cumsum(3)
        later_CC = later_CC | (number_B1NC1 != number_B1NC1.transpose(3, 4))
        from_state = from_state.masked_fill(number_B1NC1 != 0, -torch.inf)
        to_state = to_state.masked_fill(number_B1NC1 != number_B1NC1[..., -1:, :], -torch.inf)
        through = through.masked_fill(number_B1NC1[..., -1:, :] != 0, -torch.inf)
    factor_BHNCC = between_BHNCC.masked_fill(later_CC, -torch.inf).exp()
    met_BHNCC = (b_BHNC1 * k_BHNCK) @ k_BHNCK.transpose(3, 4) * factor_BHNCC
    seen_BHNCC = q_BHNCK @ k_BHNCK.transpose(3, 4) * factor_BHNCC
    right = torch.cat([b_BHNC1 * v_BHNCV, b_BHNC1 * k_BHNCK * from_state.exp()], -1)
    solved = torch.linalg.solve_triangular(met_BHNCC, right, upper=False, unitriangular=True)
    new_BHNCV, known_BHNCK = solved.split([v_BHNCV.shape[-1], k_BHNCK.shape[-1]], -1)
    asked_BHNCK, kept_BHNKC, through_BHN11 = (
        q_BHNCK * from_state.exp(), (k_BHNCK * to_state.exp()).transpose(3, 4), through.exp(),
    )  # fmt: skip
    state_BHKV = q.new_zeros(v_BSHV.shape[0], v_BSHV.shape[2], k.shape[-1], v_BSHV.shape[-1])
    outs = []
    for n in range(new_BHNCV.shape[2]):
        added_BHCV = new_BHNCV[:, :, n] - known_BHNCK[:, :, n] @ state_BHKV
        outs.append(asked_BHNCK[:, :, n] @ state_BHKV + seen_BHNCC[:, :, n] @ added_BHCV)
        state_BHKV = state_BHKV * through_BHN11[:, :, n] + kept_BHNKC[:, :, n] @ added_BHCV
    return torch.cat(outs, 2)[:, :, :seq].transpose(1, 2).to(dtype)


def _unit(x: Tensor) -> Tensor:
    """Vectors normalized to length 1, fp32."""
    x = x.float()
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + EPS)


def _in_chunks(x_BSHX: Tensor, chunk: int) -> Tensor:
    """[B, H, N, C, X], fp32, padded with zeros."""
    missing = -x_BSHX.shape[1] % chunk
    return F.pad(x_BSHX.float(), (0, 0, 0, 0, 0, missing)).transpose(1, 2).unflatten(2, (-1, chunk))
