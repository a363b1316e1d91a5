"""Streams, engines and threads on a clock that counts nanoseconds, and the shadow of the autograd graph."""
