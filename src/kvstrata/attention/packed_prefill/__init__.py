"""Prefill attention of new rows over a packed prefix and each other, from an engine's block table."""
