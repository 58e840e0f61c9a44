"""Decide: what becomes of each event, in one transaction per batch: gate → match → deliver."""
