"""Hold: waiting events and deliveries: retried when they are due, given new times when a plan changes."""
