"""For all tests: examples have no deadline of their own, as a busy machine may stop any of them for a while."""

from __future__ import annotations

import hypothesis

hypothesis.settings.register_profile("fermata", deadline=None)
hypothesis.settings.load_profile("fermata")
