"""`python -m rollout_node --config fermata.yaml`."""

import sys

from rollout_node.main import main

if __name__ == "__main__":
    sys.exit(main())
