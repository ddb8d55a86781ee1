"""Files as documents: one per line of JSON, per row of a table, per entry of a tokenised dataset, or per text file.

The extension decides the format: one of `TABLES` has rows, one of `TOKENS` has tokens, any other is text. `.gz` and
`.zst` at its end are decompressed first. A document is text, as bytes, or the tokens that another program made of it.

Tokenised files are Megatron's `.bin` and `.idx` (megatron/core/datasets/indexed_dataset.py), and numpy's `.npy`.
"""

from __future__ import annotations

import codecs
import gzip
import importlib
import io
import itertools
import json
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np


@dataclass(frozen=True)
class Marked:
    """Text of which only a part is learnt."""

    text: str
    learnt: tuple[tuple[int, int], ...]
    """Ranges of characters (first, end)."""
    ends: bool
    """Whether the separator after the text is learnt too."""


Document = bytes | np.ndarray | Marked
"""UTF-8 text, or tokens as a one-dimensional array of integers."""


@dataclass(frozen=True)
class Keys:
    """What to read from a line of JSON, or from a row of a table."""

    text: str
    """Key of the text, or of a chat's messages. `a.b` is the key `b` inside the object `a`."""
    prompt: str = ""
    """Key of a prompt before the text, which is not learnt; empty if there is none."""
    marked: Callable[[list[Any], Any, str], list[Marked]] | None = None
    """Makes the documents of a chat from its messages, its tools, and its line or row. Raises BadFileError."""
    skip_empty: bool = False
    """Whether rows whose text is null or missing are skipped. Otherwise they end the run."""

    @property
    def columns(self) -> list[str]:
        """All keys."""
        return [self.prompt, self.text] if self.prompt else [self.text]


COMPRESSED = (".gz", ".zst")
TOOLS = "tools"
"""Key of a chat's tools."""
OTHER_KEY = "data.text_key = the name of the text"
SKIPPED = f"{OTHER_KEY}, or data.skip_empty = true, which leaves such rows out"

MEGATRON, MEGATRON_DTYPES = b"MMIDIDX\0\0", {1: "u1", 2: "i1", 3: "i2", 4: "i4", 5: "i8", 8: "u2"}
NO_TEXT = {
    b"%PDF-": "a PDF",
    b"%!PS": "PostScript",
    b"{\\rtf": "rich text (RTF)",
    b"PK\3\4": "a zip file",
    b"\xfd7zXZ": "compressed by xz",
    b"BZh": "compressed by bzip2",
    b"\x1f\x8b": "compressed by gzip",
    b"\x28\xb5\x2f\xfd": "compressed by zstandard",
}
"""First bytes of formats that are not plain text, but may contain no NUL byte."""
BOM = codecs.BOM_UTF8
UTF16 = (b"\xff\xfe", b"\xfe\xff")
"""First bytes of files in UTF-16 or UTF-32."""
PIECE = 1 << 24
"""Elements of an array that are searched at a time."""


class NoTextError(Exception):
    """A file without text, as a folder may hold. The message names its real format."""


class BadFileError(Exception):
    """A file that is damaged, does not match its extension, or lacks something: a reason, and a fix."""

    def __init__(self, reason: str, fix: str = "mend it, or leave it out") -> None:
        super().__init__(reason)
        self.fix = fix


def documents(file: Path, key: Keys, separator: int) -> Iterator[Document | None]:
    """The documents of a file, in its order. A text file is one document.

    `key` defines what is read from a line of JSON or a row of a table; None stands for a skipped row without text. The
    documents of an array end with `separator`, the tokenizer's. Raises NoTextError, BadFileError and OSError.
    """
    compression = _compression(file)
    ending = Path(file.name.lower().removesuffix(compression)).suffix
    try:
        if ending in TOKENS and compression:
            raise BadFileError("holds tokens, which are read in place", "decompress it")
        if ending in TOKENS:
            yield from TOKENS[ending](file, separator)
        elif ending in TABLES and (ending != ".json" or _is_table(file, key)):
            for where, row in TABLES[ending](file, key):
                yield from _of_row(row, key, where)
        else:
            yield _text(file)
    except Exception as error:
        # Errors of the operating system have an errno, those of decompressors have none.
        damaged = isinstance(error, EOFError | zlib.error) or (isinstance(error, OSError) and error.errno is None)
        if damaged or type(error).__module__ == "pyarrow.lib":
            raise BadFileError(f"is damaged ({' '.join(str(error).split())})") from None
        raise


def index_files(file: Path) -> list[Path]:
    """Files that belong to a file of tokens and hold no documents themselves."""
    index = file.with_suffix(".idx")
    return [index] if file.suffix == ".bin" and index.is_file() else []


def _compression(file: Path) -> str:
    return file.suffix.lower() if file.suffix.lower() in COMPRESSED else ""


def _opened(file: Path) -> BinaryIO:
    """The bytes of a file, decompressed."""
    match _compression(file):
        case ".gz":
            return gzip.open(file)  # type: ignore[return-value]
        case ".zst":
            return io.BufferedReader(_arrow(file).input_stream(str(file), compression="zstd"))
    return file.open("rb")


def _arrow(file: Path, module: str = "pyarrow") -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        ending = _compression(file) or file.suffix
        raise BadFileError(f"is a {ending} file, which pyarrow reads", "pip install 'hocket[text]'") from None


def _text(file: Path) -> bytes:
    with _opened(file) as stream:
        text = stream.read()
    if b"\0" in text:
        raise NoTextError("binary: with bytes 0, as UTF-16 has")
    plain = text.removeprefix(BOM)
    begin = plain[:64].lstrip()
    for mark, kind in NO_TEXT.items():
        if begin.startswith(mark):
            raise NoTextError(f"{kind}, which is no plain text")
    _decoded(text)
    return plain


def _decoded(text: bytes, where: str = "") -> str:
    """Decode UTF-8, without its byte order mark. Raises BadFileError for other bytes: none is replaced."""
    if text.startswith(UTF16):
        raise BadFileError("is in UTF-16 or UTF-32", "save it as UTF-8")
    mark = len(BOM) if text.startswith(BOM) else 0
    try:
        return text[mark:].decode()
    except UnicodeDecodeError as error:
        place = f"byte {error.object[error.start]:#04x} at offset {mark + error.start:,}"
        reason = f"is not UTF-8 ({place}{where and f' of {where}'})"
        raise BadFileError(reason, "save it as UTF-8 (iconv -f LATIN1 -t UTF-8 FILE), or leave it out") from None


# -- Rows of a file, and where each one is -----------------------------------------------------------------------------

Row = tuple[str, Any]
"""The line or row number, in words, and the value."""


def _lines(file: Path, key: Keys) -> Iterator[Row]:
    """One object per line, or the items of one list."""
    with _opened(file) as stream:
        if file.name.lower().removesuffix(_compression(file)).endswith(".json") and _is_list(stream):
            yield from ((f"row {n}", row) for n, row in enumerate(_parsed(stream.read(), "it"), 1))
            return
        for number, line in enumerate(stream, 1):
            if line.removeprefix(BOM).strip():
                yield f"line {number}", _parsed(line, f"line {number}")


def _parsed(text: bytes, where: str) -> Any:
    """The value of a JSON text. Raises BadFileError."""
    characters = _decoded(text, where).strip()
    try:
        return json.loads(characters)
    except (ValueError, RecursionError) as error:
        at = isinstance(error, json.JSONDecodeError)
        reason = f"{error.msg}, character {error.pos + 1}" if at else error
        raise BadFileError(f"has no JSON in {where} ({reason})") from None


def _is_list(stream: BinaryIO) -> bool:
    """Whether JSON is one list rather than lines. Does not consume the stream."""
    return stream.peek(1 << 12).removeprefix(BOM).lstrip().startswith(b"[")  # pyrefly: ignore[missing-attribute]


def _is_table(file: Path, key: Keys) -> bool:
    """Whether a `.json` file has rows, as lines (like C4) or in one list. Otherwise it is text.

    Several lines that are objects are rows, whatever their keys. A list has rows if an object in it has the text key.
    """
    with _opened(file) as stream:
        listed = _is_list(stream)
        lines = [stream.read()] if listed else [line for line in (stream.readline(), stream.readline()) if line.strip()]
    try:
        rows = [json.loads(line) for line in lines]
    except (ValueError, RecursionError):
        return False
    if listed:
        return any(_has_text(row, key) for row in rows[0])
    return bool(rows) and all(isinstance(row, dict) for row in rows) and (len(rows) > 1 or _has_text(rows[0], key))


def _has_text(row: Any, key: Keys) -> bool:
    return isinstance(row, dict) and isinstance(_value(row, key.text), str | list)


def _parquet(file: Path, key: Keys) -> Iterator[Row]:
    arrow, parquet = _arrow(file), _arrow(file, "pyarrow.parquet")
    with _opened(file) as stream:
        source = arrow.BufferReader(stream.read()) if _compression(file) else stream
        table = parquet.ParquetFile(source, page_checksum_verification=True)
        number = 0
        for batch in table.iter_batches(columns=_columns(key, table.schema_arrow)):
            try:
                rows = batch.to_pylist()
            except UnicodeDecodeError as error:
                raise BadFileError(f"is damaged (text after row {number} that is no UTF-8: {error.reason})") from None
            for row in rows:
                number += 1
                yield f"row {number}", row


TABLES: dict[str, Callable[[Path, Keys], Iterator[Row]]] = {
    ".json": _lines,
    ".jsonl": _lines,
    ".ndjson": _lines,
    ".parquet": _parquet,
}
"""Extension -> function that yields the rows of a file."""


def _columns(key: Keys, schema: Any) -> list[str]:
    """The columns of a table to read, by their dotted names. Raises BadFileError if one is missing."""
    for column in key.columns:
        if not _is_in(schema, column):
            raise BadFileError(f"has no column {column}, but {', '.join(schema.names)}", OTHER_KEY)
    return [*key.columns, *({TOOLS} & set(schema.names))]


def _is_in(fields: Any, name: str) -> bool:
    """Whether an Arrow schema or struct has a field of a dotted name."""
    kinds = {field.name: field.type for field in fields}
    first, _, rest = name.partition(".")
    inner = kinds.get(first)
    return name in kinds or (bool(rest) and str(inner).startswith("struct<") and _is_in(inner, rest))


def _of_row(row: Any, key: Keys, where: str) -> Iterator[Document | None]:
    """The documents of a row. Some chats become several."""
    if not isinstance(row, dict):
        raise BadFileError(f"has no JSON object in {where}")
    values = {name: _value(row, name) for name in key.columns}
    missing = next((name for name, value in values.items() if value is None), "")
    if missing and key.skip_empty:
        yield None
        return
    if missing:
        has = f"null as {missing} in {where}" if missing in row else f"no {missing} in {where}, but {', '.join(row)}"
        raise BadFileError(f"has {has}", SKIPPED)
    text = values[key.text]
    if isinstance(text, list) and key.skip_empty and _lacks_content(text):
        yield None
        return
    if isinstance(text, list) and key.marked is not None and not key.prompt:
        for chat in key.marked(text, row.get(TOOLS), where):
            _encoded(chat.text, where)
            yield chat
        return
    texts = [_text_of(values[name], name, where) for name in key.columns]
    whole = "".join(texts)
    content = _encoded(whole, where)
    yield Marked(whole, ((len(texts[0]), len(whole)),), ends=True) if key.prompt else content


def _lacks_content(messages: list[Any]) -> bool:
    """Whether some message of a chat has neither content nor tool calls."""
    said = ("content", "tool_calls")
    return any(
        isinstance(one, dict) and "from" not in one and all(one.get(x) is None for x in said) for one in messages
    )


def _value(row: dict[str, Any], name: str) -> Any:
    """The value of a row at a key, which may be dotted; None if it is missing."""
    first, _, rest = name.partition(".")
    inner = row.get(first)
    return _value(inner, rest) if name not in row and rest and isinstance(inner, dict) else row.get(name)


def _text_of(value: Any, name: str, where: str) -> str:
    if isinstance(value, bytes):
        return _decoded(value, where)
    if not isinstance(value, str):
        raise BadFileError(f"has no text but {value!r:.40} as {name} in {where}", OTHER_KEY)
    return value


def _encoded(text: str, where: str) -> bytes:
    """Text as UTF-8. Raises BadFileError for lone surrogates, which JSON may contain."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        half = ascii(text[error.start])[1:-1]
        raise BadFileError(f"has half a character ({half}, a lone surrogate) in {where}") from None


# -- tokens ----------------------------------------------------------------------------------------------------------


def _megatron(file: Path, separator: int) -> Iterator[Document]:
    if not file.with_suffix(".idx").is_file():
        raise NoTextError("binary, without an .idx beside it, as Megatron writes")
    index, size = file.with_suffix(".idx").read_bytes(), file.stat().st_size
    try:
        if not index.startswith(MEGATRON) or struct.unpack_from("<Q", index, 9) != (1,):
            raise BadFileError("has an .idx beside it that is not Megatron's, of version 1")
        kind, sequences, ends = struct.unpack_from("<BQQ", index, 17)
        if kind not in MEGATRON_DTYPES:
            raise BadFileError(f"has tokens that are no integers (type {kind} of its .idx)")
        dtype = np.dtype(MEGATRON_DTYPES[kind])
        if size % dtype.itemsize:
            raise BadFileError(f"is damaged (its {size} bytes are no whole number of {dtype} tokens)")
        tokens = np.memmap(file, dtype=dtype, mode="r") if size else np.zeros(0, dtype)
        lengths = np.frombuffer(index, "<i4", sequences, 34)
        offsets = np.frombuffer(index, "<i8", sequences, 34 + lengths.nbytes)
        firsts = offsets // tokens.itemsize
        bounds = np.frombuffer(index, "<i8", ends, 34 + lengths.nbytes + firsts.nbytes)
    except (ValueError, struct.error):
        raise BadFileError("has an .idx beside it that is cut off") from None
    # The bounds must ascend from 0 to the number of sequences: otherwise documents would be skipped, or read twice.
    if not len(bounds) or bounds[0] != 0 or bounds[-1] != sequences or (bounds[1:] < bounds[:-1]).any():
        raise BadFileError("has an .idx beside it that is damaged: its documents do not follow each other")
    if sequences and (int(lengths.min()) < 0 or (offsets % tokens.itemsize).any()):
        raise BadFileError("has an .idx beside it that is damaged: lengths below 0, or tokens between two places")
    if sequences and (int((firsts + lengths).max()) > len(tokens) or int(firsts.min()) < 0):
        raise BadFileError(f"is cut off: it has {len(tokens)} tokens, and its .idx names more")
    for first, last in itertools.pairwise(bounds):
        yield np.concatenate([tokens[firsts[i] : firsts[i] + lengths[i]] for i in range(first, last)] or [tokens[:0]])


def _npy(file: Path, separator: int) -> Iterator[Document]:
    """An array with numpy's header."""
    try:
        tokens = np.load(file, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError):  # numpy's own message suggests allow_pickle
        raise BadFileError("is damaged, or no array that np.save has written") from None
    if tokens.ndim != 1 or tokens.dtype.kind not in "ui":
        raise BadFileError(f"has no tokens, but an array of {tokens.dtype} of shape {tokens.shape}")
    yield from _split(tokens, separator)


def _split(tokens: np.ndarray, separator: int) -> Iterator[Document]:
    """The documents of an array, each up to and including its separator."""
    first = 0
    for start in range(0, len(tokens), PIECE):
        for end in np.flatnonzero(tokens[start : start + PIECE] == separator) + start + 1:
            yield tokens[first:end]
            first = int(end)
    if first < len(tokens):
        yield tokens[first:]


TOKENS: dict[str, Callable[[Path, int], Iterator[Document]]] = {".bin": _megatron, ".npy": _npy}
"""Extension -> function that yields the documents of a file, given the tokenizer's separator."""
