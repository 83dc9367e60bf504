"""What is right: acceptance cases and their references, for proofs, families and runs on a GPU."""
