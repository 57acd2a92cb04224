"""Other people's configurations as chains."""
