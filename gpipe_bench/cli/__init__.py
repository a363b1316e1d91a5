"""The command line. A command loads its own modules only, and PyTorch not until a cell or a device is measured.

Exit status: 0 when the command did what it was asked for, also when a measured cell failed (its row says so); 1 when
nothing could be measured; 2 on bad input, with one clear line per problem and no file left.
"""

from gpipe_bench.cli.app import application, main

__all__ = ["application", "main"]
