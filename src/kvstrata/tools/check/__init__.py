"""Correctness on this machine: bench checks, random sweeps and compute-sanitizer."""
