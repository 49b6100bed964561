"""Weights as the rollout node receives, proves and serves them."""
