"""What is kept: compiled kernels by key, evidence about them, and what is let in."""
