"""The trainer node: policy, optimiser, task queue, checkpoints."""
