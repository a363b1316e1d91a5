"""One training step: the request that simulator and emulator answer, and the result that both give."""
