"""The judge: what an engine for pipeline parallelism must do, and faults that it must not have."""
