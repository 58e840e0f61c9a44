"""Benchmarks: `make bench`. Each figure is a module; `docs/performance.md` says what it means."""
