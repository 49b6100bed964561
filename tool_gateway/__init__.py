"""The tool gateway: call state, catalogue and backends; ``tool_gateway.client`` is its public client library."""
