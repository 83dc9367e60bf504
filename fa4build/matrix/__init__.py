"""What can be asked for: targets, axes, variants, selections, and how each variant is tuned."""
