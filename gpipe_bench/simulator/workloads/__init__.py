"""What partitions have to do, in nanoseconds and bytes: traces put together on a piece of hardware."""
