"""vLLM's own NCCL engine behind the same interface, as far as a machine without GPUs can tell.

Every message of ours maps onto vLLM's classes and functions; the collectives themselves need GPUs.
"""

from __future__ import annotations

import inspect
import threading
from typing import Any

import pytest
from fermata.v1 import weights_pb2 as pb

from rollout_node.weights import handshake
from rollout_node.weights.worker import WeightWorkerExtension
from trainer_node.weights import senders

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]


def init_request() -> pb.InitRequest:
    return pb.InitRequest(
        backend=pb.TRANSFER_BACKEND_NCCL,
        rendezvous_address="10.0.0.1",
        rendezvous_port=4000,
        world_size=5,
        rank_offset=3,
        packed=True,
        packed_buffer_bytes=1024,
        packed_buffers=senders.NCCL_BUFFERS,
    )


def test_init_maps_onto_vllms_init_info() -> None:
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine, NCCLWeightTransferInitInfo

    _, info = handshake.init_info(init_request(), timeout_s=5.0)
    typed = NCCLWeightTransferEngine.init_info_cls(**info)
    assert isinstance(typed, NCCLWeightTransferInitInfo)
    assert (typed.master_address, typed.master_port, typed.rank_offset, typed.world_size) == ("10.0.0.1", 4000, 3, 5)
    assert (typed.packed, typed.packed_buffer_size_bytes, typed.packed_num_buffers) == (True, 1024, 2)


def test_without_sizes_both_sides_fall_back_to_vllms_own() -> None:
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferInitInfo
    from vllm.distributed.weight_transfer.packed_tensor import DEFAULT_PACKED_BUFFER_SIZE_BYTES

    request = init_request()
    request.packed_buffer_bytes = request.packed_buffers = 0
    _, info = handshake.init_info(request, timeout_s=5.0)
    assert NCCLWeightTransferInitInfo(**info).packed_buffer_size_bytes == DEFAULT_PACKED_BUFFER_SIZE_BYTES


def test_update_maps_onto_both_engines_update_info() -> None:
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

    from rollout_node.weights.gloo import GlooWeightTransferEngine

    info = handshake.update_info([pb.TensorMeta(name="a", dtype="bfloat16", shape=[2, 3])])
    for engine in (NCCLWeightTransferEngine, GlooWeightTransferEngine):
        typed = engine.update_info_cls(**info)
        assert (typed.names, typed.dtype_names, typed.shapes) == (["a"], ["bfloat16"], [[2, 3]])


def test_the_senders_calls_fit_vllms_functions() -> None:
    from vllm.distributed.weight_transfer.nccl_common import trainer_init
    from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

    inspect.signature(trainer_init).bind({})
    inspect.signature(packed_nccl_broadcast_producer).bind(
        iterator=iter(()), group=None, src=0, post_iter_func=None, buffer_size_bytes=1, num_buffers=2
    )


def test_the_plugin_adds_gloo_beside_vllms_engines() -> None:
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    from rollout_node.weights.gloo import GlooWeightTransferEngine
    from rollout_node.weights.plugin import register

    register()
    register()
    assert {"nccl", "gloo"} <= set(WeightTransferEngineFactory._registry)
    assert WeightTransferEngineFactory._registry["gloo"]() is GlooWeightTransferEngine


class StuckEngine:
    """As vLLM's NCCL engine when the trainer is gone: only destroying the communicator wakes it."""

    def __init__(self) -> None:
        self.woken = threading.Event()

    def shutdown(self) -> None:
        self.woken.set()


def test_a_receive_without_a_timeout_of_its_own_is_cut_at_the_deadline() -> None:
    worker: Any = WeightWorkerExtension()
    worker.weight_transfer_engine = StuckEngine()
    worker.update_weights = lambda info: worker.weight_transfer_engine.woken.wait(30)
    with pytest.raises(TimeoutError, match=r"did not send its tensors within 0\.2 s"):
        worker.fermata_receive({}, 0.2)
    worker.update_weights = lambda info: None
    worker.fermata_receive({}, 30.0)
