"""How good the judge is: faults planted in every synchronisation of a kernel, and lines that no case runs."""
