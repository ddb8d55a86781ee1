"""Sharded parameters as a plan drives them: slots by number, an optimizer. Their bytes are `ParamGroup`s."""
