"""Generated examples are judged by what they show, not by how long this machine took."""

from hypothesis import settings

settings.register_profile("tidegate", deadline=None)
settings.load_profile("tidegate")
