"""Break things on purpose, then show that nothing promised was broken. `python -m chaos`; docs/chaos.md tells how."""
