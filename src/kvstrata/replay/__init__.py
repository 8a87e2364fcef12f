"""A step's metadata enters a captured graph: in one launch, or in none."""

from .copies import Bound
from .plan import CopyPlan
from .staging import HostStage, Scatter

__all__ = ["Bound", "CopyPlan", "HostStage", "Scatter"]
