"""A step's metadata enters a captured graph: in one launch, or in none."""

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
