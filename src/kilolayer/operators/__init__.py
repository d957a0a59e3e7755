"""Fused operators for products, norms and attention: plain PyTorch formulas on the CPU, Triton kernels on a GPU.

For each X.py here, X_kernel.py holds the kernels, which are tested against the formulas.
"""
