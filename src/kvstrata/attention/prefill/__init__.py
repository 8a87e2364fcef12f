"""Prefill attention: many queries over K and V as the projections output them."""
