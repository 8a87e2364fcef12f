"""Decisions of a cache: importance, budget, the tier of every token, centres."""
