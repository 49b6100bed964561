"""What a worker received: digests per tensor, taken where every transfer engine hands tensors to the model.

Invariant: `touched` is set before the first tensor can change the model, and every tensor that reaches `load_weights`
while a receipt is open has its digest in it, whatever engine brought it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from node_runtime.weight_wire import digests_of


class Receipt:
    """Stands in for the model's `load_weights` from Start to Finish."""

    def __init__(self, model: Any, *, complete: bool) -> None:
        self._model = model
        self._load = model.load_weights
        self._expected = {name for name, _ in model.named_parameters()} if complete else set()
        self._loaded: set[str] | None = set()
        self.digests: list[tuple[str, bytes]] = []
        self.touched = False
        model.load_weights = self._receive

    def _receive(self, weights: Iterable[tuple[str, Any]]) -> Any:
        pairs = list(weights)
        self.digests.extend(zip([n for n, _ in pairs], digests_of([t for _, t in pairs]), strict=True))
        self.touched = True
        loaded = self._load(pairs)
        if loaded is None:
            self._loaded = None
        elif self._loaded is not None:
            self._loaded |= loaded
        return loaded

    def missing(self) -> list[str]:
        """The model's parameters that no tensor was loaded into; empty where the model does not say what it loaded."""
        return [] if self._loaded is None else sorted(self._expected - self._loaded)

    def close(self) -> None:
        """Puts the model's own `load_weights` back."""
        if self._model.__dict__.get("load_weights") == self._receive:
            del self._model.load_weights
