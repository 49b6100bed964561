"""``python -m tool_backend calculator``: serve built-in tools and tools of one's own."""

from __future__ import annotations

import sys

from tool_backend.serve import main

if __name__ == "__main__":
    sys.exit(main())
