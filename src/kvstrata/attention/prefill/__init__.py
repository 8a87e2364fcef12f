"""Prefill attention: many queries over K and V as they come from the projections."""
