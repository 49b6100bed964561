"""Tool backends as the gateway sees them: a connection per address, one catalogue, and the choice among backends."""

from tool_gateway.backends.backend import Backend
from tool_gateway.backends.pool import Backends, InstanceReplaced, Lease, NoSuchTool, ToolLeftOut

__all__ = ["Backend", "Backends", "InstanceReplaced", "Lease", "NoSuchTool", "ToolLeftOut"]
