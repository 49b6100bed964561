"""``python -m tool_gateway --config fermata.yaml --set gateway.port=7000``."""

from __future__ import annotations

import sys
from typing import cast

from node_runtime.interrupts import interruptible_start

if __name__ == "__main__":
    interruptible_start("tool_gateway")  # before the imports that take their time

from node_runtime.process import Lifetime, run
from node_runtime.runtime_settings import RuntimeSettings
from node_runtime.settings import load_for_process
from tool_gateway.settings import GatewaySettings


def main(argv: list[str] | None = None) -> int:
    """Exit code of the process."""
    sections = load_for_process("tool_gateway", {"runtime": RuntimeSettings, "gateway": GatewaySettings}, argv)
    runtime = cast(RuntimeSettings, sections["runtime"])
    settings = cast(GatewaySettings, sections["gateway"])

    async def serve_until_stopped(lifetime: Lifetime) -> None:
        from tool_gateway.process import serve

        await serve(settings, runtime, lifetime)

    return run(serve_until_stopped, runtime, process="tool_gateway")


if __name__ == "__main__":
    sys.exit(main())
