"""Text to tokens: a token per byte, or a JSON file of the `tokenizers` package."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import numpy as np

from hocket.config import BYTE_VOCAB, BYTES
from hocket.settings.schema import problem

END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "<eos>", "</s>", "<|im_end|>", "[EOS]")
"""Names under which tokenizers know the token that ends a document, by preference."""


class Tokenizer(Protocol):
    """What the corpus needs of a tokenizer."""

    vocab: int
    """Number of tokens."""
    separator: int
    """Token that stands behind every document."""

    def encode(self, texts: list[bytes]) -> list[np.ndarray]:
        """Tokens of each document, as unsigned integers."""
        ...


class ByteTokenizer:
    """A token per byte. Byte 0 separates documents: text has none, and files that do are taken for binary ones."""

    vocab = BYTE_VOCAB
    separator = 0

    def encode(self, texts: list[bytes]) -> list[np.ndarray]:
        """The bytes themselves, uint8, without any byte 0."""
        return [np.frombuffer(text.replace(b"\0", b""), dtype=np.uint8) for text in texts]


class JsonTokenizer:
    """A tokenizer file of the `tokenizers` package.

    The separator is the end-of-text token that the file names, or one more token behind the last if it names none.
    """

    def __init__(self, path: str, origins: Mapping[str, str]) -> None:
        try:
            backend = importlib.import_module("tokenizers")
        except ImportError:
            reason, fix = (
                "the package `tokenizers` is not installed",
                "pip install 'hocket[text]', or data.tokenizer = bytes",
            )
            raise ValueError(problem("data.tokenizer", path, origins, reason, fix)) from None
        self.vocab, self.separator = _sizes(path, origins)
        self._backend = backend.Tokenizer.from_file(str(tokenizer_file(path)))

    def encode(self, texts: list[bytes]) -> list[np.ndarray]:
        """Token numbers, uint32. Bytes that are not UTF-8 become the replacement character. Uses all cores."""
        words = [text.decode("utf-8", errors="replace") for text in texts]
        encoded = self._backend.encode_batch_fast(words, add_special_tokens=False)
        return [np.asarray(one.ids, dtype=np.uint32) for one in encoded]


def tokenizer_file(name: str) -> Path:
    """The file that a setting means: `tokenizer.json` in a folder of a published model, or the file itself."""
    return Path(name, "tokenizer.json") if Path(name).is_dir() else Path(name)


def load_tokenizer(name: str, origins: Mapping[str, str]) -> Tokenizer:
    """The tokenizer a configuration names. Raises ValueError if its file or package is missing."""
    return ByteTokenizer() if name == BYTES else JsonTokenizer(name, origins)


def tokenizer_vocab(name: str, origins: Mapping[str, str]) -> int:
    """Number of tokens of a tokenizer, found without loading it. Raises ValueError if its file cannot be read."""
    return ByteTokenizer.vocab if name == BYTES else _sizes(name, origins)[0]


def _sizes(path: str, origins: Mapping[str, str]) -> tuple[int, int]:
    """(number of tokens including the separator, separator) of a tokenizer file."""
    fix = "data.tokenizer = bytes, or the path of a JSON file of the `tokenizers` package"
    try:
        content = json.loads(tokenizer_file(path).read_text(encoding="utf-8"))
        vocab = content["model"]["vocab"]
        # Unigram models list (token, score) pairs, all others map tokens to numbers.
        tokens = {token: i for i, (token, _) in enumerate(vocab)} if isinstance(vocab, list) else dict(vocab)
        tokens |= {added["content"]: added["id"] for added in content.get("added_tokens", ())}
        last = max(tokens.values())
    except OSError as error:
        raise ValueError(problem("data.tokenizer", path, origins, f"cannot be read ({error.strerror})", fix)) from None
    except (KeyError, TypeError, ValueError):
        raise ValueError(problem("data.tokenizer", path, origins, "not a tokenizer file", fix)) from None
    separator = next((tokens[name] for name in END_OF_TEXT if name in tokens), last + 1)
    return max(last, separator) + 1, separator
