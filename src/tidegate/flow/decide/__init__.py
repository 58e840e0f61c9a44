"""Decide: what happens to each event, in one transaction per batch: gate → match → deliver."""
