"""States outside of a run: tables, checkpoints, export."""
