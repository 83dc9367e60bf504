"""Forward kernels, a file for each architecture and the axes that it serves."""
