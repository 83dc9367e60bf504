"""A native engine for the simulator: the machine of the Python one as compiled C. See README.md in this folder."""
