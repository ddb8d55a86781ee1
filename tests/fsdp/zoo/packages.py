"""Models of peft and timm; tests leave out those whose package is not here."""

from __future__ import annotations

import contextlib
import importlib
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from tests.fsdp.zoo.language import TINY, next_token
from tests.fsdp.zoo.program import STEPS, Run, distance, loop, program

WHOLE = StateDictOptions(full_state_dict=True)


def _adapted(run: Run, dtype: torch.dtype = torch.float32) -> tuple[Any, Callable[[range], None]]:
    """A model with a frozen base and trained adapters, and what trains it."""
    peft: Any = importlib.import_module("peft")
    from transformers import LlamaConfig, LlamaForCausalLM

    base: Any = LlamaForCausalLM(LlamaConfig(**TINY))
    base.to(dtype)
    config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model: Any = peft.get_peft_model(base, config)
    assert {p.dtype for p in model.parameters()} == {dtype, torch.float32}
    run.shard(model, list(base.model.layers))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, foreach=True)

    def train(steps: range) -> None:
        for step in steps:
            for seed in run.seeds(step):
                run.backward(next_token(model, torch.Generator().manual_seed(seed)))
            optimizer.step()
            optimizer.zero_grad()

    return model, train


def _whole(run: Run, model: nn.Module, changed: bool = False) -> Any:
    """Inside, weights are whole; so they always are for FSDP2, whose parameters compute, and without sharding."""
    return run.contexts[model].gathered(changed) if run.form == "hocket" else contextlib.nullcontext()


@program("LoRA by peft", needs=("peft", "transformers"))
def lora(run: Run) -> None:
    model, train = _adapted(run)
    train(range(STEPS))
    run.note_weights(model)


@program("LoRA by peft, frozen base in bf16", needs=("peft", "transformers"), off=5e-3)
def lora_of_bf16(run: Run) -> None:
    model, train = _adapted(run, torch.bfloat16)
    train(range(STEPS))
    run.note_weights(model)


@program("LoRA by peft: merge_adapter and unmerge_adapter between steps", needs=("peft", "transformers"))
def lora_merged(run: Run) -> None:
    model, train = _adapted(run)
    train(range(STEPS))
    with _whole(run, model, changed=True):
        model.merge_adapter()
    run.note_weights(model, "merged ")
    with torch.no_grad():
        run.note("merged loss", next_token(model, torch.Generator().manual_seed(5)))
    with _whole(run, model, changed=True):
        model.unmerge_adapter()
    train(range(STEPS, 2 * STEPS))
    run.note_weights(model)


@program("LoRA by peft: adapters saved", needs=("peft", "transformers"))
def lora_saved(run: Run) -> None:
    model, train = _adapted(run)
    train(range(STEPS))
    peft: Any = importlib.import_module("peft")
    state = get_model_state_dict(model, options=WHOLE)
    for name, value in peft.get_peft_model_state_dict(model, state_dict=dict(state)).items():
        run.note(f"adapter {name}", value)
    with tempfile.TemporaryDirectory() as folder:
        if run.form == "hocket":
            with pytest.raises(ValueError, match=r"^save_pretrained of a sharded PeftModel"):
                model.save_pretrained(folder)
            with pytest.raises(ValueError, match=r"^save_pretrained of a sharded LlamaForCausalLM"):
                model.base_model.model.save_pretrained(folder)
    with tempfile.TemporaryDirectory() as folder, _whole(run, model):
        model.save_pretrained(folder, state_dict=dict(state) if run.form == "fsdp2" else None)
        for name, value in peft.load_peft_weights(folder, device="cpu").items():
            run.note(f"saved {name}", value)


def _timm(name: str, **sizes: Any) -> Callable[[], nn.Module]:
    return lambda: importlib.import_module("timm").create_model(name, num_classes=4, **sizes)


def _pixels(model: nn.Module, generator: torch.Generator) -> torch.Tensor:
    return distance(model(torch.randn(2, 3, 32, 32, generator=generator)), generator)


loop(
    "timm: ViT", _timm("vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=4),
    _pixels, lambda model: list(model.blocks), needs=("timm", "torchvision"),
)  # fmt: skip
loop(
    "timm: ConvNeXt", _timm("convnext_atto", depths=(1, 1, 1, 1), dims=(8, 16, 16, 16)),
    _pixels, lambda model: list(model.stages), needs=("timm", "torchvision"),
)  # fmt: skip
