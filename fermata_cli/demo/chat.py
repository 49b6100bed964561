"""Owns the ids of a conversation as the rollout node makes them: template text in one piece, foreign text in another.

Invariant: ids are appended, never made again from text; text from a task or a tool cannot become a control token.
"""

from pathlib import Path

import tokenizers

_BEFORE_QUESTION = "<|im_start|>user\n"
_AFTER_QUESTION = "<|im_end|>\n<|im_start|>assistant\n"
_BEFORE_ANSWER = "\n<|im_start|>user\n<tool_response>\n"
_AFTER_ANSWER = "\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
_END = "<|im_end|>"


class Chat:
    """Turns questions, model turns and tool answers into ids with the tokenizer of a model folder."""

    def __init__(self, model_dir: Path) -> None:
        path = str(model_dir / "tokenizer.json")
        self._tokenizer = tokenizers.Tokenizer.from_file(path)
        self._plain = tokenizers.Tokenizer.from_file(path)
        self._plain.encode_special_tokens = True  # control tokens in foreign text stay text
        self.end_id = self.control_id(_END)

    def question(self, text: str) -> list[int]:
        """The ids of a prompt: the user's question, then the start of the model's turn."""
        return self._own(_BEFORE_QUESTION) + self.foreign(text) + self._own(_AFTER_QUESTION)

    def turn(self, text: str) -> list[int]:
        """The ids of a whole turn of the model, its end included."""
        return self._own(text + _END)

    def tool_answer(self, text: str) -> list[int]:
        """The ids between the end of a turn that called a tool and the start of the next turn."""
        return self._own(_BEFORE_ANSWER) + self.foreign(text) + self._own(_AFTER_ANSWER)

    def foreign(self, text: str) -> list[int]:
        """The ids of text that is not trusted."""
        return self._plain.encode(text, add_special_tokens=False).ids

    def control_id(self, token: str) -> int:
        """The id of one control token."""
        return self._tokenizer.token_to_id(token)

    def text(self, ids: list[int]) -> str:
        """The text of ids, control tokens included."""
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def _own(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids
