"""What every test runs under."""

from hypothesis import settings

# The same examples every time, and no limit in milliseconds on one of them: `make test` leaves nothing to luck, and a
# CI machine may stall. `make test-long` looks for new examples, many more of them.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("search", max_examples=1000, deadline=None, print_blob=True)
settings.load_profile("repeatable")
