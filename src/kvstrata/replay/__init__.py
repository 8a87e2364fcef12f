"""Updating the metadata of a captured graph: in one launch, or as part of the graph."""

from .copies import Bound
from .graph import GraphRunner
from .metadata import PrecomputedMetadata, fused_copy_replay_data
from .plan import CopyPlan
from .staging import HostStage, Scatter

__all__ = [
    "Bound",
    "CopyPlan",
    "GraphRunner",
    "HostStage",
    "PrecomputedMetadata",
    "Scatter",
    "fused_copy_replay_data",
]
