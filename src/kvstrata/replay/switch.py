"""Switch between one launch for all copies and one ``.copy_`` per buffer, to compare the two.

``KVSTRATA_FUSED_COPY=0`` turns fused copies off for calls that do not pass ``fused``; it is read at import.
"""

from __future__ import annotations

import os

FUSED = os.environ.get("KVSTRATA_FUSED_COPY", "1") != "0"


def is_fused(fused: bool | None) -> bool:
    """The call's choice, or the environment's."""
    return FUSED if fused is None else bool(fused)


def backend_of(fused: bool | None) -> str:
    """Backend of a ``CopyPlan``: the best available, or the reference, which copies buffer by buffer."""
    return "auto" if is_fused(fused) else "reference"
