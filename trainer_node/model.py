"""The policy: a Hugging Face causal language model, its log-probabilities, its optimiser and its export.

Owns the one place where a model is called. Invariant: a log-probability given here is the one a sampler at the same
temperature would have given for the same ids and weights, so the two can be compared and divided.

The wrapper holds a plain `torch.nn.Module` and touches it only through forward, parameters and state, which is what
FSDP2's `fully_shard` leaves in place.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from node_runtime.errors import EXIT_USAGE, NodeError
from trainer_node.batching import Microbatch, pad, plan_microbatches

# What belongs to a tokenizer in a Hugging Face folder. Copied, not re-saved: the hash of the template must not change.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "generation_config.json",
)


class PolicyModel:
    """The trained policy. Not thread-safe: one thread at a time works with it."""

    def __init__(
        self, module: nn.Module, path: Path, device: torch.device, *, tokens_per_microbatch: int = 4096
    ) -> None:
        self.module = module
        self.path = path
        self.device = device
        self.tokens_per_microbatch = tokens_per_microbatch
        self._decoder, self._head = _split(module, device)

    @classmethod
    def load(
        cls, path: Path, *, dtype: str = "float32", device: str = "auto", tokens_per_microbatch: int = 4096
    ) -> PolicyModel:
        """Raises NodeError (exit code 2) where the folder cannot be a model."""
        if not path.is_dir():
            raise NodeError(f"model folder {path} does not exist: give a Hugging Face folder", EXIT_USAGE)
        if not (path / "config.json").is_file():
            raise NodeError(f"model folder {path} has no config.json: give a Hugging Face model folder", EXIT_USAGE)
        import transformers

        # A process's stderr is its log, not a terminal.
        transformers.utils.logging.disable_progress_bar()
        chosen = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
        try:
            module = transformers.AutoModelForCausalLM.from_pretrained(
                str(path), dtype=getattr(torch, dtype), local_files_only=True
            )
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise NodeError(
                f"model folder {path} cannot be loaded as a causal language model: {first}", EXIT_USAGE
            ) from error
        module.to(chosen)
        # Dropout would make the trainer's log-probabilities differ from the sampler's.
        module.eval()
        return cls(module, path, chosen, tokens_per_microbatch=tokens_per_microbatch)

    @property
    def vocab_size(self) -> int:
        return int(self.module.get_input_embeddings().num_embeddings)  # type: ignore[operator]

    def selected_logprobs_T(self, batch: Microbatch, temperature: float) -> Tensor:
        """log π(token | what stands before it) at the sampling temperature, float32, for the selected tokens."""
        if self._decoder is not None:
            hidden_BLD = self._decoder(input_ids=batch.ids_BL, use_cache=False).last_hidden_state
            logits_TV = self._head(hidden_BLD[batch.rows_T, batch.predicted_at_T])
        else:
            logits_BLV = self.module(input_ids=batch.ids_BL, use_cache=False).logits
            logits_TV = logits_BLV[batch.rows_T, batch.predicted_at_T]
        logits_TV = logits_TV.float()
        if temperature != 1.0:
            logits_TV = logits_TV / temperature
        return -nn.functional.cross_entropy(logits_TV, batch.targets_T, reduction="none")

    @torch.no_grad()
    def logprobs(
        self, ids: Sequence[Sequence[int]], selected: Sequence[bytes | bytearray], temperature: float
    ) -> list[list[float]]:
        """Log-probabilities of the selected tokens of each sequence, in order, without gradient."""
        results: list[list[float]] = [[] for _ in ids]
        for indices in plan_microbatches([len(row) for row in ids], self.tokens_per_microbatch):
            batch = pad([ids[i] for i in indices], [selected[i] for i in indices], self.device)
            values = self.selected_logprobs_T(batch, temperature).tolist()
            for row, value in zip(batch.rows_T.tolist(), values, strict=True):
                results[indices[row]].append(value)
        return results

    def probe_logprobs(self, probes: list[list[int]]) -> list[list[float]]:
        """Of token i+1 given the first i+1, at temperature 1: one fewer than tokens, as weights.proto's Probe wants."""
        return self.logprobs(probes, [b"\x00" + b"\x01" * (len(probe) - 1) for probe in probes], temperature=1.0)

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """What a sync sends: names as in the Hugging Face checkpoint. A tied weight goes once, under its first name."""
        seen: set[int] = set()
        for name, parameter in self.module.named_parameters(remove_duplicate=True):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            yield name, parameter.detach()
        persistent = self.module.state_dict(keep_vars=True)
        for name, buffer in self.module.named_buffers():
            if name in persistent:
                yield name, buffer

    def export(self, folder: Path) -> None:
        """Write a Hugging Face folder (weights, config, tokenizer files), whole or not at all."""
        partial = folder.with_name(folder.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        self.module.save_pretrained(str(partial), safe_serialization=True)  # type: ignore[operator]
        for name in TOKENIZER_FILES:
            if (self.path / name).is_file():
                shutil.copyfile(self.path / name, partial / name)
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)

    def make_optimizer(
        self, *, learning_rate: float, betas: tuple[float, float], eps: float, weight_decay: float
    ) -> torch.optim.AdamW:
        """AdamW; vectors (norms, biases) are not decayed."""
        parameters = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        groups: list[dict[str, Any]] = [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW([group for group in groups if group["params"]], lr=learning_rate, betas=betas, eps=eps)


def _split(module: nn.Module, device: torch.device) -> tuple[Any, Any]:
    """The decoder and the head, so that logits are made for trained tokens only; (None, None) where that is not exact.

    Some architectures scale or cap their logits outside the head. Whether this one does is measured, not assumed.
    """
    get_decoder = getattr(module, "get_decoder", None)
    get_head = getattr(module, "get_output_embeddings", None)
    if get_decoder is None or get_head is None:
        return None, None
    decoder, head = get_decoder(), get_head()
    if decoder is None or head is None or decoder is module:
        return None, None
    ids_BL = torch.arange(8, device=device).unsqueeze(0)
    with torch.no_grad():
        whole = module(input_ids=ids_BL, use_cache=False).logits
        parts = head(decoder(input_ids=ids_BL, use_cache=False).last_hidden_state)
    if whole.shape != parts.shape or not torch.allclose(whole, parts, rtol=1e-5, atol=1e-5):
        return None, None
    return decoder, head
