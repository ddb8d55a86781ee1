"""Names of kernels, ops, collectives and groups, and what they mean."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hocket_trace import PlanOp, label
from tests.trace.build import planned

TRANSFERS = [
    ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "nccl:_all_gather_base"),
    ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*)", ""),
    ("ncclSymkDevKernel_ReduceScatter_LD(ncclSymkDevWorkArgs)", ""),
    ("ncclSymDevKernel_AllGather_LL(ncclSymDevArgs)", ""),
    (
        "void c10d::symmetric_memory::(anonymous namespace)::barrier_kernel(unsigned int**, int)",
        "",
    ),
    ("(anonymous namespace)::put_signal_kernel(unsigned int**, int, int, int, int, unsigned long)", ""),
    ("(anonymous namespace)::wait_signal_kernel(unsigned int**, int, int, int, int, unsigned long)", ""),
    ("void c10d::one_shot_all_reduce_kernel<c10::BFloat16, 16, 8, true>(c10::BFloat16**)", ""),
    ("void (anonymous namespace)::two_shot_all_reduce_kernel_inplace<c10::BFloat16, 16, 8>(c10::BFloat16**)", ""),
    ("nvshmemi_barrier_all_kernel()", ""),
    ("void c10d::nvshmem_extension::allToAllV(void*, void*, long*, long*)", "symm_mem::all_to_all_vdev"),
    ("exchangeSplitAndOffset_2d<true>(long*, long*)", "symm_mem::all_to_all_vdev_2d"),
    ("void deep_ep::intranode::dispatch<8, 768, 8192>(int4*, float*)", ""),
    ("Memcpy PtoP (Device -> Device)", "aten::copy_"),
    ("_push_rows", ""),
    ("_push_counts", ""),
    ("Memcpy DtoD (Device -> Device)", "nccl:_all_gather_base"),
]
COMPUTE = [
    ("Memcpy DtoD (Device -> Device)", "aten::copy_"),
    ("Memcpy HtoD (Pinned -> Device)", "aten::copy_"),
    ("Memset (Device)", "aten::mm"),
    ("_take_rows", ""),
    ("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_TNT", "aten::mm"),
    ("triton_poi_fused_all_gather_into_tensor_wait_tensor_3", ""),
    ("triton_red_fused_reduce_scatter_tensor_all_reduce_kernel_1", ""),
    ("void at::native::vectorized_gather_kernel<16, long>(char*, char*)", "aten::gather"),
    (
        "void (anonymous namespace)::softmax_warp_forward<float, 5>(float*)",
        "aten::_softmax",
    ),
    ("void at::native::(anonymous namespace)::CatArrayBatchedCopy<int>()", "fsdp::all_gather_copy_in"),
]


@pytest.mark.parametrize(("name", "launcher"), TRANSFERS)
def test_transfers_are_communication(name: str, launcher: str) -> None:
    assert label.is_communication(name, launcher)


@pytest.mark.parametrize(("name", "launcher"), COMPUTE)
def test_local_kernels_and_copies_are_compute(name: str, launcher: str) -> None:
    assert not label.is_communication(name, launcher)


@pytest.mark.parametrize(
    ("op", "description", "collective", "around", "kind"),
    [
        # hocket's plan decides first
        ("gather dense t0 c0 l5 s0", "default_pg", "alltoall", "", "gather"),
        ("reduce experts m7 c1 l5 s0", "", "alltoall", "", "reduce"),
        ("fwd dispatch m0 c0 l1", "a2a", "alltoall", "", "a2a"),
        ("bwd combine m0 c0 l1", "", "", "", "a2a"),
        ("send act m0 c0", "pp_fwd", "send", "", "pp"),
        ("recv grad m0 c0", "", "", "", "pp"),
        ("step all", "reduce_dense", "allreduce", "", "control"),
        # then the group
        ("", "gather_experts", "allgather", "", "gather"),
        ("", "reduce_dense", "allreduce", "", "reduce"),
        ("", "control", "allreduce", "", "control"),
        ("fwd attn m0 c0 l0", "tp", "allgather", "", "tp"),
        ("", "mesh_tp", "reducescatter", "", "tp"),
        ("", "TENSOR_MODEL_PARALLEL_GROUP", "allreduce", "", "tp"),
        ("", "PIPELINE_MODEL_PARALLEL_GROUP", "sendrecv", "", "pp"),
        ("", "EXPERT_MODEL_PARALLEL_GROUP", "alltoall", "", "a2a"),
        ("", "EXPERT_DATA_PARALLEL_GROUP", "reducescatter", "", "reduce"),
        ("", "DATA_PARALLEL_GROUP_WITH_CP", "allgather", "", "gather"),
        ("", "mesh_ep", "alltoall", "", "a2a"),
        ("", "mesh_dp_shard", "allgather", "", "gather"),
        ("", "mesh_fsdp", "reducescatter", "", "reduce"),
        ("", "mesh_cp", "sendrecv", "", "cp"),
        # then the collective and what launched it
        ("", "default_pg", "allreduce", "", "reduce"),
        ("", "", "allgather", "FSDP::all_gather", "gather"),
        ("", "undefined", "reducescatter", "", "reduce"),
        ("", "", "alltoall", "", "a2a"),
        ("", "", "sendrecv", "", "pp"),
        ("", "", "barrier", "", "control"),
        ("", "", "allgather", "symm_mem::fused_all_gather_matmul", "tp"),
        ("", "", "", "  _push_rows", "a2a"),
        ("", "", "", "  _push_rows2", "other"),
        ("", "", "broadcast", "", "other"),
        ("", "", "", "", "other"),
    ],
)
def test_kinds(op: str, description: str, collective: str, around: str, kind: str) -> None:
    assert label.kind_of(PlanOp(*planned(op)) if op else None, description, collective, around, 1e6) == kind


@pytest.mark.parametrize("description", ["", "default_pg", "mesh_dp_shard"])
def test_a_few_bytes_that_ranks_agree_on_are_no_gradients(description: str) -> None:
    assert label.kind_of(None, description, "allreduce", "", 4.0) == "control"
    assert label.kind_of(None, description, "allreduce", "", 1e8) == "reduce"


def test_collectives_by_the_first_telling_text() -> None:
    assert label.collective_of("_allgather_base", "nccl:x") == "allgather"
    assert label.collective_of("all_to_allv") == "alltoall"
    assert label.collective_of("", "nccl:_reduce_scatter_base") == "reducescatter"
    assert label.collective_of("", "", "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)") == "sendrecv"
    assert label.collective_of("", "nccl:recv 0<-1", "ncclDevKernel_SendRecv") == "recv"
    assert label.collective_of("coalesced", "") == ""


def told(sent: int, received: int, n: int, dtype: str = "BFloat16", **splits: str) -> dict[str, object]:
    return {
        "In msg nelems": sent, "Out msg nelems": received, "Group size": n, "dtype": dtype,
        **{key.replace("_", " "): value for key, value in splits.items()},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("collective", "args", "size"),
    [
        ("allgather", told(100, 800, 8), 1600 * 7 / 8),
        ("reducescatter", told(800, 100, 8, "Float"), 3200 * 7 / 8),
        ("allreduce", told(800, 800, 8), 2 * 1600 * 7 / 8),
        ("alltoall", told(800, 800, 4), 1600 * 3 / 4),
        ("alltoall", told(80, 60, 2, In_split_size="[30, 50]", Out_split_size="[30, 30]"), 2 * 50),
        ("alltoall", told(40, 60, 2, In_split_size="[30, 10]", Out_split_size="[30, 30]"), 2 * 30),
        ("alltoall", told(2, 2, 2, "Long"), 8),
        ("send", told(100, 100, 2), 200),
        ("broadcast", told(100, 100, 4), 200),
        ("barrier", told(1, 1, 4), 0),
        ("allgather", told(100, 100, 1), 0),
        ("allgather", told(100, 800, 8, "Unknown"), 0),
        ("allgather", {}, 0),
    ],
)
def test_bus_bytes(collective: str, args: dict[str, object], size: float) -> None:
    assert label.bus_bytes(args, collective, 0, (0, 1)) == size


@pytest.mark.parametrize(
    ("name", "launcher", "optimizer", "kind"),
    [
        ("nvjet_sm90_tst_256x128", "aten::mm", False, "gemm"),
        ("void cublasLt::splitKreduce_kernel<32>()", "aten::addmm", False, "gemm"),
        ("_ZN7cutlass13device_kernelIN2at4cuda6detail", "aten::_grouped_mm", False, "grouped gemm"),
        ("void at::cuda::detail::prepare_grouped_gemm_data<>()", "aten::_grouped_mm", False, "grouped gemm"),
        ("_weight_gradients", "", False, "grouped gemm"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop", "aten::_cudnn_attention_forward", False, "attention"),
        ("void pytorch_flash::flash_bwd_kernel<>()", "aten::_flash_attention_backward", False, "attention"),
        ("void cudnn::fusion::compute_dot_do_o<>()", "aten::_cudnn_attention_backward", False, "attention"),
        ("void at::native::vectorized_layer_norm_kernel<>()", "aten::_fused_rms_norm", False, "norm"),
        ("void at::native::vectorized_elementwise_kernel<8, mul>()", "aten::mul", False, "elementwise"),
        ("void at::native::vectorized_gather_kernel<16, long>()", "aten::gather", False, "indexing"),
        ("void at_cuda_detail::cub::DeviceRadixSortOnesweepKernel<>()", "aten::sort", False, "indexing"),
        ("void at::native::reduce_kernel<512, 1>()", "aten::sum", False, "reduction"),
        ("void at::native::unrolled_elementwise_kernel<direct_copy_kernel_cuda>()", "aten::copy_", False, "copy"),
        ("Memcpy DtoD (Device -> Device)", "aten::cat", False, "copy"),
        ("Memset (Device)", "aten::mm", False, "copy"),
        ("void multi_tensor_apply_kernel<FusedAdamMathFunctor>()", "aten::_fused_adamw_", False, "optimizer"),
        ("void multi_tensor_apply_kernel<TensorListMetadata>()", "aten::_foreach_addcdiv_", False, "optimizer"),
        ("void multi_tensor_apply_kernel<Copy>()", "aten::_foreach_copy_", False, "copy"),
        ("void at::native::vectorized_elementwise_kernel<4, mul>()", "aten::mul", True, "optimizer"),
        ("triton_poi_fused_mul_silu_0", "", False, "elementwise"),
        ("triton_per_fused_sum_0", "", False, "reduction"),
        ("triton_red_fused_native_layer_norm_0", "", False, "norm"),
        ("triton_tem_fused_mm_0", "", False, "gemm"),
        ("my_own_thing", "mylib::mine", False, "other"),
    ],
)
def test_kernel_classes(name: str, launcher: str, optimizer: bool, kind: str) -> None:
    assert label.kernel_class(name, launcher, optimizer) == kind


def test_every_kernel_of_hocket_has_a_class() -> None:
    launched = set()
    for path in (Path(__file__).parents[2] / "hocket" / "kernels").glob("*.py"):
        text = path.read_text()
        kernels = re.findall(r"@triton\.jit.*?\ndef (\w+)", text, re.DOTALL)
        launched |= {name for name in kernels if re.search(rf"\b{name}\[", text)}
    assert len(launched) > 20
    unknown = {
        name
        for name in launched
        if not label.is_communication(name, "") and label.kernel_class(name, "", False) == "other"
    }
    assert unknown == set()


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("fwd embed m0 c0", -1),
        ("FSDP::all_gather (model.layers.31)", 31),
        ("FSDP::all_gather (4)", 4),
        ("FSDP::pre_forward (lm_head)", -1),
        ("model.layers.3.mlp", 3),
        ("transformer.h.7.attn", 7),
        ("nn.Module: blocks/2/attn", 2),
        ("aten::mm", -1),
        ("autograd.players.3", -1),
    ],
)
def test_layers(name: str, layer: int) -> None:
    assert label.layer_of(name) == layer
