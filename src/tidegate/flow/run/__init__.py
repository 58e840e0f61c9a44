"""Run: claim due runs, execute the user's functions, write what came of it."""
