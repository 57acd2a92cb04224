"""Every name of torch that is private or differs between releases."""
