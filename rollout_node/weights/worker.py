"""What the node adds to vLLM's workers: methods that its weight sync calls by `collective_rpc`.

Runs inside vLLM's workers. Invariants: joining a group never blocks a step (it happens in a thread of its own); after
`fermata_abort` the model's layers are whole again, with their old weights if no tensor had arrived; receiving is
bounded in time with every engine.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from node_runtime.weight_wire import Background
from rollout_node.weights.gloo import GlooWeightTransferEngine
from rollout_node.weights.receipt import Receipt
from rollout_node.weights.storage import digest_storage


class WeightWorkerExtension:
    """Mixed into vLLM's worker class; `self` is the worker."""

    def fermata_join(self, backend: str, init_info: dict[str, Any]) -> None:
        """Begins to join the transfer group `init_info` names; `fermata_join_state` says how it went."""
        import torch
        from vllm.config.weight_transfer import WeightTransferConfig
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

        self.fermata_leave()
        engine = WeightTransferEngineFactory.create_engine(
            WeightTransferConfig(backend=backend), self.vllm_config, self.device, self.model_runner.get_model()
        )
        typed = engine.parse_init_info(init_info)

        def join() -> None:
            if self.device.type != "cpu":
                torch.accelerator.set_device_index(self.device.index)  # the current device is a thread's own
            engine.init_transfer_engine(typed)

        self._fermata_engine = engine
        self._fermata_joining = Background(join, "fermata-join")

    def fermata_join_state(self) -> tuple[str, str]:
        """("joining" | "joined" | "failed", why)."""
        joining: Background | None = getattr(self, "_fermata_joining", None)
        if joining is None:
            return "failed", "this worker was not asked to join a group"
        if not joining.done:
            return "joining", ""
        if joining.error is not None:
            return "failed", f"{type(joining.error).__name__}: {_first_line(joining.error)}"
        self.weight_transfer_engine = self._fermata_engine
        return "joined", ""

    def fermata_leave(self) -> None:
        """Destroys this worker's communicator. Not during an update."""
        if getattr(self, "weight_transfer_engine", None) is not None:
            self.weight_transfer_engine.shutdown()
        self._fermata_joining = None
        self._fermata_engine = None

    def fermata_start(self) -> None:
        """Gets the layers ready to be loaded and opens the receipt."""
        model = self.model_runner.get_model()
        receipt = Receipt(model, complete=self.model_config.quantization is None)
        try:
            self.start_weight_update()
        except BaseException:
            receipt.close()
            raise
        self._fermata_receipt = receipt

    def fermata_receive(self, update_info: dict[str, Any], timeout_s: float) -> None:
        """Receives and loads the tensors named. TimeoutError when the trainer does not send them in time."""
        if isinstance(self.weight_transfer_engine, GlooWeightTransferEngine):
            update_info = {**update_info, "timeout_s": timeout_s}
        with self._fermata_bounded(timeout_s):
            self.update_weights(update_info)

    def fermata_finish(self) -> dict[str, Any]:
        """Finishes loading; {"received": [(name, digest)], "missing": [name]}."""
        receipt: Receipt = self._fermata_receipt
        try:
            self.finish_weight_update()
            self._fermata_repack_heads()
        finally:
            receipt.close()
        return {"received": receipt.digests, "missing": receipt.missing()}

    def fermata_abort(self) -> bool:
        """Gives an update up. Returns whether a tensor had reached the model, which then is worth nothing."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        receipt: Receipt | None = getattr(self, "_fermata_receipt", None)
        if receipt is None:
            return False
        receipt.close()
        self._fermata_receipt = None
        with set_current_vllm_config(self.vllm_config):
            # Without loaded tensors this puts every layer's own tensors back; with some it ends the half-loaded state.
            finalize_layerwise_reload(self.model_runner.get_model(), self.model_config)
        self.weight_transfer_engine.reset_weight_update_target()
        self._weight_update_active = False
        return receipt.touched

    def fermata_storage(self) -> dict[str, Any]:
        """Digest of what this worker computes with; see `storage`."""
        parallel = self.vllm_config.parallel_config
        storage = digest_storage(
            self.model_runner.get_model(),
            {
                "tensor_parallel_size": parallel.tensor_parallel_size,
                "pipeline_parallel_size": parallel.pipeline_parallel_size,
                "rank": parallel.rank,
            },
        )
        return {
            "digest": storage.digest,
            "layout": storage.layout,
            "tensors": storage.tensors,
            "faults": storage.faults,
            "opaque": storage.opaque,
        }

    def _fermata_repack_heads(self) -> None:
        """A tied head on a CPU keeps a packed copy of the embedding, which the layerwise reload does not know of."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod

        with set_current_vllm_config(self.vllm_config):
            for module in self.model_runner.get_model().modules():
                method = getattr(module, "quant_method", None)
                if isinstance(module, ParallelLMHead) and isinstance(method, UnquantizedEmbeddingMethod):
                    method.process_weights_after_loading(module)

    @contextmanager
    def _fermata_bounded(self, timeout_s: float) -> Iterator[None]:
        """Cuts the transfer group after `timeout_s`: vLLM's NCCL engine has no timeout of its own."""
        cut = threading.Event()
        engine = self.weight_transfer_engine

        def end() -> None:
            cut.set()
            engine.shutdown()  # ncclCommAbort: kernels that wait for the trainer return

        timer = threading.Timer(timeout_s, end)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
        if cut.is_set():
            raise TimeoutError(f"the trainer did not send its tensors within {timeout_s:.1f} s")


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else "no reason was given"
