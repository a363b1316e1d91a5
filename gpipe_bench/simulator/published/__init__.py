"""The published rows, and how torchgpipe ran them."""
