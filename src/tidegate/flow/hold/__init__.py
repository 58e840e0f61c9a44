"""Hold: events and deliveries that wait: tried again when their time comes, given new times when a plan changes."""
