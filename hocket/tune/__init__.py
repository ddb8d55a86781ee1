"""Chooses settings by their cost: for `auto`, and in the search for the best plan. Imports no torch."""
