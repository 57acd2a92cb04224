"""What few people need, written on the public names: nothing in the package imports it."""
