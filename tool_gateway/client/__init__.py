"""The gateway's client library: many tool calls on one stream, each of which ends in exactly one result."""

from tool_gateway.client.gateway import ToolGateway
from tool_gateway.client.interface import ToolCaller
from tool_gateway.client.reach import wait_for_gateway
from tool_gateway.client.types import CallOptions, ClientOptions, Earlier, Notice, OnEvent, Pending, Result

__all__ = [
    "CallOptions",
    "ClientOptions",
    "Earlier",
    "Notice",
    "OnEvent",
    "Pending",
    "Result",
    "ToolCaller",
    "ToolGateway",
    "wait_for_gateway",
]
