"""The race of peers: this engine, other pipelines and the plain module on the same work, in turns."""
