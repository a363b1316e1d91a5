"""Traces run again in virtual time, on the clock and the allocators of the simulator."""
