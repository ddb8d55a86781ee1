"""`hocket doctor`: whether this host is fit for overlap."""

from __future__ import annotations

import json
import os
import sys

from hocket.doctor.checks import examine, exit_code, look, to_json, to_text
from hocket.doctor.measure import measure, report
from hocket.environment import find_gpus
from hocket.predict.hardware import kept_file
from hocket.variables import passed

USAGE = """usage: hocket doctor [--json]
       hocket doctor --measure

Checks environment and hardware, and says of each finding what it costs and how to mend it. The exit code is 1 if there
is something to mend.

  --json    print the findings as JSON
  --measure time products, attention, kernels, copies and links for half a minute, and keep the rates: plans on this
            host go by them from then on, and elsewhere with --hardware.gpu FILE"""


def run(words: list[str]) -> int:
    """Print the findings, and return 1 if there is something to mend."""
    if {"-h", "--help"} & set(words):
        print(USAGE)
        return 0
    if "--measure" in words:
        return _measure(words)
    unknown = [word for word in words if word != "--json"]
    if unknown:
        raise ValueError(f"doctor {unknown[0]} (command line): there is no such option; fix: --json or --measure")
    checks = examine(look(os.environ, passed(sys.modules)))
    print(json.dumps(to_json(checks), indent=1) if "--json" in words else to_text(checks))
    return exit_code(checks)


def _measure(words: list[str]) -> int:
    """Keep the rates of this host's GPUs, and print where."""
    others = [word for word in words if word != "--measure"]
    if others:
        raise ValueError(f"doctor {others[0]} (command line): no effect beside --measure; fix: leave out one of them")
    found = measure(find_gpus(), os.environ)
    target = kept_file(found.device)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(found.to_json())
    except OSError as error:
        raise ValueError(f"doctor --measure: {target}: {error.strerror}; fix: make it writable, or set HOME") from None
    print("\n".join([f"{found.gpus} x {found.device}", *report(found), f"kept in {target}"]))
    return 0
