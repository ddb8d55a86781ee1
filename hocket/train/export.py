"""Exports a run's checkpoint as a folder that Hugging Face's libraries open."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hocket.config import BYTES, Config, DataConfig, PrecisionConfig
from hocket.config.load import as_setting
from hocket.config.schema import changed, flat, types
from hocket.files import json_in
from hocket.fsdp.saving.atomic_folder import AtomicFolder, sync
from hocket.fsdp.saving.storage import MODEL, CheckpointReader
from hocket.model.source import whole_shapes
from hocket.model.tokenizer import (
    FILE,
    NAMING,
    Known,
    ends_of,
    known_tokenizer,
    load_tokenizer,
    token_numbers,
    tokenizer_file,
)
from hocket.pretrained.families import FAMILIES, TYPES, config_for
from hocket.pretrained.folder import LARGEST, write_files
from hocket.pretrained.weights import rules_of, split
from hocket.train.chat import TEMPLATE, Chats
from hocket.train.checkpoint import META, damage_of
from hocket.train.documents import BadFileError

TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "chat_template*", "vocab.*", "merges.txt")
"""Files of a published model's tokenizer."""


class StoredModel:
    """The model of a checkpoint. Raises ValueError if it is damaged."""

    def __init__(self, checkpoint: Path) -> None:
        if damage := damage_of(checkpoint):
            raise ValueError(damage)
        self.settings: dict[str, Any] = json.loads((checkpoint / META).read_text())["config"]
        data = {"bos": "off"} | self.settings["data"]  # older runs lack the setting, and added no bos
        found = flat({"model": self.settings["model"], "data": data})
        known = {name: as_setting(value, types()[name]) for name, value in found.items() if name in types()}
        config = changed(Config(), known)
        self.model, self.data = config.model, config.data
        self._reader = CheckpointReader(checkpoint)

    @property
    def ends(self) -> list[int]:
        """Tokens that end a text: the separator of documents first, then others that an imported model had.

        Raises ValueError if the tokenizer is missing.
        """
        weights, file = Path(self.model.weights).resolve(), tokenizer_file(self.data.tokenizer).resolve()
        known = self.model.weights and (self.data.tokenizer == BYTES or file.parent == weights)
        return list(dict.fromkeys([known_tokenizer(self.data, {}).separator, *(ends_of(weights) if known else ())]))

    def value(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A whole parameter, or a router's bias, in fp32."""
        value = torch.empty(shape)
        self._reader.load({f"{MODEL}.{name}": value})
        return value


def export(checkpoint: Path, target: Path, dtype: str = "", largest: int = LARGEST) -> tuple[str, list[str]]:
    """Write a checkpoint's model to a new folder: config.json, safetensors, and the tokenizer's files.

    Returns its family, and remarks: why an imported model's own config.json could not be used, and what is missing.

    `dtype` is fp32 or bf16, by default the run's compute dtype; router biases stay fp32. Files have at most `largest`
    bytes. The folder appears whole or not at all. Raises ValueError for a damaged checkpoint, a model that no family
    computes, and a folder that already exists.
    """
    stored = StoredModel(checkpoint)
    settings, model = stored.settings, stored.model
    written = dtype or PrecisionConfig(compute=settings["precision"]["compute"]).dtype
    name, config, remark = config_for(model, settings["data"]["sequence_length"], written)

    def values() -> Iterator[tuple[str, Tensor]]:
        for param, shape in whole_shapes(model).items():
            kind = torch.float32 if param.endswith("router.bias") else getattr(torch, TYPES[written])
            value = stored.value(param, shape).to(kind)
            yield from split(*rules_of(FAMILIES[name], param)[0], value, model)

    folder = AtomicFolder(target)
    folder.begin()
    try:
        write_files(folder.temporary, values(), largest)
        missing = _write_text_files(stored, config, folder.temporary)
        (folder.temporary / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        for file in folder.temporary.iterdir():
            sync(file)
        folder.publish()
    except BaseException:
        folder.give_up()
        raise
    own = f"{remark}; so hocket wrote a config.json of its own" if remark else ""
    return name, [note for note in (own, missing) if note]


def _write_text_files(stored: StoredModel, config: dict[str, Any], folder: Path) -> str:
    """Write tokenizer, chat template, and the tokens that begin and end a text, the latter also into `config`.

    Files of an imported model are copied, except for what the run changed. Returns a remark on what is missing.
    """
    data, weights = stored.data, Path(stored.model.weights)
    file = tokenizer_file(data.tokenizer)
    source, patterns = (file.parent, TOKENIZER_FILES) if file.name == FILE else (file.parent, (*NAMING, TEMPLATE))
    if data.tokenizer == BYTES:
        source, patterns = weights, TOKENIZER_FILES if stored.model.weights else ()
    for path in (path for pattern in patterns for path in source.glob(pattern) if path.is_file()):
        shutil.copy(path, folder / path.name)
    if data.tokenizer != BYTES and not file.exists():
        config |= {key: config.get(key) for key in ("bos_token_id", "eos_token_id")}  # the family's defaults may differ
        return f"there is no {file} any more, so hocket wrote no tokenizer"
    remark = ""
    if data.chat_template and Path(data.chat_template).is_file():
        shutil.copy(data.chat_template, folder / TEMPLATE)
    elif data.chat_template:
        remark = f"there is no {data.chat_template} any more, so hocket wrote no chat template"
    known, ends = known_tokenizer(data, {}), stored.ends
    if data.tokenizer != BYTES:
        _write_tokenizer(data, known, file, folder)
    with suppress(ValueError, BadFileError):  # no template, or its packages are missing
        special = load_tokenizer(data, {}).special(Chats(data).end)
        ends += [special] if special >= 0 and special not in ends else []
    bos = next((token for token in (known.bos, *known.begins) if token >= 0), None)
    before = weights / "generation_config.json"
    generation = json_in(before) if stored.model.weights and before.exists() else {}
    if "eos_token_id" not in config or ends[0] not in ends_of(weights):
        config |= {"bos_token_id": bos, "eos_token_id": ends[0]}
        generation |= {"bos_token_id": bos}
    if set(token_numbers(generation.get("eos_token_id"))) != set(ends):
        generation |= {"eos_token_id": ends if len(ends) > 1 else ends[0]}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    return remark


def _write_tokenizer(data: DataConfig, known: Known, file: Path, folder: Path) -> None:
    """Write tokenizer.json, so that text begins as in the run, and tokenizer_config.json if there is none."""
    default, about = known_tokenizer(replace(data, bos="auto"), {}), folder / NAMING[-1]
    shutil.copy(file, folder / FILE)
    names = known.names
    if not about.exists():
        said: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        said |= {"eos_token": names[known.separator]} | ({"bos_token": names[known.bos]} if known.bos >= 0 else {})
        about.write_text(json.dumps(said, indent=2, ensure_ascii=False) + "\n")
    if known.begins != default.begins:
        text, other = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
        begin = [{"SpecialToken": {"id": names[token], "type_id": 0}} for token in known.begins]
        specials = {names[x]: {"id": names[x], "ids": [x], "tokens": [names[x]]} for x in known.begins}
        template = {"single": [*begin, text], "pair": [*begin, text, other], "special_tokens": specials}
        content = json_in(file) | {"post_processor": {"type": "TemplateProcessing", **template}}
        (folder / FILE).write_text(json.dumps(content, ensure_ascii=False))
