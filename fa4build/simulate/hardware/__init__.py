"""What warps run on: gangs, schedulers, memories, descriptors, copy engine."""
