"""What is proven of a kernel before it ships: statically, in the simulator, on a GPU's record."""
