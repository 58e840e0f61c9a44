"""The worker process: its loops, and how it starts and stops."""
