"""A performance model over the simulator's record. No part of a proof."""
