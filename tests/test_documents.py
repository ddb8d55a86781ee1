"""Files as documents: JSON Lines, tables and tokens that other programs have written, and what is refused by name."""

from __future__ import annotations

import gzip
import json
import re
import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hocket.config import DataConfig
from hocket.train.corpus import open_corpus
from hocket.train.documents import Keys, documents

WRITTEN = Path(__file__).parent / "golden" / "tokens"
"""Written by megatron-core 0.16.1 (IndexedDatasetBuilder) and datatrove 0.10.1 (TokenizedFile)."""
END = 2
"""The separator of those files."""
TEXTS = ["the first", "", "a second\nof two lines", "größer"]


def read(file: Path, key: str | Keys = "text") -> list[Any]:
    found: Iterable[Any] = documents(file, Keys(key) if isinstance(key, str) else key, END)
    return [one.tolist() if isinstance(one, np.ndarray) else one for one in found]


def refused(folder: Path, *paths: Path, **more: Any) -> str:
    data = DataConfig(paths=tuple(map(str, paths)), cache=str(folder / "cache"), **more)
    with pytest.raises(ValueError, match=r"data\.paths = .*; fix: ") as caught:
        open_corpus(data, {})
    assert not list((folder / "cache").glob("*.tmp"))
    return str(caught.value)


def lines(texts: list[str], key: str = "text") -> bytes:
    return "".join(json.dumps({"id": i, key: text}) + "\n" for i, text in enumerate(texts)).encode()


@pytest.fixture(scope="module")
def arrow() -> Any:
    return pytest.importorskip("pyarrow", reason="needs the extra: pip install hocket[text]")


# -- lines of JSON, and tables ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson", "a.json", "a.JSONL", "a.jsonl.gz", "c4.json.gz"])
def test_each_line_of_json_is_a_document(tmp_path: Path, name: str) -> None:
    content = lines(TEXTS)
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    assert read(tmp_path / name) == [text.encode() for text in TEXTS]


def test_zstandard_is_undone(tmp_path: Path, arrow: Any) -> None:
    with arrow.output_stream(str(tmp_path / "a.jsonl.zst"), compression="zstd") as out:
        out.write(lines(TEXTS))
    with arrow.output_stream(str(tmp_path / "a.txt.zst"), compression="zstd") as out:
        out.write(b"plain text")
    assert read(tmp_path / "a.jsonl.zst") == [text.encode() for text in TEXTS]
    with arrow.output_stream(str(tmp_path / "a.json.zst"), compression="zstd") as out:
        out.write(b" " * 2000 + json.dumps([{"text": text} for text in TEXTS]).encode())
    assert read(tmp_path / "a.json.zst") == [text.encode() for text in TEXTS]
    assert read(tmp_path / "a.txt.zst") == [b"plain text"]


def test_text_has_no_trace_of_json(tmp_path: Path) -> None:
    """A whole corpus of lines: no brace, and no document joined to the next."""
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.jsonl").write_bytes(lines([f"document {i}" for i in range(100)]))
    (tmp_path / "text" / "b.txt").write_text("document 100")
    corpus = open_corpus(DataConfig(paths=(str(tmp_path / "text"),), cache=str(tmp_path / "cache")), {})
    pieces = bytes(corpus.whole.tokens).split(b"\0")[:-1]
    assert sorted(pieces) == sorted(f"document {i}".encode() for i in range(101))
    assert pieces[:50] != sorted(pieces)[:50]
    assert corpus.documents == 101
    assert [bytes(corpus.whole.tokens[s : s + 8]) for s in corpus.whole.bounds[:-1]] == [b"document"] * 101


def test_json_that_is_no_table_is_text(tmp_path: Path) -> None:
    for content in (b'{"name": "a package"}', b"[1, 2]", b"{\n}", b'[{"name": "x"}]', b"[[" * 9999, b'{"a": 1}\n2'):
        (tmp_path / "a.json").write_bytes(content)
        assert read(tmp_path / "a.json") == [content]


@pytest.mark.parametrize("indent", [None, 1])
def test_a_list_of_rows_is_a_table(tmp_path: Path, indent: int | None) -> None:
    (tmp_path / "a.json").write_text(json.dumps([{"text": text} for text in TEXTS], indent=indent))
    assert read(tmp_path / "a.json") == [text.encode() for text in TEXTS]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.txt", b"caf\xc3\xa9"),
        ("a.jsonl", '{"text": "café"}'.encode()),
        ("a.json", '[{"text": "café"}]'.encode()),
        ("a.json", '{"text": "café"}\n'.encode()),
        ("a.txt.gz", gzip.compress(b"\xef\xbb\xbfcaf\xc3\xa9")),
    ],
)
def test_a_byte_order_mark_is_no_text(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content if name.endswith(".gz") else b"\xef\xbb\xbf" + content)
    assert read(tmp_path / name) == ["café".encode()]


NESTED = [{"doc": {"text": "one", "more": 1}}, {"doc": {"text": None}}, {"doc": None}, {"doc": {"text": "two"}}]


def write_rows(file: Path, rows: list[Any]) -> Path:
    """The same rows in a file of any kind."""
    if file.suffix == ".jsonl":
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif file.suffix == ".json":
        file.write_text(json.dumps(rows))
    else:
        arrow = pytest.importorskip("pyarrow", reason="needs the extra: pip install hocket[text]")
        table = arrow.Table.from_pylist(rows)
        if file.suffix == ".parquet":
            pytest.importorskip("pyarrow.parquet", reason="needs pyarrow").write_table(table, file)
        else:
            with pytest.importorskip("pyarrow.ipc", reason="needs pyarrow").new_stream(str(file), table.schema) as out:
                out.write_table(table)
    return file


KINDS = ["a.jsonl", "a.json", "a.parquet"]


@pytest.mark.parametrize("name", KINDS)
def test_a_dotted_name_reads_what_is_inside(tmp_path: Path, name: str) -> None:
    file = write_rows(tmp_path / name, NESTED)
    assert read(file, Keys("doc.text", skip_empty=True)) == [b"one", None, None, b"two"]
    if name != "a.json":  # a list without such texts is text itself
        assert re.search(
            r"has no (column )?doc\.words( in line 1)?, but doc; fix: ",
            refused(tmp_path, file, text_key=("doc.words",)),
        )
    flat = write_rows(tmp_path / f"b.{name}", [{"doc.text": "flat", "doc": {"text": "deep"}}])
    assert read(flat, "doc.text") == [b"flat"]


@pytest.mark.parametrize("name", KINDS)
def test_rows_without_text_are_left_out_and_counted_where_asked(tmp_path: Path, name: str) -> None:
    file = write_rows(tmp_path / name, [{"id": 1, "text": "one"}, {"id": 2, "text": None}, {"id": 3}, {"text": "two"}])
    told = refused(tmp_path, file)
    assert "has null as text in " in told
    assert "; fix: data.text_key = the name of the text, or data.skip_empty = true, which leaves such rows" in told
    paths, cache = (str(file),), str(tmp_path / "cache")
    corpus = open_corpus(DataConfig(paths=paths, cache=cache, skip_empty=True, validation=(0.0,)), {})
    assert sorted(bytes(corpus.whole.tokens).split(b"\0")) == [b"", b"one", b"two"]
    assert str(corpus).endswith(", 2 rows without text left out")
    held = DataConfig(paths=paths, cache=cache, skip_empty=True, validation=paths)
    assert str(open_corpus(held, {})).endswith(", 4 rows without text left out")
    assert "has null as text in " in refused(tmp_path, file), "the cache of another setting"


def test_a_row_needs_both_texts_and_no_other_kind_is_skipped(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "a.jsonl", [{"p": "a", "text": "b"}, {"p": None, "text": "c"}, {"p": "d"}])
    found = read(file, Keys("text", "p", skip_empty=True))
    assert (found[0].text, found[1:]) == ("ab", [None, None])
    write_rows(file, [{"text": 7}])
    assert "has no text but 7 as text in line 1; fix: data.text_key = the name of the text" in refused(
        tmp_path, file, skip_empty=True
    )
    write_rows(file, [{"text": None}] * 3)
    assert "no text in 1 files (" in (told := refused(tmp_path, file, skip_empty=True))
    assert ", 3 rows without text left out; fix: " in told


def test_bytes_of_a_table_are_utf8(tmp_path: Path, arrow: Any) -> None:
    rows = [{"p": b"ask", "text": "größer".encode()}, {"p": b"ask", "text": b"caf\xe9"}]
    file = write_rows(tmp_path / "a.parquet", rows[:1])
    assert read(file) == ["größer".encode()]
    write_rows(file, rows)
    for names in (("text",), ("p", "text")):
        told = refused(tmp_path, file, text_key=names)
        assert "is not UTF-8 (byte 0xe9 at offset 3 of row 2); fix: save it as UTF-8" in told


def test_tables_without_rows_are_listed(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"\n")
    (tmp_path / "b.txt").write_text("words " * 50)
    data = DataConfig(paths=(str(tmp_path),), cache=str(tmp_path / ".cache"))
    assert str(open_corpus(data, {})).endswith(f"1 files left out: {tmp_path}/a.jsonl (empty: no documents)")


def test_text_of_parquet_that_is_no_text_is_refused(tmp_path: Path, arrow: Any) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs pyarrow")
    more = {"compression": "none", "use_dictionary": False, "write_statistics": False}
    parquet.write_table(arrow.table({"text": ["a flipped bit"] * 9}), tmp_path / "a.parquet", **more)
    content = (tmp_path / "a.parquet").read_bytes().replace(b"flipped", b"fl\xe9pped")
    (tmp_path / "a.parquet").write_bytes(content)
    assert "a.parquet is damaged (text after row 0 that is no UTF-8" in refused(tmp_path, tmp_path / "a.parquet")
    parquet.write_table(
        arrow.table({"text": ["some bit"] * 9}), tmp_path / "b.parquet", write_page_checksum=True, **more
    )
    content = (tmp_path / "b.parquet").read_bytes()
    at = content.index(b"some bit")
    (tmp_path / "b.parquet").write_bytes(content[:at] + b"Some" + content[at + 4 :])
    assert "b.parquet is damaged" in refused(tmp_path, tmp_path / "b.parquet")


@pytest.mark.parametrize("ending", [".parquet", ".parquet.gz"])
def test_each_row_of_parquet_is_a_document(tmp_path: Path, arrow: Any, ending: str) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs pyarrow")
    table = arrow.table({"id": list(range(len(TEXTS))), "content": TEXTS})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=2, compression="zstd")
    if ending.endswith(".gz"):
        (tmp_path / "a.parquet.gz").write_bytes(gzip.compress((tmp_path / "a.parquet").read_bytes()))
    assert read(tmp_path / f"a{ending}", key="content") == [text.encode() for text in TEXTS]


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.jsonl", b'{"text": "x"}\nnot json\n', "has no JSON in line 2"),
        ("a.jsonl", b"[1]\n", "has no JSON object in line 1"),
        ("a.jsonl", b'{"content": "x", "id": 1}\n', "has no text in line 1, but content, id; fix: data.text_key"),
        (
            "a.jsonl",
            b'{"text": null}\n',
            "has null as text in line 1; fix: data.text_key = the name of the text, or data.s",
        ),
        (
            "a.jsonl",
            b'{"text": "x"}\n{"text": "\xff"}\n',
            "is not UTF-8 (byte 0xff at offset 10 of line 2); fix: save it",
        ),
        (
            "a.jsonl.gz",
            gzip.compress(b'{"text": "\xff"}\n', mtime=0),
            "is not UTF-8 (byte 0xff at offset 10 of line 1)",
        ),
        ("a.json", b'[{"text": "x"},\n {"text": "\xff"}]', "is not UTF-8 (byte 0xff at offset 27)"),
        ("a.txt", "café naïve".encode("latin-1"), "is not UTF-8 (byte 0xe9 at offset 3); fix: save it as UTF-8 (iconv"),
        ("a", b"\xef\xbb\xbf caf\xe9", "is not UTF-8 (byte 0xe9 at offset 7)"),
        ("a.txt", "二月".encode("utf-16"), "is in UTF-16 or UTF-32; fix: save it as UTF-8"),
        (
            "a.jsonl",
            b'{"text": "cut off \\ud83d"}\n',
            r"has half a character (\ud83d, a lone surrogate) in line 1; fix: mend",
        ),
        (
            "a.jsonl",
            b'{"text": "x"}\r\n{"text": "y"\n',
            "has no JSON in line 2 (Expecting ',' delimiter, character 13)",
        ),
        ("a.jsonl", '{"text": "x"}\n'.encode("utf-16"), "is in UTF-16 or UTF-32; fix: save it as UTF-8"),
        ("a.jsonl", b"[" * 100_000, "has no JSON in line 1"),
        ("a.json", b'{"id": 1}\n{"id": 2}\n', "has no text in line 1, but id; fix: data.text_key"),
        ("a.json", b'[{"text": "x"},\n {"content": "y"}]', "has no text in row 2, but content"),
        ("A.JSONL.GZ", gzip.compress(b'{"content": "x"}', mtime=0), "has no text in line 1"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "x"}\n' * 9999)[:-9], "is damaged"),
        ("a.txt.gz", b"no gzip", "is damaged"),
        ("a.parquet", b"no parquet", "is damaged"),
        ("a.zst", b"no zstandard", "is damaged"),
        ("a.bin.gz", b"", "holds tokens, which are read in place; fix: decompress it"),
        ("a.npy", b"123", "is damaged"),
    ],
)
def test_a_file_that_is_not_what_its_name_says_is_refused(
    tmp_path: Path, request: pytest.FixtureRequest, name: str, content: bytes, reason: str
) -> None:
    if Path(name).suffix in (".parquet", ".zst"):
        request.getfixturevalue("arrow")
    (tmp_path / name).write_bytes(content)
    assert f"{tmp_path / name} {reason}" in refused(tmp_path, tmp_path / name)


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    assert "a.parquet is a .parquet file, which pyarrow reads; fix: pip install 'hocket[text]'" in refused(
        tmp_path, tmp_path / "a.parquet"
    )


# -- tokens ----------------------------------------------------------------------------------------------------------


def test_files_of_megatron_are_read() -> None:
    assert read(WRITTEN / "megatron.bin") == [[5, 6, 7, 2], [8, 2], [9, 10, 11, 12, 2], [1, 2, 3, 4, 2]]


def tokenizer(folder: Path, vocab: int) -> str:
    """A tokenizer of so many tokens whose separator is `END`."""
    words = {"</s>": END} | {f"w{i}": i for i in range(vocab) if i != END}
    added = [{"id": END, "content": "</s>", "special": True} | dict.fromkeys(
        ("single_word", "lstrip", "rstrip", "normalized"), False
    )]  # fmt: skip
    model = {"type": "WordLevel", "vocab": words, "unk_token": "w0"}
    content = {"version": "1.0", "added_tokens": added, "model": model}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return str(folder)


def test_tokens_of_others_are_a_corpus(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers", reason="needs the extra: pip install hocket[text]")
    named = tokenizer(tmp_path, 13)
    data = DataConfig(paths=(str(WRITTEN),), cache=str(tmp_path / "cache"), tokenizer=named)
    corpus = open_corpus(data, {})
    assert (corpus.documents, corpus.skipped, len(corpus.whole.tokens)) == (4, (), 16)
    split = np.split(corpus.whole.tokens, corpus.whole.bounds[1:-1])
    assert sorted(one.tolist() for one in split) == sorted([[5, 6, 7, 2], [8, 2], [9, 10, 11, 12, 2], [1, 2, 3, 4, 2]])
    small = tokenizer(tmp_path, 12)
    told = refused(tmp_path, WRITTEN, tokenizer=small)
    assert "has the token 12, and data.tokenizer has tokens 0 to 11; fix: data.tokenizer = the tokenizer" in told


def save(array: np.ndarray) -> Callable[[Path], None]:
    def write(file: Path) -> None:
        with file.open("wb") as out:
            np.save(out, array)

    return write


FLAT = np.array([5, 6, END, 7, END, 8], dtype="<u2")


def test_flat_arrays_are_cut_at_separators(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(FLAT.astype("<i8"))(tmp_path / "numpy.npy")
    for piece in (1, 2, 1 << 24):
        monkeypatch.setattr("hocket.train.documents.PIECE", piece)
        assert read(tmp_path / "numpy.npy") == [[5, 6, 2], [7, 2], [8]]


@pytest.mark.parametrize(
    ("name", "write", "reason"),
    [
        ("a.npy", save(np.zeros(3)), "has no tokens, but an array of float64"),
        ("a.npy", save(np.zeros((2, 2), int)), "has no tokens, but an array of int64 of shape (2, 2)"),
        ("a.npy", lambda file: file.write_bytes(FLAT.tobytes()), "is damaged, or no array that np.save has written"),
        ("a.bin", lambda file: file.write_bytes(b"\0" * 2000), "holds no text (binary, without an .idx beside it"),
    ],
)
def test_arrays_that_are_no_tokens_are_refused(
    tmp_path: Path, name: str, write: Callable[[Path], None], reason: str
) -> None:
    write(tmp_path / name)
    assert f"{tmp_path / name} {reason}" in refused(tmp_path, tmp_path / name)


@pytest.mark.parametrize(
    "begin", [b"PK\3\4", b"BZh9", b"\x1f\x8b", b"%PDF-1.7\n", b"\n%PDF-1.4\n", b"%!PS-Adobe-3.0\n", b"{\\rtf1\\ansi\n"]
)
def test_pages_for_printers_are_no_text(tmp_path: Path, begin: bytes) -> None:
    """They may have no byte 0, and are mostly commands."""
    file = tmp_path / "page"
    file.write_bytes(begin + b"BT /F1 12 Tf (words) Tj ET\n" * 100)
    assert f"{file} holds no text (" in refused(tmp_path, file)
    (tmp_path / "more.txt").write_text("About %PDF- files. " * 100)
    assert read(tmp_path / "more.txt")


def test_damaged_pairs_of_megatron_are_refused(tmp_path: Path) -> None:
    tokens, index = (WRITTEN / "megatron.bin").read_bytes(), (WRITTEN / "megatron.idx").read_bytes()
    float_tokens = index[:17] + struct.pack("<B", 7) + index[18:]
    count, bounds = struct.unpack_from("<QQ", index, 18)
    first = len(index) - 8 * bounds
    assert struct.unpack_from("<q", index, first) == (0,)

    def changed(place: int, kind: str, value: int) -> bytes:
        return index[:place] + struct.pack(kind, value) + index[place + struct.calcsize(kind) :]

    for found, beside, reason in [
        (tokens[:-2], index, "is cut off: it has 15 tokens"),
        (tokens, index[:60], "has an .idx beside it that is cut off"),
        (tokens, b"MMIDIDX", "has an .idx beside it that is not Megatron's"),
        (tokens, float_tokens, "has tokens that are no integers"),
        (tokens, changed(first, "<q", 1), "has an .idx beside it that is damaged"),
        (tokens, changed(first, "<q", -1), "has an .idx beside it that is damaged"),
        (tokens, changed(first + 8 * (bounds - 1), "<q", 10**12), "has an .idx beside it that is damaged"),
        (tokens, changed(first + 8, "<q", 10**12), "has an .idx beside it that is damaged"),
        (tokens, changed(34, "<i", -1), "has an .idx beside it that is damaged: lengths below 0"),
        (tokens, changed(34 + 4 * count, "<q", 1), "has an .idx beside it that is damaged"),
    ]:
        (tmp_path / "a.bin").write_bytes(found)
        (tmp_path / "a.idx").write_bytes(beside)
        assert f"{tmp_path}/a.bin {reason}" in refused(tmp_path, tmp_path / "a.bin")
