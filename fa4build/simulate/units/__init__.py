"""Bit formats and arithmetic units, bit for bit."""
