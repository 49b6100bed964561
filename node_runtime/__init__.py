"""What every Fermata process shares: settings, gRPC set-up, TLS, health, metrics, spans, logs and orderly shutdown."""

import os

# gRPC's core writes to stderr for every connection that fails, past all logging; it reads this when it is loaded.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
