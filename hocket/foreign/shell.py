"""The words of a command or of a whole script, as a shell would hand them to a program.

Variables and arrays of the script are put in where they are used, and comments of a script are left out. Nothing is
run: `$(...)`, `$1` and what the script does not set stay as they are written.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

END = "\n"
"""A word in place of the end of a command."""

_QUOTED = r"""'[^']*'|"(?:\\.|[^"\\])*\""""
_PLAIN = rf"(?:\\.|{_QUOTED}|[^\s'\"\\])"
_GROUP = rf"\((?:{_QUOTED}|\#[^\n]*+|[^()'\"#]|\([^()]*\))*\)"
_COMMENT = re.compile(r"#[^\n]*")
_ARRAY = re.compile(rf"(\w+)=({_GROUP})(?=\s|;|$)", re.DOTALL)
_ONE = re.compile(rf"{_PLAIN}+", re.DOTALL)
_SPACE = re.compile(r"(?:[^\S\n]|\\\n|\\\s*\Z)+")
_PIECE = re.compile(rf"{_QUOTED}|\\.|[^'\"\\]+", re.DOTALL)
_SET = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_USED = re.compile(r"\$(?:(\w+)|\{(\w+)(?:\[[@*]\])?(?::?-([^}]*))?\})")
_OPERATORS = re.compile(r"\d?(?:[|&;]{1,2}|[<>]{1,2}(?:&\d)?)")


def words(text: str) -> list[str]:
    """Words, with `END` behind each command. Raises ValueError for a quotation that has no end."""
    script = text.strip().count("\n") > 0
    used = {name for match in _USED.finditer(text) for name in match.groups()[:2] if name}
    known: dict[str, list[str]] = {}
    found: list[str] = []
    at = 0
    while at < len(text):
        if text[at] == "\n":
            found.append(END)
            at += 1
        elif space := _SPACE.match(text, at):
            at = space.end()
        elif script and (comment := _COMMENT.match(text, at)):
            at = comment.end()
        elif (array := _ARRAY.match(text, at)) and array[1] in used:
            inside = words(_within(array[2]))
            known[array[1]] = [each for word in inside for each in _expanded(word, known) if each != END]
            at = array.end()
        elif one := _ONE.match(text, at):
            raw, at = one[0], one.end()
            if (made := _SET.fullmatch(raw.removesuffix(";") if script else raw)) and made[1] in used:
                known[made[1]] = [" ".join(_expanded(made[2], known))]
                found = found[:-1] if found[-1:] == ["export"] else found
            else:
                found += _command(raw, known, script)
        else:
            raise ValueError(f"{text[:40]} (command line): No closing quotation; fix: close the quotation")
    return found


def _within(group: str) -> str:
    """What an array holds, without its comments and ends of lines."""
    lines = (re.sub(r"(?:^|(?<=\s))#.*", "", line) for line in group[1:-1].split("\n"))
    return " ".join(line.removesuffix("\\") for line in lines)


def _command(raw: str, known: Mapping[str, Sequence[str]], script: bool) -> list[str]:
    """A word of a command. A semicolon behind it ends the command, as other signs between commands do."""
    if _OPERATORS.fullmatch(raw):
        return [END, raw, END]
    if script and raw.endswith(";"):
        return [*_expanded(raw[:-1], known), END]
    return _expanded(raw, known)


def _expanded(raw: str, known: Mapping[str, Sequence[str]]) -> list[str]:
    """The words that a word stands for: several where it is a variable of several, and none where that is empty."""
    bare = raw.removeprefix('"').removesuffix('"')
    whole = _USED.fullmatch(bare)
    if whole and (whole[1] or whole[2]) in known:
        values = known[whole[1] or whole[2]]
        return [*values] if bare != raw else [each for value in values for each in value.split()]
    return ["".join(_piece(piece, known) for piece in _PIECE.findall(raw))]


def _piece(piece: str, known: Mapping[str, Sequence[str]]) -> str:
    """Text between quotation marks, or outside of any."""
    if piece.startswith("'"):
        return piece[1:-1]
    if piece.startswith("\\"):
        return piece[1:]
    if piece.startswith('"'):
        piece = re.sub(r'\\(["\\$`])', r"\1", piece[1:-1].replace("\\\n", ""))
    return _USED.sub(lambda use: _value(use, known), piece)


def _value(use: re.Match[str], known: Mapping[str, Sequence[str]]) -> str:
    name, otherwise = use[1] or use[2], use[3]
    if name in known:
        return " ".join(known[name])
    return use[0] if otherwise is None else otherwise.strip("\"'")
