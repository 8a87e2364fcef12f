"""Prefill attention of new rows over a packed prefix and themselves, from an engine's block table."""
