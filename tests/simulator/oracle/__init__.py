"""The simulation in Python, one thing at a time: what the clock and the memory in C are held against."""
