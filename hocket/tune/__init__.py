"""Choosing settings by their cost: `auto`, and the search for the best plan. Imports no torch."""
