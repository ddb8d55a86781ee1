"""`python -m hocket_trace`."""

from __future__ import annotations

from hocket_trace.cli import main

if __name__ == "__main__":
    main()
