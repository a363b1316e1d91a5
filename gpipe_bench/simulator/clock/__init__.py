"""The clock in C: what is to run as arrays, the run itself, and its tasks as columns."""
