"""Every torch name that is private or has changed between releases, looked up once."""
