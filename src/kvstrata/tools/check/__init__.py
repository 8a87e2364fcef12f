"""Correctness checks on this machine: bench cases, random sweeps and compute-sanitizer."""
