"""Prefill attention of a chunk of new tokens over everything its cache holds."""
