"""`hocket import`: the settings of a model that Hugging Face has."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

from hocket.commands.options import write
from hocket.config import BYTE_VOCAB, BYTES, DataConfig, ModelConfig
from hocket.model.tokenizer import FILES, known_tokenizer, tokenizer_file
from hocket.settings.schema import flat, show, unseen
from hocket.settings.tomlfile import written

USAGE = """usage: hocket import DIR FILE.toml [--data.eos TOKEN]

Reads config.json and all tensors of DIR, and writes the settings of its model to FILE.toml. A run of that file begins
with the weights of DIR, on any mesh: hocket train FILE.toml --mesh.dp 8 --data.paths my/texts
--data.eos names the token that ends a text, as the tokenizer writes it, where no file of DIR does."""


def run(words: list[str]) -> int:
    """Check a folder, and write a file of settings. Returns the exit code."""
    if {"-h", "--help"} & set(words):
        print(USAGE)
        return 0
    words, eos = (words[:2], words[3]) if len(words) == 4 and words[2] == "--data.eos" else (words, "")
    if len(words) != 2 or not words[1].endswith(".toml"):
        text = " ".join(words)
        raise ValueError(f"import {text} (command line): not a folder and a file; fix: hocket import DIR FILE.toml")
    folder, target = str(Path(words[0]).absolute()), words[1]
    if Path(target).exists():
        raise ValueError(f"{target} (command line): is there already; fix: another name, or remove it")
    if unseen(folder):
        raise ValueError(f"{show(folder)} (command line): has a character that cannot be shown; fix: rename the folder")
    from hocket.model.source import open_weights  # imports torch
    from hocket.pretrained.configuration import model_of, read_config

    try:
        config = read_config(Path(folder))
        model = model_of(config)
        opened = open_weights(replace(model, weights=folder))
    except ValueError as error:
        raise ValueError(f"{folder} (command line): {error}; fix: a whole folder of a family that is there") from None
    try:
        data, remark = _data(folder, model, eos)
    except ValueError as error:
        raise ValueError(f"{folder} (command line): {error}") from None
    write(target, _toml(folder, config["model_type"], model, data))
    if remark:
        print(f"note: {remark}")
    if broken := opened.not_finite():
        more = f", and {len(broken) - 1} more tensors have such" if len(broken) > 1 else ""
        print(f"WARNING  {broken[0]}{more}: a run refuses to begin with them")
    if opened.further:
        some = f"{len(opened.further)} tensors, such as {min(opened.further)},"
        print(f"note: {some} belong to layers that predict further tokens; hocket leaves them out, and exports none")
    return 0


def _data(folder: str, model: ModelConfig, eos: str) -> tuple[dict[str, str], str]:
    """Settings of the folder's tokenizer, and a remark if it has none. Raises ValueError if no token ends a text."""
    tokenizer = tokenizer_file(folder)
    if tokenizer.exists():
        data = DataConfig(tokenizer=str(tokenizer), eos=eos)
        known_tokenizer(data, {"data.tokenizer": "import", "data.eos": "command line, --data.eos"})
        return {"tokenizer": data.tokenizer} | ({"eos": eos} if eos else {}), ""
    if model.vocab == BYTE_VOCAB:  # hocket export writes such folders
        return {"tokenizer": BYTES}, f"{folder} has {BYTE_VOCAB} tokens and no tokenizer: a token is a byte"
    needs = "a run of this file needs data.tokenizer, or it is refused"
    return {}, f"{folder} has no tokenizer that hocket reads ({' or '.join(FILES)}): {needs}"


def _toml(folder: str, family: str, model: ModelConfig, data: dict[str, str]) -> str:
    """A file of settings."""
    default = flat(asdict(ModelConfig()))
    said = {name: value for name, value in flat(asdict(model)).items() if value != default[name]}
    settings = {f"model.{name}": value for name, value in {**said, "weights": folder}.items()}
    return written(f"{folder}, {family}", settings | {f"data.{name}": value for name, value in data.items()})
