"""Parameter servers: both sides of one protocol."""
