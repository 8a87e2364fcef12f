"""``plan_all``: compiled loops if numba is installed and the tokens are on the CPU, otherwise torch operations."""

from __future__ import annotations

import numpy as np

from .plan import FAIL, Plans, Policy, Scopes


def plan_all(scopes: Scopes, policy: Policy, headroom: int) -> Plans:
    """Targets for all tokens of scopes; each scope is planned independently. Changes nothing."""
    tokens = scopes.tokens
    if not len(tokens):
        return Plans(tokens.tier, [None] * len(scopes), [headroom] * len(scopes))
    if tokens.head_cache.device.type == "cpu":
        try:
            from .plan_numba import chosen
        except ImportError:
            from .plan_reference import chosen
    else:
        from .plan_reference import chosen
    target, parts = chosen(scopes, policy, headroom)
    failed = parts.kind == FAIL
    needed = [int(n) if fails else None for n, fails in zip(parts.needed, failed, strict=True)]
    return Plans(target, needed, np.where(failed, 0, parts.spare).tolist())
