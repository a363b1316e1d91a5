"""A training step: what is asked, of the simulator and the emulator alike, and what comes out."""
