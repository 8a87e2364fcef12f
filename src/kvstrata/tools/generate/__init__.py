"""Text of a real model over a compressed cache, and over the 16-bit one."""
