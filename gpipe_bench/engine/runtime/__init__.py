"""The runtime: runs any schedule of :mod:`gpipe_bench.schedules`, with a graph of its own for each task."""
