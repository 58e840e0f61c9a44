"""When to look: hints that something is due. The row decides whether; losing every hint costs latency only."""
