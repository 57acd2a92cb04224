"""Parameters that come and go, gradients that leave."""
