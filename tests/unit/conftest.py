"""Generated examples are judged by what they show, not by how long this machine took."""

from hypothesis import settings

settings.register_profile("headgate", deadline=None, max_examples=4000)
settings.load_profile("headgate")
