"""What can be set in ``copy.cu``, for `kvstrata tune`: who works on a copy, and how the bytes are cut.

``worker`` is a block or a warp, ``threads`` those of a block, ``share`` the bytes of a block.
"""

from __future__ import annotations

from .cuda import Config

CHOICES: dict[str, tuple[int | str, ...]] = {
    "worker": ("block", "warp"),
    "threads": (64, 128, 256, 512, 1024),
    "share": (1024, 2048, 4096, 8192, 16384, 32768),
}


def invalid(config: Config) -> str | None:
    """Why this cut makes no sense, or None."""
    if config.share < 4 * config.threads:
        return f"a share of {config.share} bytes is less than 4 for each of {config.threads} threads"
    return None
