"""`hocket train`: train a recipe's model."""

from __future__ import annotations

from dataclasses import dataclass

from hocket.commands.options import RecipeOptions, parse
from hocket.config.schema import changed

PROFILED = 2
"""Steps that --profile records: enough to compare them, few enough for a small trace."""


@dataclass(frozen=True)
class Train(RecipeOptions):
    """Train a recipe's model. Starts its own processes, or joins those of torchrun or Slurm."""

    profile: bool = False
    """Record two steps soon after the start, and tell how much communication is exposed."""
    restarts: int = 0
    """How often the ranks start again from the last checkpoint when one of them has failed. torchrun has its own."""


def run(words: list[str]) -> int:
    """Train, and return the exit code."""
    options, origins = parse(Train, "train", words)
    config = options.config
    if options.profile:
        if "train.profile" in origins:
            raise ValueError(
                f"profile = True (command line, --profile): sets train.profile, and {origins['train.profile']} does "
                "too; fix: leave one of them out"
            )
        config = changed(config, {"train.profile": (0, min(PROFILED, config.train.steps))})
        origins["train.profile"] = "command line, --profile"
    from hocket.launching import launch

    return launch.train(config, origins, options.restarts)
