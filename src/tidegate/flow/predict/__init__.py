"""Predict: what a replay, an edited trigger or another limit would do, or would have done. Nothing here writes."""
