"""Fused operators for products, norms and attention: plain PyTorch formulas on the CPU, Triton kernels on a GPU.

The files *_kernel.py hold the kernels, which are tested against the formulas.
"""
