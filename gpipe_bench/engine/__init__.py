"""The reference pipeline engine: one mechanism per file."""
