"""Who can take part in a benchmark, and what a contender is.

A peer is one function `make(workload, rank, device) -> Contender` in `benchmarks/bench/peers/`, and one line in
`CONTENDERS`. It must compute what all others do: weights from `plain.fill`, tokens as they are given, the mean loss
of a microbatch divided by the number of microbatches, gradients averaged over all data-parallel ranks, AdamW
(`plain.adamw`) on fp32 main weights without clipping. The default process group exists before `make` is called.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import importlib.metadata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from hocket.config import Config
from hocket.recipes import PLAIN

if TYPE_CHECKING:  # the list of contenders is shown without loading torch
    import torch
    from torch import Tensor

    from benchmarks.bench.workload import Workload
    from hocket.model.documents import Microbatch


class Contender(Protocol):
    """A program that can do the steps of a workload, resident on this rank."""

    @property
    def settings(self) -> Mapping[str, str]:
        """Everything a reader needs to repeat it, beside the workload; printed and stored."""
        ...

    def step(self, microbatches: Sequence[Microbatch]) -> Tensor:
        """One step. Returns this rank's mean loss, 0-dim, 0 on ranks without the head.

        The host need not wait for the GPU; what it returns when it does is part of the measured time.
        """
        ...

    def close(self) -> None:
        """Let go of memory and groups."""
        ...


@runtime_checkable
class Resting(Protocol):
    """A contender that holds memory which others may have while it does not step."""

    def rest(self) -> None:
        """Give it back. The next step takes it again."""
        ...


Maker = Callable[["Workload", int, "torch.device"], Contender]


@dataclass(frozen=True)
class Entry:
    """What is known of a contender before it is built."""

    make: str
    """Module and function, `benchmarks.bench.peers.ddp:ddp`; loaded in the workers only."""
    about: str
    """One line for the list."""
    package: str = ""
    """Distribution and version that it is written for, `megatron-fsdp==0.6.1`; empty needs nothing but torch."""
    cuda: bool = False
    """Whether it runs on GPUs only."""
    pp: Literal["one", "many", "any"] = "one"
    """Whether it runs without a pipeline (mesh.pp = 1), with one only, or both."""
    model: Literal["dense", "moe", "whole", "any"] = "any"
    """`dense`: no MoE layers; `moe`: experts on several ranks (mesh.ep above 1); `whole`: not on several ranks."""
    cp: Literal["one", "many", "any"] = "one"
    """Whether it runs where no ranks share sequences (mesh.cp = 1), where they do only, or both."""
    bound: bool = False
    """Whether it leaves out communication, so that its losses mean nothing."""
    computes: bool = True
    """Whether it does the work of a step, so that it has FLOP/s."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What is set for it beside what the user says, by dotted name: it has a configuration of its own."""

    @property
    def peer(self) -> bool:
        """Whether it is another program than hocket, and no bound."""
        return not self.ours and not self.bound

    @property
    def ours(self) -> bool:
        """Whether it is hocket, in one way or another."""
        return not self.make.startswith(_PEERS)


_PEERS, _OURS, _SHARDED = "benchmarks.bench.peers", "benchmarks.bench.ours", "benchmarks.bench.sharded"
_MFSDP = "megatron-fsdp==0.6.1"
_HF = "transformers==5.23.0"

_CE = {"train.transport": "copy_engine"}
_ISSUED = {"plan.graphs": "off", "overlap.ep.splits": "host"}
_PER_RANK = {**_ISSUED, "overlap.ep.copies": "per_rank"}
_DEVICE = {"plan.graphs": "off", "overlap.ep.splits": "device", "overlap.ep.copies": "per_expert"}
_GRAPH = {"plan.graphs": "on", "overlap.ep.splits": "auto", "overlap.ep.copies": "auto"}


def _hocket(about: str, settings: Mapping[str, Any], **fits: Any) -> Entry:
    """Hocket with settings of its own."""
    return Entry(f"{_OURS}:planned", f"hocket, {about}", pp="any", cp="any", settings=settings, **fits)


def _megatron_core(way: str, about: str, **fits: Any) -> Entry:
    target = f"{_PEERS}.megatron_core:megatron_core{way}"
    return Entry(target, about, "megatron-core==0.19.2", cuda=True, pp="any", **fits)


def _torchtitan(way: str, about: str, **fits: Any) -> Entry:
    return Entry(f"{_PEERS}.torchtitan:torchtitan{way}", about, "torchtitan==0.2.2", cuda=True, pp="any", **fits)


CONTENDERS: dict[str, Entry] = {
    "bound": Entry(f"{_PEERS}.bound:bound", "the plain stack without any communication, whole weights", bound=True),
    "bound_graph": Entry(f"{_PEERS}.bound:bound_graph", "the bound, replayed as a CUDA graph", cuda=True, bound=True),
    "hocket": Entry(f"{_OURS}:planned", "hocket with the plan of the configuration", pp="any", cp="any"),
    "hocket_sequential": _hocket(
        "one microbatch after the other", settings={**PLAIN, "plan.order": "sequential"}
    ),
    "hocket_interleaved": _hocket("the classic order, nothing merged", settings={**PLAIN, "plan.order": "auto"}),
    "hocket_nccl": _hocket("all on NCCL's kernels", cuda=True, settings={"train.transport": "nccl"}),
    "hocket_ce": _hocket("gathers and reduces on copy engines", cuda=True, settings=_CE),
    "hocket_ce_gather": _hocket(
        "gathers on copy engines", cuda=True, settings={"train.transport": "copy_engine_gathers"}
    ),
    "hocket_per_rank": _hocket("a copy for each rank", model="moe", settings=_PER_RANK),
    "hocket_per_rank_ce": _hocket(
        "a copy for each rank, on copy engines", cuda=True, model="moe", settings=_PER_RANK | _CE
    ),
    "hocket_device": _hocket("splits that no host knows", model="moe", settings=_DEVICE),
    "hocket_device_ce": _hocket(
        "splits that no host knows, gathers and reduces on copy engines", cuda=True, model="moe", settings=_DEVICE | _CE
    ),
    "hocket_issued": _hocket("steps issued op by op, host-known splits", settings=_ISSUED),
    "hocket_graph": _hocket("steps as CUDA graphs, splits that no host knows", cuda=True, settings=_GRAPH),
    "hocket_graph_ce": _hocket(
        "steps as CUDA graphs, gathers and reduces on copy engines", cuda=True, settings=_GRAPH | _CE
    ),
    "hocket_null": Entry(f"{_OURS}:null", "hocket's program without communication", pp="any", cp="any", bound=True),
    "hocket_signal": Entry(
        f"{_OURS}:signal", "hocket's program with the pipeline's waits, but no communication", pp="many", bound=True
    ),
    "hocket_zigzag": Entry(
        f"{_OURS}:zigzag", "hocket whose context-parallel chunks do not go by documents", pp="any", cp="many"
    ),
    "exchanges": Entry(
        f"{_OURS}:exchanges", "the exchanges of rows alone, nothing computed", model="moe", bound=True, computes=False
    ),
    "fully_shard": Entry(f"{_SHARDED}:fully_shard", "hocket.fully_shard on NCCL's kernels"),
    "fully_shard_ce": Entry(f"{_SHARDED}:copy_engine", "hocket.fully_shard as called, on copy engines", cuda=True),
    "fully_shard_ce_gather": Entry(
        f"{_SHARDED}:copy_engine_gathers", "hocket.fully_shard, gathers on copy engines", cuda=True
    ),
    "fully_shard_null": Entry(
        f"{_SHARDED}:null", "hocket.fully_shard, the same program without communication", bound=True
    ),
    "fully_shard_fp32_wire": Entry(f"{_SHARDED}:fp32_wire", "hocket.fully_shard, gradients sent in fp32"),
    "fully_shard_optim": Entry(f"{_SHARDED}:optim", "hocket.fully_shard, the optimizer's state shared"),
    "fully_shard_optim_ce": Entry(
        f"{_SHARDED}:optim_copy_engine", "hocket.fully_shard, the optimizer's state shared, on copy engines", cuda=True
    ),
    "fully_shard_offload": Entry(f"{_SHARDED}:offload", "hocket.fully_shard, shards and optimizer on the host"),
    "fully_shard_no_shard": Entry(f"{_SHARDED}:no_shard", "hocket.fully_shard, nothing shared"),
    "ddp": Entry(f"{_PEERS}.ddp:ddp", "torch DistributedDataParallel", model="whole"),
    "fsdp2": Entry(f"{_PEERS}.fsdp2:fsdp2", "torch fully_shard, defaults"),
    "fsdp2_fp32": Entry(f"{_PEERS}.fsdp2:fsdp2_fp32", "torch fully_shard, defaults, fp32 reduce"),
    "fsdp2_tuned": Entry(f"{_PEERS}.fsdp2:fsdp2_tuned", "torch fully_shard, explicit prefetch"),
    "fsdp2_tuned_fp32": Entry(f"{_PEERS}.fsdp2:fsdp2_tuned_fp32", "torch fully_shard, explicit prefetch, fp32 reduce"),
    "fsdp2_kept": Entry(f"{_PEERS}.fsdp2:fsdp2_kept", "torch fully_shard, tuned, reshard_after_forward=False"),
    "torch_cp_gather": Entry(
        f"{_PEERS}.context:gather", "torch context_parallel, keys gathered, and fully_shard", cuda=True, cp="many"
    ),
    "torch_cp_ring": Entry(
        f"{_PEERS}.context:ring", "torch context_parallel, keys round a ring, and fully_shard", cuda=True, cp="many"
    ),
    "ulysses": Entry(f"{_PEERS}.context:heads", "heads exchanged for tokens (Ulysses), and fully_shard", cp="many"),
    "ep_sync": Entry(f"{_PEERS}.fsdp2:ep_sync", "synchronous expert all-to-all beside fully_shard", model="moe"),
    "pipelining_1f1b": Entry(f"{_PEERS}.pipelining:one_f_one_b", "torch pipelining, 1F1B", pp="many"),
    "pipelining_interleaved": Entry(f"{_PEERS}.pipelining:interleaved", "torch pipelining, interleaved", pp="many"),
    "pipelining_zb": Entry(f"{_PEERS}.pipelining:zero_bubble", "torch pipelining, zero-bubble V", pp="many"),
    "megatron_fsdp": Entry(f"{_PEERS}.megatron_fsdp:megatron_fsdp", "megatron-fsdp, double buffer", _MFSDP, cuda=True),
    "megatron_fsdp_experimental": Entry(
        f"{_PEERS}.megatron_fsdp:experimental", "megatron-fsdp, experimental fully_shard", _MFSDP, cuda=True
    ),
    "deepspeed": Entry(
        f"{_PEERS}.deepspeed:deepspeed", "DeepSpeed ZeRO-3", "deepspeed==0.19.8", cuda=True, model="whole"
    ),
    "megatron_core": _megatron_core("", "megatron-core: schedules, DDP, sharded optimizer, expert overlap"),
    "megatron_core_fp32": _megatron_core("_fp32", "megatron-core, gradients in fp32"),
    "megatron_core_sync": _megatron_core("_sync", "megatron-core, synchronous expert all-to-all", model="moe"),
    "transformers_plan": Entry(
        "benchmarks.bench.any_model:planned", "transformers' Qwen3-MoE in a planned step", _HF, pp="any"
    ),
    "transformers_plan_ce": Entry(
        "benchmarks.bench.any_model:planned",
        "the same, gathers, reductions and rows on copy engines",
        _HF,
        cuda=True,
        pp="any",
        settings=_CE,
    ),
    "transformers_fsdp2": Entry(
        f"{_PEERS}.transformers_fsdp2:fsdp2", "transformers' Qwen3-MoE under torch fully_shard", _HF
    ),
    "torchtitan": _torchtitan("", "torchtitan: FSDP2 wiring, experts' plan, its best pipeline"),
    "torchtitan_fp32": _torchtitan("_fp32", "torchtitan, fp32 reduce"),
    "torchtitan_dispatcher": _torchtitan("_dispatcher", "torchtitan with its own permutation of rows", model="moe"),
}  # fmt: skip
"""Every contender by name, but those that a user makes of settings."""


def entry(name: str) -> Entry:
    """What stands for a contender; of a name that is not listed, hocket with settings of the user's."""
    return CONTENDERS.get(name) or _hocket("with settings of its own", {})


def find(names: Sequence[str]) -> list[Entry]:
    """The entries of contenders. Raises ValueError for unknown and repeated names."""
    for position, name in enumerate(names):
        if name not in CONTENDERS:
            close = difflib.get_close_matches(name, CONTENDERS, n=1)
            hint = f"did you mean {close[0]}?" if close else "hocket bench --list shows all"
            raise ValueError(f"against = {name} (command line): there is no such contender; fix: {hint}")
        if name in names[:position]:
            raise ValueError(f"against = {name} (command line): named twice; fix: name it once")
    return [CONTENDERS[name] for name in names]


def why_not(name: str, config: Config) -> str:
    """Why a contender cannot run this resolved configuration here, and the fix; empty if it can."""
    one, problem = entry(name), ""
    moe, pp, ep, cp = "moe" in config.model.kinds(), config.mesh.pp, config.mesh.ep, config.mesh.cp
    if one.cuda and config.train.device != "cuda":
        problem = "needs GPUs; fix: leave it out, or train.device = cuda on a host with GPUs"
    elif one.pp == "one" and pp > 1:
        problem = f"knows no pipeline, and mesh.pp = {pp}; fix: mesh.pp = 1, or leave it out"
    elif one.pp == "many" and pp == 1:
        problem = "needs a pipeline, and mesh.pp = 1; fix: mesh.pp = 2 or more, or leave it out"
    elif one.cp == "one" and cp > 1:
        problem = f"has sequences whole, and mesh.cp = {cp}; fix: mesh.cp = 1, or leave it out"
    elif one.cp == "many" and cp == 1:
        problem = "needs ranks that share sequences, and mesh.cp = 1; fix: mesh.cp = 2 or more, or leave it out"
    elif config.data.packing != "off" and not one.make.startswith(_OURS):
        problem = (
            f"knows no documents, and data.packing = {config.data.packing}; fix: data.packing = off, or leave it out"
        )
    elif one.model == "dense" and moe:
        problem = "knows no MoE layers, and the model has them; fix: model.experts = 0, or leave it out"
    elif one.model == "moe" and (not moe or ep == 1):
        problem = f"needs experts on several ranks, and mesh.ep = {ep}; fix: mesh.ep = 2 or more, or leave it out"
    elif one.model == "whole" and ep > 1:
        problem = f"knows no expert parallelism, and mesh.ep = {ep}; fix: mesh.ep = 1, or leave it out"
    elif one.package:
        problem = _package_problem(one.package)
    return f"against = {name} (command line): {problem}" if problem else ""


def _package_problem(requirement: str) -> str:
    package, _, wanted = requirement.partition("==")
    try:
        found = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return f"the package {package} is not installed; fix: pip install {requirement}, or leave it out"
    if wanted and found != wanted:
        return f"it is written for {requirement}, and {found} is installed; fix: pip install {requirement}"
    return ""


def load(name: str) -> Maker:
    """The function that builds a contender. Imports its module."""
    module, _, function = entry(name).make.partition(":")
    return getattr(importlib.import_module(module), function)


@contextlib.contextmanager
def blame(name: str, phase: str) -> Iterator[None]:
    """Say which contender failed, and in what. What the user can mend already names it, and stays as it is."""
    try:
        yield
    except Exception as error:
        if isinstance(error, ValueError) and str(error).startswith("against = "):
            raise
        raise RuntimeError(f"{name} failed while {phase}: {type(error).__name__}: {error}") from error
