"""`hocket doctor`: whether this host is fit for overlap."""

from __future__ import annotations

import json
import os
import sys

from hocket.doctor.checks import examine, exit_code
from hocket.doctor.look import look
from hocket.doctor.report import to_json, to_text
from hocket.variables import passed

USAGE = """usage: hocket doctor [--quick] [--json]

Checks environment and hardware, and says of each finding what it costs and how to mend it. The exit code is 1 if there
is something to mend. With two GPUs or more it also gathers on copy engines, and looks at what moved the bytes.

  --quick   leave the gather out
  --json    print the findings as JSON"""


def run(words: list[str]) -> int:
    """Print the findings, and return 1 if there is something to mend."""
    if {"-h", "--help"} & set(words):
        print(USAGE)
        return 0
    unknown = [word for word in words if word not in ("--quick", "--json")]
    if unknown:
        raise ValueError(f"doctor {unknown[0]} (command line): there is no such option; fix: --quick or --json")
    checks = examine(look(os.environ, passed(sys.modules), "--quick" not in words))
    print(json.dumps(to_json(checks), indent=1) if "--json" in words else to_text(checks))
    return exit_code(checks)
