# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Tool calling in the loop
#
# A model that calls tools spends much of a rollout waiting: for a search, a sandbox, a test suite, a person. This
# notebook shows how Fermata holds *one* trajectory at its tool call, for as long as it takes, while the engine goes on
# with all others, and what a trainer gets out of it.
#
# Everything here is real: a vLLM engine, a gateway, a tool, each a process of its own. Only the model is tiny, so two
# processor cores and a few minutes are enough. Every figure comes from the run itself; to repeat it, *restart the
# kernel and run all cells*. You know language models and reinforcement learning; of Fermata you need to know nothing.

# %%
import asyncio
import json
import os
import re
import statistics
import tempfile
import time
from collections import deque
from contextlib import AsyncExitStack
from pathlib import Path

# Beside this notebook: drawings, vLLM without Fermata to compare with, and who did what when.
import pictures
from plain_vllm import PlainVllm
from records import Record, spans_of

work = tempfile.TemporaryDirectory(prefix="fermata-")
os.chdir(work.name)  # what the notebook writes is gone with its kernel
system = AsyncExitStack()  # what it starts is stopped in the last cell

# %% [markdown]
# ## 1. What "in-loop" means
#
# Many rollout loops work in **lock-step turns**: generate a turn for the whole batch, run all tools of that turn,
# generate the next. One slow tool holds up everybody, and in each turn there is one.
#
# **In-loop**, a trajectory is suspended at its own call and resumed by itself when its own answer is there. Nobody
# waits for somebody else's tool. A sketch with made-up times:

# %%
tool_seconds = [[5, 1], [1, 1.5], [1, 5], [2, 1]]  # of four trajectories with two calls each
pictures.schematic(tool_seconds)

# %% [markdown]
# ## 2. A small system
#
# ```
#   this notebook ───►  rollout node ───►  tool gateway ───►  tool backend
#   (in training:       a vLLM engine      queues, retries,   your tools,
#   the trainer)        and trajectories   one outcome        in any language
# ```
#
# We begin with the tool: a calculator that is **slow on purpose**. It either waits until somebody approves the call,
# or takes a random time with a heavy tail (log-normal, as tool times tend to be). Which of them is told by whoever
# starts the trajectory, in `call.context`; the model knows nothing of it.

# %%
# %%writefile slow_tools.py
import asyncio
import os
import random

from tool_backend import ToolContext, tool
from tool_backend.calculator.tool import calculate


@tool(read_only=True, default_timeout_s=3600, max_timeout_s=3600)
async def calculator(call: ToolContext, expression: str) -> str:
    """Compute a + b, a - b or a * b."""
    if approval := call.context.get("approval"):
        while not os.path.exists(approval):
            await asyncio.sleep(0.02)
    if seed := call.context.get("seed"):  # the same seed and expression: the same time
        await asyncio.sleep(random.Random(seed + expression).lognormvariate(mu=-1.4, sigma=1.0))
    return calculate(expression, max_operators=1)


# %% [markdown]
# Now the processes: those of `fermata demo`, without its trainer. Loading the engine takes most of the time.

# %%
from fermata_cli.cluster.plan import Role
from fermata_cli.demo.serving import serving_cluster

cluster = await system.enter_async_context(serving_cluster(Path("run"), tools={"calculator": "slow_tools:calculator"}))
await cluster.start(trainer=False)
(gateway,), (node,) = cluster.of_role(Role.GATEWAY), cluster.of_role(Role.ROLLOUT)

# %% [markdown]
# ## 3. One trajectory, watched
#
# `RolloutClient` speaks to the rollout node as the trainer does. We ask a question whose call has to be approved, and
# listen until the node says *parked*.

# %%
from trainer_node.client import RolloutClient

client = await system.enter_async_context(RolloutClient([node.address]))

question = "What is (543+80)+90?"
held = client.start(question, tools=["calculator"], name="held", temperature=0, context={"approval": "approved"})
parked = await held.until("parked")
for heard in held.heard:
    print(f"{heard.seconds:8.3f} s  {heard.kind}")

# %% [markdown]
# The model has called its tool and is suspended. The event brings a snapshot: the tokens so far, and the call that is
# open. Nothing else is left of the trajectory: no slot of the engine, no thread, no lock. Should the node die now,
# another would go on from here.

# %%
snapshot = parked.said.snapshot
(open_call,) = snapshot.pending
print(f"open call  {open_call.tool}({open_call.args_json.decode()})")
print(f"snapshot   {snapshot.total_tokens} tokens, {snapshot.ByteSize()} bytes")

# %% [markdown]
# The call stays open while you read this. Take your time.
#
# ## 4. Meanwhile, the others
#
# We start further trajectories, whose calls take random times, and wait until **all of them** have finished. If
# anybody waited for somebody else's tool, this cell would never end.

# %%
from fermata_cli.demo import EVAL_TASKS
from trainer_node.tasks import load_tasks

tasks = [task for task in load_tasks(EVAL_TASKS) if task.kind in ("one_call", "two_calls")]
others = [client.start(t.messages, tools=["calculator"], name="other", context={"seed": t.id}) for t in tasks[:31]]
finished = await asyncio.gather(*others)

print(f"{len(finished)} others have finished, with {sum(len(t.calls) for t in finished)} calls between them")
print(f"{held.trajectory_id} is still {held.heard[-1].kind}")
assert not held.done

# %% [markdown]
# Now the approval. Nobody wakes the trajectory up: the tool answers, the gateway passes the answer on, the node goes
# on generating where it stopped.

# %%
Path("approved").touch()
trajectory = await held
for heard in held.heard:
    print(f"{heard.seconds:8.3f} s  {heard.kind}")
print(f"{question}  {trajectory.answer}")
assert trajectory.answer == str((543 + 80) + 90)

# %% [markdown]
# Every process of Fermata writes *spans*: what happened, from when to when. Drawn as lanes, a row for each trajectory:

# %%
spans = await spans_of(Path("run/spans"), [trajectory, *finished])
pictures.lanes(Record.of_spans(spans), held.trajectory_id)

# %% [markdown]
# How soon did it go on, once its tool had answered?

# %%
mine = sorted((span for span in spans if span.trajectory == held.trajectory_id), key=lambda span: span.start)
wait = next(span for span in mine if span.kind == "tool-run" and span.attributes.get("seen_from") == "node")
resumed = next(span for span in mine if span.kind == "generate" and span.start >= wait.end)
print(f"held for {wait.end - wait.start:.2f} s")
print(f"generating again {1000 * (resumed.start - wait.end):.1f} ms after the answer reached the node")

# %% [markdown]
# ## 5. Blocking against in-loop, measured
#
# The same tasks, three ways:
#
# - **lock-step turns**, written below;
# - **plain asyncio**, written below too: a coroutine for each conversation. It does not block either, so it is the
#   control to be held against;
# - **in-loop**: the rollout node.
#
# All three have the same model and engine settings on the same core, greedy sampling, the same gateway and tool, and
# the same number of places; a free place is filled as soon as it can be. A call takes equally long in all three, for
# its time follows from seed and expression. The two controls get a vLLM engine of their own, with no rollout node
# around it.

# %%
from fermata_cli.demo import MODEL_DIR
from fermata_cli.demo.chat import Chat
from node_runtime.runtime_settings import RuntimeSettings
from tool_gateway.client import CallOptions, ToolGateway

chat = Chat(MODEL_DIR)  # the model's chat format, in token ids
vllm = await PlainVllm.start(Path("run/fermata.yaml"), Path("vllm.log"), stop_ids=[chat.end_id])
system.push_async_callback(vllm.stop)
tools = await system.enter_async_context(
    ToolGateway([gateway.address], runtime=RuntimeSettings(), run_id="control", node_id="control")
)

# %% [markdown]
# What both controls are made of: let the model speak, then run the tool that it called.

# %%
CALL = re.compile(r"<tool_call>\n(.*)\n</tool_call>")


class Conversation:
    def __init__(self, task, repeat, arm):
        self.ids, self.turn, self.answer = chat.question(task.messages[0][1]), 0, ""
        self.seed, self.name = f"{repeat}/{task.id}", f"{arm}-{repeat}-{task.id}"

    async def generate(self):
        with record.during(self.name, "generate"):
            sampled = await vllm.generate(self.ids)
        self.ids, self.turn, self.answer = self.ids + sampled, self.turn + 1, chat.text(sampled[:-1])

    async def run_tool(self):
        """False where the model called none: the conversation is over."""
        if (found := CALL.search(self.answer)) is None:
            return False
        call, key = json.loads(found[1]), f"control/{self.name}/0/{self.turn}/0"
        arguments, options = json.dumps(call["arguments"]).encode(), CallOptions(context={"seed": self.seed})
        with record.during(self.name, "tool"):
            result = await tools.call(key=key, tool=call["name"], args_json=arguments, deadline_s=60, options=options)
        self.ids = self.ids + chat.tool_answer(result.text.decode())
        return True


# %% [markdown]
# **Lock-step turns.** The tools of a turn run in parallel, and whoever is done makes room at once.


# %%
async def lock_step(tasks, repeat):
    everybody = [Conversation(task, repeat, "lock-step") for task in tasks]
    waiting, batch = deque(everybody), []
    while waiting or batch:
        while waiting and len(batch) < PLACES:
            batch.append(waiting.popleft())
        await asyncio.gather(*(c.generate() for c in batch))  # a turn of everybody,
        called = await asyncio.gather(*(c.run_tool() for c in batch))  # then all of its tools
        batch = [c for c, goes_on in zip(batch, called, strict=True) if goes_on]
    return everybody


# %% [markdown]
# **Plain asyncio.**


# %%
async def plain_asyncio(tasks, repeat):
    free = asyncio.Semaphore(PLACES)

    async def converse(task):
        async with free:
            c = Conversation(task, repeat, "asyncio")
            await c.generate()
            while await c.run_tool():
                await c.generate()
            return c

    return await asyncio.gather(*map(converse, tasks))


# %% [markdown]
# **In-loop.** There is no loop to write: the node has it.


# %%
async def in_loop(tasks, repeat):
    free = asyncio.Semaphore(PLACES)

    async def roll_out(task):
        async with free:
            context = {"seed": f"{repeat}/{task.id}"}
            return await client.start(task.messages, tools=["calculator"], name="loop", temperature=0, context=context)

    return await asyncio.gather(*map(roll_out, tasks))


# %% [markdown]
# Each repeat draws new tool times, the same for all three.

# %%
PLACES, REPEATS, measured = 32, 3, tasks[:80]
arms = {"lock-step turns": lock_step, "plain asyncio": plain_asyncio, "in-loop (Fermata)": in_loop}
seconds, right, records = {name: [] for name in arms}, {name: [] for name in arms}, {}

for repeat in range(REPEATS):
    for name, arm in arms.items():
        record = records[name] = Record()
        began = time.perf_counter()
        done = await arm(measured, repeat)
        seconds[name].append(time.perf_counter() - began)
        right[name].append(sum(d.answer == t.answer for d, t in zip(done, measured, strict=True)))
records["in-loop (Fermata)"] = Record.of_spans(await spans_of(Path("run/spans"), done))

# %%
for name, taken in seconds.items():
    print(
        f"{name:18} median {statistics.median(taken):5.1f} s, from {min(taken):.1f} to {max(taken):.1f}"
        f"   right answers: {right[name]} of {len(measured)}"
    )
for control in ("lock-step turns", "plain asyncio"):
    ratios = [other / ours for other, ours in zip(seconds[control], seconds["in-loop (Fermata)"], strict=True)]
    print(f"{control} / in-loop: median {statistics.median(ratios):.2f}, from {min(ratios):.2f} to {max(ratios):.2f}")
assert statistics.median(seconds["lock-step turns"]) > statistics.median(seconds["in-loop (Fermata)"])
pictures.repeats(seconds)

# %% [markdown]
# Where the time went, in the last repeat. Orange is lost: the answer is there, and the trajectory waits for the tools
# of others. White are places that nobody may take yet, or for which no task is left.

# %%
pictures.places(records, PLACES)

# %% [markdown]
# **Plain asyncio is about as fast as in-loop**, since it does not block either; for one batch, a `gather` is enough.
# What Fermata adds is what training needs besides:
#
# | | plain asyncio over vLLM | Fermata |
# |---|---|---|
# | nobody waits for another's tool | yes | yes |
# | exact ids, mask, log-probabilities and weight version of every token | yours to keep | kept and checked |
# | a rollout node, gateway or tool backend dies | conversations are lost, tools run twice | goes on from snapshots; a call has one outcome |
# | new weights while calls are open | wait for everybody, or mix unnoticed | between two engine steps, proven, each token stamped |
# | a tool's host fails | an exception, or a wrong answer | retried; else masked, never scored |
#
# ## 6. What the trainer sees
#
# A trajectory arrives as *segments*: runs of tokens with one author each. This is the one that was held:

# %%
from fermata.v1.rollout_pb2 import SegmentKind

print(f"{'kind':8}{'turn':>4}{'tokens':>8}{'trained':>9}{'weights':>9}  text")
for s in trajectory.segments:
    kind = SegmentKind.Name(s.kind).removeprefix("SEGMENT_KIND_")
    weights = ", ".join(f"v{version.number}" for version, _ in s.versions) or "–"
    text = chat.text(list(trajectory.ids[s.start : s.stop]))
    print(f"{kind:8}{s.turn:4}{len(s):8}{sum(trajectory.mask[s.start : s.stop]):9}{weights:>9}  {text!r}")

# %% [markdown]
# And token by token. Only what the model sampled is trained on; what the tool wrote is context.

# %%
pictures.token_strip(trajectory, chat.text)

# %% [markdown]
# Three things a trainer relies on, checked here on all trajectories of section 4.
#
# **The mask is exact.** Trained is what the model sampled, and nothing else; segments leave no gap.

# %%
from node_runtime.segments import MODEL, Columns

for t in [trajectory, *finished]:
    assert [s.start for s in t.segments] == [0, *(s.stop for s in t.segments[:-1])]
    assert t.segments[-1].stop == len(t.ids)
    for s in t.segments:
        assert set(t.mask[s.start : s.stop]) == ({1} if s.kind == MODEL else {0})
trained = sum(t.trained_tokens for t in finished)
print(f"{trained} tokens trained, {sum(map(len, finished)) - trained} masked")

# %% [markdown]
# **Ids are append-only.** What the snapshot held while the call was open is, id by id, how the trajectory begins.

# %%
before = Columns.unpack(snapshot.segments).ids
assert trajectory.ids[: len(before)] == before
print(f"{len(before)} ids at the call, the same among the {len(trajectory)} at the end")

# %% [markdown]
# **Tokens trained are tokens sampled.** For these very ids, the trainer's model (transformers) finds the
# log-probabilities that the sampler (vLLM) reported when it drew them, over all suspensions.

# %%
from trainer_node.model import PolicyModel

policy = PolicyModel.load(MODEL_DIR, device="cpu")
by_trainer = policy.logprobs([t.ids for t in finished], [t.mask for t in finished], temperature=1.0)
by_sampler = [[p for p, trained in zip(t.logprobs, t.mask, strict=True) if trained] for t in finished]
gaps = [abs(a - b) for pair in zip(by_trainer, by_sampler, strict=True) for a, b in zip(*pair, strict=True)]
print(f"{len(gaps)} sampled tokens: they differ by {statistics.mean(gaps):.1e} on average, by {max(gaps):.1e} at most")
assert max(gaps) < 1e-2

# %% [markdown]
# Why ids, and not text? Because text does not bring them back. Where a tool spells a control token, in an error message
# perhaps, Fermata keeps that as text. A loop that encodes the conversation anew in each turn makes the token itself of
# it, and trains on a conversation that the model never had:

# %%
from transformers import AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
sampled = await asyncio.gather(*(client.start(t.messages, tools=["calculator"]) for t in load_tasks(EVAL_TASKS)))
anew = [tokenizer(tokenizer.decode(t.ids), add_special_tokens=False).input_ids for t in sampled]
changed = [(list(t.ids), ids) for t, ids in zip(sampled, anew, strict=True) if ids != list(t.ids)]
print(f"{len(changed)} of {len(sampled)} trajectories get other ids when their text is encoded anew")
for before, after in changed[:1]:
    at = next(at for at, (a, b) in enumerate(zip(before, after, strict=False)) if a != b)
    shown = ["|".join(chat.text([id]) for id in ids[at - 1 : at + 4]) for ids in (before, after)]
    print(f"for example  {shown[0]!r}  comes back as  {shown[1]!r}")

# %% [markdown]
# ## 7. Clean up
#
# In reverse order: the engine of the controls, the client, then rollout node, gateway and backend.

# %%
await system.aclose()
for child in cluster.children:
    print(f"{child.spec.name:14} ended with exit code {child.ended.result()}")
os.chdir(Path.home())
work.cleanup()

# %% [markdown]
# ## Where to go next
#
# - `make demo` closes the loop: the same processes and a trainer; this model learns to use its tools while you watch.
# - [Your first tool](../../docs/first-tool.md), in Python, or in any language that speaks
#   [tool.proto](../../protos/fermata/v1/tool.proto).
# - [How a trajectory lives](../../docs/trajectory.md), and
#   [why a call ends the engine's request](../../docs/adr/0002-finish-and-resubmit.md) instead of pausing inside it.
# - [What Fermata promises](../../README.md#what-it-promises), with the tests that fail if it does not hold.
