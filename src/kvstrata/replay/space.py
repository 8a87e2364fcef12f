"""Tunable parameters of ``copy.cu``, for `kvstrata tune`.

``worker`` is the unit that copies, a block or a warp; ``threads`` are per block, ``share`` is in bytes per block.
"""

from __future__ import annotations

from .cuda import Config

CHOICES: dict[str, tuple[int | str, ...]] = {
    "worker": ("block", "warp"),
    "threads": (64, 128, 256, 512, 1024),
    "share": (1024, 2048, 4096, 8192, 16384, 32768),
}


def invalid(config: Config) -> str | None:
    """Reason why a config is invalid, or None."""
    if config.share < 4 * config.threads:
        return f"a share of {config.share} bytes is less than 4 for each of {config.threads} threads"
    return None
