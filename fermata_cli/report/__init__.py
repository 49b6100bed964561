"""What is left of a run: figures and pictures."""
