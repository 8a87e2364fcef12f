"""Writing packed pages that an engine owns: store_packed writes tokens, copy_pages copies blocks."""
