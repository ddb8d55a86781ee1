"""What says how Hugging Face has a family of models; the families are in `tables.py`.

A family says which key of config.json is which setting, what hocket computes of the other keys, and which tensors make
which parameter. Shapes are those of `docs/models.md`: D hidden width, E experts, F width of an MLP.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

FULL, WINDOW, DELTA = "full_attention", "sliding_attention", "linear_attention"
"""How `layer_types` calls layers without and with a window, and those with a delta net."""
REQUIRED = object()
"""In place of a value: a configuration without that key is refused."""


@dataclass(frozen=True)
class Key:
    """Where config.json has a setting."""

    name: str
    """Empty: no key has it, and `missing` always counts."""
    missing: Any = REQUIRED
    """Its value where the key is missing or null; a text is a product or quotient of settings."""
    other: str = ""
    """Another name that some versions give it."""
    times: str = ""
    """Key of a number by which this one is multiplied."""
    null: bool = False
    """Whether its value where the key is missing is written as null."""


@dataclass(frozen=True)
class Only:
    """A key of which hocket computes some values alone, or lists of them alone. The first one is written."""

    values: tuple[Any, ...]
    missing: Any = None
    """What a model does where the key is missing."""
    written: bool = True
    """Whether transformers reads it. Other code may."""


Way = Literal["rows", "experts", "fused", "stacked", "mxfp4"]


@dataclass(frozen=True)
class Rule:
    """A parameter and its tensors on disk; `{i}` is the layer, `{e}` the expert."""

    ours: str
    """The parameter, without its layer."""
    theirs: tuple[str, ...]
    way: Way = "rows"
    """rows: tensors are stacked along rows. experts: so are those of each expert, and [rows, columns] is turned over.
    fused: one tensor for all experts, [E, rows, columns] turned over. stacked: one for all experts, as it is. mxfp4: as
    fused, of blocks of 32 columns, [E, rows, columns / 32, 16], and their scales, [E, rows, columns / 32]; only read.
    """
    pairs: str = ""
    """Setting that counts the rows before those of rotary positions, `qk_rope_head_dim` of them: in each head, or in
    all. On disk these stand last, and neighbours are a pair. Here they stand first, and the halves are pairs."""
    blocks: tuple[str, ...] = ()
    """Of delta nets: each tensor has blocks of rows, one after the other, where the parameter has one key head after
    the other, and of each what it has in all blocks. For a key head, k are as many rows as keys are wide, v as the
    values of its value heads, and h one for each of these."""
    channels: bool = False
    """Whether a tensor has a dimension of 1 behind the first, as convolutions have."""
    turns: bool = False
    """Of stacked and mxfp4: on disk gate and up take turns, where the parameter has one behind the other."""


@dataclass(frozen=True)
class Windows:
    """Windows of attention: what a family's config.json says of them beside `sliding_window`."""

    missing: int | None = None
    """The window of a model that does not say. That differs from null, which is none."""
    switch: str = ""
    """Key without which no layer has a window."""
    listed: bool = True
    """Whether transformers reads `layer_types`. Without, all layers have a window or none has."""
    every: int = 0
    """Where no layers are listed: each so many-th has no window."""
    first: tuple[str, int] | None = None
    """Where no layers are listed: a key that says how many first ones have no window, and how many if it is missing."""
    plain: float = 0.0
    """Above 0 layers with a window have plain positions, and `rope_scaling` is that of the others. Their base where
    config.json does not name them: transformers takes this one, not `rope_theta`."""


@dataclass(frozen=True)
class Family:
    """One `model_type`."""

    architecture: str
    keys: Mapping[str, Key]
    """By setting, without `model.`."""
    rules: tuple[Rule, ...]
    """Of several for one parameter, the first whose tensors are there counts. The first of all is written."""
    only: Mapping[str, Only] = field(default_factory=dict)
    always: Mapping[str, Any] = field(default_factory=dict)
    """Settings that the family itself has."""
    partial: tuple[str, float] | None = None
    """Whether a part of each head may rotate: the key that says how much, and how much does where the key is missing.
    The key is a share of the head, or `rotary_dim`."""
    pictures: bool = False
    """Whether transformers has a model for pictures too, whose tokens have three positions. Those of text are one."""
    without: int = 0
    """Whether layers may have no positions: every how many layers one has none where config.json does not say."""
    windows: Windows | None = None
    """None: no layer may have a window."""
    deltas: int = 0
    """Whether layers have delta nets: every how many layers one has full attention where config.json does not say."""
    dense: Literal["all", "none", "steps", "first", "types"] = "all"
    """Which layers have no experts: all, none, those of `decoder_sparse_step` and `mlp_only_layers`, the first
    `first_k_dense_replace`, or those that `mlp_layer_types` calls dense, and where it is missing the first ones."""
    same: Mapping[str, str] = field(default_factory=dict)
    """Keys that say again what a setting says."""

    @property
    def ways(self) -> set[Way]:
        """The ways of its rules."""
        return {rule.way for rule in self.rules}
