"""How an attached `nn.Module` is instrumented. Knows no optimizer."""
