"""The switch between one launch for all copies and one ``.copy_`` for each buffer, to compare the two.

``KVSTRATA_FUSED_COPY=0`` turns fused copies off where a call does not say; it is read when the package is imported.
"""

from __future__ import annotations

import os

FUSED = os.environ.get("KVSTRATA_FUSED_COPY", "1") != "0"


def is_fused(fused: bool | None) -> bool:
    """The choice of a call, or that of the environment."""
    return FUSED if fused is None else bool(fused)


def backend_of(fused: bool | None) -> str:
    """Backend of a ``CopyPlan``: the best there is, or the reference, which copies buffer by buffer."""
    return "auto" if is_fused(fused) else "reference"
