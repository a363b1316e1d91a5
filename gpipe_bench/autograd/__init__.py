"""What engine, simulator and models know of PyTorch: sequences of layers, values, nodes of autograd, its dispatcher."""
