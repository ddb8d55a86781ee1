"""What a rank keeps of a sharded model, by the names of the whole model: as dicts, and in checkpoints on disk."""
