"""`hocket train`: train a recipe's model."""

from __future__ import annotations

from dataclasses import dataclass

from hocket.commands.options import RecipeOptions, parse


@dataclass(frozen=True)
class Train(RecipeOptions):
    """Train a recipe's model. Starts its own processes, or joins those of torchrun or Slurm."""


def run(words: list[str]) -> int:
    """Train, and return the exit code."""
    options, origins = parse(Train, "train", words)
    from hocket import launch

    return launch.train(options.config, origins)
