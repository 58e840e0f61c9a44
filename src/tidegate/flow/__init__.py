"""Verbs, read top to bottom: ingest → gate → match → deliver → run; dispatch is the batch that composes the middle
three in one transaction; reconcile watches what is due and has not moved."""
