"""The caching allocator, and what the passes of tasks ask it for."""
