"""For all tests: no deadline on a Hypothesis example, since a busy machine is no fault of the code."""

from hypothesis import settings

settings.register_profile("frontier", deadline=None)
settings.load_profile("frontier")
