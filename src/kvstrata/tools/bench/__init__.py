"""The measuring core: cold, interleaved, checked samples, and statistics and tables from them.

A benchmark is a module `bench/cases/<op>.py`; `kvstrata bench <op>` runs it.
"""

from .case import Absent, Bench, Case, sets_for
from .peers import attach, peer
from .timer import Timer

__all__ = ["Absent", "Bench", "Case", "Timer", "attach", "peer", "sets_for"]
