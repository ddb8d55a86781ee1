"""Qwen3-MoE as transformers writes it, with the weights of all other contenders, trained by a planned step.

The model is transformers' own class, unmodified, with torch's attention: what `hocket.plan_model` makes of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.bench.contender import Contender
from benchmarks.bench.plain import optimizer_name
from benchmarks.bench.workload import Workload
from hocket.adapters.transformers import Pretrained
from hocket.adapters.verify import verify
from hocket.config import RopeConfig
from hocket.config.schema import changed
from hocket.engine import Engine
from hocket.model.documents import Microbatch
from hocket.model.source import init_tensor
from hocket.pretrained import families

_OURS = {
    "input_layernorm.weight": "attn_norm",
    "post_attention_layernorm.weight": "ffn_norm",
    "self_attn.q_proj.weight": "attn.wq",
    "self_attn.k_proj.weight": "attn.wk",
    "self_attn.v_proj.weight": "attn.wv",
    "self_attn.o_proj.weight": "attn.wo",
    "self_attn.q_norm.weight": "attn.q_norm",
    "self_attn.k_norm.weight": "attn.k_norm",
    "mlp.gate.weight": "router.weight",
    "mlp.experts.gate_up_proj": "experts.w_gate_up",
    "mlp.experts.down_proj": "experts.w_down",
}
"""Parameter of a layer -> hocket's name. Experts' weights have their last two dimensions in the other order."""
_ENDS = {"model.embed_tokens.weight": "embed.weight", "model.norm.weight": "head.norm", "lm_head.weight": "head.weight"}


def model_of(workload: Workload) -> Any:
    """The model on the meta device. Raises ValueError for sizes that transformers' class does not have."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    m = workload.config.model
    lost = families.differences(m, families.model_of(families.config_of("qwen3_moe", m, "float32", 1)))
    if lost or m.qkv_bias or any(m.windows()) or m.rope != RopeConfig() or m.aux_loss or m.tied:
        raise ValueError(
            "against = transformers_plan or transformers_fsdp2 (command line): transformers' Qwen3-MoE has q and k "
            "norms, a softmax router, and here neither biases, shared expert nor balance; "
            "fix: qwen3_30b_a3b --model.aux_loss 0"
        )
    sizes: dict[str, Any] = dict(
        vocab_size=m.vocab, hidden_size=m.hidden, num_hidden_layers=m.layers, num_attention_heads=m.heads,
        num_key_value_heads=m.kv_heads, head_dim=m.head_dim, intermediate_size=m.ffn, num_experts=m.experts,
        moe_intermediate_size=m.expert_ffn, num_experts_per_tok=m.top_k, norm_topk_prob=m.normalize_top_k,
        rms_norm_eps=m.norm_eps, rope_parameters={"rope_type": "default", "rope_theta": m.rope_theta},
        mlp_only_layers=list(m.dense_layers), tie_word_embeddings=False, use_cache=False, attention_dropout=0.0,
        max_position_embeddings=max(workload.config.data.sequence_length, 4096),
    )  # fmt: skip
    config = Qwen3MoeConfig(**sizes)  # one by one, type checkers miss `head_dim`, which the class takes by **kwargs
    config._attn_implementation, config._experts_implementation = "sdpa", "grouped_mm"
    with torch.device("meta"):
        return Qwen3MoeForCausalLM(config).train()


def value_of(name: str, shape: Sequence[int], workload: Workload, device: torch.device) -> Tensor:
    """First value of a parameter by transformers' name, whole, fp32: that of hocket's parameter of this meaning."""
    ours, turned = _ENDS.get(name, ""), ".experts." in name
    if not ours:
        _, _, number, rest = name.split(".", 3)
        ours = f"layers.{number}.{_OURS[rest]}"
    shape = (shape[0], shape[2], shape[1]) if turned else tuple(shape)
    value = init_tensor(ours, shape, workload.config.model, workload.config.train.seed, device=str(device))
    return value.transpose(1, 2) if turned else value


class Planned:
    """The step that `hocket.plan_model` makes of the model, with an optimizer if others have one."""

    def __init__(self, workload: Workload, rank: int, device: torch.device) -> None:
        model = model_of(workload)
        shapes = {name: param.shape for name, param in model.named_parameters()}
        own = changed(workload.config, {"plan.graphs": "off", "overlap.ep.splits": "host"})

        def value(name: str) -> Tensor:
            if name in shapes:
                return value_of(name, shapes[name], workload, device)
            return buffer_of(model, name, device)

        source = Pretrained(model)
        source.values = value
        verify(source)
        self.engine = Engine(own, rank, device, update=workload.optimizer, source=source)
        self.engine.init_weights()
        self.lr = workload.config.train.lr
        self.settings: dict[str, str] = {
            "model": f"transformers' {type(model).__name__}, unmodified",
            "transport": own.train.transport,
            "optimizer": optimizer_name(workload, "on fp32 shards", kernel=True),
            "compile": "off",
        }

    def step(self, microbatches: Sequence[Microbatch]) -> Tensor:
        return self.engine.train_step(microbatches, self.lr).loss

    def close(self) -> None:
        self.engine.close()
        del self.engine


def buffer_of(model: nn.Module, name: str, device: torch.device) -> Tensor:
    """A buffer of the model, which is the rotary frequencies: transformers makes them when the model is made."""
    config: Any = model.config
    if not name.endswith(("inv_freq", "original_inv_freq")):
        what = f"nothing says what the buffer {name} holds; fix: another version of transformers"
        raise ValueError(f"against = transformers_plan (command line): {what}")
    theta, width = config.rope_parameters["rope_theta"], config.head_dim
    return 1.0 / theta ** (torch.arange(0, width, 2, dtype=torch.int64, device=device).float() / width)


def planned(workload: Workload, rank: int, device: torch.device) -> Contender:
    """The contender."""
    return Planned(workload, rank, device)
