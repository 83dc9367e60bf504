"""A native engine for the simulator: the same machine as the Python one, as compiled C. README.md here has the map."""
