"""Task sets: where an episode starts, what its goal is, and how the outcome is read."""
