"""Safetensors files that are written tensor by tensor, so that none but the current one is in memory."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from hocket.pretrained.folder import INDEX, Entry

LARGEST = 5 * 10**9
"""Bytes of a file."""
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "I64": torch.int64}


def files_of(tensors: Mapping[str, tuple[tuple[int, ...], str]], largest: int = LARGEST) -> dict[str, Entry]:
    """In which file each tensor goes, by name; tensors have a shape and a type of elements, and keep their order."""
    numbers, size, number = dict[str, int](), 0, 1
    for name, (shape, dtype) in tensors.items():
        nbytes = prod(shape) * DTYPES[dtype].itemsize
        if size and size + nbytes > largest:
            size, number = 0, number + 1
        size, numbers[name] = size + nbytes, number
    whole = {
        n: "model.safetensors" if number == 1 else f"model-{n:05}-of-{number:05}.safetensors" for n in numbers.values()
    }
    return {name: Entry(whole[numbers[name]], *tensors[name]) for name in tensors}


def write_files(folder: Path, entries: Mapping[str, Entry], tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Write tensors, which come in the order of `entries`, and an index if there is more than one file.

    Format: eight bytes of length, a header of JSON with the range of each tensor, and their bytes.
    """
    current = ""
    output = None
    expected = iter(entries.items())
    try:
        for name, tensor in tensors:
            wanted, entry = next(expected)
            assert (name, tuple(tensor.shape)) == (wanted, entry.shape), f"{name} where {wanted} belongs"
            if entry.file != current:
                if output is not None:
                    output.close()
                current = entry.file
                output = (folder / current).open("wb")
                output.write(_header({n: e for n, e in entries.items() if e.file == current}))
            assert output is not None
            flat = tensor.to(DTYPES[entry.dtype]).contiguous().view(-1)
            output.write(flat.view(torch.uint8).numpy().data)
            del tensor, flat  # before the next one is made
    finally:
        if output is not None:
            output.close()
    assert next(expected, None) is None, "not all tensors came"
    if len({entry.file for entry in entries.values()}) > 1:
        total = sum(prod(entry.shape) * DTYPES[entry.dtype].itemsize for entry in entries.values())
        index = {"metadata": {"total_size": total}, "weight_map": {name: e.file for name, e in entries.items()}}
        (folder / INDEX).write_text(json.dumps(index, indent=2))


def _header(entries: Mapping[str, Entry]) -> bytes:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, entry in entries.items():
        end = start + prod(entry.shape) * DTYPES[entry.dtype].itemsize
        header[name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of eight bytes
    return len(text).to_bytes(8, "little") + text
