"""Ahead-of-time builder for FlashAttention-4 kernels. Importing it does nothing else."""

__version__ = "0.1.0"
