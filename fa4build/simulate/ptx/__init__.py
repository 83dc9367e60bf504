"""PTX text to typed instructions. Knows the grammar, not what instructions do."""
