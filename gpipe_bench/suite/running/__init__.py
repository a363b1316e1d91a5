"""Running cells, each in a fresh process, measured or simulated."""
