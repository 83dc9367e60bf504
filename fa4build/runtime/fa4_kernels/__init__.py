"""FlashAttention-4 kernels compiled ahead of time: nothing is compiled, downloaded or written at run time."""

__version__ = "0.1.0"
