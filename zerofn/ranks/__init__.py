"""Process groups, collectives, their adjoints, and agreement between ranks."""
