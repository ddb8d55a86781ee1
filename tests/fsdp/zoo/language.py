"""Models of transformers, as they come, from tiny configurations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.fsdp.zoo.program import Loss, distance, loop

VOCAB = 64
_TINY: dict[str, Any] = dict(
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


def hidden(model: nn.Module, generator: torch.Generator) -> Tensor:
    """Of a model without a head."""
    return distance(model(input_ids=ids(generator)).last_hidden_state, generator)


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


zoo_of("llama", "LlamaForCausalLM", "LlamaConfig", **_TINY)
zoo_of("gpt2", "GPT2LMHeadModel", "GPT2Config", vocab_size=VOCAB, n_positions=16, n_embd=32, n_layer=2, n_head=4)
zoo_of("mixtral", "MixtralForCausalLM", "MixtralConfig", **_TINY, num_local_experts=4)
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
