"""Sharded parameters as a plan drives them: slots by number, leases, an optimizer. Their bytes are `ParamGroup`s."""
