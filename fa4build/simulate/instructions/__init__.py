"""One rule an opcode; `rules` registers all of them."""
