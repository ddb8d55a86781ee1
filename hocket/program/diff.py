"""What differs between two Programs, op by op, by name: an inserted op shows as one line, not as a shift of all."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence

from hocket.program.ops import Op, Program


def diff(a: Program, b: Program) -> str:
    """The differences from `a` to `b`, empty if there are none.

    Per rank: `-` an op only in a, `+` an op only in b, `>` an op that has moved among those in both, `~` an op
    whose lane, slot, dependencies or frees have changed.
    """
    lines = [
        f"{name}: {old} -> {new}"
        for name in ("layout", "microbatches", "weight_slots", "grad_slots", "in_flight", "notes")
        if (old := getattr(a, name)) != (new := getattr(b, name))
    ]
    for rank in range(max(len(a.ranks), len(b.ranks))):
        old_ops, new_ops = (program.ranks[rank] if rank < len(program.ranks) else () for program in (a, b))
        if old_ops != new_ops:
            lines += [f"rank {rank}", *(f"  {line}" for line in _diff_rank(old_ops, new_ops))]
    return "".join(f"{line}\n" for line in lines)


def _diff_rank(old_ops: tuple[Op, ...], new_ops: tuple[Op, ...]) -> Iterator[str]:
    old_names, new_names = _names(old_ops), _names(new_ops)
    old, new = ({name: position for position, name in enumerate(names)} for names in (old_names, new_names))
    for name in old_names:
        if name not in new:
            yield f"- {name}  @{old_ops[old[name]].lane}"
    moved = set(_moved([name for name in old_names if name in new], new))
    for position, name in enumerate(new_names):
        after = new_names[position - 1] if position else "the start"
        if name not in old:
            yield f"+ {name}  @{new_ops[position].lane}, after {after}"
            continue
        if name in moved:
            was = old_names[old[name] - 1] if old[name] else "the start"
            yield f"> {name}: after {was} -> after {after}"
        changes = list(_changes(old_ops[old[name]], new_ops[position], old_names, new_names))
        if changes:
            yield f"~ {name}: {'; '.join(changes)}"


def _names(ops: Sequence[Op]) -> list[str]:
    """Short names without the slot. The second op of a name, which only a broken program has, is `name #2`."""
    seen: dict[str, int] = defaultdict(int)
    names = []
    for op in ops:
        name = str(op._replace(slot=-1))
        seen[name] += 1
        names.append(name if seen[name] == 1 else f"{name} #{seen[name]}")
    return names


def _moved(names: list[str], new: dict[str, int]) -> Iterator[str]:
    """The fewest names that have to move to bring `names` into their new order: all off a longest rising run."""
    tails: list[int] = []  # tails[k]: the smallest new position that ends a rising run of length k + 1
    lengths = []
    for name in names:
        k = bisect_left(tails, new[name])
        tails[k : k + 1] = [new[name]]
        lengths.append(k)
    wanted, limit = len(tails) - 1, len(new)
    kept = set()
    for name, length in zip(reversed(names), reversed(lengths), strict=True):
        if length == wanted and new[name] < limit:
            kept.add(name)
            wanted, limit = wanted - 1, new[name]
    return (name for name in names if name not in kept)


def _changes(old: Op, new: Op, old_names: list[str], new_names: list[str]) -> Iterator[str]:
    if old.lane != new.lane:
        yield f"lane {old.lane} -> {new.lane}"
    if old.slot != new.slot:
        yield f"slot {old.slot} -> {new.slot}"
    for word, before, after in (
        ("waits for", old.deps, new.deps),
        ("frees", old.frees, new.frees),
        ("trims", old.trims, new.trims),
    ):
        was, now = {_name(old_names, p): 0 for p in before}, {_name(new_names, p): 0 for p in after}
        less, more = [name for name in was if name not in now], [name for name in now if name not in was]
        if less:
            yield f"no longer {word} {', '.join(less)}"
        if more:
            yield f"now {word} {', '.join(more)}"


def _name(names: list[str], position: int) -> str:
    return names[position] if 0 <= position < len(names) else f"op {position}"
