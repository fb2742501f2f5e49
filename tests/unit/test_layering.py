"""Who may import whom: the architecture's rules, checked on the source without importing it."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
WALKED = ("components", "recipes", "tools")

# Packages below the trainer, lowest first: each may import itself and those before it.
LAYERS = (
    ("components.attention", ()),
    ("components.rollout.types", ("components.attention",)),
    ("components.rl", ("components.attention", "components.rollout.types")),
)
PLAIN_PYTHON = ("components.envs", "components.chat", "components.safety")
MAY_IMPORT_TORCHTUNE = (
    "recipes",
    "components.models",
    "components.policy.local",
    "components.training",
    "components.cli",
)
MAY_IMPORT_OMEGACONF = (
    "recipes",
    "components.training.config",
    "components.training.overrides",
)
HEAVY = (
    "tau2",
    "litellm",
    "vllm",
    "transformers",
    "wandb",
    "tensorboard",
    "torch.utils.tensorboard",
    "matplotlib",
)


class Import(NamedTuple):
    """One imported module."""

    module: str
    line: int
    on_load: bool
    """Runs when the importing module is loaded: not in a function, not for type checkers only."""


def _inside(module: str, *packages: str) -> bool:
    return any(module == package or module.startswith(package + ".") for package in packages)


def _module_name(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def _statements(tree: ast.AST, on_load: bool = True) -> Iterator[tuple[ast.AST, bool]]:
    """Every node, and whether it runs when the module is loaded."""
    for node in ast.iter_child_nodes(tree):
        yield node, on_load
        if _is_type_checking(node):
            assert isinstance(node, ast.If)
            for child in node.body:
                yield child, False
                yield from _statements(child, False)
            for child in node.orelse:
                yield child, on_load
                yield from _statements(child, on_load)
            continue
        lazy = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        yield from _statements(node, on_load and not lazy)


def _imports(path: str, source: str, known: set[str]) -> list[Import]:
    """Modules that a file imports; a string given to import_module counts as well."""
    package = _module_name(path).split(".")
    if not path.endswith("/__init__.py"):
        package = package[:-1]
    found = []
    for node, on_load in _statements(ast.parse(source, path)):
        modules: list[str] = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parts = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*parts, *([node.module] if node.module else [])])
            # `from package import module` imports the module, `from module import name` does not.
            names = [f"{base}.{alias.name}" for alias in node.names]
            modules = [n if n in known or n in HEAVY else base for n in names]
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = ast.unparse(node.func)
            if called.split(".")[-1] in ("import_module", "__import__"):
                modules = [str(node.args[0].value)]
        found += [Import(m, getattr(node, "lineno", 0), on_load) for m in dict.fromkeys(modules)]
    return found


def _packages_and_modules(modules: Mapping[str, object]) -> set[str]:
    return {
        ".".join(name.split(".")[:n]) for name in modules for n in range(1, name.count(".") + 2)
    }


def violations(files: Mapping[str, str]) -> list[str]:
    """Broken rules in files given as path relative to the root -> source."""
    modules = {_module_name(path): path for path in files}
    known = _packages_and_modules(modules)
    table = {name: _imports(path, files[path], known) for name, path in modules.items()}
    found = []
    for name, imports in table.items():
        for imported in imports:
            why = _broken_rule(name, imported)
            if why:
                found.append(f"{modules[name]}:{imported.line} imports {imported.module}: {why}")
        if _inside(name, *PLAIN_PYTHON):
            chain = _way_to_torch(name, table)
            if chain:
                found.append(f"{modules[name]} loads torch by way of {' -> '.join(chain)}")
    return found


def _broken_rule(name: str, imported: Import) -> str:
    """Which rule the import breaks, or nothing."""
    module = imported.module
    ours = _inside(module, *WALKED, "tests")
    if _inside(module, "recipes"):
        return "nothing imports a recipe"
    if _inside(module, "tools", "tests") and not _inside(name, "tools"):
        return "components and recipes import neither tools nor tests"
    for layer, before in LAYERS:
        if _inside(name, layer) and ours and not _inside(module, layer, *before):
            return f"{layer} may import of ours only {[*before, layer]}"
    if _inside(name, *PLAIN_PYTHON) and _inside(module, "torch", "torchtune"):
        return "environments, chat and safety are plain Python"
    if _inside(module, "torchtune") and not _inside(name, *MAY_IMPORT_TORCHTUNE):
        return f"torchtune belongs in {MAY_IMPORT_TORCHTUNE}"
    if _inside(module, "omegaconf") and not _inside(name, *MAY_IMPORT_OMEGACONF):
        return f"omegaconf belongs in {MAY_IMPORT_OMEGACONF}"
    if _inside(module, *HEAVY) and imported.on_load:
        return "heavy and optional packages are imported in the function that uses them"
    return ""


def _way_to_torch(name: str, table: Mapping[str, list[Import]]) -> list[str]:
    """Modules from ``name`` to an import of torch on load, through our own modules only."""
    ways = [[name]]
    seen = {name}
    while ways:
        way = ways.pop(0)
        for imported in table.get(way[-1], []):
            if not imported.on_load:
                continue
            if _inside(imported.module, "torch", "torchtune"):
                # A direct import is reported by its own rule.
                return [*way, imported.module] if len(way) > 1 else []
            parts = imported.module.split(".")
            for n in range(1, len(parts) + 1):  # the packages around a module are loaded too
                step = ".".join(parts[:n])
                if step in table and step not in seen:
                    seen.add(step)
                    ways.append([*way, step])
    return []


def _repository() -> dict[str, str]:
    return {
        path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
        for folder in WALKED
        for path in sorted((ROOT / folder).rglob("*.py"))
    }


def test_repository_keeps_the_rules():
    files = _repository()
    assert {"components/rl/packing.py", "components/envs/base.py"} <= files.keys()
    assert violations(files) == []


BASE = {
    "components/__init__.py": "",
    "components/attention/masks.py": "import torch\n",
    "components/rollout/__init__.py": "",
    "components/rollout/types.py": "import math\n",
    "components/rollout/workers.py": "from components.envs.base import Env\n",
    "components/rl/__init__.py": "",
    "components/rl/packing.py": (
        "import torch\nfrom components.attention.masks import TreeMask\n"
        "from components.rollout.types import Tokens\nfrom components.rollout import types\n"
    ),
    "components/envs/base.py": "import dataclasses\n",
    "components/envs/tau2.py": "def load():\n    import tau2.run\n",
    "components/chat/base.py": "from components.rollout.types import Tokens\n",
    "components/models/smollm2.py": "import torchtune\n",
    "components/training/config.py": "from omegaconf import OmegaConf\n",
    "recipes/grpo_agentic.py": "import torchtune\nfrom components.rl import packing\n",
    "tools/plot.py": "from components.rl import packing\n",
}


def test_a_clean_tree_has_no_violations():
    assert violations(BASE) == []


@pytest.mark.parametrize(
    ("path", "source", "message"),
    [
        ("components/cli.py", "import recipes.grpo_agentic", "nothing imports a recipe"),
        ("tools/bench.py", "from recipes import grpo_agentic", "nothing imports a recipe"),
        ("recipes/sft.py", "from recipes.grpo_agentic import x", "nothing imports a recipe"),
        ("recipes/sft.py", "from .grpo_agentic import x", "nothing imports a recipe"),
        ("components/cli.py", "def f():\n    import_module('recipes.x')", "nothing imports"),
        ("components/cli.py", "import tools.plot", "neither tools nor tests"),
        ("recipes/sft.py", "from tests.tiny import x", "neither tools nor tests"),
        ("components/attention/lse.py", "import components.rl.packing", "components.attention may"),
        ("components/attention/lse.py", "from components.rollout.types import T", "may import"),
        ("components/rl/losses.py", "from components.rollout.workers import W", "components.rl"),
        ("components/rl/losses.py", "from components.rollout import workers", "components.rl"),
        ("components/rl/losses.py", "from ..rollout import workers", "components.rl"),
        ("components/rl/losses.py", "def f():\n    from components.envs import base", "may import"),
        ("components/rl/losses.py", "from components import envs", "components.rl may"),
        ("components/rollout/types.py", "import components.rl", "components.rollout.types may"),
        (
            "components/rl/losses.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import components.envs.base",
            "components.rl may",
        ),
        ("components/rl/losses.py", "from torchtune import utils", "torchtune belongs"),
        ("components/rl/losses.py", "from omegaconf import DictConfig", "omegaconf belongs"),
        (
            "components/policy/vllm.py",
            "def f():\n    import torchtune.modules",
            "torchtune belongs",
        ),
        ("components/policy/local_cache.py", "import torchtune", "torchtune belongs"),
        ("tools/bench.py", "import torchtune", "torchtune belongs"),
        ("components/envs/x.py", "import torch.nn", "plain Python"),
        ("components/chat/x.py", "def f():\n    import torch", "plain Python"),
        ("components/safety/x.py", "import torchtune", "plain Python"),
        ("components/envs/x.py", "from components.rl import packing", "loads torch by way of"),
        ("components/envs/x.py", "import tau2", "in the function that uses them"),
        (
            "components/envs/x.py",
            "try:\n    import litellm\nexcept ImportError:\n    pass",
            "in the",
        ),
        ("components/envs/x.py", "class A:\n    from tau2.run import x", "in the function"),
        ("components/training/x.py", "from torch.utils import tensorboard", "in the function"),
        ("components/training/x.py", "from torch.utils.tensorboard import S", "in the function"),
        ("recipes/sft.py", "import matplotlib.pyplot as plt", "in the function"),
    ],
)
def test_planted_violations_are_found(path, source, message):
    found = violations({**BASE, path: source})
    assert len(found) == 1, found
    assert message in found[0]
    assert found[0].startswith(path)


def test_torch_behind_a_package_is_found():
    """Importing a module loads the packages around it."""
    found = violations({**BASE, "components/rollout/__init__.py": "import torch\n"})
    assert found == [
        "components/chat/base.py loads torch by way of "
        "components.chat.base -> components.rollout -> torch"
    ]


def test_type_only_and_lazy_imports_load_nothing():
    source = (
        "import typing\nif typing.TYPE_CHECKING:\n    import tau2\nelse:\n    tau2 = None\n"
        "def f():\n    from components.rl import packing\n    import litellm\n"
    )
    assert violations({**BASE, "components/envs/x.py": source}) == []
