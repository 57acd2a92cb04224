"""Training steps as compositions of pure functions over trees of tensors."""
