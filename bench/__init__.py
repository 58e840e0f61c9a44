"""Benchmarks: `make bench`. Each figure is a module; `bench/NOTES.md` describes it."""
