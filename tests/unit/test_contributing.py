"""The examples of CONTRIBUTING.md, taken from the page and used as it says."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import yaml

from components.attention.plan import MaskPlan
from components.envs.base import Message, ToolCall
from components.envs.check import check_env
from components.rl.importance import mismatch
from components.rollout.agent_loop import Limits, run_episode
from components.rollout.types import Rollout
from components.training.component import check_component
from components.training.config import load_config, validate
from components.training.update import UpdateTotals
from tests.unit.models import tiny
from tests.unit.rollout.fakes import FakeEngine, make_renderer, spec

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
NAMES = ("environment", "tasks", "model", "loss")
MAX_LINES = 40


def fenced(kind: str, language: str) -> dict[str, str]:
    """The fenced blocks that stand below ``<!-- kind: NAME -->``, by name."""
    pattern = rf"^<!-- {kind}: (\w+) -->\n```{language}\n(.*?)^```$"
    return dict(re.findall(pattern, PAGE, flags=re.MULTILINE | re.DOTALL))


EXAMPLES = fenced("example", "python")
CONFIGS = fenced("config", "yaml")


def lines_of_code(source: str) -> int:
    """Lines that are neither blank nor comment nor docstring."""
    docstrings = set()
    for node in ast.walk(ast.parse(source)):
        has_docstring = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
        if has_docstring and ast.get_docstring(node):
            text = node.body[0]
            docstrings |= set(range(text.lineno, (text.end_lineno or text.lineno) + 1))
    return sum(
        bool(line.strip()) and not line.strip().startswith("#") and number not in docstrings
        for number, line in enumerate(source.splitlines(), start=1)
    )


@pytest.fixture
def my_package(tmp_path, monkeypatch) -> ModuleType:
    """One importable module with all examples, as the page has it."""
    path = tmp_path / "my_package.py"
    path.write_text("\n\n".join(EXAMPLES.values()), encoding="utf-8")
    loader = importlib.util.spec_from_file_location("my_package", path)
    assert loader is not None
    assert loader.loader is not None
    module = importlib.util.module_from_spec(loader)
    monkeypatch.setitem(sys.modules, "my_package", module)
    loader.loader.exec_module(module)
    return module


# ---------------------------------------------------------------- the page


def test_every_example_is_found():
    assert tuple(EXAMPLES) == NAMES
    assert PAGE.count("<!-- example:") == len(EXAMPLES)
    assert tuple(CONFIGS) == ("environment", "model", "loss")
    assert PAGE.count("<!-- config:") == len(CONFIGS)


@pytest.mark.parametrize("name", NAMES)
def test_examples_are_short(name):
    assert 0 < lines_of_code(EXAMPLES[name]) <= MAX_LINES


def test_lines_of_code_are_counted():
    source = '"""Doc."""\n\n# why\ndef f():\n    """One\n    two."""\n    return 1\n'
    assert lines_of_code(source) == 2


@pytest.mark.parametrize("name", NAMES)
def test_examples_stand_alone_in_the_project_style(name):
    for command in (["check"], ["format", "--check"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "--stdin-filename", f"{name}.py", "-"],
            input=EXAMPLES[name],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_configs_of_the_page_fit_the_recipe(my_package):
    from recipes.grpo_agentic import SCHEMA, check

    cfg = load_config(ROOT / "configs" / "mock.yaml")
    for text in CONFIGS.values():
        for key, value in yaml.safe_load(text).items():
            if isinstance(value, dict) and "_component_" not in value:
                cfg[key] = {**cfg[key], **value}
            else:
                cfg[key] = value
    checked = validate(cfg, SCHEMA, check=check)
    assert checked.env["_component_"] == "my_package.SumEnv"
    assert checked.warm_start.num_steps == 0
    assert checked.eval is None


# ---------------------------------------------------------------- add an environment


def call(**arguments: int) -> Message:
    return Message(role="assistant", tool_calls=(ToolCall(name="tell_total", arguments=arguments),))


@pytest.mark.parametrize("turn", ["It is five.", call(total=5), call(total=6)])
def test_the_environment_passes_the_check(my_package, turn):
    check_env(my_package.SumEnv(checker=my_package.RightTotal()), task_id="2+3", turns=(turn,))


def test_the_check_as_the_page_calls_it(my_package):
    (line,) = re.findall(r"^check_env\(.*\)$", PAGE, flags=re.MULTILINE)
    exec(line, {**vars(my_package), "check_env": check_env})


def play(my_package: ModuleType, *turns: Message) -> Rollout:
    """An episode of the task 20+3 in which the policy says these turns."""
    renderer, order = make_renderer(), spec("20+3")
    engine = FakeEngine({order.rollout_id: [renderer.render_assistant(turn) for turn in turns]})
    loop = run_episode(
        my_package.SumEnv(checker=my_package.RightTotal()),
        renderer,
        order,
        limits=Limits(max_turns=4, max_turn_tokens=200, max_tokens=2000, max_refused=2),
        temperature=1.0,
    )
    request = next(loop)
    try:
        while True:
            request = loop.send(engine.generate([request])[0])
    except StopIteration as stop:
        return stop.value


@pytest.mark.parametrize(
    ("turn", "reward"),
    [
        (call(total=23), 1.0),
        (call(total=24), 0.0),
        (call(), 0.0),
        (Message(role="assistant", content="It is 23."), 0.0),
    ],
)
def test_an_episode_in_the_agent_loop(my_package, turn, reward):
    rollout = play(my_package, turn)
    assert rollout.status == "completed", rollout.error
    assert rollout.reward == reward
    assert rollout.reward_breakdown == {"official": reward, "strict": reward}
    assert [m["role"] for m in rollout.messages] == ["user", "assistant"]
    assert rollout.messages[0]["content"] == "What is 20+3?"
    assert rollout.stats["tool_calls"] == len(turn.tool_calls)
    prompt = make_renderer().decode(rollout.tokens.ids[: rollout.turns[0][0]])
    assert "tell_total" in prompt
    assert "Use the tool." in prompt


def test_an_empty_turn_is_refused_and_the_episode_goes_on(my_package):
    rollout = play(my_package, Message(role="assistant", content=" "), call(total=23))
    assert (rollout.status, rollout.reward) == ("completed", 1.0)
    assert rollout.stats["refused"] == 1


def test_the_tasks_are_drawn_by_the_loader(my_package):
    from components.data.dataset import task_loader

    tasks = my_package.SumTasks(largest=9)
    assert len(tasks.tasks) == 100
    drawn = next(iter(task_loader(tasks, tasks_per_step=3, seed=0)))
    assert len({task.id for task in drawn}) == 3
    assert all(task in tasks.tasks for task in drawn)


# ---------------------------------------------------------------- add a model


@pytest.mark.parametrize("tie", [True, False])
def test_the_model_equals_transformers(my_package, tmp_path, tie):
    from transformers import MistralConfig, MistralForCausalLM

    directory, window, num_tokens = tiny.write(tmp_path / "tiny", tie=tie), 5, 20
    state = tiny.tensors(tie=tie)
    # Mistral counts the token itself.
    settings = {"sliding_window": window + 1, "attn_implementation": "eager"}
    unlike = ("architectures", "model_type", "torch_dtype")
    same = {key: value for key, value in tiny.CONFIG.items() if key not in unlike}
    theirs = MistralForCausalLM(MistralConfig(**same | {"tie_word_embeddings": tie}, **settings))
    if tie:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    theirs.load_state_dict(state)
    ours = my_package.windowed_llama(directory, dtype=torch.float32, window=window)
    tokens = torch.randint(0, 50, (1, num_tokens), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = theirs.eval()(tokens).logits[0]
        logits = ours(
            tokens, mask=MaskPlan.causal(num_tokens), input_pos=torch.arange(num_tokens)[None]
        )
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)


def test_the_model_refuses_another_architecture(my_package, tmp_path):
    directory = tiny.write(tmp_path / "tiny")
    config = directory / "config.json"
    config.write_text(config.read_text().replace('"llama"', '"gemma"'))
    with pytest.raises(ValueError, match="model_type is 'gemma'"):
        my_package.windowed_llama(directory, dtype=torch.float32, window=5)


def test_the_model_needs_its_window(my_package):
    problems = check_component(
        {"_component_": "my_package.windowed_llama"}, "model", provided=["dtype"], positional=1
    )
    assert problems == [
        "model.window: missing, my_package.windowed_llama needs it; must be an integer"
    ]


# ---------------------------------------------------------------- add a loss


def test_the_loss_by_hand(my_package):
    loss = my_package.Reinforce()
    assert loss.beta == 0.0
    logprobs = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64, requires_grad=True)
    out = loss(
        logprobs,
        old_logprobs=logprobs.detach(),
        advantages=torch.tensor([1.0, 1.0, -2.0], dtype=torch.float64),
        denominator=4.0,
        ref_logprobs=None,
        is_weights=torch.tensor([1.0, 0.5, 2.0], dtype=torch.float64),
    )
    # -(1 * 1 * -1 + 0.5 * 1 * -2 + 2 * -2 * -0.5) = 0; and with weights of 1: -(-1 - 2 + 1) = 2
    assert float(out.policy_sum) == 0.0
    (gradient,) = torch.autograd.grad(out.loss, logprobs)
    assert gradient.tolist() == [-0.25, -0.125, 1.0]  # -w A / 4
    plain = loss(
        logprobs,
        old_logprobs=logprobs.detach() - torch.log(torch.tensor(2.0)),
        advantages=torch.tensor([1.0, 1.0, -2.0], dtype=torch.float64),
        denominator=4.0,
    )
    assert float(plain.loss.detach()) == 0.5
    assert float(plain.policy_sum) == 2.0
    assert float(plain.ratio_sum) == pytest.approx(6.0)
    assert plain.num_tokens == 3


def test_the_loss_of_a_rank_without_tokens(my_package):
    """A rank with fewer rows takes part with empty ones: no value, but a gradient of nothing."""
    logprobs = torch.zeros(0, requires_grad=True)
    empty = torch.zeros(0)
    out = my_package.Reinforce()(
        logprobs, old_logprobs=empty, advantages=empty, denominator=4.0, is_weights=empty
    )
    assert float(out.loss.detach()) == 0.0
    out.loss.backward()


def test_the_sums_of_the_loss_become_metrics(my_package):
    logprobs, advantages = torch.tensor([-1.0, -3.0]), torch.tensor([1.0, -2.0])
    totals = UpdateTotals(denominator=2.0)
    out = my_package.Reinforce()(
        logprobs, old_logprobs=logprobs, advantages=advantages, denominator=2.0
    )
    totals.add(out, entropy=torch.tensor([0.5, 1.5]), gap=mismatch(logprobs, logprobs))

    class Alone:
        sum = max = staticmethod(list)

    metrics = totals.metrics(Alone())  # type: ignore[arg-type]
    assert metrics["loss/policy"] == metrics["loss/total"] == -2.5  # -(-1 + 6) / 2
    assert metrics["loss/kl"] == metrics["policy/clip_frac_low"] == 0.0
    assert metrics["policy/entropy"] == 1.0
