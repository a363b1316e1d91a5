"""What an operator of PyTorch costs: the kernels that it launches on an accelerator, and their times on a profile."""
