"""Which modules make a unit together, by size.

A *bucket* is a unit of several modules: their weights are gathered as one and their gradients reduced as one. Where
modules are small, every collective costs more time to begin than to move its bytes; a bucket begins once for all of
them. Where one is large enough by itself nothing is gained, and more is exposed at either end of a step.

Buckets are filled from the end of the model, where backward begins, and none is larger than it may be unless a single
module is. So what is left over is the first bucket: the one whose gather nothing hides, and whose reduction comes last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from hocket.fsdp.members import Rule, chosen_units, is_called
from hocket.fsdp.precision import Precision
from hocket.sizes import Size, parse_size

DEFAULT = parse_size("128Mi params")
"""How large a bucket may be where nobody says, and no units are named."""

Named = tuple[str, nn.Module]
Measure = Callable[[nn.Module], int]


def parse_bucket(text: object) -> Size | None:
    """The most that a bucket holds; None for `auto`. Raises: ValueError for what is no size."""
    if text == "auto":
        return None
    if not isinstance(text, str):
        raise ValueError(f"bucket={text!r} has no unit: give a size such as '128M params' or '256MiB', or 'auto'")
    size = parse_size(text, "bucket")
    if size.value < 1:
        raise ValueError(f"bucket={text!r} holds nothing: give a size above 0, such as '128M params'")
    return size


def make_buckets(root: nn.Module, rule: Rule, most: Size | None, precision: Precision) -> list[list[Named]]:
    """The modules of each unit of a model, in the order of its tree, without what is left to the root.

    `rule` chooses modules, of which neighbours share a bucket if `most` is given. Without it modules are taken as large
    as they fit into a bucket. Sizes in bytes are those of gathered weights, in the dtype that `precision` gives them.

    Raises: ValueError for a rule that chooses nothing, or a module that is never called.
    """
    if rule is not None and most is None:
        return [[one] for one in chosen_units(root, rule)]
    size = most or DEFAULT

    def measure(module: nn.Module) -> int:
        if size.unit == "params":
            return sum(param.numel() for param in module.parameters())
        return sum(param.numel() * precision.of(param.dtype).compute.itemsize for param in module.parameters())

    chosen = _pieces("", root, size.value, measure) if rule is None else chosen_units(root, rule)
    if rule is None and [module for _, module in chosen] == [root]:
        return []
    return _join(chosen, size.value, measure)


def _pieces(name: str, module: nn.Module, most: int, measure: Measure) -> list[Named]:
    """The largest modules below one that fit into a bucket and are called; those without children as they are.

    Parameters of a module that is divided stay with the root.
    """
    children = dict.fromkeys(module.children())
    if is_called(module) and (measure(module) <= most or not children):
        return [(name, module)] if measure(module) else []
    found: list[Named] = []
    for key, child in module.named_children():  # a module that is there twice comes once
        found += _pieces(f"{name}.{key}" if name else key, child, most, measure)
    return found


def _join(chosen: Sequence[Named], most: int, measure: Measure) -> list[list[Named]]:
    """Neighbours together, as many as fit. A module that contains another one of them stays alone."""
    modules = {module for _, module in chosen}
    found: list[list[Named]] = []
    room = -1  # in the bucket that is being filled; none yet
    for name, module in reversed(chosen):
        inside = any(one in modules for one in module.modules() if one is not module)
        need = measure(module)
        if inside:
            found.append([(name, module)])
            room = -1
        elif need <= room:
            found[-1].insert(0, (name, module))
            room -= need
        else:
            found.append([(name, module)])
            room = most - need
    return found[::-1]
