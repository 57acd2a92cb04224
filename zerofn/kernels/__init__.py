"""Arithmetic on tensors: rounding, the formulas of optimizers and their kernels, norms, C."""
