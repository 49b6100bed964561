"""What every Fermata process shares: settings, gRPC set-up, TLS, health, metrics, spans, logs and orderly shutdown."""

import os

# gRPC's core writes to stderr, past all logging, whenever a stranger knocks: under ERROR still for each that asks for
# another name. What matters reaches us as a status. It reads this when it is loaded.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
