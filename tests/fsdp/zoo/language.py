"""Models of transformers, as they come, from tiny configurations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.fsdp.zoo.program import Loss, distance, loop

VOCAB = 64
TINY: dict[str, Any] = dict(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=64, pad_token_id=None, bos_token_id=0, eos_token_id=0,
    attention_dropout=0.0,
)  # fmt: skip


def ids(generator: torch.Generator, length: int = 8) -> Tensor:
    return torch.randint(VOCAB, (2, length), generator=generator)


def next_token(model: nn.Module, generator: torch.Generator) -> Tensor:
    """The loss of a causal or masked language model, or of one from text to text."""
    given = ids(generator)
    return model(input_ids=given, labels=given).loss


def pixels(labels: int = 4) -> Loss:
    def loss(model: nn.Module, generator: torch.Generator) -> Tensor:
        image = torch.randn(2, 3, 16, 16, generator=generator)
        return model(pixel_values=image, labels=torch.randint(labels, (2,), generator=generator)).loss

    return loss


def states(model: nn.Module, generator: torch.Generator) -> Tensor:
    """A loss of what a model without a head captures, and of nothing that its last layer returns."""
    given: dict[str, Tensor] = {"input_ids": ids(generator)}
    if hasattr(model.config, "image_size"):
        given = {"pixel_values": torch.randn(2, 3, 16, 16, generator=generator)}
    found = model(**given, output_hidden_states=True, output_attentions=True)
    return distance(found.hidden_states[1], generator) + sum(one.square().mean() for one in found.attentions)


def hidden(model: nn.Module, generator: torch.Generator) -> Tensor:
    """Of a model without a head."""
    return distance(model(input_ids=ids(generator)).last_hidden_state, generator)


def with_outputs(model: nn.Module, generator: torch.Generator) -> Tensor:
    """The loss with all that transformers captures inside of layers: hidden states, attentions, logits of routers."""
    given = ids(generator)
    flags = {"output_hidden_states": True, "output_attentions": True}
    if getattr(model.config, "num_local_experts", 0):
        flags["output_router_logits"] = True
    found = model(input_ids=given, labels=given, **flags)
    assert len(found.hidden_states) == 3
    assert len(found.attentions) == 2
    states = [state for name in ("hidden_states", "attentions", "router_logits") for state in found.get(name) or ()]
    return found.loss + 0.01 * sum(state.square().mean() for state in states)


def _build(name: str, config: str, sizes: dict[str, Any]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        model = getattr(transformers, name)(getattr(transformers, config)(**sizes))
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0  # the plain run has other random numbers for the second rank
        return model.train()

    return build


def _layers(model: nn.Module) -> list[nn.Module]:
    """The modules in lists of layers, as people name them."""
    return [layer for one in model.modules() if isinstance(one, nn.ModuleList) for layer in one if _whole(layer)]


def _whole(layer: nn.Module) -> bool:
    return len(list(layer.children())) > 1 and any(True for _ in layer.parameters())


def zoo_of(program: str, name: str, config: str, loss: Loss = next_token, heavy: bool = False, **sizes: Any) -> None:
    """Register a model of transformers with its layers as units."""
    loop(program, _build(name, config, sizes), loss, _layers, heavy=heavy, needs=("transformers",))


def generating(model: Any, generator: torch.Generator) -> Tensor:
    """`generate` before every step; the model keeps a cache in both."""
    given = ids(generator)
    with torch.no_grad():
        model.generate(given[:, :3], min_new_tokens=3, max_new_tokens=3, do_sample=False, pad_token_id=1)
    found = model(input_ids=given, labels=given)
    assert found.past_key_values is not None
    return found.loss


zoo_of("llama", "LlamaForCausalLM", "LlamaConfig", **TINY)
zoo_of("llama that generates before every step", "LlamaForCausalLM", "LlamaConfig", generating, **TINY)
EAGER: dict[str, Any] = dict(TINY, attn_implementation="eager")
zoo_of("llama with captured outputs", "LlamaForCausalLM", "LlamaConfig", with_outputs, **EAGER)
zoo_of("mixtral with captured outputs", "MixtralForCausalLM", "MixtralConfig", with_outputs, **EAGER,
       num_local_experts=4)  # fmt: skip
zoo_of("qwen3_moe with captured outputs", "Qwen3MoeForCausalLM", "Qwen3MoeConfig", with_outputs, **EAGER, num_experts=4,
       num_local_experts=4, moe_intermediate_size=16, num_experts_per_tok=2, decoder_sparse_step=1)  # fmt: skip
loop("llama with captured outputs, the inner model a unit", _build("LlamaForCausalLM", "LlamaConfig", EAGER),
     with_outputs, lambda model: [*_layers(model), model.model], needs=("transformers",))  # fmt: skip
zoo_of("gpt2", "GPT2LMHeadModel", "GPT2Config", vocab_size=VOCAB, n_positions=16, n_embd=32, n_layer=2, n_head=4)
zoo_of("mixtral", "MixtralForCausalLM", "MixtralConfig", **TINY, num_local_experts=4)
zoo_of(
    "bert", "BertForMaskedLM", "BertConfig", vocab_size=VOCAB, hidden_size=32, intermediate_size=48,
    num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=16,
)  # fmt: skip
zoo_of(
    "t5", "T5ForConditionalGeneration", "T5Config", vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=48, num_layers=2,
    num_heads=4, decoder_start_token_id=0,
)  # fmt: skip
zoo_of(
    "bart", "BartForConditionalGeneration", "BartConfig", vocab_size=VOCAB, d_model=32, encoder_layers=2,
    decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48,
    max_position_embeddings=16,
)  # fmt: skip
zoo_of(
    "vit", "ViTForImageClassification", "ViTConfig", pixels(), hidden_size=32, intermediate_size=48,
    num_hidden_layers=2, num_attention_heads=4, image_size=16, patch_size=8, num_labels=4,
)  # fmt: skip
zoo_of(
    "mamba", "MambaForCausalLM", "MambaConfig", vocab_size=VOCAB, hidden_size=32, state_size=4, num_hidden_layers=2,
    expand=2, conv_kernel=4, time_step_rank=4,
)  # fmt: skip


def speech(model: nn.Module, generator: torch.Generator) -> Tensor:
    features = torch.randn(2, 8, 16, generator=generator)
    return model(input_features=features, labels=ids(generator)).loss


def pairs(model: nn.Module, generator: torch.Generator) -> Tensor:
    image = torch.randn(2, 3, 16, 16, generator=generator)
    return model(input_ids=ids(generator), pixel_values=image, return_loss=True).loss


zoo_of(
    "whisper", "WhisperForConditionalGeneration", "WhisperConfig", speech, vocab_size=VOCAB, num_mel_bins=8,
    d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
    encoder_ffn_dim=48, decoder_ffn_dim=48, max_source_positions=8, max_target_positions=16, pad_token_id=0,
    bos_token_id=0, eos_token_id=0, decoder_start_token_id=1,
)  # fmt: skip
_TOWER: dict[str, Any] = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
zoo_of(
    "clip", "CLIPModel", "CLIPConfig", pairs, projection_dim=16,
    text_config=dict(**_TOWER, vocab_size=VOCAB, max_position_embeddings=16, eos_token_id=1),
    vision_config=dict(**_TOWER, image_size=16, patch_size=8),
)  # fmt: skip

zoo_of("llama without a head, with captured outputs", "LlamaModel", "LlamaConfig", states, **EAGER)
zoo_of(
    "vit without a head, with captured outputs", "ViTModel", "ViTConfig", states, **_TOWER, image_size=16,
    patch_size=8, attn_implementation="eager",
)  # fmt: skip
_ROUTED: dict[str, Any] = dict(TINY, output_router_logits=True, router_aux_loss_coef=0.5, num_experts_per_tok=2)
zoo_of("mixtral, router losses", "MixtralForCausalLM", "MixtralConfig", **_ROUTED, num_local_experts=4)
zoo_of("qwen3_moe, router losses", "Qwen3MoeForCausalLM", "Qwen3MoeConfig", **_ROUTED, num_experts=4,
       moe_intermediate_size=16)  # fmt: skip
zoo_of("gpt_oss, router losses", "GptOssForCausalLM", "GptOssConfig", **_ROUTED, num_local_experts=4)

_LATENT: dict[str, Any] = dict(
    TINY, num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8,
)  # fmt: skip
zoo_of("qwen3_moe", "Qwen3MoeForCausalLM", "Qwen3MoeConfig", **TINY, num_experts=4,
       moe_intermediate_size=16, num_experts_per_tok=2)  # fmt: skip
zoo_of("gemma2", "Gemma2ForCausalLM", "Gemma2Config", **TINY, sliding_window=4)
zoo_of("gemma3", "Gemma3ForCausalLM", "Gemma3TextConfig", **TINY, sliding_window=4)
zoo_of(
    "deepseek_v3", "DeepseekV3ForCausalLM", "DeepseekV3Config", **_LATENT, moe_intermediate_size=16,
    n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2, n_group=2, topk_group=1, first_k_dense_replace=1,
)  # fmt: skip
zoo_of("gpt_oss", "GptOssForCausalLM", "GptOssConfig", **TINY, num_local_experts=4, num_experts_per_tok=2)
zoo_of("qwen2", "Qwen2ForCausalLM", "Qwen2Config", heavy=True, tie_word_embeddings=True, **TINY)
zoo_of("phi3", "Phi3ForCausalLM", "Phi3Config", heavy=True, **TINY)
zoo_of("olmo2", "Olmo2ForCausalLM", "Olmo2Config", heavy=True, **TINY)
zoo_of("falcon", "FalconForCausalLM", "FalconConfig", heavy=True, vocab_size=VOCAB, hidden_size=32,
       num_hidden_layers=2, num_attention_heads=4)  # fmt: skip
zoo_of("bloom", "BloomForCausalLM", "BloomConfig", heavy=True, vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4)
zoo_of("opt", "OPTForCausalLM", "OPTConfig", heavy=True, vocab_size=VOCAB, hidden_size=32, ffn_dim=48,
       num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=16, word_embed_proj_dim=32)  # fmt: skip
zoo_of("rwkv", "RwkvForCausalLM", "RwkvConfig", heavy=True, vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2)
zoo_of(
    "zamba2", "Zamba2ForCausalLM", "Zamba2Config", vocab_size=VOCAB, hidden_size=32, intermediate_size=48,
    num_hidden_layers=4, num_attention_heads=4, mamba_d_state=4, mamba_headdim=8, n_mamba_heads=8, mamba_ngroups=1,
    layers_block_type=["mamba", "hybrid", "mamba", "hybrid"], hybrid_layer_ids=[1, 3], chunk_size=4, num_mem_blocks=1,
    adapter_rank=4, use_mem_rope=False,
)  # fmt: skip
zoo_of(
    "mamba2", "Mamba2ForCausalLM", "Mamba2Config", heavy=True, vocab_size=VOCAB, hidden_size=32, state_size=4,
    num_hidden_layers=2, num_heads=8, head_dim=8, n_groups=1, chunk_size=4,
)  # fmt: skip
zoo_of(
    "roberta", "RobertaForMaskedLM", "RobertaConfig", heavy=True, vocab_size=VOCAB, hidden_size=32,
    intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=16,
)  # fmt: skip
zoo_of(
    "distilbert", "DistilBertForMaskedLM", "DistilBertConfig", heavy=True, vocab_size=VOCAB, dim=32, hidden_dim=48,
    n_layers=2, n_heads=4, max_position_embeddings=16,
)  # fmt: skip
zoo_of(
    "albert", "AlbertForMaskedLM", "AlbertConfig", vocab_size=VOCAB, embedding_size=16, hidden_size=32,
    intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=16,
)  # fmt: skip
zoo_of(
    "electra", "ElectraForMaskedLM", "ElectraConfig", heavy=True, vocab_size=VOCAB, embedding_size=16, hidden_size=32,
    intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=16,
)  # fmt: skip
zoo_of("dinov2", "Dinov2ForImageClassification", "Dinov2Config", pixels(), heavy=True, **_TOWER, image_size=16,
       patch_size=8, num_labels=4, mlp_ratio=2)  # fmt: skip
zoo_of("convnext", "ConvNextForImageClassification", "ConvNextConfig", pixels(), heavy=True, num_labels=4,
       hidden_sizes=[8, 16, 16, 16], depths=[1, 1, 1, 1], image_size=32, patch_size=1)  # fmt: skip
zoo_of("resnet", "ResNetForImageClassification", "ResNetConfig", pixels(), heavy=True, num_labels=4, embedding_size=8,
       hidden_sizes=[8, 8], depths=[1, 1], layer_type="basic")  # fmt: skip
