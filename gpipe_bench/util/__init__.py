"""Files, processes, terminal and imports: what is not about pipelines."""
