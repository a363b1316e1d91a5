"""What host threads issue, and when: the forward program, models of autograd, the scheduled backward pass."""
