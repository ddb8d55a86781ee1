"""Text to tokens: a token per byte, a JSON file of the `tokenizers` package, or a model of sentencepiece."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from hocket.config import BYTE_VOCAB, BYTES
from hocket.files import finite, json_in
from hocket.settings.schema import problem

END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "<eos>", "</s>", "<|im_end|>", "[EOS]")
"""Names under which tokenizers know the token that ends a document, by preference."""


FILES = ("tokenizer.json", "tokenizer.model")
"""Names of a tokenizer's file in a folder of a published model, by preference."""


class Tokenizer(Protocol):
    """What the corpus needs of a tokenizer."""

    vocab: int
    """Number of tokens."""
    separator: int
    """Token that stands behind every document."""

    def encode(self, texts: list[bytes]) -> list[np.ndarray]:
        """Tokens of each document, as unsigned integers."""
        ...

    def places(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """(tokens of a document, the character at which each begins), of the same length."""
        ...

    def decode(self, tokens: list[int]) -> str:
        """The text of tokens; bytes that are no character become the replacement character."""
        ...


class ByteTokenizer:
    """A token per byte. Byte 0 separates documents: text has none, and files that do are taken for binary ones."""

    vocab = BYTE_VOCAB
    separator = 0

    def encode(self, texts: list[bytes]) -> list[np.ndarray]:
        """The bytes themselves, uint8, without any byte 0."""
        return [np.frombuffer(text.replace(b"\0", b""), dtype=np.uint8) for text in texts]

    def places(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """The bytes, and the character of each."""
        parts = ["" if character == "\0" else character for character in text]
        sizes = [len(part.encode(errors="replace")) for part in parts]
        (tokens,) = self.encode(["".join(parts).encode(errors="replace")])
        return tokens, np.repeat(np.arange(len(text)), sizes)

    def decode(self, tokens: list[int]) -> str:
        """The bytes as UTF-8, without those that are no byte."""
        return bytes(token for token in tokens if token < BYTE_VOCAB).decode(errors="replace")


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

    def places(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Token numbers, uint32, and where each begins."""
        encoded = self._backend.encode(text, add_special_tokens=False)
        return np.asarray(encoded.ids, dtype=np.uint32), np.asarray([first for first, _ in encoded.offsets], dtype=int)

    def decode(self, tokens: list[int]) -> str:
        """The text, without special tokens."""
        return self._backend.decode(tokens)


class SentencePieceTokenizer:
    """A `.model` file of sentencepiece.

    The separator is the model's end of a sentence, or one more token behind the last if it has none.
    """

    def __init__(self, path: str, origins: Mapping[str, str]) -> None:
        fix = "data.tokenizer = bytes, or the path of a model of sentencepiece"
        try:
            backend = importlib.import_module("sentencepiece")
        except ImportError:
            reason = "the package `sentencepiece` is not installed"
            fix = "pip install 'hocket[text]', or a JSON file of the `tokenizers` package"
            raise ValueError(problem("data.tokenizer", path, origins, reason, fix)) from None
        try:
            proto = finite(tokenizer_file(path)).read_bytes()
            model: Any = backend.SentencePieceProcessor(model_proto=proto) if proto else None
        except OSError as error:
            reason = f"cannot be read ({error.strerror})"
            raise ValueError(problem("data.tokenizer", path, origins, reason, fix)) from None
        except RuntimeError:
            model = None
        if model is None or not model.vocab_size():
            raise ValueError(problem("data.tokenizer", path, origins, "not a model of sentencepiece", fix))
        self._model, pieces, end = model, model.vocab_size(), model.eos_id()
        self.separator = end if end >= 0 else pieces
        self.vocab = max(pieces, self.separator + 1)

    def encode(self, texts: list[bytes]) -> list[np.ndarray]:
        """Token numbers, uint32. Bytes that are not UTF-8 become the replacement character. Uses all cores."""
        words = [text.decode("utf-8", errors="replace") for text in texts]
        return [np.asarray(ids, dtype=np.uint32) for ids in self._model.encode(words, out_type=int, num_threads=-1)]

    def places(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Token numbers, uint32, and where each begins."""
        try:
            pieces = self._model.encode(text, out_type="immutable_proto").pieces
            ids, firsts = [piece.id for piece in pieces], [piece.begin for piece in pieces]
        except ValueError:  # sentencepiece 0.2.3 has none
            found = self._model.encode(text, out_type="offset_mapping")
            ids, firsts = found["ids"], [first for first, _ in found["offsets"]]
        return np.asarray(ids, dtype=np.uint32), np.asarray(firsts, dtype=int)

    def decode(self, tokens: list[int]) -> str:
        """The text."""
        return self._model.decode([token for token in tokens if token < self._model.vocab_size()])


def tokenizer_file(name: str) -> Path:
    """The file that a setting means: that of a published model's folder, or the file itself."""
    if not Path(name).is_dir():
        return Path(name)
    return next((file for file in map(Path(name).joinpath, FILES) if file.exists()), Path(name, FILES[0]))


def load_tokenizer(name: str, origins: Mapping[str, str]) -> Tokenizer:
    """The tokenizer a configuration names. Raises ValueError if its file or package is missing."""
    if name == BYTES:
        return ByteTokenizer()
    return (SentencePieceTokenizer if tokenizer_file(name).suffix == ".model" else JsonTokenizer)(name, origins)


def tokenizer_vocab(name: str, origins: Mapping[str, str]) -> int:
    """Number of tokens of a tokenizer. Raises ValueError if its file cannot be read."""
    if name == BYTES:
        return ByteTokenizer.vocab
    if tokenizer_file(name).suffix == ".model":
        return SentencePieceTokenizer(name, origins).vocab
    return _sizes(name, origins)[0]  # without its package


def _sizes(path: str, origins: Mapping[str, str]) -> tuple[int, int]:
    """(number of tokens including the separator, separator) of a tokenizer file."""
    fix = "data.tokenizer = bytes, or the path of a JSON file of the `tokenizers` package"
    try:
        content = json_in(tokenizer_file(path))
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
