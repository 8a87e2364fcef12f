"""Kernel profiles by Nsight Compute: measuring, saving and comparing them."""
