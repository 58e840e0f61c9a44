"""Accept: events come in. Who may publish, what is valid, what is stored; 202 only after the commit."""
