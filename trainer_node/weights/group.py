"""The transfer group: the trainer's sender and every worker of the nodes in it, one generation at a time.

Invariants: a generation is never changed, only replaced by the next; a rendezvous that does not come about ends within
its time, says who was missing, and leaves no thread that anybody waits for.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from fermata.v1 import weights_pb2 as pb

from trainer_node.weights.control import Lost, NodeControl, Refused
from trainer_node.weights.senders import Sender

Result = TypeVar("Result")


class GroupError(Exception):
    """The group could not be made. `lost`: who is to blame, and why; may be empty."""

    def __init__(self, sentence: str, lost: dict[str, str]) -> None:
        super().__init__(sentence)
        self.lost = lost


async def in_thread(call: Callable[[], Result], name: str) -> Result:
    """Runs a blocking call in a daemon thread. Cancelling leaves the thread to itself: it holds nothing of ours."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Result] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if future.cancelled():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)

    def run() -> None:
        result, error = None, None
        try:
            result = call()
        except BaseException as caught:  # noqa: BLE001  (raised where the result is awaited)
            error = caught
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return await future


class TransferGroup:
    """One generation of the group."""

    def __init__(self, sender: Sender, members: Sequence[NodeControl], lineage: str, generation: int) -> None:
        self.sender = sender
        self.nodes = frozenset(member.node for member in members)
        self.lineage = lineage
        self.generation = generation

    @classmethod
    async def form(
        cls,
        make_sender: Callable[[], Sender],
        members: Sequence[NodeControl],
        version: pb.WeightVersion,
        generation: int,
        *,
        timeout_s: float,
    ) -> TransferGroup:
        """Everybody joins at once. Raises GroupError."""
        sender = await in_thread(make_sender, "weights-store")
        world_size = 1 + sum(member.workers for member in members)
        own = asyncio.ensure_future(in_thread(lambda: sender.join(world_size, timeout_s), "weights-join"))
        joins: dict[asyncio.Future[Any], str] = {own: "the trainer"}
        rank = 1
        for member in members:
            request = pb.InitRequest(
                context=pb.SyncContext(version=version, group_generation=generation, deadline_ms=int(timeout_s * 1000)),
                backend=sender.backend,
                rendezvous_address=sender.host,
                rendezvous_port=sender.port,
                world_size=world_size,
                rank_offset=rank,
                packed=True,
                packed_buffer_bytes=sender.bucket_bytes,
                packed_buffers=sender.buffers,
            )
            joins[asyncio.ensure_future(member.call("Init", request, timeout_s))] = member.node
            rank += member.workers
        complete = False
        try:
            done, waiting = await asyncio.wait(joins, timeout=timeout_s + 1, return_when=asyncio.FIRST_EXCEPTION)
            first = {joins[join]: error for join in done if (error := join.exception()) is not None}
            if not first and not waiting:
                complete = True
                for member in members:
                    member.generation = generation
                return cls(sender, members, version.lineage, generation)
        finally:
            if not complete:
                sender.close()  # whoever still waits for the rendezvous gives up now
                for join in joins:
                    join.cancel()
                await asyncio.gather(*joins, return_exceptions=True)
        # Later failures follow from the first; who did not answer is to blame before who says that others are missing.
        lost = {node: str(error) for node, error in first.items() if isinstance(error, Lost)}
        blame = lost or {node: str(error) for node, error in first.items() if isinstance(error, Refused)}
        sentence = "; ".join(f"{error}" for error in first.values()) or f"not everybody came within {timeout_s:.0f} s"
        for error in first.values():
            if not isinstance(error, Lost | Refused | RuntimeError | TimeoutError):
                raise error
        raise GroupError(f"the transfer group could not be made: {sentence}", blame)

    def close(self) -> None:
        self.sender.close()
