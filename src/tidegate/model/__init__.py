"""The domain model: frozen records, states and pure rules. Nothing here does I/O."""
