"""The models of the suite, each a plain ``nn.Sequential``, and one table of them all (:mod:`gpipe_bench.models.table`).

Importing this package loads no PyTorch.
"""
