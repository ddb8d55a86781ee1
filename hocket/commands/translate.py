"""`hocket explain --from-megatron "..."` and its like: settings of other systems in hocket's words."""

from __future__ import annotations

import json

from hocket.commands.options import write
from hocket.foreign.systems import SYSTEMS
from hocket.foreign.translate import translate
from hocket.foreign.write import to_json, to_text, to_toml
from hocket.recipes import recipe
from hocket.settings.schema import show

USAGE = """usage: hocket explain --from-megatron "FLAGS", or SCRIPT.sh [--gpus N] [--recipe NAME] [--toml FILE] [--json]
       hocket explain --from-bridge "KEY=VALUE ...", or lines of Python such as cfg.model.num_layers = 4
       hocket explain --from-torchtitan "FLAGS", or FILE.toml
       hocket explain --from-deepspeed FILE.json

Says what settings of Megatron-LM, Megatron Bridge, torchtitan and DeepSpeed are in hocket, which are not needed, and
which are not there. The exit code is 1 if something that was asked for is not there or not known, or is no setting.

  --gpus N      number of ranks, which these settings leave open
  --recipe NAME recipe to stand on: its model, where the settings have none, and all that they leave open
  --toml FILE   write what they become to a file that hocket reads
  --json        print everything as JSON"""

_OTHERS = ("--gpus", "--recipe", "--toml", "--json")


def run(words: list[str]) -> int:
    """Print a translation, and return 1 if something has no counterpart."""
    values: dict[str, str] = {}
    rest = iter(words)
    for word in rest:
        name, equals, value = word.partition("=")
        if name not in (*_OTHERS, *(f"--from-{system}" for system in SYSTEMS)):
            fix = f"one of {', '.join(f'--from-{system}' for system in SYSTEMS)}, with {', '.join(_OTHERS)}"
            why = "nothing translates this system" if name.startswith("--from-") else "it does not go with --from-..."
            raise ValueError(f"explain {word} (command line): {why}; fix: {fix}")
        if name in values:
            raise ValueError(f"{name} (command line): given twice; fix: give it once")
        if name == "--json" and equals:
            raise ValueError(f"--json (command line): takes no value; fix: leave out {show(value)}")
        values[name] = "on" if name == "--json" else value if equals else next(rest, "")
        if not values[name]:
            raise ValueError(f"{name} (command line): its value is missing; fix: {name} VALUE")
    asked = [name for name in values if name.startswith("--from-")]
    if len(asked) > 1:
        raise ValueError(f"{asked[1]} (command line): {asked[0]} is given, too; fix: one of them")
    system, read = SYSTEMS[asked[0].removeprefix("--from-")]
    pairs = read(values[asked[0]])
    if not pairs:
        said = show(values[asked[0]])
        fix = f"hocket explain {asked[0]} --help shows how they are given"
        raise ValueError(f"{said} (command line, {asked[0]}): holds no settings of {system.name}; fix: {fix}")
    base = values.get("--recipe", "")
    if base:
        recipe(base, "command line, --recipe")
    found = translate(system, pairs, _gpus(values["--gpus"]) if "--gpus" in values else 0, base)
    if "--toml" in values:
        if found.lacking:
            missing = [name for name in found.lacking if name != "recipe"]
            why = f"the settings have no whole model ({', '.join(missing)})" if missing else "no model is named"
            fix = "add --recipe NAME, of hocket recipes"
            raise ValueError(f"{show(values['--toml'])} (command line, --toml): {why}; fix: {fix}")
        write(values["--toml"], to_toml(found))
    print(json.dumps(to_json(found), indent=1) if "--json" in values else to_text(found))
    return 0 if found.complete else 1


def _gpus(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise ValueError(f"gpus = {show(text)} (command line, --gpus): not a number of ranks; fix: 1 or more")
    return int(text)
