"""Parameters made of the tensors of a folder, and tensors made of parameters: the rules of a family, both ways."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hocket.config import ModelConfig
from hocket.pretrained.configuration import differences, family_of, model_of, read_config
from hocket.pretrained.folder import (
    FP8,
    MXFP4_BLOCK,
    READ,
    NotFiniteError,
    TensorFolder,
    blocks_of,
    mxfp4_values,
    scale_name,
)
from hocket.pretrained.tables import FURTHER_LAYERS, IGNORED_TENSORS, Family, Rule

Shape = tuple[int, ...]


def rules_of(family: Family, name: str) -> list[tuple[Rule, str]]:
    """The rules of a parameter, each with its layer's number as text."""
    unit, _, rest = name.partition(".")
    number, _, inside = rest.partition(".") if unit == "layers" else ("", "", name)
    return [(rule, number) for rule in family.rules if rule.ours == inside]


def tensors_of(
    rule: Rule, number: str, shape: Shape, model: ModelConfig, first: int = 0
) -> Iterator[tuple[str, Shape]]:
    """Names and shapes of the tensors of a parameter of `shape`; of experts, from number `first` on."""
    if rule.blocks:
        for name, widths in zip(rule.theirs, _widths(rule, model), strict=True):
            behind = (1, *shape[1:]) if rule.channels else shape[1:]
            yield name.format(i=number), (model.delta_key_heads * sum(widths), *behind)
    elif rule.way == "rows":
        for name in rule.theirs:
            yield name.format(i=number), (shape[0] // len(rule.theirs), *shape[1:])
    elif rule.way == "stacked":
        yield rule.theirs[0].format(i=number), shape
    elif rule.way == "fused":
        yield rule.theirs[0].format(i=number), (shape[0], shape[2], shape[1])
    elif rule.way == "mxfp4":
        scales = (shape[0], shape[2], shape[1] // MXFP4_BLOCK)
        for name, of_each in zip(rule.theirs, ((MXFP4_BLOCK // 2,), ()), strict=True):
            yield name.format(i=number), (*scales, *of_each)
    else:
        for e in range(shape[0]):
            for name in rule.theirs:
                yield name.format(i=number, e=first + e), (shape[2] // len(rule.theirs), shape[1])


def join(rule: Rule, number: str, shape: Shape, first: int, read: Callable[..., Tensor], model: ModelConfig) -> Tensor:
    """A parameter of `shape`, of what `read(name)`, or of rows `read(name, first, count)`, gives."""
    names = [name for name, _ in tensors_of(rule, number, shape, model, first)]
    if rule.blocks:
        values = [read(name).squeeze(1) if rule.channels else read(name) for name in names]
        counts = [[model.delta_key_heads * width for width in widths] for widths in _widths(rule, model)]
        blocks = [block for value, rows in zip(values, counts, strict=True) for block in value.split(rows)]
        return torch.cat([block.unflatten(0, (model.delta_key_heads, -1)) for block in blocks], 1).flatten(0, 1)
    if rule.pairs:
        rest, pairs = _blocks(read(names[0]), getattr(model, rule.pairs), model.qk_rope_head_dim)
        return torch.cat([pairs[:, 0::2], pairs[:, 1::2], rest], 1).flatten(0, 1)
    if rule.way == "fused":
        return read(names[0], first, shape[0]).transpose(1, 2)
    if rule.way == "stacked":
        return _halves(read(names[0], first, shape[0]), rule.turns)
    if rule.way == "mxfp4":
        blocks, scales = (read(name, first, shape[0]) for name in names)
        value = torch.empty(shape)
        for e in range(shape[0]):
            value[e] = _halves(mxfp4_values(blocks[e], scales[e]).T, rule.turns)
        return value
    if rule.way == "rows":
        return read(names[0]) if len(names) == 1 else torch.cat([read(name) for name in names])
    value, count = torch.empty(shape), len(rule.theirs)
    for e in range(shape[0]):
        value[e] = torch.cat([read(name) for name in names[e * count : (e + 1) * count]]).T
    return value


def split(rule: Rule, number: str, value: Tensor, model: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a parameter: what `join` was given."""
    names, count = [name for name, _ in tensors_of(rule, number, tuple(value.shape), model)], len(rule.theirs)
    assert rule.way != "mxfp4", "quantised tensors are only read"
    if rule.blocks:
        widths = _widths(rule, model)
        in_order = [width for of_one in widths for width in of_one]
        heads = iter(value.unflatten(0, (model.delta_key_heads, -1)).split(in_order, 1))
        parts = [torch.cat([next(heads).flatten(0, 1) for _ in of_one]) for of_one in widths]
        parts = [part.unsqueeze(1) for part in parts] if rule.channels else parts
    elif rule.way == "fused":
        parts = [value.transpose(1, 2)]
    elif rule.way == "stacked":
        parts = [torch.stack(value.chunk(2, -1), -1).flatten(-2) if rule.turns else value]
    elif rule.pairs:
        halves, rest = _blocks(value, model.qk_rope_head_dim, getattr(model, rule.pairs))
        pairs = torch.stack(halves.chunk(2, 1), 2).flatten(1, 2)
        parts = [torch.cat([rest, pairs], 1).flatten(0, 1)]
    elif rule.way == "rows":
        parts = list(value.chunk(count))
    else:
        parts = [part for expert in value for part in expert.T.chunk(count)]
    yield from zip(names, parts, strict=True)


def _further(config: Mapping[str, Any], layers: int, names: Iterable[str]) -> list[str]:
    """Those of the names that belong to layers behind the last, as many as a key of `FURTHER_LAYERS` counts, or that
    Qwen3-Next and 3.5 have for them.
    """
    count = max(config.get(key) or 0 for key in FURTHER_LAYERS)
    prefixes = ("mtp.", *(f"model.layers.{i}." for i in range(layers, layers + count)))
    return [name for name in names if name.startswith(prefixes)]


def _widths(rule: Rule, model: ModelConfig) -> list[list[int]]:
    """Of every tensor of a delta net the rows in each block that belong to one key head."""
    each = model.delta_heads // model.delta_key_heads
    rows = {"k": model.delta_key_dim, "v": each * model.delta_value_dim, "h": each}
    return [[rows[letter] for letter in letters] for letters in rule.blocks]


def _blocks(value: Tensor, first: int, second: int) -> tuple[Tensor, Tensor]:
    """Blocks of rows, such as heads, and in each the first rows and the second."""
    begin, end = value.unflatten(0, (-1, first + second)).split([first, second], 1)
    return begin, end


def _halves(value: Tensor, turns: bool) -> Tensor:
    """Columns that take turns, one behind the other."""
    return torch.cat([value[..., 0::2], value[..., 1::2]], -1) if turns else value


class PretrainedFolder:
    """A model's folder: config.json, and the weights of hocket's transformer as its tensors have them.

    Raises ValueError, in one line, for a model that hocket's transformer is not.
    """

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        config = read_config(self.path)
        self.family, self.model = family_of(config), model_of(config)
        self.folder = TensorFolder(self.path, blocks_of(config, "mxfp4" if "mxfp4" in self.family.ways else "fp8"))
        self.further = _further(config, self.model.layers, self.folder.entries)
        """Tensors of layers that predict further tokens, which no parameter takes."""

    def require(self, model: ModelConfig) -> None:
        """Raise ValueError unless this folder has a model of such settings."""
        if found := differences(model, self.model):
            raise ValueError(f"its config.json says {', '.join(found)}")

    def check(self, parameters: Mapping[str, Shape]) -> None:
        """Raise ValueError unless the tensors of the folder make each parameter once, and all are used."""
        entries, used, lacks = self.folder.entries, set[str](), list[str]()
        for name, shape in parameters.items():
            rule, number = self._rule(name)
            for tensor, expected in tensors_of(rule, number, shape, self.model):
                used.add(tensor)
                entry = entries.get(tensor)
                if entry is None:
                    lacks.append(tensor)
                elif entry.shape != expected:
                    raise ValueError(f"{tensor} has shape {list(entry.shape)}, and {name} needs {list(expected)}")
                elif reason := self.folder.unreadable(tensor, ("U8",) if rule.way == "mxfp4" else READ):
                    raise ValueError(reason)
                elif entry.dtype == FP8:
                    used.add(scale_name(tensor))
        if lacks:
            raise ValueError(f"{self.path} lacks {listed(lacks)}")
        used.update(self.further)
        more = [name for name in entries if name not in used and not re.search(IGNORED_TENSORS, name)]
        head, embedding = "lm_head.weight", "model.embed_tokens.weight"
        if self.model.tied and head in more and self.folder.same(head, embedding):
            more.remove(head)
        if more:
            raise ValueError(f"{self.path} has {listed(more)}, which no parameter takes")

    def not_finite(self) -> list[str]:
        """A line for each tensor that has elements that are not finite. Reads all that the model has."""
        scales = {scale_name(name) for name, entry in self.folder.entries.items() if entry.dtype == FP8}
        found = []
        for name in self.folder.entries.keys() - {*self.further, *scales}:
            if not re.search(IGNORED_TENSORS, name):
                try:
                    self.folder.read(name)
                except NotFiniteError as error:
                    found.append(str(error))
        return sorted(found)

    def _rule(self, name: str) -> tuple[Rule, str]:
        """The rule of a parameter whose tensors are there; else the first."""
        rules = rules_of(self.family, name)
        assert rules, f"no rule for {name}"
        there = (r for r in rules if next(tensors_of(*r, (1, 1, 1), self.model))[0] in self.folder.entries)
        return next(there, rules[0])

    def value(self, name: str, shape: Shape, first_expert: int = 0) -> Tensor:
        """A parameter, fp32; of experts, those from `first_expert` on that `shape` counts.

        Raises ValueError for tensors that are not finite.
        """
        rule, number = self._rule(name)
        try:
            return join(rule, number, shape, first_expert, self.folder.read, self.model).float()
        except NotFiniteError as error:
            raise ValueError(f"{error}; fix: download it again, or take another folder") from None


def listed(names: list[str]) -> str:
    more = len(names) - 2
    return ", ".join(sorted(names)[:2]) + (f" and {more} more" if more > 0 else "")
