"""Transparency on real data: training with and without the pipeline, from the same weights on the same batches."""
