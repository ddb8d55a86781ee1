"""`hocket doctor`: whether this host's environment and hardware suit overlap."""

from __future__ import annotations

import json
import os
import sys

from hocket.commands.options import Parser
from hocket.doctor.checks import examine, exit_code, look, to_json, to_text
from hocket.doctor.measure import measure, report
from hocket.environment import find_gpus
from hocket.predict.hardware import measured_file
from hocket.variables import passed

PARSER = Parser("doctor", "Checks environment and hardware. The exit code is 1 if there is something to mend.")
HOW = PARSER.add_mutually_exclusive_group()
HOW.add_argument("--json", action="store_true", help="print the findings as JSON")
HOW.add_argument(
    "--measure",
    action="store_true",
    help="time products, attention, kernels, copies and links for half a minute, and keep the rates: plans on this "
    "host go by them from then on, and elsewhere with --hardware.gpu FILE",
)


def run(words: list[str]) -> int:
    """Print the findings. Returns 1 if one needs a fix."""
    options = PARSER.read(words)
    if options.measure:
        return _measure()
    checks = examine(look(os.environ, passed(sys.modules)))
    print(json.dumps(to_json(checks), indent=1) if options.json else to_text(checks))
    return exit_code(checks)


def _measure() -> int:
    """Measure and store the rates of this host's GPUs, and print the file's name."""
    found = measure(find_gpus(), os.environ)
    target = measured_file(found.device)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(found.to_json())
    except OSError as error:
        raise ValueError(f"doctor --measure: {target}: {error.strerror}; fix: make it writable, or set HOME") from None
    print("\n".join([f"{found.gpus} x {found.device}", *report(found), f"kept in {target}"]))
    return 0
