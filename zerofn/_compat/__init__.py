"""All names of torch that are private or differ between releases."""
