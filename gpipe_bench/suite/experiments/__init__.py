"""The configuration of the suite, its experiments, and what the workflow makes of it."""
