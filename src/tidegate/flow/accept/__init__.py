"""Accept: authenticate clients, validate and store events; 202 only after the commit."""
