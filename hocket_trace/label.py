"""Classifies activities: communication or compute, kind, kernel class, and bytes.

A program's description of its ops (`plan.py`) has priority. Otherwise text decides: the kernel's name, the op that
launched it, annotations around the launch, and torch's args of a collective. Callers call each function once per
distinct set of texts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from hocket_trace.data import KernelClass, Kind, PlanOp

_MODULE_LAYER = re.compile(r"(?:(?:^|[^a-z])(?:layers?|blocks?|h)[._/]|^FSDP::\w+ \()(\d+)", re.IGNORECASE)

_TRANSFER = re.compile(
    r"nccl|rccl|nvshmem|symm_?mem|symmetric_memory|multimem|deep_ep|exchangeSplitAndOffset|cross_device_reduce"
    r"|(^|[^a-z])(barrier|(put|wait)_signal|(one|two)_shot_all_\w+)_kernel|all_?to_?all|all_?reduce_kernel"
    r"|Memcpy (PtoP|P2P)|^_push_(rows|counts)|^_take_blocks",
    re.IGNORECASE,
)
_ONLY_COMPUTE = re.compile(r"^triton_(poi|red|per|tem|for)_(?!.*(nvshmem|symm_mem))|at::native::|cutlass|cub::|cudnn")
"""Kernels that never communicate, even if the compiler wrote names of collectives into theirs."""

COLLECTIVES: tuple[str, ...] = (
    "allgather", "reducescatter", "allreduce", "alltoall", "sendrecv", "send", "recv", "broadcast", "barrier",
    "reduce", "gather", "scatter",
)  # fmt: skip
_COPYING = ("nccl:", "c10d::", "symm_mem::_low_contention", "hocket:")
"""Prefixes of launchers whose copies are communication, even within a GPU."""
_ENDLESS = 1e18
"""Elements and bytes beyond which a number is taken for corrupt."""
_SMALL = 4096
"""Bytes up to which an all-reduce or broadcast counts as agreement between ranks, not as gradients."""

_BY_COLLECTIVE: Mapping[str, Kind] = {
    "allgather": "gather", "reducescatter": "reduce", "allreduce": "reduce", "alltoall": "a2a", "send": "pp",
    "recv": "pp", "sendrecv": "pp", "reduce": "reduce", "barrier": "control",
}  # fmt: skip


def _patterns(*table: tuple[KernelClass, str]) -> tuple[tuple[re.Pattern[str], KernelClass], ...]:
    return tuple((re.compile(pattern, re.IGNORECASE), found) for found, pattern in table)


def _ops(words: str) -> str:
    """A pattern for ops of any library by the first parts of names: `mm` matches `aten::mm` and `aten::_mm_out`."""
    return rf"::_?({'|'.join(words.split())})(?![a-z])"


_OP_CLASS = _patterns(
    ("copy", r"_foreach_copy|split_with_sizes_copy|all_gather_copy_in|chunk_cat"),
    ("optimizer", r"_fused_(adam|sgd|adagrad|lamb)|_foreach_"),
    ("grouped gemm", r"grouped_mm"),
    ("attention", r"attention|flash|fmha"),
    ("gemm", _ops("mm bmm mv addmm addbmm baddbmm addmv matmul linear scaled_mm convolution cudnn_convolution")),
    ("norm", r"(rms|layer|group|batch)_norm"),
    ("reduction", r"softmax|nll_loss|cross_entropy"),
    (
        "reduction",
        _ops("sum mean norm linalg_vector_norm max min amax amin argmax argmin cumsum any all prod logsumexp"),
    ),
    ("indexing", _ops("index embedding gather scatter sort argsort topk searchsorted nonzero masked take unique")),
    ("indexing", _ops("bincount repeat_interleave arange")),
    ("copy", _ops("(copy|cat|to|to_copy|clone|contiguous|fill|zero|zeros|full|ones|stack)(_|_out)?$")),
    ("elementwise", _ops("add sub rsub mul div neg pow exp log sqrt rsqrt silu gelu relu sigmoid tanh where lerp")),
    ("elementwise", _ops("addcmul addcdiv abs clamp dropout floor_divide eq ne lt le gt ge")),
)
"""Torch op -> class; the first match counts."""

_NAME_CLASS = _patterns(
    ("copy", r"^Mem(cpy|set)|^_(take_rows|cast_rows|transposed)"),
    (
        "indexing",
        r"^_(lay_out_blocks|pair_(counts|rows)|(read|write)_labels|label_grads|spread|total(_backward)?|weights)$",
    ),
    ("reduction", r"^_(local_sum|merge|squares|route_backward|row_sums)$"),
    ("optimizer", r"fused_?adam|multi_tensor_apply|^_adamw"),
    ("grouped gemm", r"grouped_?(gemm|mm)|GroupProblemShape|^_weight_gradients"),
    ("attention", r"flash|fmha|attention|sdpa"),
    ("gemm", r"^_router_|nvjet|cutlass|gemm|cublas|splitK|xmma|triton_tem|triton_mm|wgmma|_mm_kernel"),
    ("norm", r"(rms|layer|group|batch)_?norm"),
    ("elementwise", r"^triton_poi"),
    ("reduction", r"^triton_(red|per)|reduce_kernel|softmax|nll_loss|cross_entropy|scan"),
    ("indexing", r"gather|scatter|index|radix_?sort|sort|topk|embedding|searchsorted|permute"),
    ("copy", r"copy_kernel|CatArray|_copy|FillFunctor|fill"),
    ("elementwise", r"elementwise|pointwise|silu|swiglu|gelu|rope|rotary|^_add_by_expert"),
)
"""Kernel name -> class; the first match counts."""

_DTYPE_BYTES: Mapping[str, int] = {
    "Double": 8, "Long": 8, "Float": 4, "Int": 4, "BFloat16": 2, "Half": 2, "Short": 2, "Byte": 1, "Char": 1, "Bool": 1,
    "Float8_e4m3fn": 1, "Float8_e5m2": 1, "Float8_e4m3fnuz": 1, "Float8_e5m2fnuz": 1, "ComplexFloat": 8,
}  # fmt: skip


def layer_of(name: str) -> int:
    """The layer in a module's name such as `model.layers.5.mlp`, else -1."""
    found = _MODULE_LAYER.search(name)
    return int(found[1]) if found else -1


def is_communication(name: str, launcher: str, op: PlanOp | None = None) -> bool:
    """Whether a kernel, copy or memset moves data between ranks, from its name, its launcher and the plan's op.

    A copy within the GPU counts if it is a collective's, the rank's own part of a copy-engine collective, or a receive,
    which copies data that a neighbour has copied to this rank to its destination.
    """
    if op is not None and op.kind == "pp" and name.startswith("Memcpy DtoD"):
        return True
    if name.startswith(("Memcpy", "Memset")) and launcher.startswith(_COPYING):
        return True
    return not _ONLY_COMPUTE.search(name) and _TRANSFER.search(name) is not None


def collective_of(*texts: str) -> str:
    """The collective that the first text with a known name contains: one of `COLLECTIVES`, else empty."""
    for text in texts:
        plain = re.sub(r"[^a-z0-9]", "", text.lower())
        for collective in COLLECTIVES:
            if collective in plain:
                return collective
    return ""


def kind_of(op: PlanOp | None, description: str, collective: str, around: str, size: float) -> Kind:
    """The kind of a communication.

    `op` is the plan's op, `description` the process group's, `collective` one of `COLLECTIVES` or empty, `around` the
    names of the ops and annotations around the launch and of the kernel, and `size` its bytes, 0 if not known.
    """
    if op is not None and op.kind != "compute":
        return op.kind
    small = 0 < size <= _SMALL and collective in ("allreduce", "broadcast", "reduce", "gather", "scatter", "allgather")
    return _by_group(description, collective, small) or _by_name(collective, around, small)


def _by_group(description: str, collective: str, small: bool) -> Kind | None:
    words = set(re.split(r"[^a-z0-9]+", description.lower()))
    if words & {"control"}:
        return "control"
    if words & {"tp", "tensor", "sp"} and not words & {"data", "dp"}:
        return "tp"
    if words & {"pp", "pipe", "pipeline"}:
        return "pp"
    if words & {"cp", "context"} and not words & {"data", "dp"}:
        return "cp"
    if words & {"a2a", "ep", "expert", "experts", "moe"} and not words & {"gather", "reduce", "data", "dp", "edp"}:
        return "a2a"
    if words & {"gather", "reduce"}:
        return "gather" if "gather" in words else "reduce"
    if words & {"dp", "ddp", "edp", "fsdp", "hsdp", "data", "shard", "replicate", "zero"}:
        if small and collective != "allgather":
            return "control"
        return "gather" if collective in ("allgather", "broadcast") else _BY_COLLECTIVE.get(collective)
    return None


def _by_name(collective: str, around: str, small: bool) -> Kind:
    if re.search(r"fused_all_gather_matmul|fused_\w*matmul_reduce_scatter", around):
        return "tp"
    if re.search(r"deep_ep|dispatch|combine|(^| )_push_(rows|counts)\b", around) and collective in ("alltoall", ""):
        return "a2a"
    if small:
        return "control"
    return _BY_COLLECTIVE.get(collective, "other")


def kernel_class(name: str, launcher: str, in_optimizer: bool) -> KernelClass:
    """The class of a compute kernel, from the op that launched it or else from its name."""
    if name.startswith(("Memcpy", "Memset")):
        return "copy"
    if in_optimizer:
        return "optimizer"
    for pattern, found in _OP_CLASS:
        if pattern.search(launcher):
            return found
    return next((found for pattern, found in _NAME_CLASS if pattern.search(name)), "other")


def is_stand_in(name: str, launcher: str, op: PlanOp | None) -> bool:
    """Whether a kernel of the null transport writes a stand-in for a plan op's received data.

    The copy of an exchange's counts to the host is none: a run that communicates has it too.
    """
    moves_rows = op is not None and op.kind in ("a2a", "pp")
    copied = launcher == "aten::copy_" and not name.startswith("Memcpy DtoH")
    return moves_rows and (copied or name.startswith("_take_rows"))


def is_copy(name: str) -> bool:
    """Whether a copy engine ran it. Traces lack the launches of batched copies."""
    return name.startswith("Memcpy")


def is_barrier(name: str) -> bool:
    """Whether a kernel is symmetric memory's barrier, which ends the stores or copies before it."""
    return "barrier_kernel" in name


def bus_bytes(args: Mapping[str, Any], collective: str, rank: int, ranks: tuple[int, ...]) -> float:
    """Bytes of a collective over this rank's link, by the factors of nccl-tests; 0 if the args don't have them.

    For an all-to-all with uneven splits, the larger of sent and received bytes.
    """
    element = _DTYPE_BYTES.get(str(args.get("dtype", "")), 0)
    sent, received = element * number(args, "In msg nelems"), element * number(args, "Out msg nelems")
    n = int(number(args, "Group size")) or len(ranks)
    if collective in ("send", "recv", "sendrecv", "broadcast", "reduce"):
        return max(sent, received)
    if n < 2:
        return 0.0
    if collective == "alltoall":
        own = ranks.index(rank) if rank in ranks else 0
        return max(
            sent * _foreign(args.get("In split size"), own, n), received * _foreign(args.get("Out split size"), own, n)
        )
    if collective in ("allgather", "reducescatter"):
        return max(sent, received) * (n - 1) / n
    return 2 * sent * (n - 1) / n if collective == "allreduce" else 0.0


def number(args: Mapping[str, Any], key: str) -> float:
    """A count in an activity's args; 0 if it is missing or invalid."""
    value = args.get(key)
    return float(value) if isinstance(value, int | float) and 0 <= value < _ENDLESS else 0.0


def _foreign(splits: Any, own: int, n: int) -> float:
    """The share of an all-to-all's rows that other ranks send or receive."""
    rows = [int(row) for row in re.findall(r"\d+", str(splits or ""))]
    if len(rows) != n or not sum(rows):
        return (n - 1) / n
    return 1.0 - rows[own] / sum(rows)
