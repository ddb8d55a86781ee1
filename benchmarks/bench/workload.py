"""What every contender does: one optimizer step of a model, over the same tokens on the same ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch

from benchmarks.context_balance import lengths_of
from hocket.config import Config
from hocket.model.documents import Documents, Microbatch, documents_of
from hocket.predict.part_sizes import model_flops_per_token
from hocket.program.mesh import Mesh
from hocket.program.stages import mesh_of
from hocket.runtime.weights import DTYPES


@dataclass(frozen=True)
class Workload:
    """One step, as all contenders must do it. `config` is resolved: no setting is `auto`."""

    config: Config
    optimizer: bool = True
    """Whether AdamW is part of the step. Without it a step ends with reduced gradients, which are then dropped."""
    compile: bool = False
    """Whether contenders made of the plain stack compile each layer with `torch.compile`."""
    variants: Mapping[str, Config] = field(default_factory=dict)
    """Contender -> its configuration, of those that have their own; they differ from `config` in how, not in what."""

    def of(self, name: str) -> Workload:
        """What one contender is given."""
        return replace(self, config=self.variants[name], variants={}) if name in self.variants else self

    def having(self, change: Callable[[Config], Config]) -> Workload:
        """The same with a change to all configurations."""
        variants = {name: change(config) for name, config in self.variants.items()}
        return replace(self, config=change(self.config), variants=variants)

    @property
    def mesh(self) -> Mesh:
        """The grid of ranks. Contenders of other names for the axes map them: dp is pure data parallel, ep inside."""
        return mesh_of(self.config)

    @property
    def chunks(self) -> int:
        """Virtual stages per rank; without a pipeline there is one, whatever the plan says."""
        return self.config.plan.chunks if self.mesh.pp > 1 else 1

    @property
    def dtype(self) -> torch.dtype:
        """What computes. Main weights and optimizer state are fp32."""
        return DTYPES[self.config.precision.dtype]

    @property
    def tokens_per_microbatch(self) -> int:
        """Tokens of one microbatch on one data-parallel rank."""
        return self.config.train.sequences * self.config.data.sequence_length

    @property
    def tokens(self) -> int:
        """Tokens of one step, over all ranks."""
        return self.config.mesh.dp * self.config.train.microbatches * self.tokens_per_microbatch

    @property
    def flops(self) -> float:
        """Model FLOPs of one step over all ranks: 6 per active weight and token, causal attention at half."""
        return model_flops_per_token(self.config.model, self.config.data.sequence_length) * self.tokens


def batches(workload: Workload, rank: int, seed: int, device: torch.device) -> list[Microbatch]:
    """The microbatches of step `seed` on a global rank: random tokens, [B, S], the same for all contenders.

    Ranks of one pipeline (equal `dp` coordinate) get the same tokens. With `data.packing` sequences are documents of
    log-normal lengths, 2,048 tokens on average or an eighth of a sequence, and none is longer than a sequence.
    """
    config = workload.config
    generator = torch.Generator().manual_seed(100_003 * seed + workload.mesh.coordinates(rank).dp)
    shape = (config.train.sequences, config.data.sequence_length + 1)
    made = []
    for _ in range(config.train.microbatches):
        ids = torch.randint(config.model.vocab, shape, generator=generator)
        documents = None if config.data.packing == "off" else _documents(*shape, generator).to(device)
        both = (x.contiguous().to(device) for x in (ids[:, :-1], ids[:, 1:]))
        made.append(Microbatch(*both, documents=documents))
    return made


def _documents(batch: int, tokens: int, generator: torch.Generator) -> Documents:
    length = tokens - 1
    seeds = torch.randint(2**31, (batch,), generator=generator).tolist()
    bounds = [lengths_of(seed, length, max(1, min(2048, length // 8))) for seed in seeds]
    rows = [torch.arange(len(each) - 1).repeat_interleave(torch.tensor(each).diff()) for each in bounds]
    return documents_of(torch.stack(rows))
