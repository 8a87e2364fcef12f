"""Kernel profiles by Nsight Compute: taken, saved, compared."""
