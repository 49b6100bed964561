"""The demo's assets: a tiny model that half fails with its tools, and tasks that it cannot solve without them.

Everything here is made by the committed scripts `make_tasks`, `tokenizer` and `warm_start`, seeded, so that what is
shipped (`model/`, `tasks/`, `corpus.jsonl`) can be made again. Importing this package costs nothing: torch and
transformers are imported by `warm_start` and `rehearsal` alone.
"""

from pathlib import Path

HERE = Path(__file__).resolve().parent
MODEL_DIR = HERE / "model"
TRAIN_TASKS = HERE / "tasks" / "train.jsonl"
EVAL_TASKS = HERE / "tasks" / "eval.jsonl"
CORPUS = HERE / "corpus.jsonl"
