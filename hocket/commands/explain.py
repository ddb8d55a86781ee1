"""`hocket explain`: what was decided, why, and what it will do."""

from __future__ import annotations

import json as json_module
import os
import sys
from dataclasses import dataclass

from hocket.commands import translate
from hocket.commands.options import RecipeOptions, parse
from hocket.commands.plan import resolve_for_plan
from hocket.explain.build import explain
from hocket.explain.text import to_text
from hocket.variables import passed, survey


@dataclass(frozen=True)
class Explain(RecipeOptions):
    """Say what hides communication in a run and what does not, why, what was chosen, and what it will cost.

    Needs no GPU. `hocket explain --from-megatron "FLAGS"` translates settings of other systems instead; see its --help.
    """

    json: bool = False
    """Print the explanation as JSON."""


def run(words: list[str]) -> int:
    """Explain a configuration, or translate settings of another system. Returns the exit code."""
    if any(word.startswith("--from-") for word in words):
        if {"-h", "--help"} & set(words):
            print(translate.USAGE)
            return 0
        return translate.run(words)
    options, origins = parse(Explain, "explain", words)
    settings = resolve_for_plan(options.config, origins)
    found = explain(settings, survey(os.environ, settings.overlap.env, passed(sys.modules)))
    print(json_module.dumps(found.as_json(), indent=1) if options.json else to_text(found))
    return 0
