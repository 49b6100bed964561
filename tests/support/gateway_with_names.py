"""A real gateway whose names are looked up in a file, in the place of DNS; all else is as ``python -m tool_gateway``.

    python tests/support/gateway_with_names.py NAMES.json --set gateway.pools='[{name: calc, dns: "calc:7020"}]'

NAMES.json holds {"calc": ["127.0.0.2", "127.0.0.3"]}, is read at each look-up, and knows no other names.
"""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path
from typing import cast

from node_runtime.addresses import join
from node_runtime.process import Lifetime, run
from node_runtime.runtime_settings import RuntimeSettings
from node_runtime.settings import load_for_process
from tool_gateway.process import serve
from tool_gateway.settings import GatewaySettings


def main(names: Path, argv: list[str]) -> int:
    sections = load_for_process("gateway_with_names", {"runtime": RuntimeSettings, "gateway": GatewaySettings}, argv)
    runtime = cast(RuntimeSettings, sections["runtime"])
    settings = cast(GatewaySettings, sections["gateway"])

    def look_up(host: str, port: int) -> list[str]:
        known = json.loads(names.read_text())
        if host not in known:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [join(number, port) for number in known[host]]

    async def serve_until_stopped(lifetime: Lifetime) -> None:
        await serve(settings, runtime, lifetime, look_up)

    return run(serve_until_stopped, runtime, process="tool_gateway")


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
