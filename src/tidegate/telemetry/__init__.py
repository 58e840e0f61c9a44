"""Logs, and later metrics, traces and health: every name declared once."""
