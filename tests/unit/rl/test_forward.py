"""The head sees the predecessors of the trained tokens; the model the mask and positions."""

import torch

from components.attention.plan import MaskPlan
from components.rl.forward import packed_logprobs
from components.rl.packing import PackItem, pack
from components.rollout.types import Ledger


def test_log_probabilities_are_those_of_the_dense_softmax():
    ledger = Ledger()
    ledger.append_rendered([4, 1, 2], [1, 2, 0])
    ledger.append_sampled([3, 0], [-0.1, -0.2], policy_version=0)
    (batch,) = pack([PackItem(tokens=ledger.freeze(), advantage=1.0, key="a")], tokens_per_batch=16)
    plan = MaskPlan.from_tree(batch.tree)
    torch.manual_seed(0)
    embedding = torch.randn(5, 8, dtype=torch.float64)
    seen = {}

    def model(tokens, *, mask, input_pos, index, head):
        seen.update(mask=mask, input_pos=input_pos, tokens=tokens)
        return head(embedding[tokens[0]][index], embedding)

    logprobs, entropy = packed_logprobs(
        model, batch, plan=plan, temperature=0.5, chunk_size=1, compute_entropy=True
    )
    assert seen["mask"] is plan
    assert seen["tokens"].tolist() == [[4, 1, 2, 3]]
    assert seen["input_pos"].tolist() == [[0, 1, 2, 3]]
    dense = torch.log_softmax(embedding[[2, 3]] @ embedding.T / 0.5, dim=-1)
    torch.testing.assert_close(logprobs, dense[[0, 1], [3, 0]])
    torch.testing.assert_close(entropy, -(dense.exp() * dense).sum(-1))
