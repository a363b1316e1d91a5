"""The machine: the trace of a training step, virtual hardware that replays it, and profiles of devices."""
