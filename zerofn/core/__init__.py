"""What a transform is, and how a chain is surveyed and run."""
