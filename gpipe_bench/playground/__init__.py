"""A page on which schedules are compared and changed by hand; its answers come from :mod:`gpipe_bench.schedules`."""
