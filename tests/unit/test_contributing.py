"""The examples of CONTRIBUTING.md, taken from the page and used as it says."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shlex
import subprocess
import sys
from types import ModuleType

import gymnasium
import pytest
import torch

from components.attention.plan import MaskPlan
from components.data.demonstrations import collect, demonstrate
from components.envs.base import Message, ToolCall
from components.envs.check import check_env
from components.envs.tool_game import FinalState
from components.envs.tools import ToolEnv
from components.rl.importance import mismatch
from components.rollout.agent_loop import Limits, run_episode
from components.rollout.types import Rollout
from components.training.component import check_component
from components.training.config import instantiate, load_config, validate
from components.training.update import UpdateTotals
from tests.contributing import CONFIGS, EXAMPLES, PAGE, ROOT, edited, write_library
from tests.unit.models import tiny
from tests.unit.rollout.fakes import FakeEngine, make_renderer, spec

OF_MY_PACKAGE = ("environment", "tasks", "model", "loss")
OF_THE_LIBRARY = ("library", "library_more")
NAMES = ("environment", "tasks", *OF_THE_LIBRARY, "model", "loss")
MAX_LINES = {"library": 60}
"""A game with its tasks is longer than the 40 lines of the others."""


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
    """One importable module with the examples that stand in one, as the page has it."""
    path = tmp_path / "my_package.py"
    source = "\n\n".join(EXAMPLES[name] for name in OF_MY_PACKAGE)
    path.write_text(source, encoding="utf-8")
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
    assert tuple(CONFIGS) == ("environment", "library", "library_eval", "model", "loss")
    assert PAGE.count("<!-- config:") == len(CONFIGS)


@pytest.mark.parametrize("name", NAMES)
def test_examples_are_short(name):
    assert 0 < lines_of_code(EXAMPLES[name]) <= MAX_LINES.get(name, 40)


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


def checked(name, *, copied, recipe):
    """The copy of a shipped config with the keys of the page, checked as the recipe does."""
    cfg = edited(load_config(ROOT / "configs" / f"{copied}.yaml"), name)
    return validate(cfg, recipe.SCHEMA, check=recipe.check)


def test_the_configs_of_the_page_fit_the_recipe(my_package):
    from recipes import grpo_agentic

    found = {
        name: checked(name, copied="mock", recipe=grpo_agentic)
        for name in ("environment", "model", "loss")
    }
    assert found["environment"].env["_component_"] == "my_package.SumEnv"
    assert found["environment"].warm_start.num_steps == 0
    assert found["environment"].eval is None
    assert found["model"].model.window == 1024
    assert found["loss"].loss["_component_"] == "my_package.Reinforce"


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


# ---------------------------------------------------------------- from tau2 to your own tools


@pytest.fixture
def library(tmp_path, monkeypatch) -> ModuleType:
    """The modules ``library`` and ``library_more``, importable as the page says."""
    write_library(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name in OF_THE_LIBRARY:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module("library")
    gymnasium.registry.pop("library-desk-v0")


def desk(library: ModuleType) -> ToolEnv:
    return ToolEnv(game=library.LibraryDesk(), checker=FinalState())


def use(name: str, **arguments: object) -> Message:
    return Message(role="assistant", tool_calls=(ToolCall(name=name, arguments=arguments),))


def ended(env: ToolEnv, task_id: str, *turns: str | Message) -> tuple[list[str], dict]:
    """The texts that came back, and info at the end, to which the last turn must lead."""
    _, info = env.reset(seed=0, options={"task_id": task_id})
    heard = [message.content for message in info["messages"]]
    for number, turn in enumerate(turns, start=1):
        *_, over, _, info = env.step(turn)
        heard += [message.content for message in info["messages"]]
        assert over == (number == len(turns))
    return heard, info


LEND = use("lend_book", title="Dune", card=17)
ATLAS = use("lend_book", title="Atlas", card=17)
WHICH = "What is the number of your card?"


@pytest.mark.parametrize(
    ("task_id", "turns", "reward"),
    [
        ("lend-dune", (WHICH, LEND, "Done."), 1.0),
        ("lend-dune", (WHICH, use("lend_book", title="Dune", card="17"), LEND, "Done."), 1.0),
        ("lend-dune", (LEND, use("return_book", title="Dune"), "Done."), 0.0),
        ("lend-dune", (use("lend_book", title="Dune", card=18), "Done."), 0.0),
        ("lend-dune", (LEND, use("lend_book", title="Walden", card=17), "Done."), 0.0),
        ("lend-dune", ("Done.",), 0.0),
        ("return-emma", (use("return_book", title="Emma"), "Done."), 1.0),
        ("lend-atlas", ("I am sorry.",), 1.0),
        ("lend-atlas", (WHICH, ATLAS, "Done."), 0.0),
        ("lend-emma", (use("lend_book", title="Emma", card=52), "I am sorry."), 1.0),
        ("lend-walden", (use("lend_book", title="Walden", card=52), "Done."), 1.0),
    ],
)
def test_the_desk_is_scored_by_its_books(library, task_id, turns, reward):
    heard, info = ended(desk(library), task_id, *turns)
    assert info["reward"].breakdown == {"official": reward, "strict": reward}
    assert heard[-1] == "Thank you. Goodbye."
    assert ("It is 17." in heard) == (WHICH in turns)  # the card is told when it is asked for
    assert "17" not in heard[0]


def test_what_the_agent_of_the_desk_reads(library):
    env = desk(library)
    _, info = env.reset(seed=0, options={"task_id": "lend-dune"})
    assert "The Atlas is never lent." in info["system_prompt"]
    assert [tool.name for tool in info["tools"]] == ["find_book", "lend_book", "return_book"]
    lend = info["tools"][1]
    assert lend.description == "Lend a book that is on the shelf."
    assert lend.parameters["properties"]["card"]["type"] == "integer"
    assert lend.parameters["properties"]["card"]["description"] == "number of the reader's card."
    turns = (use("find_book", title="Emma"), use("lend_book", title="Emma", card=1), "Sorry.")
    heard, info = ended(env, "lend-emma", *turns)
    assert heard[1:3] == ['{"title": "Emma", "lent_to": 31}', "Error: Emma is lent already"]
    assert info["trajectory"].num_tool_errors == 1
    heard, _ = ended(env, "lend-dune", use("find_book", title="Ulysses"), "Sorry.")
    assert heard[1] == "Error: there is no book 'Ulysses', only Dune, Emma, Atlas, Walden"


def test_the_desk_passes_the_checks_as_the_page_calls_them(library):
    (command,) = re.findall(r"^python (tools/check_env.py library.*)$", PAGE, flags=re.MULTILINE)
    tool, *arguments = shlex.split(command)
    done = subprocess.run(
        [sys.executable, ROOT / tool, *arguments],
        env={**os.environ, "PYTHONPATH": "."},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(" passes") == 2


@pytest.mark.parametrize("name", ["lend-dune", "return-emma", "lend-atlas", "lend-walden"])
def test_the_desk_keeps_the_promises_in_every_kind_of_episode(library, name):
    turns = (WHICH, LEND, use("nothing"), use("lend_book"), ATLAS, "Goodbye.")
    check_env(desk(library), task_id=name, turns=turns)


def test_the_configs_of_the_desk_fit_the_recipes(library):
    from recipes import eval_agentic, grpo_agentic

    trained = checked("library", copied="mock", recipe=grpo_agentic)
    tasks = {
        cfg.split: [task.id for task in instantiate(cfg).tasks]
        for cfg in (trained.dataset, trained.eval.dataset)
    }
    assert tasks == {
        "train": ["lend-dune", "return-emma", "lend-atlas"],
        "test": ["lend-walden", "lend-emma"],
    }
    assert not trained.warm_start.use_cache  # it would not see a change of library.py
    evaluated = checked("library_eval", copied="mock_eval", recipe=eval_agentic)
    assert isinstance(instantiate(evaluated.env), ToolEnv)
    assert evaluated.dataset.split == "test"


def test_the_demonstrator_solves_every_task_of_the_desk(library):
    from library_more import DeskOracle  # type: ignore[import-not-found]

    orders = [spec(task_id) for task_id in library.REQUESTS]
    made = collect(
        orders,
        play=lambda order: demonstrate(desk(library), DeskOracle(order), make_renderer(), order),
        max_tokens=4000,
    )
    assert [rollout.spec for rollout in made.rollouts] == orders
    asked = {
        r.spec.task_id for r in made.rollouts if any(m["content"] == WHICH for m in r.messages)
    }
    assert asked == {"lend-dune", "lend-walden"}
    assert all(rollout.stats["tool_errors"] == 0 for rollout in made.rollouts)


def test_the_other_checker_of_the_desk(library):
    from library_more import FewErrors  # type: ignore[import-not-found]

    env = ToolEnv(game=library.LibraryDesk(), checker=FewErrors())
    _, info = ended(env, "lend-dune", use("nothing"), use("lend_book"), LEND, "Done.")
    assert info["reward"].value == pytest.approx(0.8)
    assert info["reward"].breakdown == {"official": 1.0, "strict": 1.0}


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
