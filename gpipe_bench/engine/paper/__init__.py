"""The paper's executor: one autograd graph through all partitions (torchgpipe, arXiv 2004.09910, section 3)."""
