"""Kernels of the original notes, kept as baselines."""
