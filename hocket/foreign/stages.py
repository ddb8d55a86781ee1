"""Rules of `megatron.toml` about layers: those of each pipeline stage, and those that have experts."""

from __future__ import annotations

import ast
import math
import re
from typing import Any

from hocket.foreign.entry import Answer, Given

LAYERS, PIPELINE = "--num-layers", "--pipeline-model-parallel-size"
VIRTUAL_LAYERS, VIRTUAL_STAGES = "--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank"
FIRST, LAST = "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"
EMBEDDING, LOSS = "--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"
_MOST = 10**6
"""Largest product of the multiples in a text of stages, and longest list of layers."""

LAYOUT_BY_HAND = "plan.layers_per_stage takes the layers of every stage; hocket plan --search finds them"


def chunks_of(value: Any, given: Given) -> Answer:
    """Virtual stages per rank from the layers of one of them."""
    layers, pp = _counted_layers(given), given.number(PIPELINE)
    if not layers or pp * value < 1 or layers % (pp * value):
        why = f"it needs {LAYERS}, a multiple of {PIPELINE} x {value}, to become plan.chunks"
        return Answer("not there", words=why)
    return Answer("becomes", {"plan.chunks": layers // (pp * value)}, f"{layers} layers over {pp} ranks")


def uneven(value: Any, given: Given) -> Answer:
    """Layers of every stage, where the first or the last has another number."""
    layers, pp = given.number(LAYERS, default=0), given.number(PIPELINE)
    ends = {at: given.number(name, default=0) for at, name in ((0, FIRST), (pp - 1, LAST))}
    fixed = {at: count for at, count in ends.items() if count}
    rest, others = layers - sum(fixed.values()), pp - len(fixed)
    virtual = given.number(VIRTUAL_STAGES) > 1 or VIRTUAL_LAYERS in given.values
    if not layers or pp < 2 or virtual or rest < 0 or (rest % others if others else rest):
        return Answer("not there", words=f"only with {LAYERS} and one stage per rank: {LAYOUT_BY_HAND}")
    stages = tuple(fixed.get(rank, rest // others if others else 0) for rank in range(pp))
    return Answer("becomes", {"plan.layers_per_stage": stages})


def _counted_layers(given: Given) -> int:
    """The model's layers, and its embedding and head where they count as one each; 0 if the layers are not known."""
    layers = given.number(LAYERS, default=0)
    return layers and layers + sum(bool(given.values.get(name)) for name in (EMBEDDING, LOSS))


def counted(value: Any, given: Given) -> Answer:
    """Layers of every stage, where the embedding or the head counts as one."""
    if not value:
        return Answer("not needed", words="that is how it is without it")
    layers, size = _counted_layers(given), given.number(VIRTUAL_LAYERS, default=0)
    stages = layers // size if size > 0 else given.number(PIPELINE) * given.number(VIRTUAL_STAGES)
    if stages < 2 or layers < stages or layers % stages:
        return Answer("not there", words=f"only where what counts can be split evenly: {LAYOUT_BY_HAND}")
    sizes = [layers // stages] * stages
    sizes[0] -= bool(given.values.get(EMBEDDING))
    sizes[-1] -= bool(given.values.get(LOSS))
    return Answer("becomes", {"plan.layers_per_stage": tuple(sizes)})


def stages_of(value: Any, given: Given) -> Answer:
    """Layers of every stage from a text such as `Et*3|(tt|)*29|L`: embedding, layers and the head, a stage a piece."""
    text, pp = str(value).replace(",", "").replace(" ", ""), given.number(PIPELINE)
    if math.prod(int(times) for times in re.findall(r"\*(\d{1,9})", text)) > _MOST:
        return Answer("not there", words=LAYOUT_BY_HAND)
    for product in (r"\(([^()]+)\)\*(\d+)", r"(.)\*(\d+)"):
        text = re.sub(product, lambda found: found[1] * int(found[2]), text)
    stages = text.split("|")
    if not re.fullmatch(r"Et*(\|t+)*(\|t*L)", text) or pp < 1 or len(stages) % pp:
        words = f"only embedding, layers and head, on a multiple of {PIPELINE} stages: {LAYOUT_BY_HAND}"
        return Answer("not there", words=words)
    sizes = tuple(stage.count("t") for stage in stages)
    return Answer("becomes", {"plan.layers_per_stage": sizes, "plan.chunks": len(stages) // pp})


def dense_layers(value: Any, given: Given) -> Answer:
    """Every n-th layer, or a list of 0 and 1, or such a list as Python writes it, is a MoE layer."""
    layers = given.number(LAYERS, default=0)
    if isinstance(value, str):
        value = _pattern(value)
    if isinstance(value, int):
        value = [int(layer % value == 0) for layer in range(layers)] if value else []
    if not layers or not isinstance(value, list) or len(value) != layers:
        return Answer("not there", words="it needs --num-layers, and a number for each of them")
    return Answer("becomes", {"model.dense_layers": tuple(layer for layer in range(layers) if not value[layer])})


def _pattern(text: str) -> list[int]:
    """Lists as they are written in scripts: `([0]*3+[1]*58)`. Empty for any other text, and for a list too long."""
    try:
        found = _list(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    return found if isinstance(found, list) else []


def _list(node: ast.expr) -> list[int] | int:
    """A list of 0 and 1, sums and multiples of lists, and how often. Raises ValueError for all else."""
    match node:
        case ast.Constant(value=int(value)):
            return int(value)
        case ast.List(elts=parts) if all(_list(part) in (0, 1) for part in parts):
            return [int(_list(part) == 1) for part in parts]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            match _list(left), _list(right):
                case list(first), list(second) if len(first) + len(second) <= _MOST:
                    return first + second
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            match _list(left), _list(right):
                case (list(each), int(times)) | (int(times), list(each)) if len(each) * times <= _MOST:
                    return each * times
    raise ValueError(ast.unparse(node))
