"""The pages say what the code has: settings, metrics, files, commands and names."""

from __future__ import annotations

import ast
import inspect
import pkgutil
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import yaml

from components.training import component, registry
from components.training.config import load_config, validate
from components.training.schema import Component, Section, as_field
from recipes import eval_agentic, grpo_agentic, sft_agentic

ROOT = Path(__file__).parents[2]
RECIPES = {
    "grpo_agentic": grpo_agentic,
    "sft_agentic": sft_agentic,
    "eval_agentic": eval_agentic,
}
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("recipes/*.md"), *ROOT.glob("tests/**/*.md")])
CONFIGS = sorted(ROOT.glob("configs/**/*.yaml"))

WHAT_LOGS = {
    "grpo_agentic": (
        "recipes/grpo_agentic.py",
        "components/training/*.py",
        "components/models/gpt_oss/*.py",
        "components/rollout/stats.py",
        "components/rollout/evaluation.py",
        "components/policy/vllm.py",
        "components/policy/local.py",
    ),
    "sft_agentic": (
        "recipes/sft_agentic.py",
        "components/training/supervised.py",
        "components/rollout/evaluation.py",
    ),
    "eval_agentic": ("recipes/eval_agentic.py", "components/rollout/evaluation.py"),
}
METRIC = re.compile(r"[a-z]+/(?!\*$)[\w^@*]+")
TRACKED = ("recipes/", "components/", "configs/", "tools/", "tests/")


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def page(recipe: str) -> str:
    return (ROOT / "recipes" / f"{recipe}.md").read_text(encoding="utf-8")


def first_column(text: str, heading: str) -> set[str]:
    """Names in backticks in the first column of the tables below a heading."""
    section = re.split(rf"^## {heading}$", text, flags=re.MULTILINE)[1]
    section = re.split(r"^## ", section, flags=re.MULTILINE)[0]
    cells = re.findall(r"^\| ([^|]*) \|", section, flags=re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


def code(text: str) -> str:
    """What stands in backticks and in fences."""
    return "\n".join(re.findall(r"```.*?```|`[^`]+`", text, flags=re.DOTALL))


# ---------------------------------------------------------------- settings


def settings(schema: Any) -> set[str]:
    """Dotted keys of a schema, those of sections left out unless they may be null."""
    section, found = as_field(schema), set()
    assert isinstance(section, Section)
    for key, field in section.fields.items():
        if isinstance(field, Section):
            found |= {f"{key}.{inner}" for inner in settings(field)}
            found |= {key} if field.default is None else set()
        else:
            found.add(key)
    return found


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_setting_is_on_the_page_and_no_other(recipe):
    assert first_column(page(recipe), "Settings") == settings(RECIPES[recipe].SCHEMA)


def test_settings_are_found():
    found = settings(grpo_agentic.SCHEMA)
    assert {"seed", "rollout.group_size", "warm_start.oracle", "eval", "eval.every"} <= found
    assert "rollout" not in found


def components_of(node: Mapping[str, Any], schema: Any) -> Iterator[tuple[str, Component, str]]:
    """Key, field and dotted path of the components that a config names."""
    section = as_field(schema)
    assert isinstance(section, Section)
    for key, field in section.fields.items():
        inner = node.get(key)
        if isinstance(field, Component) and inner:
            yield key, field, inner["_component_"]
        elif isinstance(field, Section) and inner:
            yield from components_of(inner, field)


def shipped_components() -> set[tuple[str, str]]:
    """(path, parameter) of every setting of our own components in the shipped configs."""
    found = set()
    extra = {
        "model": ["components.models.smollm2.lora_smollm2"],
        "checker": [
            *(f"components.envs.rewards.{name}" for name in ("OfficialReward", "StrictReward")),
            *(f"components.envs.weighted.{name}" for name in ("WeightedSum", "Part")),
            "components.safety.gate.SafetyGated",
        ],
    }
    for config in CONFIGS:
        plain = yaml.safe_load(config.read_text(encoding="utf-8"))
        for key, field, path in components_of(plain, RECIPES[plain["recipe"]].SCHEMA):
            for target in [path, *extra.get(key, [])]:
                if not target.startswith("components."):
                    continue
                parameters = list(inspect.signature(component.locate(target)).parameters)
                names = set(parameters[field.positional :]) - set(field.provided)
                found |= {(target, name) for name in names}
    return found


def test_every_setting_of_a_component_is_on_the_page():
    text = code(page("grpo_agentic"))
    # A dtype cannot be written in YAML; the engine is handed versions by the recipe.
    internal = {"lora_dtype", "policy_version"}
    asked = {(path, name) for path, name in shipped_components() if name not in internal}
    assert ("components.envs.tau2.Tau2Env", "max_text_chars") in asked
    assert ("components.models.smollm2.lora_smollm2", "lora_rank") in asked
    missing = [pair for pair in asked if not re.search(rf"`[^`]*\b{pair[1]}\b", text)]
    assert missing == []


# ---------------------------------------------------------------- metrics


def metric_names(source: str) -> set[str]:
    """Literals ``group/name``; what an f-string fills in is ``*``."""
    found = set()
    nodes = list(ast.walk(ast.parse(source)))
    pieces = {id(p) for node in nodes if isinstance(node, ast.JoinedStr) for p in node.values}
    for node in nodes:
        text = ""
        if isinstance(node, ast.Constant) and id(node) not in pieces:
            text = str(node.value)
        elif isinstance(node, ast.JoinedStr):
            parts = [p.value if isinstance(p, ast.Constant) else "*" for p in node.values]
            text = "".join(map(str, parts))
        if METRIC.fullmatch(text):
            found.add(text)
    return found


def logged(recipe: str) -> set[str]:
    files = [path for pattern in WHAT_LOGS[recipe] for path in ROOT.glob(pattern)]
    assert len(files) >= len(WHAT_LOGS[recipe])
    return set().union(*(metric_names(path.read_text(encoding="utf-8")) for path in files))


def unmatched(names: Iterable[str], others: Iterable[str]) -> list[str]:
    """Names that neither equal one of the others nor match it, read as patterns either way."""
    others = list(others)
    return sorted(
        name
        for name in names
        if not any(fnmatchcase(name, other) or fnmatchcase(other, name) for other in others)
    )


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_metric_is_on_the_page_and_no_other(recipe):
    in_code, on_page = logged(recipe), first_column(page(recipe), "Metrics")
    assert len(in_code) > 5
    assert unmatched(in_code, on_page) == []
    assert unmatched(on_page, in_code) == []


def test_metric_names_are_found():
    source = (
        'x = {"loss/kl": 1, f"time/{phase}_s": 2, "a path/to it": 3, f"eval/{step}": 4}\n'
        'y = f"eval/pass^{k}", "https://x", "configs/retail.yaml", "reward/mean"\n'
    )
    assert metric_names(source) == {"loss/kl", "time/*_s", "eval/pass^*", "reward/mean"}
    assert unmatched(["time/*_s", "loss/kl", "eval/pass^*"], ["time/step_s", "eval/pass^k"]) == [
        "loss/kl"
    ]


# ---------------------------------------------------------------- links, files, names


def anchors(text: str) -> set[str]:
    """What GitHub makes of the headings."""
    titles = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_relative_links_lead_somewhere(path):
    for link in re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8")):
        if re.match(r"[a-z]+:", link):
            continue
        target, _, anchor = link.partition("#")
        file = (path.parent / target) if target else path
        assert file.exists(), link
        if anchor:
            assert anchor in anchors(file.read_text(encoding="utf-8")), link


@pytest.mark.parametrize("path", [*PAGES, *CONFIGS, ROOT / "Makefile"], ids=name_of)
def test_files_that_are_named_exist(path):
    text = path.read_text(encoding="utf-8")
    for name in re.findall(rf"(?<![\w/.*])(?:{'|'.join(TRACKED)})[\w./-]+\.\w+", text):
        assert (ROOT / name).exists(), name


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_names_in_components_exist(path):
    text = path.read_text(encoding="utf-8")
    for name in re.findall(r"(?<![\w./])components(?:\.\w+)+", text):
        pkgutil.resolve_name(name)


# ---------------------------------------------------------------- commands


def commands(path: Path) -> list[list[str]]:
    """The words of each command in the fences of a page, or in the comments of a config."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        fences = re.findall(r"^```(\w*)\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
        plain = [fence.replace("\\\n", " ") for language, fence in fences if not language]
        lines = [line for fence in plain for line in fence.splitlines()]
        lines += re.findall(r"`((?:tune|make|python) [^`<\n]+)`", text)
    else:
        lines = [line.lstrip("# ") for line in text.splitlines() if line.startswith("#   ")]
    return [
        shlex.split(line.partition(" #")[0])
        for line in lines
        if line.startswith(("tune ", "make ", "python "))
    ]


ALL_COMMANDS = [(path, line) for path in [*PAGES, *CONFIGS] for line in commands(path)]


def test_commands_are_found():
    found = [" ".join(line) for path, line in ALL_COMMANDS if path.name == "README.md"]
    assert "make retail" in found
    assert "tune ls" in found
    assert any(line.startswith("tune run recipes/eval_agentic.py") for line in found)
    assert {path.name for path, _ in ALL_COMMANDS} >= {path.name for path in CONFIGS}


def test_targets_of_make_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^(\w[\w-]*):", makefile, flags=re.MULTILINE))
    asked = [line[1] for _, line in ALL_COMMANDS if line[0] == "make"]
    assert {"retail", "test", "test-slow"} <= set(asked) <= targets


@pytest.mark.parametrize(
    "words", [line for _, line in ALL_COMMANDS if line[0] == "tune"], ids=" ".join
)
def test_commands_of_tune_name_what_exists(words):
    """Files, names and overrides; what the reader makes (``my/...``) is what they were told of."""
    subcommand, *arguments = words[1:]
    assert subcommand in ("ls", "cp", "cat", "run", "validate")
    registry.register()
    known = {*registry.recipe_names(), *registry.config_names()}
    if subcommand in ("cp", "cat"):
        assert arguments[0] in known
    if "--config" not in arguments:
        return
    config = arguments[arguments.index("--config") + 1]
    overrides = [word for word in arguments if "=" in word]
    own = config.removeprefix("my/")
    if own != config:
        config = own.removesuffix(".yaml")
    plain = load_config(config if config in known else ROOT / config, overrides)
    recipe = RECIPES[plain["recipe"]]
    validate(plain, recipe.SCHEMA, check=getattr(recipe, "check", None))
    for word in arguments:
        if word.endswith(".py") and not word.startswith("my/"):
            assert word == f"recipes/{plain['recipe']}.py"


@pytest.mark.parametrize("config", CONFIGS, ids=name_of)
def test_a_config_says_how_it_is_started(config):
    first = next(line for path, line in ALL_COMMANDS if path == config)
    assert first[:2] == ["tune", "run"]
    assert first[first.index("--config") + 1] == name_of(config)
