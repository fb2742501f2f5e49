import pytest
import torch
from torch.nn import functional as F

from components.attention.plan import MaskPlan
from components.models.smollm2 import smollm2
from components.training.parallelize import World, build_policy

from . import tiny


@pytest.fixture
def model(tmp_path):
    return smollm2(tiny.write(tmp_path / "tiny"), dtype=torch.float32, backend="folded")


TOKENS = torch.tensor([[3, 14, 15, 9, 2, 6, 5]])
POSITIONS = torch.arange(7)[None]


def test_only_the_picked_rows_get_a_head(model):
    plan = MaskPlan.causal(7)
    logits = model(TOKENS, mask=plan, input_pos=POSITIONS)
    assert logits.shape == (7, 50)
    assert logits.dtype == torch.float32
    index = torch.tensor([5, 0, 5])
    picked = model(TOKENS, mask=plan, input_pos=POSITIONS, index=index)
    assert torch.allclose(picked, logits[index], atol=1e-6)

    seen = []

    def head(hidden, weight):
        seen.append((hidden.shape, weight))
        return F.linear(hidden, weight)

    got = model(TOKENS, mask=plan, input_pos=POSITIONS, index=index, head=head)
    assert torch.allclose(got, picked, atol=1e-6)
    (shape, weight), *_ = seen
    assert shape == (3, 24)
    assert weight is model.tok_embeddings.weight


def test_the_index_counts_rows_of_the_whole_batch(model):
    tokens = torch.cat([TOKENS, TOKENS.flip(1)])
    positions = POSITIONS.expand(2, -1)
    plan = MaskPlan.causal(7)
    second = model(tokens, mask=plan, input_pos=positions, index=torch.arange(7, 14))
    alone = model(TOKENS.flip(1), mask=plan, input_pos=POSITIONS)
    assert torch.allclose(second, alone, atol=1e-5)


def test_a_tied_embedding_gets_both_gradients(tmp_path):
    tied = smollm2(tiny.write(tmp_path / "tied"), dtype=torch.float32, backend="folded")
    state = tiny.tensors() | {"lm_head.weight": tiny.tensors()["model.embed_tokens.weight"].clone()}
    untied = smollm2(
        tiny.write(tmp_path / "untied", tie=False, state=state),
        dtype=torch.float32,
        backend="folded",
    )
    for m in (tied, untied):
        logits = m(TOKENS, mask=MaskPlan.causal(7), input_pos=POSITIONS)
        F.cross_entropy(logits[:-1], TOKENS[0, 1:]).backward()
    assert untied.output is not None
    total = untied.tok_embeddings.weight.grad + untied.output.weight.grad
    assert torch.allclose(tied.tok_embeddings.weight.grad, total, atol=1e-6)
    assert "output.weight" not in tied.state_dict()


def test_a_packed_row_may_be_longer_than_the_context(model):
    tokens = torch.randint(0, 50, (1, 48))  # the context is 32
    positions = torch.cat([torch.arange(24), torch.arange(24)])[None]
    logits = model(tokens, mask=MaskPlan.causal(48), input_pos=positions)
    assert logits.shape == (48, 50)


@pytest.mark.parametrize(("first", "span"), [(30, "30 to 36"), (-1, "-1 to 5")])
def test_a_position_outside_the_context_is_an_error(model, first, span):
    with pytest.raises(ValueError, match=f"{span}.*context is 32 tokens.*0 to 31"):
        model(TOKENS, mask=MaskPlan.causal(7), input_pos=POSITIONS + first)


def test_every_token_needs_its_position(model):
    with pytest.raises(ValueError, match=r"input_pos has shape \[1, 6\], tokens \[1, 7\]"):
        model(TOKENS, mask=MaskPlan.causal(7), input_pos=POSITIONS[:, :6])


def test_recomputed_layers_give_the_same_gradients(tmp_path):
    directory = tiny.write(tmp_path / "tiny")
    grads, calls = [], []
    for recompute in (False, True):
        model = smollm2(
            directory, dtype=torch.float32, backend="folded", checkpoint_activations=recompute
        )
        count = []
        model.layers[0].mlp.register_forward_pre_hook(lambda *_, c=count: c.append(1))
        model(TOKENS, mask=MaskPlan.causal(7), input_pos=POSITIONS).square().sum().backward()
        grads.append({name: p.grad for name, p in model.named_parameters()})
        calls.append(len(count))
    assert calls == [1, 2]
    assert all(torch.equal(grads[0][name], grads[1][name]) for name in grads[0])


def test_offloading_without_cuda_is_refused_before_the_run(tmp_path):
    directory = tiny.write(tmp_path / "offload")

    def make(dtype):
        return smollm2(directory, dtype=dtype, backend="folded", offload_activations=True)

    with pytest.raises(ValueError, match=r"offload_activations: .* this is cpu; set it to false"):
        build_policy(make, World.alone(), dtype=torch.float32)
    model = make(torch.float32)
    tokens, places = torch.tensor([[1, 2]]), torch.tensor([[0, 1]])
    with pytest.raises(ValueError, match="offload_activations"):
        model(tokens, mask=MaskPlan.causal(2), input_pos=places)
    with torch.no_grad():  # nothing is kept, so there is nothing to move
        model(tokens, mask=MaskPlan.causal(2), input_pos=places)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("recompute", [False, True])
def test_offloaded_activations_give_the_same_gradients(tmp_path, recompute):
    directory = tiny.write(tmp_path / "offload")
    tokens = torch.arange(32, device="cuda")[None]
    grads = []
    for offload in (False, True):
        model = smollm2(
            directory,
            dtype=torch.bfloat16,
            backend="folded",
            checkpoint_activations=recompute,
            offload_activations=offload,
        ).cuda()
        model(tokens, mask=MaskPlan.causal(32), input_pos=tokens).square().sum().backward()
        grads.append({name: p.grad for name, p in model.named_parameters()})
    assert all(torch.equal(grads[0][name], value) for name, value in grads[1].items())
