"""A native engine for the simulator: the same machine as the Python one, as compiled C."""
