"""`hocket explain --from-megatron TEXT`: flags of Megatron-LM and keys of Megatron Bridge as hocket's settings.

A flag (`--tensor-model-parallel-size 2`) or key (`cfg.model.tensor_model_parallel_size = 2`) is looked up by its last
word, with underscores. The answer names each one that was given, whether hocket has it or not.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Mapping
from typing import Any, get_args

from hocket.commands.options import Parser
from hocket.config.load import MOST_KEYS, value_of
from hocket.config.rule import show
from hocket.config.schema import beyond, meant, types
from hocket.problems import stop_if
from hocket.typed import describe

TABLE = """
tensor_model_parallel_size -> mesh.tp; pipeline_model_parallel_size -> mesh.pp; context_parallel_size -> mesh.cp
expert_model_parallel_size -> mesh.ep; data_parallel_size -> mesh.dp; micro_batch_size -> train.sequences
num_virtual_stages_per_pipeline_rank virtual_pipeline_model_parallel_size -> plan.chunks
microbatch_group_size_per_virtual_pipeline_stage microbatch_group_size_per_vp_stage -> plan.group
seq_length sequence_length -> data.sequence_length; moe_router_force_load_balancing => model.routing=even
cp_comm_type=all_gather => overlap.cp.method=gather; cp_comm_type=a2a => overlap.cp.method=heads
data_parallel_sharding_strategy -> overlap.dp.strategy; use_distributed_optimizer => overlap.dp.strategy=optim
use_torch_fsdp2 => overlap.dp.strategy=optim_grads_params
overlap_param_gather_with_optimizer_step => overlap.dp.update=next_step
ddp_reduce_scatter_with_fp32_accumulation reduce_scatter_with_fp32_accumulation => train.transport=copy_engine
use_nccl_ub nccl_ub moe_enable_deepep moe_token_dispatcher_type=flex => train.transport=copy_engine
tp_comm_overlap => overlap.tp.method=auto; tp_comm_overlap=false => overlap.tp.method=off
disable_tp_comm_overlap_ag tp_comm_overlap_ag=false => \
overlap.tp.method=qkv_forward:off,fc1_forward:off,proj_backward:off,fc2_backward:off
disable_tp_comm_overlap_rs tp_comm_overlap_rs=false => overlap.tp.method=proj_forward:off,fc2_forward:off
disable_tp_comm_bulk_dgrad tp_comm_bulk_dgrad=false => overlap.tp.method=qkv_backward:off,fc1_backward:off
tp_comm_overlap_rs_dgrad => overlap.tp.method=qkv_backward:pipeline,fc1_backward:pipeline
tp_comm_overlap_disable_qkv => overlap.tp.method=qkv_forward:off,qkv_backward:off
tp_comm_overlap_disable_fc1 => overlap.tp.method=fc1_forward:off,fc1_backward:off
overlap_p2p_backward_on_comm_stream .. gradients always arrive on a lane of their own
delay_wgrad_compute -> overlap.defer_wgrad
overlap_p2p_with_transformer_layer_wgrad .. overlap.pp.defer_layers = 2 takes all parts, and attn:2 attention
defer_embedding_wgrad_compute => overlap.pp.defer_head=-1; wgrad_deferral_limit !! overlap.pp.defer_head is that number
overlap_moe_expert_parallel_comm -> overlap.ep.merge; overlap_p2p_wgrad_delayed_layer_number -> overlap.pp.defer_layers
ep_overlap_early_attn_memory_release => plan.layer_order=early_release; grad_reduce_in_bf16 => precision.wire=bf16
bf16 mixed_precision=bf16_mixed mixed_precision=bf16-mixed => precision.compute=bf16
fp8=hybrid fp8=e4m3 fp8_format=hybrid fp8_format=e4m3 => precision.compute=fp8; fp8_param_gather => precision.gather=fp8
first_last_layers_bf16 => precision.fp8=but_first:1,but_last:1; exp_avg_dtype exp_avg_sq_dtype -> precision.averages
accumulate_allreduce_grads_in_fp32 grad_reduce_in_fp32 => precision.wire=fp32
accumulate_allreduce_grads_in_fp32=false grad_reduce_in_fp32=false => precision.wire=auto
moe_layer_recompute recompute_modules=moe => plan.recompute=experts; recompute_modules=mlp => plan.recompute=mlp
enable_cuda_graph external_cuda_graph cuda_graph_impl=local cuda_graph_impl=transformer_engine => plan.graphs=on
overlap_grad_reduce overlap_param_gather overlap_p2p_communication overlap_p2p_comm .. each communication has a lane
align_grad_reduce align_param_gather no_align_grad_reduce no_align_param_gather delay_grad_reduce delay_param_gather \
tp_comm_overlap_cfg tp_comm_bulk_wgrad disable_tp_comm_bulk_wgrad tp_comm_overlap_ag tp_comm_overlap_rs \
tp_comm_bulk_dgrad overlap_p2p_communication_warmup_flush overlap_p2p_comm_warmup_flush moe_shared_expert_overlap \
high_priority_stream_groups nccl_communicator_config_path cuda_graph_scope .. the plan decides it
sequence_parallel=true expert_tensor_parallel_size=1 num_distributed_optimizer_instances=1 fsdp_double_buffer \
init_model_with_meta_device ddp_average_in_collective average_in_collective moe_token_dispatcher_type=alltoall \
moe_grouped_gemm moe_permute_fusion moe_router_fusion use_precision_aware_optimizer fp8_recipe main_grads_dtype=fp32 \
main_params_dtype=fp32 moe_router_dtype=fp32 recompute_activations recompute_modules=core_attn .. as in hocket
use_megatron_fsdp use_custom_fsdp torch_fsdp2_no_reshard_after_forward recompute_method recompute_num_layers \
recompute_granularity=selective moe_flex_dispatcher_backend .. another flag decides
nproc_per_node ntasks_per_node nnodes nodes .. --gpus is the number of ranks over all hosts
num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels num_experts moe_router_topk \
moe_ffn_hidden_size vocab_size padded_vocab_size .. the model comes from a recipe, or from hocket import
CUDA_DEVICE_MAX_CONNECTIONS .. hocket wants 32: no order of its ops relies on the order of launches
cp_comm_type hierarchical_context_parallel_sizes !! keys and values are gathered, or heads exchanged, by all ranks
sequence_parallel !! with tensor parallelism the residual stream is split over tokens
expert_tensor_parallel_size !! experts are not split over tensor ranks
num_distributed_optimizer_instances !! mesh.shard is the number of ranks that share a copy of the weights
global_batch_size !! train.microbatches is this number / (micro_batch_size x mesh.dp)
num_layers_per_virtual_pipeline_stage !! plan.chunks is the number of virtual stages of a rank
no_overlap_p2p_communication batch_p2p_communication batch_p2p_comm !! sends have lanes of their own, never batched
ddp_bucket_size bucket_size ddp_num_buckets num_buckets suggested_communication_unit_size !! a bucket is a layer
moe_token_dispatcher_type !! rows travel by all-to-all alone; cuda_graph_impl !! plan.graphs records the whole step
moe_expert_capacity_factor moe_pad_expert_input_to_capacity moe_token_drop_policy !! no row is ever dropped or padded
mixed_precision fp16 fp8 fp8_format fp4_format !! precision.compute is fp32, bf16, or fp8: e4m3, a scale for each row
recompute_modules recompute_granularity !! plan.recompute names parts to do again: attn, mlp, experts
distribute_saved_activations cpu_offloading optimizer_cpu_offload !! plan.offload names parts that go to the host
main_grads_dtype main_params_dtype moe_router_dtype !! these are fp32; use_sharp !! no reductions inside switches
"""
"""Names in Megatron, each for all values or for one, and a sign. `->` names a setting that takes the value. `=>` gives
settings, for true if the name has no value. `..`: why hocket does not need it. `!!`: what hocket has instead."""

OFF = ("false", "none", "null", "0")
AXES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
NEEDLESS, LACKING, UNKNOWN = "NOT NEEDED", "NO COUNTERPART", "NOT KNOWN"


def pairs(text: str) -> list[tuple[str, list[str]]]:
    """Flags and keys with their values. The first word is always a name. Raises ValueError."""
    try:
        words = shlex.split(re.sub(r"\s*=\s*", "=", text.replace("\\\n", " ")))
    except ValueError as error:
        raise ValueError(f"{show(text)} (Megatron): {error}; fix: close the quotation") from None
    found = list[tuple[str, list[str]]]()
    for word in words:
        name, equals, value = word.partition("=")
        if word.startswith("--") or (equals and re.fullmatch(r"\+*[\w.]+", name)) or not found:
            found.append((name, [each.strip("[]' ") for each in value.split(",")] if value else []))
        else:
            found[-1][1].append(word)
    return found


def table(given: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Name, or name=value -> sign and the rest of the row. A few rows depend on other given flags."""
    found = dict[str, tuple[str, str]]()
    for row in re.split("; |\n", TABLE.strip()):
        names, sign, said = re.split(r" (->|=>|\.\.|!!) ", row)
        idle = "overlap.tp." in said and given.get(AXES[0], "1") == "1"
        for name in names.split():
            key = f"{name}=true" if sign == "=>" and "=" not in name else name
            found[key] = ("..", "there are no tensor ranks") if idle else (sign, said)
    if "torch_fsdp2_no_reshard_after_forward" in given:
        found["use_torch_fsdp2=true"] = ("=>", "overlap.dp.strategy=optim_grads")
    if "data_parallel_sharding_strategy" in given:
        found["use_distributed_optimizer=true"] = ("..", "data_parallel_sharding_strategy says which")
    if given.keys() & {"fp8", "fp8_format"}:
        found["bf16=true"] = ("..", "what runs in no fp8 runs in bf16")
    return found


class Translation:
    """hocket's settings, each with its value and the flag that set it; and the flags that set none, by reason."""

    def __init__(self, text: str, gpus: int = 0) -> None:
        """Raises ValueError for impossible values and for contradicting flags, with a line for each."""
        self.settings, self.notes = dict[str, tuple[Any, str]](), dict[str, list[str]]()
        self._problems, given, sources = list[str](), dict[str, str](), dict[str, str]()
        for name, words in pairs(text):
            key, value = re.sub(r"^[+-]+|.*\.", "", name).replace("-", "_"), ",".join(words) or "true"
            value = value.lower() if value.lower() in ("true", *OFF) else value
            sources.setdefault(key, " ".join([name, *words]))
            if given.setdefault(key, value) != value:
                self._problems.append(f"{name} = {value} (Megatron): it is {given[key]}, too; fix: leave one out")
        if not 0 < len(given) <= MOST_KEYS:
            raise ValueError(f"{len(given)} settings (Megatron): not 1 to {MOST_KEYS}; fix: the flags of one run")
        known = table(given)
        for key, value in given.items():
            for each in value.split(","):
                self._look_up(known, key, each, sources[key])
        self._derive(given, gpus)
        stop_if(self._problems)

    def _look_up(self, known: Mapping[str, tuple[str, str]], key: str, value: str, source: str) -> None:
        """Translate one value of a flag."""
        sign, said = known.get(f"{key}={value}") or known.get(key) or ("", "")
        if sign in ("->", "=>") and "$" not in value:
            for setting, _, its in (each.partition("=") for each in said.split()):
                self._put(setting, its or value, source)
        elif not sign and f"{key}=true" in known and value not in OFF:
            self._problems.append(f"{source} (Megatron): takes no value; fix: leave out {show(value)}")
        elif sign == ".." or (value in OFF and (sign or f"{key}=true" in known)):
            why = said if sign == ".." else "it is off without it"
            self.notes.setdefault(NEEDLESS, []).append(f"{source}: {why}")
        elif sign:
            why = "its value is set elsewhere; write it here" if "$" in value else said
            self.notes.setdefault(LACKING, []).append(f"{source}: {why}")
        else:
            close = meant(key, [name for name in known if "=" not in name])
            self.notes.setdefault(UNKNOWN, []).append(f"{source}: did you mean {close}?" if close else source)

    def _put(self, setting: str, value: str, source: str) -> None:
        """Set a setting; values of list settings are combined."""
        hint = types()[setting]
        choices = {"true": "on", "false": "off"} if "on" in get_args(hint) else {}
        try:
            made = value_of([choices.get(word, word) for word in value.split(",")], hint)
            wanted = beyond(setting, made)
        except ValueError:
            made, wanted = None, describe(hint)
        before, its = self.settings.setdefault(setting, (made, source)) if not wanted else (made, source)
        both = list[str]()
        if isinstance(made, tuple) and isinstance(before, tuple) and before != made:
            both = list(dict.fromkeys((*before, *made)))
        if wanted:
            self._problems.append(f"{source} (Megatron): {setting} is {wanted}; fix: give {wanted}")
        elif both and len({each.partition(":")[0] for each in both}) == len(both):
            self.settings[setting] = (tuple(both), its)
        elif before != made:
            why = f"becomes {setting} = {show(made)}, and {its} makes it {show(before)}"
            self._problems.append(f"{source} (Megatron): {why}; fix: leave one of them out")

    def _derive(self, given: Mapping[str, str], gpus: int) -> None:
        """Derive settings from several flags, and add Megatron-LM's defaults where hocket's differ."""
        numbers = [int(given[name]) for name in AXES if given.get(name, "").isdecimal()]
        others = max(math.prod(numbers), 1)
        if gpus and not gpus % others:
            self._put("mesh.dp", str(gpus // others), f"(--gpus {gpus})")
        elif "mesh.dp" not in self.settings or gpus:
            why = f"{gpus} ranks cannot be split over {others}, the other axes" if gpus else "it needs --gpus N"
            self.notes.setdefault(LACKING, []).append(f"mesh.dp: {why}")
        for setting in ("mesh.tp", "mesh.pp", "mesh.cp", "mesh.ep", "plan.chunks"):
            self.settings.setdefault(setting, (1, "(not given)"))
        self.settings.setdefault("overlap.dp.strategy", ("no_shard", "(no sharding flag)"))
        bf16 = self.settings.get("precision.compute", ("",))[0] == "bf16"
        if bf16 and not any("reduce_scatter" in name for name in given):
            self.settings.setdefault("precision.wire", ("fp32", "(no --grad-reduce-in-bf16)"))

    def __str__(self) -> str:
        """The settings as TOML, and the notes as comments."""
        lines = ["# Megatron's settings in hocket's words. hocket explain FILE.toml --recipe NAME adds a model.\n"]
        found = sorted(self.settings.items())
        lines += [f"{setting} = {json.dumps(value)}  # {show(source)}" for setting, (value, source) in found]
        for title, said in self.notes.items():
            lines += ["", f"# {title}", *(f"#   {show(text)}" for text in dict.fromkeys(said))]
        return "\n".join(lines)


PARSER = Parser(
    "explain",
    "Print Megatron's settings as hocket's, in TOML, and what hocket lacks in comments; then the exit code is 1.",
)
PARSER.add_argument(
    "--from-megatron", required=True, metavar="TEXT", help="flags, or keys such as model.seq_length=4096"
)
PARSER.add_argument("--gpus", type=int, default=0, metavar="N", help="number of ranks")


def run(words: list[str]) -> int:
    """Print a translation. Returns the exit code."""
    options = PARSER.read(words)
    found = Translation(options.from_megatron, options.gpus)
    print(found)
    return 1 if found.notes.keys() - {NEEDLESS} else 0
