"""One rank of transformers' own class under torch's FSDP2, trained as `hocket train` would train with the same words.

`benchmarks.training` starts it by torchrun. First weights, tokens, learning rates, clipping and AdamW are hocket's.
Each layer is a unit; gradients are summed in fp32.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from hocket.commands.options import RecipeOptions, parse
from hocket.config import ModelConfig
from hocket.config.rule import Host
from hocket.model.source import init_tensor, whole_shapes
from hocket.pretrained.families import FAMILIES, config_of, family_for
from hocket.pretrained.weights import rules_of, split
from hocket.program.documents import as_read
from hocket.resolve import Settings, resolve
from hocket.train.data import Mix, Stream, make_streams
from hocket.train.sources import open_text
from hocket.train.trainer import learning_rate


def empty_model(model: ModelConfig, length: int) -> Any:
    """transformers' class of the model's family, on the meta device."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if model.aux_loss or model.bias_rate:
        raise ValueError("model.aux_loss, model.bias_rate: the peer has no balance; fix: --model.aux_loss 0")
    family = family_for(model)
    said = config_of(family, model, "float32", length)
    config = AutoConfig.for_model(said.pop("model_type"), **said)
    config._attn_implementation, config.use_cache = "sdpa", False
    if model.experts:
        config._experts_implementation = "grouped_mm"
    with torch.device("meta"):
        made: Any = AutoModelForCausalLM.from_config(config)
    return made.train()


def fill(model: Any, settings: Settings, device: torch.device) -> None:
    """Give every parameter the value that hocket's of the same meaning has; of a `DTensor`, this rank's part."""
    params, config = dict(model.named_parameters()), settings.model
    left = set(params)
    for name, shape in whole_shapes(config).items():
        rules = rules_of(FAMILIES[family_for(config)], name)
        rule, number = next(r for r in rules if r[0].theirs[0].format(i=r[1], e=0) in params)
        value = init_tensor(name, shape, config, settings.train.seed, device=str(device))
        for theirs, whole in split(rule, number, value, config):
            param = params[theirs]
            assert isinstance(param, DTensor)
            assert param.shape == whole.shape
            part = distribute_tensor(whole.contiguous(), param.device_mesh, param.placements, src_data_rank=None)
            with torch.no_grad():
                param.to_local().copy_(part.to_local())
            left.discard(theirs)
    assert not left, f"no value for {sorted(left)}"


def sharded(settings: Settings, device: torch.device) -> Any:
    """The model under FSDP2, with its first values."""
    model = empty_model(settings.model, settings.data.sequence_length)
    mesh = init_device_mesh(device.type, (settings.mesh.dp,))
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[settings.precision.compute]
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    model.to_empty(device=device)
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config).to(device)  # its buffers follow from config
    fill(model, settings, device)
    return model


def mean(value: Tensor) -> float:
    """Of all ranks."""
    dist.all_reduce(value)
    return float(value / dist.get_world_size())


class Run:
    """One rank of the run."""

    def __init__(self, settings: Settings, device: torch.device) -> None:
        self.settings, self.device = settings, device
        self.train, validation = make_streams(open_text(settings), settings)
        (self.validation,) = validation.values()
        self.model = sharded(settings, device)
        t = settings.train
        params = list(self.model.parameters())
        groups = [
            {"params": [p for p in params if p.dim() >= 2], "weight_decay": t.weight_decay},
            {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=t.lr, betas=t.betas, eps=t.eps, fused=device.type == "cuda")

    def loss(self, stream: Mix | Stream, position: int, microbatch: int) -> Tensor:
        s = self.settings
        order = as_read(s.train.microbatches, s.mesh.dp, s.train.sequences)
        ids, targets, _ = stream.batch([position + n for n in order[microbatch][dist.get_rank()]])
        logits = self.model(input_ids=ids.to(self.device), use_cache=False).logits
        return F.cross_entropy(logits.float().flatten(0, 1), targets.to(self.device).flatten())

    def step(self, number: int) -> dict[str, Any]:
        """Step `number`, from 0."""
        t, started, losses = self.settings.train, time.perf_counter(), []
        for m in range(t.microbatches):
            loss = self.loss(self.train, number * self.settings.batch, m)
            (loss / t.microbatches).backward()
            losses.append(loss.detach())
        params = list(self.model.parameters())
        norm: Any = torch.nn.utils.clip_grad_norm_(params, t.clip or float("inf"))
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(number, t)
        self.optimizer.step()
        self.optimizer.zero_grad()
        loss = mean(torch.stack(losses).mean())
        whole = norm.full_tensor() if isinstance(norm, DTensor) else norm
        seconds = time.perf_counter() - started
        return {"step": number + 1, "loss": loss, "grad_norm": float(whole), "seconds": seconds}

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean cross-entropy of the batches that hocket validates with."""
        t, batch = self.settings.train, self.settings.batch
        losses = [
            self.loss(self.validation, b * batch, m) for b in range(t.eval_batches) for m in range(t.microbatches)
        ]
        return mean(torch.stack(losses).mean())


def train(words: list[str]) -> None:
    """Train as this rank of the process group."""
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", dist.get_rank()) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    options, origins = parse(RecipeOptions, "train", words)
    host = Host(gpus=dist.get_world_size()) if gpu else Host()
    settings = resolve(options.config, host, origins)
    run = Run(settings, device)
    path = Path(settings.run.folder) / "metrics.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    steps, every = settings.train.steps, settings.train.eval_every or settings.train.steps
    with path.open("a") as lines:
        for number in range(steps):
            rows = [run.step(number)]
            if (number + 1) % every == 0 or number + 1 == steps:
                rows.append({"step": number + 1, "validation_loss": run.evaluate()})
            if dist.get_rank() == 0:
                lines.writelines(json.dumps(row) + "\n" for row in rows)
                lines.flush()
                if number % 20 == 0:
                    print(f"transformers: step {number + 1}: {rows[0]}", flush=True)


def main(words: list[str]) -> None:
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    train(words)
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # a thread that torch's gloo has not joined would abort the process


if __name__ == "__main__":
    main(sys.argv[1:])
