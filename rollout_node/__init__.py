"""The rollout node: one vLLM engine and the trajectories on it."""
