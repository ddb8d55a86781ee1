"""What recorded runs have shown about a plan's ops: measured costs, and a prediction beside what was measured."""
