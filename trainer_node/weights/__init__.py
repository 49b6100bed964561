"""The trainer's side of the weight sync: broadcast, proofs gathered and compared, the group kept whole."""

from trainer_node.weights.report import NodeReport, SyncReport
from trainer_node.weights.sync import WeightSync

__all__ = ["NodeReport", "SyncReport", "WeightSync"]
