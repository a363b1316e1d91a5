"""Figures drawn from CSV alone: no PyTorch, no run, the same bytes every time."""
