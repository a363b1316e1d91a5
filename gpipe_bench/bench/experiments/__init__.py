"""The configuration of the suite, its experiments, and what the workflow and a session on one GPU make of it."""
