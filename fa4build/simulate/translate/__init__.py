"""From PTX nodes to Python text: the opcode table and the writer of functions."""
