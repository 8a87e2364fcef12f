"""Decode attention over packed pages of one format, in blocks that an engine owns."""
