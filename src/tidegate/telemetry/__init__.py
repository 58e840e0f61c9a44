"""Logs, metrics and traces: each name is declared once."""
