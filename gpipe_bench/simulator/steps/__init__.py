"""A training step as a trace: the paper's program, or a schedule, on lanes that write rows."""
