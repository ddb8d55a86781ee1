"""`python -m hocket`."""

from hocket.cli import main

main()
