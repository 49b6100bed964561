"""What every Fermata process shares: settings, gRPC set-up, TLS, health, metrics, spans, logs and orderly shutdown."""
