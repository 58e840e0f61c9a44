"""Call: one attempt at one run, from the call of the user's function to its end."""
