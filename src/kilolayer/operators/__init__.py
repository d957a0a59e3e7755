"""Products, norms and attention as single operators: plain formulas on the CPU, kernels of our own on a GPU."""
