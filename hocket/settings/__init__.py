"""Settings: their names, sources and types, what may go with what, and what is chosen where a user left it open."""
