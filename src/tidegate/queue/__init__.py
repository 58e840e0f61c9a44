"""Hints that work may be due, so that workers need not wait for the next poll. The rows in Postgres decide what is due;
losing every hint costs latency only."""
