"""The models of the suite, each a plain ``nn.Sequential``, and one table of them all (:mod:`models.table`).

Importing this package loads no PyTorch.
"""
