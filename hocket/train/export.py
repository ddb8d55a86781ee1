"""A run's checkpoint as a folder that Hugging Face's libraries open."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from hocket.config import BYTES, Config, PrecisionConfig
from hocket.fsdp.saving.dcp import run_dcp
from hocket.fsdp.saving.flat_tensor import FlatTensor
from hocket.fsdp.saving.harmless import HarmlessPlanner, HarmlessReader
from hocket.fsdp.saving.whole import WholeFolder, sync
from hocket.model.source import whole_shapes
from hocket.model.tokenizer import tokenizer_file
from hocket.pretrained.configuration import TYPES, config_for
from hocket.pretrained.convert import rules_of, split, tensors_of
from hocket.pretrained.tables import FAMILIES
from hocket.pretrained.written import LARGEST, files_of, write_files
from hocket.settings.schema import changed, flat, types
from hocket.train.damage import META, damage_of

BESIDE = ("tokenizer*", "special_tokens_map.json", "generation_config.json", "chat_template*", "vocab.*", "merges.txt")
"""Files of an imported model that go on unchanged."""


class StoredModel:
    """The model of a checkpoint. Raises ValueError if it is damaged."""

    def __init__(self, checkpoint: Path) -> None:
        if damage := damage_of(checkpoint):
            raise ValueError(damage)
        self.settings: dict[str, Any] = json.loads((checkpoint / META).read_text())["config"]
        found = flat({"model": self.settings["model"], "data": self.settings["data"]})
        known = {name: tuple(v) if isinstance(v, list) else v for name, v in found.items() if name in types()}
        config = changed(Config(), known)
        self.model, self.data = config.model, config.data
        self._reader = HarmlessReader(checkpoint)

    def value(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A whole parameter, or a balance bias, fp32."""
        value = torch.empty(prod(shape))
        kind = "bias" if name.endswith("router.bias") else "weight"
        state = {f"{kind}.{name}": FlatTensor(value, shape, 0, value.numel())}
        said = f"{self._reader.path} cannot be read: "
        run_dcp(said, dcp.load, state, storage_reader=self._reader, planner=HarmlessPlanner())
        return value.view(shape)


def export(checkpoint: Path, target: Path, dtype: str = "", largest: int = LARGEST) -> tuple[str, str]:
    """Write a checkpoint's model to a new folder: config.json, safetensors, and the tokenizer.

    Returns its family, and a remark: why an imported model's own config.json could not be taken; empty if it was.

    `dtype` is fp32 or bf16, by default the one that the run computed in; balance biases stay fp32. Holds one parameter
    at a time. A folder appears whole or not at all. Raises ValueError for a damaged checkpoint, for a model that no
    family computes, and for a folder that is there already.
    """
    stored = StoredModel(checkpoint)
    settings, model = stored.settings, stored.model
    written = dtype or PrecisionConfig(compute=settings["precision"]["compute"]).dtype
    name, config, remark = config_for(model, settings["data"]["sequence_length"], written)
    shapes, kind = whole_shapes(model), TYPES[written][1]
    rules = {param: rules_of(FAMILIES[name], param)[0] for param in shapes}
    tensors = {
        tensor: (shape, "F32" if param.endswith("router.bias") else kind)
        for param, whole in shapes.items()
        for tensor, shape in tensors_of(*rules[param], whole, model)
    }

    def values() -> Iterator[tuple[str, Tensor]]:
        for param, shape in shapes.items():
            yield from split(*rules[param], stored.value(param, shape), model)

    folder = WholeFolder(target)
    folder.begin()
    try:
        write_files(folder.temporary, files_of(tensors, largest), values())
        (folder.temporary / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        _copy_tokenizer(settings, folder.temporary)
        for file in folder.temporary.iterdir():
            sync(file)
        folder.publish()
    except BaseException:
        folder.give_up()
        raise
    return name, remark


def _copy_tokenizer(settings: dict[str, Any], folder: Path) -> None:
    weights, tokenizer = settings["model"].get("weights", ""), settings["data"]["tokenizer"]
    for pattern in BESIDE if weights else ():
        for file in Path(weights).glob(pattern):
            shutil.copy(file, folder / file.name)
    if tokenizer != BYTES and (file := tokenizer_file(tokenizer)).exists():
        shutil.copy(file, folder / "tokenizer.model" if file.suffix == ".model" else "tokenizer.json")
