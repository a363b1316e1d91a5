"""Virtual time: the engine's own schedule on machines that are not there."""
