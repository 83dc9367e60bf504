"""Scripts that recorded what tests/golden holds of a GPU."""
