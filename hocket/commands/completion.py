"""`hocket completion`: what a shell needs to complete commands, recipes, settings and their values."""

from __future__ import annotations

from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from hocket.cli import COMMANDS
from hocket.recipes import RECIPES
from hocket.settings.schema import types

USAGE = """usage: hocket completion [fish]

Prints a script that completes commands, recipes, settings and their values:

  eval "$(hocket completion)"        # in ~/.bashrc or ~/.zshrc
  hocket completion fish | source    # in ~/.config/fish/config.fish"""

TAKE_RECIPE = ("train", "plan", "explain", "bench")
"""Commands that take a recipe and settings."""

_SCRIPT = """# hocket: completion for bash and zsh. Made by `hocket completion`.
[ -n "${ZSH_VERSION-}" ] && autoload -U +X bashcompinit && bashcompinit
_hocket() {
  local word="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}" words=
  if [ "$COMP_CWORD" -eq 1 ]; then
    words="%(commands)s"
  elif [[ " %(take)s " == *" ${COMP_WORDS[1]} "* ]]; then
    case "$before" in
      %(values)s
      *) case "$word" in -*) words="%(settings)s" ;; esac ;;
    esac
    if [ "$COMP_CWORD" -eq 2 ] && [ -z "$words" ]; then words="%(recipes)s"; fi
  fi
  if [ -n "$words" ]; then COMPREPLY=($(compgen -W "$words" -- "$word")); else COMPREPLY=(); fi
}
complete -o default -F _hocket hocket
"""

_FISH = """# hocket: completion for fish. Made by `hocket completion fish`.
complete -c hocket -n 'test (count (commandline -opc)) -eq 1' -f -a '%(commands)s'
set -l takes '__fish_seen_subcommand_from %(take)s'
complete -c hocket -n "$takes; and test (count (commandline -opc)) -eq 2" -a '%(recipes)s'
%(settings)s
"""


def run(words: list[str]) -> int:
    """Print the script."""
    if words and words[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    common = {"commands": " ".join(COMMANDS), "take": " ".join(TAKE_RECIPE), "recipes": " ".join(RECIPES)}
    if words == ["fish"]:
        print(_FISH % {**common, "settings": "\n".join(map(_fish, types()))}, end="")
        return 0
    if words:
        reason = "takes fish, or nothing for bash and zsh"
        raise ValueError(f"completion {' '.join(words)} (command line): {reason}; fix: hocket completion")
    by_values: dict[str, list[str]] = {}
    for name, hint in types().items():
        if options := " ".join(_options(hint)):
            by_values.setdefault(options, []).append(f"--{name}")
    cases = (f'{"|".join(names)}) words="{options}" ;;' for options, names in by_values.items())
    print(
        _SCRIPT
        % {
            **common,
            "values": "\n      ".join(cases),
            "settings": " ".join(f"--{name}" for name in types()),
        },
        end="",
    )
    return 0


def _fish(setting: str) -> str:
    """The line for a setting and its values."""
    options = " ".join(_options(types()[setting]))
    return f'complete -c hocket -n "$takes" -l {setting} ' + (f"-x -a '{options}'" if options else "-r")


def _options(hint: Any) -> list[str]:
    """The values that a type names."""
    if hint is bool:
        return ["True", "False"]
    if get_origin(hint) is Literal:
        return [str(each) for each in get_args(hint)]
    if get_origin(hint) in (Union, UnionType, tuple):
        return list(dict.fromkeys(option for each in get_args(hint) for option in _options(each)))
    return []
