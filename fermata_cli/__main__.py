"""`python -m fermata_cli` is the `fermata` command."""

import sys

from fermata_cli.main import main

sys.exit(main())
