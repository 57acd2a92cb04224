"""Hooks and guards on an attached `nn.Module`. This folder knows no optimizer."""
