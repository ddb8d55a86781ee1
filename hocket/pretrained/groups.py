"""Which tensors of a folder make which parameters of a module, and back.

The names of a module's `state_dict` are those of its folder. Of a model of transformers some are not: there its own
conversions say what was renamed, stacked, turned over or cut (`transformers.conversion_mapping`), and they are run, on
the meta device first, which tells all names and shapes before anything is read. hocket's own transformer goes by the
rules of its family.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hocket.config import ModelConfig
from hocket.pretrained.configuration import read_config
from hocket.pretrained.convert import listed, rules_of, split, tensors_of
from hocket.pretrained.folder import READ, TensorFolder
from hocket.pretrained.tables import IGNORED_TENSORS, Family

Shape = tuple[int, ...]
Read = Callable[[str], Tensor]


@dataclass(frozen=True)
class Group:
    """Tensors of one side that make tensors of the other, and no others do."""

    sources: tuple[str, ...]
    targets: Mapping[str, Shape]
    make: Callable[[Read], Mapping[str, Tensor]]
    """The targets, of what the sources are."""
    renames: bool = False
    """Whether there is one source and one target, and they are the same."""

    @property
    def numel(self) -> int:
        """Elements of all targets."""
        return sum(map(prod, self.targets.values()))


def is_pretrained(model: nn.Module) -> bool:
    """Whether a model is one of transformers."""
    return any(kind.__name__ == "PreTrainedModel" for kind in type(model).__mro__)


def plain(model: nn.Module) -> Any:
    """A model of transformers as its author has it: of one that is sharded, another one on the meta device."""
    if all(type(param).__name__ != "ShardedParameter" for param in model.parameters()):
        return model
    kind: Any = getattr(model, "_hocket_original", type(model))
    with torch.device("meta"):
        return kind(copy.deepcopy(model.config))


def of_family(family: Family, model: ModelConfig, state: Mapping[str, Shape]) -> Iterator[Group]:
    """Tensors of hocket's own transformer as files of a family have them."""
    for name, shape in state.items():
        rule, number = rules_of(family, name)[0]

        def make(read: Read, name: str = name, rule: Any = rule, number: str = number) -> Mapping[str, Tensor]:
            return dict(split(rule, number, read(name), model))

        targets = dict(tensors_of(rule, number, shape, model))
        same = list(targets.values()) == [shape] and not (rule.pairs or rule.turns or rule.blocks)
        yield Group((name,), targets, make, same)


def written(model: nn.Module, state: Mapping[str, Shape]) -> list[Group]:
    """The tensors of files that `save_pretrained` writes of a module whose state has such shapes. Raises ValueError."""
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
    """Those of transformers, in one direction."""

    def __init__(self, model: Any, conversions: list[Any], backward: bool = False) -> None:
        from transformers.core_model_loading import WeightConverter, WeightRenaming

        self.model, self.backward = model, backward
        self.renamings = [one for one in conversions if isinstance(one, WeightRenaming)]
        self.converters = [one for one in conversions if isinstance(one, WeightConverter)]

    def _renamed(self, name: str, known: Mapping[str, Any] | None) -> tuple[str, str | None]:
        """The first name that a tensor becomes part of, and the pattern of the conversion that makes it."""
        from transformers.core_model_loading import apply_converters, apply_renamings, rename_source_key

        if self.backward:
            found, pattern = apply_converters(name, self.converters)
            return (found, pattern) if pattern is not None else (apply_renamings(name, self.renamings), None)
        prefix, there = self.model.base_model_prefix, dict(known or {})
        found, pattern = rename_source_key(name, self.renamings, self.converters, prefix, there)
        if found not in there and name in there:
            return rename_source_key(name, [], [], prefix, there)
        return found, pattern

    def groups(self, tensors: Mapping[str, Shape], known: Mapping[str, Any] | None) -> list[Group]:
        """Of all tensors whose names become known ones; without `known`, of all."""
        from transformers.core_model_loading import apply_renamings, dot_natural_key

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
                return {
                    apply_renamings(name, self.renamings) if self.backward else name: v for name, v in values.items()
                }

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

    `state` has the shapes of all that the module saves, `others` further names of some -> the name that counts, and
    `buffers` the names of what is no parameter. Raises ValueError, in one line, unless each is made once and all
    tensors are used, for quantised weights, and for files that are damaged.
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
            self._take(group, known, others, buffers)
        if lacks := [name for name in state if name not in self._of]:
            raise ValueError(f"{path} lacks what makes {listed(lacks)}")

    @classmethod
    def of(cls, path: Path, model: nn.Module) -> ModuleFolder:
        """That of a module that is not sharded. It may be on the meta device."""
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

    def _take(self, group: Group, known: Mapping[str, Shape], others: Mapping[str, str], buffers: set[str]) -> None:
        """Note what a group makes."""
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
        """Names of tensors that are made together, and what reads them: it gives elements from one to another, 1-D.

        Of a tensor that is stored as it is, no more is read than the rows that have these elements.
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
