"""Makes parameters from the tensors of a folder, and tensors from parameters.

hocket's own transformer follows the rules of its family: `stored` defines which elements of a parameter a tensor has,
and both directions copy these. A module's folder has the names of its `state_dict`. A model of transformers may differ:
its own conversions rename, stack, transpose or split tensors (`transformers.conversion_mapping`). They are first run on
the meta device, which gives all names and shapes before anything is read.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hocket.config import ModelConfig
from hocket.pretrained.families import (
    FURTHER_LAYERS,
    IGNORED_TENSORS,
    Family,
    Rule,
    differences,
    family_of,
    model_of,
    read_config,
)
from hocket.pretrained.folder import FP8, MXFP4_BLOCK, READ, TensorFolder, blocks_of, mxfp4_values, scale_name

Shape = tuple[int, ...]
Read = Callable[..., Tensor]
"""Returns a tensor by its name, or `count` of its rows from row `first`: `read(name, first, count)`."""

# -- rules of families -------------------------------------------------------------------------------------------------


def rules_of(family: Family, name: str) -> list[tuple[Rule, str]]:
    """The rules of a parameter, each with its layer's number as text."""
    unit, _, rest = name.partition(".")
    number, _, inside = rest.partition(".") if unit == "layers" else ("", "", name)
    return [(rule, number) for rule in family.rules if rule.ours == inside]


@dataclass(frozen=True, eq=False)
class Stored:
    """A tensor of a folder, as the elements of a parameter that it has."""

    name: str
    shape: Shape
    pieces: tuple[Tensor, ...]
    """Views of the parameter. The tensor consists of `blocks` equal blocks; each block has its part of every view, in
    order. Empty for a tensor without elements of the parameter, such as scales."""
    blocks: int = 1

    def load(self, value: Tensor) -> None:
        """Copy the tensor's elements into the parameter."""
        sizes = [piece.numel() // self.blocks for piece in self.pieces]
        for piece, part in zip(self.pieces, value.reshape(self.blocks, -1).split(sizes, 1), strict=True):
            piece.copy_(part.reshape(piece.shape))

    def tensor(self) -> Tensor:
        """The tensor, from the parameter's elements."""
        if len(self.pieces) == 1:
            return self.pieces[0].reshape(self.shape)
        return torch.cat([piece.reshape(self.blocks, -1) for piece in self.pieces], 1).reshape(self.shape)


def stored(rule: Rule, number: str, value: Tensor, model: ModelConfig, first: int = 0) -> Iterator[Stored]:
    """The tensors of a parameter with this value; for experts, from number `first` on."""
    names, count = [name.replace("{i}", number) for name in rule.theirs], len(rule.theirs)
    if rule.blocks:
        rows = {"k": model.delta_key_dim, "v": model.delta_heads // model.delta_key_heads * model.delta_value_dim}
        rows["h"] = model.delta_heads // model.delta_key_heads
        widths = [[rows[letter] for letter in letters] for letters in rule.blocks]
        heads = value.unflatten(0, (model.delta_key_heads, -1)).split([n for each in widths for n in each], 1)
        for name, each in zip(names, widths, strict=True):
            here, heads = heads[: len(each)], heads[len(each) :]
            width = (1, *value.shape[1:]) if rule.channels else value.shape[1:]
            yield Stored(name, (model.delta_key_heads * sum(each), *width), here)
    elif rule.pairs:
        turning, rest = model.qk_rope_head_dim, getattr(model, rule.pairs)
        pairs, others = value.unflatten(0, (-1, turning + rest)).split([turning, rest], 1)
        yield Stored(names[0], tuple(value.shape), (others, _neighbours(pairs, 1)), len(pairs))
    elif rule.way == "rows":
        for name, part in zip(names, value.chunk(count), strict=True):
            yield Stored(name, tuple(part.shape), (part,))
    elif rule.way == "stacked":
        yield Stored(names[0], tuple(value.shape), (_neighbours(value, -1) if rule.turns else value,))
    elif rule.way == "fused":
        yield Stored(names[0], (value.shape[0], value.shape[2], value.shape[1]), (value.transpose(1, 2),))
    elif rule.way == "mxfp4":
        turned, scales = value.transpose(1, 2), (value.shape[0], value.shape[2], value.shape[1] // MXFP4_BLOCK)
        yield Stored(names[0], (*scales, MXFP4_BLOCK // 2), (_neighbours(turned, 1) if rule.turns else turned,))
        yield Stored(names[1], scales, ())
    else:
        for e, expert in enumerate(value, first):
            for name, part in zip(names, expert.T.chunk(count), strict=True):
                yield Stored(name.replace("{e}", str(e)), tuple(part.shape), (part,))


def _neighbours(value: Tensor, dim: int) -> Tensor:
    """A view that interleaves the two halves along a dimension: [..., N / 2, 2, ...] of [..., N, ...]."""
    halves = value.unflatten(dim, (2, -1))
    return halves.transpose(dim, dim + 1) if dim >= 0 else halves.transpose(dim, dim - 1)


def tensors_of(rule: Rule, number: str, shape: Shape, model: ModelConfig) -> Iterator[tuple[str, Shape]]:
    """Names and shapes of the tensors of a parameter of `shape`."""
    return ((each.name, each.shape) for each in stored(rule, number, torch.empty(shape, device="meta"), model))


def join(rule: Rule, number: str, shape: Shape, first: int, read: Read, model: ModelConfig) -> Tensor:
    """A parameter of `shape`, fp32."""
    value = torch.empty(shape)
    tensors = list(stored(rule, number, value, model, first))
    if rule.way == "mxfp4":
        blocks, scales = (read(each.name, first, shape[0]) for each in tensors)
        for e, expert in enumerate(tensors[0].pieces[0]):
            expert.copy_(mxfp4_values(blocks[e], scales[e]).view(expert.shape))
        return value
    rows = (first, shape[0]) if rule.way in ("fused", "stacked") else ()
    for each in tensors:
        each.load(read(each.name, *rows))
    return value


def split(rule: Rule, number: str, value: Tensor, model: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a parameter: the inverse of `join`."""
    assert rule.way != "mxfp4", "quantised tensors are only read"
    return ((each.name, each.tensor()) for each in stored(rule, number, value, model))


def _further(config: Mapping[str, Any], layers: int, names: Iterable[str]) -> list[str]:
    """The names of tensors in additional layers after the last, as many as a key of `FURTHER_LAYERS` counts, or of
    those that Qwen3-Next and 3.5 have.
    """
    count = max(config.get(key) or 0 for key in FURTHER_LAYERS)
    prefixes = ("mtp.", *(f"model.layers.{i}." for i in range(layers, layers + count)))
    return [name for name in names if name.startswith(prefixes)]


class PretrainedFolder:
    """A model's folder: config.json, and the weights for hocket's transformer.

    Raises ValueError, in one line, for a model that hocket's transformer cannot compute.
    """

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        config = read_config(self.path)
        self.family, self.model = family_of(config), model_of(config)
        self.folder = TensorFolder(
            self.path, blocks_of(config, "mxfp4" if any(rule.way == "mxfp4" for rule in self.family.own) else "fp8")
        )
        self.further = _further(config, self.model.layers, self.folder.entries)
        """Tensors of layers that predict further tokens; no parameter uses them."""

    def require(self, model: ModelConfig) -> None:
        """Raise ValueError unless this folder has a model of such settings."""
        if found := differences(model, self.model):
            raise ValueError(f"its config.json says {', '.join(found)}")

    def check(self, parameters: Mapping[str, Shape]) -> None:
        """Raise ValueError unless the folder's tensors make each parameter once, and all are used."""
        entries, used, lacks = self.folder.entries, set[str](), list[str]()
        for name, shape in parameters.items():
            rule, number = self._rule(name)
            for tensor, expected in tensors_of(rule, number, shape, self.model):
                if tensor in used:
                    lacks.append(f"a tensor for {name}")
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

    def _rule(self, name: str) -> tuple[Rule, str]:
        """The first rule of a parameter whose tensors exist; else the first rule."""
        rules = rules_of(self.family, name)
        assert rules, f"no rule for {name}"
        there = ((rule, i) for rule, i in rules if rule.theirs[0].format(i=i, e=0) in self.folder.entries)
        return next(there, rules[0])

    def value(self, name: str, shape: Shape, first_expert: int = 0) -> Tensor:
        """A parameter, fp32; for experts, those from `first_expert` on, as many as `shape` says.

        Raises ValueError for tensors that are not finite.
        """
        return join(*self._rule(name), shape, first_expert, self.folder.read, self.model)


def listed(names: list[str]) -> str:
    more = len(names) - 2
    return ", ".join(sorted(names)[:2]) + (f" and {more} more" if more > 0 else "")


# -- tensors of modules ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Group:
    """Tensors of one side that are made exactly from some tensors of the other side."""

    sources: tuple[str, ...]
    targets: Mapping[str, Shape]
    make: Callable[[Read], Mapping[str, Tensor]]
    """The targets, from the values of the sources."""
    renames: bool = False
    """Whether one source is one target, unchanged."""


def is_pretrained(model: nn.Module) -> bool:
    """Whether a model is one of transformers."""
    return any(kind.__name__ == "PreTrainedModel" for kind in type(model).__mro__)


def plain(model: nn.Module) -> Any:
    """A model of transformers as its author wrote it: for a sharded one, a copy of its class on the meta device."""
    if not any(hasattr(param, "full_name") for param in model.parameters()):
        return model
    kind: Any = getattr(model, "_hocket_original", type(model))
    with torch.device("meta"):
        return kind(copy.deepcopy(model.config))


def of_family(family: Family, model: ModelConfig, state: Mapping[str, Shape]) -> Iterator[Group]:
    """Tensors of hocket's own transformer in the layout of a family's files."""
    for name, shape in state.items():
        rule, number = rules_of(family, name)[0]

        def make(read: Read, name: str = name, rule: Any = rule, number: str = number) -> Mapping[str, Tensor]:
            return dict(split(rule, number, read(name), model))

        targets = dict(tensors_of(rule, number, shape, model))
        same = list(targets.values()) == [shape] and not (rule.pairs or rule.turns or rule.blocks)
        yield Group((name,), targets, make, same)


def written(model: nn.Module, state: Mapping[str, Shape]) -> list[Group]:
    """The tensors that `save_pretrained` writes for a module whose state has such shapes. Raises ValueError."""
    if not is_pretrained(model):
        return [_same(name, name, shape) for name, shape in state.items()]
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange

    known = getattr(model, "_weight_conversions", None)
    twin = plain(model)
    if known is None:
        found = get_model_conversion_mapping(twin, add_legacy=False)
        known = [one for one in found if not isinstance(one, PrefixChange)]
    return _Conversions(twin, [one.reverse_transform() for one in reversed(known)], backward=True).groups(state, None)


class _Conversions:
    """transformers' conversions, in one direction."""

    def __init__(self, model: Any, conversions: list[Any], backward: bool = False) -> None:
        from transformers.core_model_loading import WeightConverter, WeightRenaming

        self.model, self.backward = model, backward
        self.renamings = [one for one in conversions if isinstance(one, WeightRenaming)]
        self.converters = [one for one in conversions if isinstance(one, WeightConverter)]

    def _renamed(self, name: str, known: Mapping[str, Any] | None) -> tuple[str, str | None]:
        """The first target of a tensor's conversion, and the pattern of that conversion."""
        from transformers.core_model_loading import rename_source_key

        if self.backward:
            found, pattern = rename_source_key(name, [], self.converters)
            return rename_source_key(name, self.renamings, []) if pattern is None else (found, pattern)
        prefix, there = self.model.base_model_prefix, dict(known or {})
        found, pattern = rename_source_key(name, self.renamings, self.converters, prefix, there)
        if found not in there and name in there:
            return rename_source_key(name, [], [], prefix, there)
        return found, pattern

    def groups(self, tensors: Mapping[str, Shape], known: Mapping[str, Any] | None) -> list[Group]:
        """Groups of all tensors whose targets are known; without `known`, of all tensors."""
        from transformers.core_model_loading import dot_natural_key, rename_source_key

        patterns = {pattern: one for one in self.converters for pattern in one.source_patterns}
        members: dict[str, list[tuple[str, str | None]]] = {}
        for name in sorted(tensors, key=dot_natural_key):
            found, pattern = self._renamed(name, known)
            if known is None or found in known:
                members.setdefault(found, []).append((name, pattern))
        groups: list[Group] = []
        for first, sources in members.items():
            pattern = sources[0][1]
            if pattern is None:
                if len(sources) > 1:
                    raise ValueError(f"{sources[0][0]} and {sources[1][0]} are both {first}")
                groups.append(_same(sources[0][0], first, tensors[sources[0][0]]))
                continue

            def make(read: Read, first: str = first, sources: Any = sources, by: Any = patterns[pattern]) -> Any:
                converter = copy.deepcopy(by)
                for name, pattern in sources:
                    converter.add_tensor(first, name, pattern, lambda name=name: read(name))
                made = converter.convert(first, model=self.model, config=self.model.config)
                values = {name: value[0] if isinstance(value, list) else value for name, value in made.items()}
                renamings = self.renamings if self.backward else []
                return {rename_source_key(name, renamings, [])[0]: value for name, value in values.items()}

            try:
                made = make(lambda name: torch.empty(tensors[name], device="meta"))
            except (RuntimeError, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
                listed = ", ".join(name for name, _ in sources[:2])
                raise ValueError(f"{listed}: transformers cannot convert them to {first} ({error})") from None
            shapes = {name: tuple(value.shape) for name, value in made.items()}
            groups.append(Group(tuple(name for name, _ in sources), shapes, make))
        return groups


def _same(source: str, target: str, shape: Shape) -> Group:
    return Group((source,), {target: shape}, lambda read: {target: read(source)}, renames=True)


class ModuleFolder:
    """A folder of safetensors, and the groups of its tensors that make the state of a module.

    `state` has the shapes of everything that the module saves, `others` maps aliases to primary names, and `buffers`
    has the names that are not parameters. Raises ValueError, in one line, unless each is made once and all tensors are
    used, for quantised weights, and for damaged files.
    """

    def __init__(
        self, path: Path, model: nn.Module, state: Mapping[str, Shape], others: Mapping[str, str], buffers: set[str]
    ) -> None:
        self.path = path
        self.tensors = TensorFolder(path)
        self._of: dict[str, Group] = {}
        shapes = {name: entry.shape for name, entry in self.tensors.entries.items()}
        known, ignored = {**state, **{other: state[name] for other, name in others.items()}}, [IGNORED_TENSORS]
        if is_pretrained(model):
            self._refuse_config(model)
            from transformers.conversion_mapping import get_model_conversion_mapping

            twin = plain(model)
            groups = _Conversions(twin, get_model_conversion_mapping(twin)).groups(shapes, known)
            ignored += getattr(twin, "_keys_to_ignore_on_load_unexpected", None) or []
        else:
            groups = [_same(name, name, shape) for name, shape in shapes.items() if name in known]
        used = {name for group in groups for name in group.sources}
        more = [name for name in shapes if name not in used and not any(re.search(rule, name) for rule in ignored)]
        if more:
            raise ValueError(f"{path} has {listed(more)}, which the model does not take")
        for group in groups:
            self._add(group, known, others, buffers)
        if lacks := [name for name in state if name not in self._of]:
            raise ValueError(f"{path} lacks what makes {listed(lacks)}")

    @classmethod
    def of(cls, path: Path, model: nn.Module) -> ModuleFolder:
        """The folder for an unsharded module, which may be on the meta device."""
        names: dict[int, list[str]] = {}
        found = {name: x for name, x in model.state_dict(keep_vars=True).items() if isinstance(x, Tensor)}
        for name, value in found.items():
            names.setdefault(id(value), []).append(name)
        state = {first: tuple(found[first].shape) for first, *_ in names.values()}
        others = {other: first for first, *more in names.values() for other in more}
        params = {id(param) for param in model.parameters()}
        return cls(path, model, state, others, {name for name in state if id(found[name]) not in params})

    def _refuse_config(self, model: Any) -> None:
        config = read_config(self.path)
        if config.get("quantization_config"):
            raise ValueError(f"{self.path}/config.json has a quantization_config: only plain weights are read here")
        if (kind := config.get("model_type")) != model.config.model_type:
            raise ValueError(f"{self.path}/config.json has model_type = {kind}, the model {model.config.model_type}")

    def _add(self, group: Group, known: Mapping[str, Shape], others: Mapping[str, str], buffers: set[str]) -> None:
        """Register the tensors that a group makes."""
        for name, shape in group.targets.items():
            if name not in known:
                raise ValueError(f"{listed(list(group.sources))} make {name}, which the model does not have")
            if shape != tuple(known[name]):
                raise ValueError(f"{name} has shape {list(shape)} in {self.path}, the model's {list(known[name])}")
            for source in group.sources:
                if name not in buffers and (reason := self.tensors.unreadable(source, READ)):
                    raise ValueError(reason)
            name = others.get(name, name)
            if name not in self._of:
                self._of[name] = group
                continue
            first = self._of[name]
            if not (first.renames and group.renames and self.tensors.same(first.sources[0], group.sources[0])):
                raise ValueError(f"{first.sources[0]} and {group.sources[0]} are both {name}, and are not equal")

    def value(self, name: str) -> Tensor:
        """A tensor of the state, as it is stored."""
        group = self._of[name]
        made = group.make(self.tensors.read)
        return next(iter(made.values())) if group.renames else made[name]

    def each(self) -> Iterator[tuple[tuple[str, ...], Callable[[], Callable[[str, int, int], Tensor]]]]:
        """Names of tensors that are made together, and a function that reads them: it returns a range of elements, 1-D.

        For a tensor that is stored unchanged, only the rows with these elements are read.
        """
        by_group: dict[int, list[str]] = {}
        for name, group in self._of.items():
            by_group.setdefault(id(group), []).append(name)
        for names in by_group.values():
            yield tuple(names), partial(self._parts, self._of[names[0]])

    def _parts(self, group: Group) -> Callable[[str, int, int], Tensor]:
        (source, *_), read = group.sources, self.tensors.read
        shape = self.tensors.entries[source].shape
        if not group.renames or not shape:
            made = group.make(read)
            only = next(iter(made.values())) if group.renames else None
            return lambda name, lo, hi: (made[name] if only is None else only).reshape(-1)[lo:hi]
        width = max(1, prod(shape[1:]))

        def rows(_: str, lo: int, hi: int) -> Tensor:
            first, end = lo // width, -(-hi // width)
            return read(source, first, end - first).reshape(-1)[lo - first * width : hi - first * width]

        return rows
