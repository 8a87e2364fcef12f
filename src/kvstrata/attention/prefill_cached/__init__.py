"""Prefill attention of a chunk of new tokens over all tokens of its cache."""
