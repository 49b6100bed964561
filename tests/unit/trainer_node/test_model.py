import json

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from node_runtime.errors import NodeError
from tests.unit.trainer_node.builders import tiny_module, tiny_policy
from trainer_node.batching import pad, plan_microbatches
from trainer_node.model import PolicyModel


@given(st.lists(st.integers(1, 200), max_size=60), st.integers(1, 500))
def test_every_sequence_is_in_exactly_one_microbatch(lengths, max_tokens):
    batches = plan_microbatches(lengths, max_tokens)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    for batch in batches:
        width = max(lengths[index] for index in batch)
        assert len(batch) == 1 or width * len(batch) <= max_tokens


def test_sorting_by_length_keeps_padding_small():
    lengths = [53 + (7 * i) % 45 for i in range(128)]
    padded = sum(len(batch) * max(lengths[i] for i in batch) for batch in plan_microbatches(lengths, 2048))
    assert padded < 1.1 * sum(lengths)


def test_pad_lays_selected_tokens_out_flat_and_in_order():
    batch = pad([[5, 6, 7], [8, 9]], [b"\0\1\1", b"\0\1"], torch.device("cpu"))
    assert batch.ids_BL.tolist() == [[5, 6, 7], [8, 9, 0]]
    assert batch.rows_T.tolist() == [0, 0, 1]
    assert batch.predicted_at_T.tolist() == [0, 1, 0]
    assert batch.targets_T.tolist() == [6, 7, 9]


def test_the_first_token_has_no_logprob():
    with pytest.raises(ValueError, match="nothing predicts it"):
        pad([[1, 2]], [b"\1\1"], torch.device("cpu"))


SEQUENCES = [[1, 2, 3, 4, 5], [9, 8, 7], [11, 12, 13, 14, 15, 16, 17]]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("tied", [False, True])
def test_logprobs_equal_those_of_each_sequence_alone(tied, temperature):
    policy = tiny_policy(tied=tied)
    got = policy.logprobs(SEQUENCES, [b"\0" + b"\1" * (len(ids) - 1) for ids in SEQUENCES], temperature)
    for ids, values in zip(SEQUENCES, got, strict=True):
        with torch.no_grad():
            logits = policy.module(input_ids=torch.tensor([ids])).logits[0] / temperature
        wanted = torch.log_softmax(logits, -1)[torch.arange(len(ids) - 1), torch.tensor(ids[1:])]
        assert values == pytest.approx(wanted.tolist(), abs=1e-5)


def test_probes_get_one_logprob_fewer_than_tokens():
    values = tiny_policy().probe_logprobs([[1, 2, 3], [4, 5]])
    assert [len(row) for row in values] == [2, 1]


def test_the_split_into_decoder_and_head_is_used_only_where_it_is_exact():
    assert tiny_policy()._decoder is not None

    class Capped(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = tiny_module()

        def get_decoder(self):
            return self.inner.model

        def get_output_embeddings(self):
            return self.inner.lm_head

        def forward(self, **kwargs):
            output = self.inner(**kwargs)
            output.logits = 0.5 * torch.tanh(output.logits)
            return output

    from pathlib import Path

    policy = PolicyModel(Capped(), Path("none"), torch.device("cpu"))
    assert policy._decoder is None
    assert policy.probe_logprobs([[1, 2, 3]]) != tiny_policy().probe_logprobs([[1, 2, 3]])


def test_sync_names_are_the_checkpoints_and_a_tied_weight_goes_once():
    untied = dict(tiny_policy().named_tensors())
    assert {"model.embed_tokens.weight", "lm_head.weight", "model.layers.0.self_attn.q_proj.weight"} <= untied.keys()
    tied = dict(tiny_policy(tied=True).named_tensors())
    assert "model.embed_tokens.weight" in tied
    assert "lm_head.weight" not in tied


def test_export_is_a_folder_that_transformers_loads(tmp_path):
    source = tmp_path / "source"
    tiny_module().save_pretrained(source)
    (source / "tokenizer.json").write_text("{}")
    (source / "chat_template.jinja").write_text("{{ messages }}")
    policy = PolicyModel.load(source)
    with torch.no_grad():
        for parameter in policy.module.parameters():
            parameter.add_(0.01)
    target = tmp_path / "run" / "model"
    policy.export(target)
    policy.export(target)  # over an older one
    assert (target / "chat_template.jinja").read_text() == "{{ messages }}"
    assert (target / "tokenizer.json").exists()
    again = transformers.AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    for (name, mine), (_, theirs) in zip(policy.module.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(mine, theirs), name
    assert not target.with_name("model.partial").exists()


def test_a_folder_that_is_no_model_is_one_sentence(tmp_path):
    with pytest.raises(NodeError, match="does not exist") as caught:
        PolicyModel.load(tmp_path / "absent")
    assert caught.value.exit_code == 2
    with pytest.raises(NodeError, match=r"no config\.json"):
        PolicyModel.load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no such model"}))
    with pytest.raises(NodeError, match="cannot be loaded"):
        PolicyModel.load(tmp_path)


def test_vectors_are_not_decayed():
    optimizer = tiny_policy().make_optimizer(learning_rate=1e-3, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
    matrices, vectors = optimizer.param_groups
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.1, 0.0)
    assert all(p.ndim >= 2 for p in matrices["params"])
    assert all(p.ndim == 1 for p in vectors["params"])
