"""Section `data`: the text to train on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from hocket.config.rule import FILLED, LONG, Between, Rule

BYTES, BYTE_VOCAB = "bytes", 256
"""The tokenizer that needs no file, and its vocabulary size."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The text to train on."""

    paths: Annotated[tuple[str, ...], FILLED] = ()
    """Files, folders or patterns of text or tokens, or a TOML file of several weighted sources: docs/training.md.
    Empty: the source of Python's standard library."""
    text_key: Annotated[tuple[str, ...], FILLED] = ("text",)
    """Key of the text, or of a chat's messages, in a line of JSON or a row of a table. `a.b` is the key `b` inside `a`.
    With two keys the first is that of a prompt, which precedes the text and is not learnt."""
    skip_empty: bool = False
    """Skip rows whose text is null or missing, and report how many. Otherwise such a row ends the run."""
    chat_template: str = ""
    """A Jinja template file that makes text of messages. Empty: the one in the tokenizer's folder."""
    tokenizer: Annotated[str, FILLED] = "bytes"
    """`bytes` (a token per byte), or the path of a JSON file of the `tokenizers` package, or a folder that has one."""
    eos: str = ""
    """The token after each document, as the tokenizer writes it. Empty: the one in tokenizer_config.json, config.json
    or generation_config.json next to the tokenizer, or one of a list of common names."""
    bos: Literal["auto", "on", "off"] = "auto"
    """Whether documents, except chats, begin with the tokenizer's beginning-of-text token. auto follows the
    post-processor in tokenizer.json."""
    sequence_length: Annotated[int, Between(1, LONG)] = 128
    """Tokens of one sequence."""
    packing: Literal["off", "on", "best_fit"] = "off"
    """on separates documents that share a sequence: attention stays inside each document, positions restart in each,
    and no document predicts the first token of the next. best_fit also cuts no document, and pads sequences. off only
    puts a separator between documents."""
    validation: Annotated[tuple[float | str, ...], Between(0, 0.9), FILLED] = (0.05,)
    """Share of the tokens that is kept for validation; or files, folders or patterns of validation text, and then all
    of data.paths is for training."""
    cache: Annotated[str, FILLED] = ".cache/hocket"
    """Folder for tokenised text."""

    @property
    def sources(self) -> str:
        """The file of several sources; empty if there is one source."""
        return next((path for path in self.paths if path.endswith(".toml") and not {*"*?["} & {*path}), "")

    @property
    def names(self) -> tuple[str, str]:
        """Keys of the text and of the prompt; the latter is empty if there is none."""
        *prompt, text = self.text_key or ("",)
        return text, next(iter(prompt), "")

    @property
    def kept_back(self) -> float:
        """Share of the tokens that is kept for validation."""
        return next((item for item in self.validation if not isinstance(item, str)), 0.0)

    @property
    def held_out(self) -> tuple[str, ...]:
        """Files that are only for validation."""
        return tuple(item for item in self.validation if isinstance(item, str))


DATA_RULES: tuple[Rule, ...] = (
    Rule(
        ("data.validation",),
        lambda c, h: len(c.data.validation) > 1 and len(c.data.held_out) < len(c.data.validation),
        "one share of the tokens is kept for validation, or files and folders are read",
        "leave data.validation out",
    ),
    Rule(
        ("data.paths", "data.validation"),
        lambda c, h: bool(c.data.sources) and (len(c.data.paths) > 1 or bool(c.data.held_out)),
        "a TOML file is one of sources, and each source names its own text",
        "data.paths with files or folders, or leave data.paths and data.validation out",
    ),
    Rule(
        ("data.text_key",),
        lambda c, h: len(c.data.text_key) not in (1, 2),
        "it is the name of the text, or the names of a prompt and of the text",
        "leave data.text_key out",
    ),
    Rule(
        ("data.tokenizer", "model.weights"),
        lambda c, h: bool(c.model.weights) and c.data.tokenizer == BYTES and h.tokenizer_vocab > 0,
        "a token would be a byte, and {model.weights} has weights for tokens of a tokenizer of its own",
        "the folder or file of that tokenizer, or data.tokenizer = bytes (by name, if they are meant)",
        unless_set=True,
    ),
    Rule(
        ("data.eos", "data.bos", "data.tokenizer"),
        lambda c, h: c.data.tokenizer == BYTES and (bool(c.data.eos) or c.data.bos != "auto"),
        "byte 0 ends a document of bytes, and no token begins it",
        "leave data.eos and data.bos out, or another data.tokenizer",
    ),
    Rule(
        ("model.vocab", "data.tokenizer"),
        lambda c, h: c.model.vocab < h.tokenizer_vocab,
        "the tokenizer has {host.tokenizer_vocab} tokens, more than the model",
        "model.vocab = {host.tokenizer_vocab} or more",
    ),
    Rule(
        ("data.validation", "train.eval_batches"),
        lambda c, h: c.data.kept_back == 0 and c.train.eval_batches > 0 and not (c.data.held_out or c.data.sources),
        "nothing is kept for validation, but train.eval_batches = {train.eval_batches}",
        "data.validation above 0, or train.eval_batches = 0",
    ),
)
