"""The programs of docs/coming-from.md compute under hocket what they do under FSDP2."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh

from hocket.sharding import FSDPModule
from tests.helpers.ranks import run_ranks

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "coming-from.md").read_text("utf-8"), flags=re.DOTALL)
TITAN, TRAINER = PROGRAMS


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.RMSNorm(16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.norm(x)).relu()


class Titan(nn.Module):
    """A model with the names of torchtitan's."""

    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings, self.norm, self.output = nn.Embedding(32, 16), nn.RMSNorm(16), nn.Linear(16, 32)
        self.layers = nn.ModuleDict({str(i): Block() for i in range(3)})

    def init_weights(self) -> None:
        torch.manual_seed(1)
        for param in self.parameters():
            nn.init.trunc_normal_(param, std=0.1) if param.ndim > 1 else nn.init.ones_(param)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tok_embeddings(ids)
        for block in self.layers.values():
            x = block(x)
        return self.output(self.norm(x))


WHOLE = StateDictOptions(full_state_dict=True)


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def titan(rank: int) -> list[float]:
    torch.manual_seed(1)
    plain = Titan()
    plain.init_weights()
    losses: list[list[float]] = []
    for text in (TITAN, TITAN.replace("from hocket.sharding", "from torch.distributed.fsdp")):
        program: dict[str, Any] = {}
        exec(text, program)
        model = program["build"](Titan, init_device_mesh("cpu", (2,)), "cpu")
        if losses:  # FSDP2 draws other numbers on each rank
            set_model_state_dict(model, plain.state_dict(), options=WHOLE)
        assert same(dict(get_model_state_dict(model, options=WHOLE)), plain.state_dict())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses.append([])
        for step in range(3):
            ids = torch.randint(32, (4, 9), generator=torch.Generator().manual_seed(2 * step + rank))
            loss = nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1).float(), ids[:, 1:].flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)  # in bf16
    return losses[0]


def test_torchtitans_way() -> None:
    first, second = run_ranks(titan, 2)
    assert first != second  # each its own data


class Data(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.randint(32, (8,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


@contextlib.contextmanager
def fsdp_on_cpus(rank: int) -> Iterator[None]:
    """Inside, accelerate takes gloo for a group of GPUs: of CPUs it shards nothing."""
    state: Any = importlib.import_module("accelerate.state")
    gpus = "gloo", state.DistributedType.MULTI_GPU
    where = {"ACCELERATE_TORCH_DEVICE": "cpu", "LOCAL_RANK": str(rank), "RANK": str(rank), "WORLD_SIZE": "2"}
    with patch.dict(os.environ, where), patch.object(state.PartialState, "_prepare_backend", lambda *_, **__: gpus):
        yield


def trained(text: str, folder: str, **more: Any) -> Any:
    """The trainer of the program of the page, with a few further settings."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=32, **sizes))
    quiet = dict(report_to=[], disable_tqdm=True, logging_steps=1, seed=0, learning_rate=1e-2)
    steps = dict(gradient_accumulation_steps=2, per_device_train_batch_size=2, max_grad_norm=0.5)
    found: dict[str, Any] = {"model": model, "data": Data(), "folder": folder, "more": {**quiet, **steps, **more}}
    exec(text, found)
    return found["trainer"]


def numbers(trainer: Any) -> list[tuple[float, float]]:
    return [(one["loss"], float(one["grad_norm"])) for one in trainer.state.log_history if "loss" in one]


def trainers(rank: int, folder: str) -> list[list[tuple[float, float]]]:
    training, *_ = TRAINER.split("trainer.save_model")
    theirs = training.replace("hocket.sharding.instead_of_fsdp2()", "contextlib.nullcontext()")
    resumed = training.replace("trainer.train()", "trainer.train(resume_from_checkpoint=f'{folder}/checkpoint-2')")
    sharded = training.replace("FULL", "SHARDED")
    loaded = training.replace('"state_dict_type"', '"cpu_ram_efficient_loading": True, "state_dict_type"')
    again = resumed.replace("FULL", "SHARDED")
    assert len({training, theirs, resumed, sharded, loaded, again}) == 6
    found = []
    with fsdp_on_cpus(rank):
        found.append(numbers(trained("import contextlib\n" + theirs, f"{folder}/fsdp2")))
        trainer = trained(TRAINER, f"{folder}/hocket")
        model: Any = trainer.model
        assert issubclass(type(model), FSDPModule)
        with pytest.raises(ValueError, match=r"^save_pretrained of a sharded LlamaForCausalLM would"):
            model.save_pretrained(f"{folder}/parts")
        found += [numbers(trainer), numbers(trained(resumed, f"{folder}/hocket"))]
        found.append(numbers(trained(sharded, f"{folder}/sharded")))
        found.append(numbers(trained(again, f"{folder}/sharded")))
        found.append(numbers(trained(loaded, f"{folder}/loaded", save_strategy="no")))
        weights = dict(get_model_state_dict(model, options=WHOLE))
    dist.barrier()
    for name in ("whole", "also_whole", "checkpoint-4"):
        saved = model._hocket_original.from_pretrained(f"{folder}/hocket/{name}")
        assert saved.config.architectures == ["LlamaForCausalLM"]
        assert same(saved.state_dict(), weights), name
    return found


@pytest.mark.full
def test_trainer(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="needs accelerate")
    theirs, *ours = run_ranks(trainers, 2, str(tmp_path))[0]
    assert len(theirs) == 4
    for one in ours:
        assert one == [pytest.approx(pair, rel=1e-4) for pair in theirs]
