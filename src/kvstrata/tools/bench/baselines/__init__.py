"""What the notes start from, as the thing to beat."""
