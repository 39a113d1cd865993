"""The gradients of attention: which kernels, which numbers."""
