"""The race of peers: the engine, other pipelines and the plain module on the same work, side by side."""
