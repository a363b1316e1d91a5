"""The best settings of a model on a hardware profile, by simulation."""
