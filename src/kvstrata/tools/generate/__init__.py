"""Text of a real model over a compressed cache, beside the 16-bit one."""
