"""Decode attention: a few queries of each request over every tier of its cache."""
