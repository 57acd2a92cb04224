"""Numbers below a tensor: rounding, the formulas of optimizers and their fast forms, norms, C."""
