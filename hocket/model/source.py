"""The source of a planned run's model: the methods that an engine calls."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from hocket.config import Config, ModelConfig
from hocket.config.model import spreads
from hocket.layers.linears import WHOLE, Linears
from hocket.model.moe import Router
from hocket.model.parts import ExpertPlace
from hocket.model.transformer import Chunk
from hocket.pretrained.weights import PretrainedFolder
from hocket.program.ops import Layout
from hocket.program.stages import layout_of
from hocket.runtime.comm import Groups

# -- init --------------------------------------------------------------------------------------------------------------
# Initial values of weights. The same seed gives the same weights on any mesh.
#
# Every parameter is drawn from its own generator, seeded by its name in the whole model; every expert of a stacked
# weight from one seeded by the name and the expert's global number. So a weight depends neither on the chunk, nor on
# the shard, nor on the expert-parallel rank that has it.


def init_tensor(
    name: str, shape: Sequence[int], config: ModelConfig, seed: int, *, first_expert: int = 0, device: str = "cpu"
) -> Tensor:
    """Initial value of the parameter `name`, fp32, drawn on `device`.

    Norms are ones, or zeros if one is added to them. Biases, whose names begin with b, are zeros. In delta nets `dt` is
    ones, and `a_log` the logarithm of numbers spread evenly from 0.01 to 16, as in Qwen3-Next. Other weights are
    normal, with the standard deviations of `config/model.py`. For experts, `shape` counts the local ones, and
    `first_expert` is the global number of the first. CPU and GPU draw different numbers.
    """
    leaf = name.rsplit(".", 1)[-1]
    if leaf.endswith("norm") or leaf == "dt":
        zeros = config.norm_plus_one and leaf not in ("o_norm", "dt")
        return torch.full(tuple(shape), 0.0 if zeros else 1.0, device=device)
    if leaf.startswith("b"):
        return torch.zeros(tuple(shape), device=device)
    if leaf == "a_log":
        return (
            torch.rand(tuple(shape), generator=_generator(name, seed, device), device=device).mul(15.99).add(0.01).log()
        )
    std, up_std = spreads(name, config)
    if ".experts." in name:
        experts = [_normal(f"{name}.{first_expert + e}", shape[1:], std, seed, device) for e in range(shape[0])]
        value = torch.stack(experts)
    else:
        value = _normal(name, shape, std, seed, device)
    if up_std != std:
        value.chunk(2, -1 if ".experts." in name else 0)[1].mul_(up_std / std)
    return value


def _generator(name: str, seed: int, device: str) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "little"))


def _normal(name: str, shape: Sequence[int], std: float, seed: int, device: str) -> Tensor:
    return torch.randn(tuple(shape), generator=_generator(name, seed, device), device=device) * std


def init_biases(chunk: Chunk, device: torch.device | str) -> None:
    """Set the balance biases of a chunk's routers to fp32 zeros, and loads to even: all of its buffers.

    Existing tensors keep their memory, which a recorded step goes on reading.
    """
    for module in chunk.modules():
        if isinstance(module, Router) and module.bias is not None:
            if module.bias.is_meta:
                module.bias = torch.empty(module.bias.shape, device=device, dtype=torch.float32)
            module.bias.zero_()
        if isinstance(module, Router) and module.over_batch:
            experts = len(module.weight)
            if module.share is None:
                module.share = torch.empty(experts, device=device, dtype=torch.float32)
            module.share.fill_(1 / experts)


# -- source ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ChunkPlace:
    """Which part of the model a chunk is, and the ranks that compute it."""

    layers: range
    first: bool
    last: bool
    ep: ExpertPlace
    device: torch.device
    linears: Linears = WHOLE
    groups: Groups | None = None
    """For parts that communicate on their own lane."""
    ends: dict[str, nn.Parameter] = field(default_factory=dict)
    """Parameters of a tied model's embedding and head, by name, shared by a rank's chunks: the first such chunk adds
    its own."""


class ModelSource(ABC):
    """A model from which an engine gets its chunks. Its sizes are in the `model` section of the settings."""

    def layout(self, config: Config) -> Layout:
        """The places of its layers, and their parts. `config` is resolved."""
        return layout_of(config)

    @abstractmethod
    def chunk(self, place: ChunkPlace) -> Any:
        """One virtual stage of the model: consecutive layers, and the embedding or the head at the ends.

        `embed` makes hidden states from token ids, or is None; `layers` has the layers by their number as text, and
        `layer(number)` returns one; `loss(x, targets)` is the mean cross-entropy of the last chunk;
        `named_parameters()` has each parameter once. Parameters are named `embed.*`, `layers.N.*`, `layers.N.experts.*`
        and `head.*`; N counts from the first layer of the model. They are on the meta device, and stacked experts are
        those of one expert-parallel rank. Layers have the part functions of docs/design/architecture.md.
        """

    @abstractmethod
    def value(self, name: str, shape: tuple[int, ...], first_expert: int, device: torch.device) -> Tensor:
        """The initial value of a parameter or bias of this `shape`; of weights stacked by expert, the whole."""

    def begin(self, chunk: Any, device: torch.device) -> None:  # noqa: B027  optional
        """Initialize a chunk's buffers, on a device."""

    def own_name(self, name: str) -> str:
        """The model's own name of a parameter."""
        return name


class OwnTransformer(ModelSource):
    """hocket's own transformer."""

    def __init__(self, config: Config) -> None:
        """`config` is resolved."""
        self._config = config

    @cached_property
    def _folder(self) -> PretrainedFolder | None:
        """Opened when a value is first needed: a run resumed from a checkpoint needs none."""
        weights = self._config.model.weights
        return PretrainedFolder(weights) if weights else None

    def chunk(self, place: ChunkPlace) -> Chunk:
        config = self._config
        shared = None
        if config.mesh.cp > 1:
            assert place.groups is not None, "ranks that share sequences have a group"
            shared = place.groups.cp, config.overlap.cp.method
        chunk = Chunk(
            config.model, place.layers, place.first, place.last, ep=place.ep, aux_scale=1.0 / config.train.microbatches,
            linears=place.linears, shared=shared,
        )  # fmt: skip
        chunk.tie(place.ends)
        return chunk

    def value(self, name: str, shape: tuple[int, ...], first_expert: int, device: torch.device) -> Tensor:
        if self._folder is not None:
            return self._folder.value(name, shape, first_expert)
        config = self._config
        return init_tensor(name, shape, config.model, config.train.seed, first_expert=first_expert, device=str(device))

    def begin(self, chunk: Chunk, device: torch.device) -> None:
        init_biases(chunk, device)


def open_weights(config: ModelConfig) -> PretrainedFolder:
    """The folder `model.weights`, if its tensors give each parameter of the model once. Raises ValueError."""
    folder = PretrainedFolder(config.weights)
    folder.require(config)
    folder.check(whole_shapes(config))
    return folder


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of all parameters of a model. Allocates nothing."""
    return {name: tuple(value.shape) for name, value in Chunk(config, range(config.layers)).named_parameters()}


def whole_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of all parameters of a model, and of the biases of its routers. Allocates nothing."""
    chunk = Chunk(config, range(config.layers))
    return {name: tuple(value.shape) for name, value in (*chunk.named_parameters(), *chunk.named_buffers())}
