"""Operations on a cache: append, decode step, crop, fork, copy, save and load, inspect."""
