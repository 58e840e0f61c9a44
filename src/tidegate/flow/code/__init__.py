"""Code: the functions that users write, what they are given, and how they are called."""
