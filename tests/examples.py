"""Numbers of Hypothesis's examples: some on every change, many more in `make test-all`."""

from hypothesis import settings

NIGHTLY = 20
"""Times as many examples as `make test` tries."""


def is_nightly() -> bool:
    """Return whether pytest runs with `--hypothesis-profile nightly`, as `make test-all` does."""
    return settings.get_current_profile_name() == "nightly"


def examples(number: int) -> int:
    """Return how many examples a test tries, of which `make test` tries `number`."""
    return number * NIGHTLY if is_nightly() else number
