"""Faults planted in the PTX of a right kernel, to see that each is caught as what it is."""
