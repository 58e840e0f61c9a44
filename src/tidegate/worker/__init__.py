"""Process life: the loops of a worker, and how it starts and stops."""
