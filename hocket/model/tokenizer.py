"""Text to tokens: a token per byte, or a JSON file of the `tokenizers` package.

Note: [Where a text begins and ends]
A document ends with the token that `data.eos` names. By default it is the first of the tokenizer's tokens named in
`tokenizer_config.json`, `config.json` or `generation_config.json` beside the tokenizer, or in the list `END_OF_TEXT`.
A document begins with the tokens that transformers puts before a text by default: those of the post-processor in
`tokenizer.json`. Chats have exactly the tokens of their template.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

from hocket.config import BYTE_VOCAB, BYTES, DataConfig
from hocket.config.rule import problem
from hocket.files import json_in

END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "<eos>", "</s>", "<|im_end|>", "[EOS]")
"""Usual names of the token that ends a document, by preference, for tokenizers whose files name none."""

FILE = "tokenizer.json"
"""Name of a tokenizer's file in the folder of a published model."""
NAMING = ("special_tokens_map.json", "tokenizer_config.json")
"""Files beside a tokenizer that name its special tokens; the second takes precedence."""
NUMBERING = ("config.json", "generation_config.json")
"""Files of a model beside its tokenizer that give the numbers of special tokens. They are read beside a `FILE` only:
beside a tokenizer of another name they may belong to another program."""


@dataclass(frozen=True)
class Known:
    """Properties of a tokenizer that need no package. See Note: [Where a text begins and ends]."""

    vocab: int
    """Number of tokens."""
    separator: int
    """Token after every document; -1 if none is known."""
    bos: int
    """Token that its files call beginning of text; -1 if they name none."""
    begins: tuple[int, ...]
    """Tokens before every document except chats."""
    names: Mapping[int, str]
    """Tokens as the tokenizer writes them."""

    @property
    def begin(self) -> str:
        """Tokens before every document except chats, as text."""
        return "".join(self.names.get(token, str(token)) for token in self.begins)


class ByteTokenizer:
    """A token per byte. Byte 0 separates documents: text has none, and files with one are treated as binary."""

    vocab: int = BYTE_VOCAB
    """Number of tokens."""
    separator: int = 0
    """Token after every document; -1 if none is known."""
    begins: tuple[int, ...] = ()
    """Tokens before every document except chats. See Note: [Where a text begins and ends]."""

    def encode(self, texts: list[bytes]) -> list[np.ndarray]:
        """Tokens of each document, as unsigned integers."""
        return [np.frombuffer(text.replace(b"\0", b""), dtype=np.uint8) for text in texts]

    def places(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """(tokens of a document, start of each in characters), of equal length."""
        parts = ["" if character == "\0" else character for character in text]
        sizes = [len(part.encode(errors="replace")) for part in parts]
        (tokens,) = self.encode(["".join(parts).encode(errors="replace")])
        return tokens, np.repeat(np.arange(len(text)), sizes)

    def decode(self, tokens: list[int]) -> str:
        """The text of tokens; invalid bytes become the replacement character."""
        return bytes(token for token in tokens if token < BYTE_VOCAB).decode(errors="replace")

    def special(self, text: str) -> int:
        """The special token at the start of a text; -1 if there is none."""
        return -1


class JsonTokenizer:
    """Tokenizes by a file of the `tokenizers` package. Uses all cores.

    Documents are not truncated, whatever the file says. Bytes that are not UTF-8 become the replacement character.
    """

    def __init__(self, data: DataConfig, origins: Mapping[str, str]) -> None:
        try:
            backend = importlib.import_module("tokenizers")
        except ImportError:
            reason, fix = "the package `tokenizers` is not installed", "pip install 'hocket[text]'"
            raise ValueError(problem("data.tokenizer", data.tokenizer, origins, reason, fix)) from None
        known = _known(data, origins)
        self.vocab, self.separator, self.begins = known.vocab, known.separator, known.begins
        self._backend = backend.Tokenizer.from_file(str(tokenizer_file(data.tokenizer)))
        self._backend.no_truncation()  # the file may enable truncation and padding
        self._backend.no_padding()

    def encode(self, texts: list[bytes]) -> list[np.ndarray]:
        words = [text.decode("utf-8", errors="replace") for text in texts]
        encoded = self._backend.encode_batch_fast(words, add_special_tokens=False)
        return [np.asarray(one.ids, dtype=np.uint32) for one in encoded]

    def places(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        encoded = self._backend.encode(text, add_special_tokens=False)
        return np.asarray(encoded.ids, dtype=np.uint32), np.asarray([first for first, _ in encoded.offsets], dtype=int)

    def decode(self, tokens: list[int]) -> str:
        return self._backend.decode(tokens)

    def special(self, text: str) -> int:
        first = self._backend.encode(text, add_special_tokens=False).ids[:1]
        added = self._backend.get_added_tokens_decoder()
        return next((token for token in first if token in added and added[token].special), -1)


Tokenizer = ByteTokenizer | JsonTokenizer
"""The tokenizer's interface for the corpus."""


def tokenizer_file(name: str) -> Path:
    """The file of a setting: that in a published model's folder, or the file itself."""
    return Path(name, FILE) if Path(name).is_dir() else Path(name)


def tokenizer_files(name: str) -> list[Path]:
    """All files that determine tokens; those beside the tokenizer's own may be missing."""
    if name == BYTES:
        return []
    file = tokenizer_file(name)
    beside = (*NAMING, *(NUMBERING if file.name == FILE else ()))
    return [file, *(path for path in map(file.with_name, beside) if path.exists())]


def load_tokenizer(data: DataConfig, origins: Mapping[str, str]) -> Tokenizer:
    """The tokenizer of a configuration. Raises ValueError if its file or package is missing."""
    return ByteTokenizer() if data.tokenizer == BYTES else JsonTokenizer(data, origins)


def known_tokenizer(data: DataConfig, origins: Mapping[str, str]) -> Known:
    """Properties of the tokenizer of the training text.

    Raises ValueError like `load_tokenizer`, and if no token is known that ends a document.
    """
    if data.tokenizer == BYTES:
        return Known(BYTE_VOCAB, ByteTokenizer.separator, -1, (), {})
    known = _known(data, origins)
    if known.separator < 0:
        reason = f"it is not known which token ends a text: no file beside the tokenizer says it, and of {END_OF_TEXT} "
        fix = "data.eos = that token as the tokenizer writes it, such as --data.eos '</s>'"
        raise ValueError(problem("data.tokenizer", data.tokenizer, origins, f"{reason}it has none", fix))
    return known


def _known(data: DataConfig, origins: Mapping[str, str]) -> Known:
    """Properties of a tokenizer file of the `tokenizers` package."""
    fix = (
        "a JSON file of the `tokenizers` package, such as the tokenizer.json of a published model; of a "
        "tokenizer.model transformers makes one by AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
    )
    try:
        content = json_in(tokenizer_file(data.tokenizer))
        vocab = content["model"]["vocab"]
        # Unigram models list (token, score) pairs, all others map tokens to numbers.
        tokens = {token: i for i, (token, _) in enumerate(vocab)} if isinstance(vocab, list) else dict(vocab)
        tokens |= {added["content"]: added["id"] for added in content.get("added_tokens", ())}
        max(tokens.values()) + 1  # raises if there are no tokens, or values are not numbers
        begins = _begins(content.get("post_processor"))
    except OSError as error:
        reason = f"cannot be read ({error.strerror})"
        raise ValueError(problem("data.tokenizer", data.tokenizer, origins, reason, fix)) from None
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ValueError(problem("data.tokenizer", data.tokenizer, origins, "not a tokenizer file", fix)) from None
    file = tokenizer_file(data.tokenizer)
    beside = {path.name: _table(path, data, origins) for path in tokenizer_files(data.tokenizer)[1:]}
    named = {key: value for name in NAMING for key, value in beside.get(name, {}).items() if value}
    numbered, numbers = [beside.get(name, {}) for name in NUMBERING], set(tokens.values())

    def special(kind: str) -> int:
        name = named.get(f"{kind}_token")
        name = name.get("content") if isinstance(name, dict) else name
        if isinstance(name, str) and name in tokens:
            return tokens[name]
        return next((x for said in numbered for x in token_numbers(said.get(f"{kind}_token_id")) if x in numbers), -1)

    bos, eos = special("bos"), special("eos")
    eos = eos if eos >= 0 else next((tokens[name] for name in END_OF_TEXT if name in tokens), -1)
    if data.eos:
        eos = tokens.get(data.eos, -1)
        if eos < 0:
            reason, fix = "data.tokenizer has no such token", "one of its tokens, as the tokenizer writes it"
            raise ValueError(problem("data.eos", data.eos, origins, reason, fix))
    if data.bos == "off":
        begins = ()
    elif data.bos == "on" and not begins:
        if bos < 0:
            reason = "the files of data.tokenizer name no token that begins a text"
            fix = f"data.bos = auto, or a bos_token in {file.parent / NAMING[-1]}"
            raise ValueError(problem("data.bos", data.bos, origins, reason, fix))
        begins = (bos,)
    return Known(max(numbers) + 1, eos, bos, begins, {number: token for token, number in tokens.items()})


def _begins(processor: Any) -> tuple[int, ...]:
    """The tokens that a post-processor of the `tokenizers` package puts before a text."""
    match (processor or {}).get("type"):
        case "TemplateProcessing":
            before = takewhile(lambda piece: "SpecialToken" in piece, processor["single"])
            ids = (processor["special_tokens"][piece["SpecialToken"]["id"]]["ids"] for piece in before)
            return tuple(token for each in ids for token in each)
        case "BertProcessing" | "RobertaProcessing":
            return (processor["cls"][1],)
        case "Sequence":  # later ones add their tokens around those of earlier ones
            return tuple(token for each in reversed(processor["processors"]) for token in _begins(each))
    return ()


def _table(path: Path, data: DataConfig, origins: Mapping[str, str]) -> dict[str, Any]:
    """The content of a file beside a tokenizer."""
    with suppress(OSError, ValueError):
        if isinstance(found := json_in(path), dict):
            return found
    reason, fix = f"{path} is no table of JSON", "mend it, or put the published one there"
    raise ValueError(problem("data.tokenizer", data.tokenizer, origins, reason, fix))


def token_numbers(said: Any) -> list[int]:
    """The tokens of one number or a list of them in a file."""
    return [token for token in (said if isinstance(said, list) else [said]) if type(token) is int]


def ends_of(folder: Path) -> list[int]:
    """Tokens at which transformers ends generation: those of generation_config.json, else of config.json."""
    file = next((file for file in (folder / name for name in reversed(NUMBERING)) if file.exists()), None)
    found = json_in(file) if file else {}
    return token_numbers(found.get("eos_token_id")) if isinstance(found, dict) else []
