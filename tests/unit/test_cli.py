"""The ``tune`` command, mostly in this process: a start of its own costs seconds."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from components import cli
from components.training import registry, shipped

ROOT = Path(__file__).parents[2]

RECIPE = '''
"""Writes down what it was run with."""
import json, os, sys
from pathlib import Path
from components.training.config import Component, ConfigError, Int, Str, parse

SCHEMA = {
    "seed": Int(min=0),
    "out": Str(),
    "name": Str(default="toy"),
    "rollout": {"group_size": Int(min=1, default=2)},
    "part": Component(default=None),
}

@parse(SCHEMA)
def recipe_main(cfg):
    """A toy."""
    if cfg.seed == 13:
        raise ConfigError("13 brings bad luck")
    rank = os.environ.get("RANK", "single")
    Path(cfg.out, f"{rank}.json").write_text(json.dumps({
        "argv": sys.argv, "path": sys.path, "name": cfg.name, "seed": cfg.seed,
        "world": os.environ.get("WORLD_SIZE"), "cli": sys.modules["components"].__file__,
    }))

if __name__ == "__main__":
    sys.exit(recipe_main())
'''


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A user's directory: my/recipe.py, my/toy.yaml and an empty out/; the working directory."""
    (tmp_path / "my").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "my" / "recipe.py").write_text(RECIPE)
    (tmp_path / "my" / "toy.yaml").write_text("recipe: my/recipe.py\nseed: 3\nout: out\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(Path(sys.executable).parent), *sys.path])
    return tmp_path


@pytest.fixture
def tune(monkeypatch, capsys):
    """Runs the command in this process; returns exit code, stdout, stderr."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["tune", *arguments])
        code = 0
        try:
            cli.main()
        except SystemExit as exit:
            code = exit.code or 0
        return code, *capsys.readouterr()

    return run


def light(*arguments, cwd=ROOT):
    """Runs the command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "components.cli", *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_ls_lists_ours_after_torchtunes_without_importing_torch():
    code = (
        "import sys; sys.argv = ['tune', 'ls']\n"
        "from components.cli import main; main()\n"
        "assert not {'torch', 'torchao', 'omegaconf', 'huggingface_hub'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    names = [line.split()[0] for line in done.stdout.splitlines() if not line.startswith(" ")]
    assert names[:2] == ["RECIPE", "full_finetune_single_device"]
    assert names[-len(shipped.recipes()) :] == list(shipped.recipes())


def test_ls_shows_configs_beside_the_recipe_that_they_name():
    lines = light("ls").stdout.splitlines()
    shown, recipe = {}, ""
    for line in lines[1:]:
        recipe, config = (line.split() if line[0] != " " else [recipe, line.strip()])[:2]
        shown.setdefault(recipe, []).append(config)
    for name, file in shipped.configs().items():
        assert name in shown[shipped.recipe_of(file)]


def test_sft_is_listed_with_its_configs_which_fit_it(here, tune):
    lines = light("ls").stdout.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("sft_agentic "))
    names = ["mock_learn_sft", "mock_sft", "retail_sft"]
    assert [line.split()[-1] for line in lines[at : at + 3]] == names
    for name in names:
        code, out, err = tune("validate", name)
        assert (code, err) == (0, "")
        assert "fits recipe sft_agentic" in out
    code, _, err = tune("validate", "mock_sft", "held_out_fraction=0.1")
    assert code == 2
    assert "held_out_fraction: unknown key; did you mean 'held_out_frac'?" in err


def test_every_shipped_config_names_a_shipped_recipe():
    for name, file in shipped.configs().items():
        assert shipped.recipe_of(file) in shipped.recipes(), name


def test_shipped_names_do_not_hide_torchtunes():
    registry.register()
    for names in (registry.recipe_names(), registry.config_names()):
        assert len(names) == len(set(names))
    from torchtune._recipe_registry import get_all_recipes

    names = [recipe.name for recipe in get_all_recipes()]
    assert len(names) == len(set(names))


def test_shipped_files_lie_inside_the_package_in_a_wheel(tmp_path, monkeypatch):
    package = tmp_path / "components"
    (package / "_shipped" / "recipes").mkdir(parents=True)
    (package / "_shipped" / "configs" / "gpt_oss").mkdir(parents=True)
    (package / "_shipped" / "recipes" / "__init__.py").touch()
    (package / "_shipped" / "recipes" / "toy.py").touch()
    config = package / "_shipped" / "configs" / "gpt_oss" / "20b.yaml"
    config.write_text("# recipe: no\nx:\n  recipe: no\nrecipe: 'toy'  # yes\n")
    monkeypatch.setattr(shipped, "_PACKAGE", package)
    assert list(shipped.recipes()) == ["toy"]
    assert shipped.configs() == {"gpt_oss/20b": config}
    assert shipped.recipe_of(config) == "toy"


def test_cp_makes_parents_and_copies_into_directories(tmp_path):
    recipe = next(iter(shipped.recipes()))
    done = light("cp", recipe, "my/recipe.py", "--make-parents", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "my/recipe.py").read_bytes() == shipped.recipes()[recipe].read_bytes()
    assert light("cp", recipe, "my", cwd=tmp_path).returncode == 0
    assert (tmp_path / "my" / f"{recipe}.py").is_file()
    (tmp_path / "my/recipe.py").write_text("mine")
    light("cp", "-n", recipe, "my/recipe.py", cwd=tmp_path)
    assert (tmp_path / "my/recipe.py").read_text() == "mine"
    theirs = light("cp", "llama2/7B_full", "theirs.yaml", cwd=tmp_path)
    assert theirs.returncode == 0
    assert "llama2" in (tmp_path / "theirs.yaml").read_text()
    assert "Invalid file name" in light("cp", "nothing", ".", cwd=tmp_path).stderr


def test_cat_prints_a_config(tmp_path):
    (tmp_path / "a.yaml").write_text("seed: 3\n")
    assert light("cat", "a.yaml", cwd=tmp_path).stdout == "seed: 3\n"
    assert "torchtune.models" in light("cat", "llama2/7B_full").stdout


@pytest.mark.parametrize(
    "form", ["my/recipe.py", "./my/recipe.py", "my/recipe", "my.recipe", "abs"]
)
def test_run_takes_a_path_of_any_form(here, tune, form):
    code, _, err = tune(
        "run", str(here / "my/recipe.py") if form == "abs" else form, "--config", "my/toy.yaml",
        "name=a=b=c",
    )  # fmt: skip
    assert (code, err) == (0, "")
    ran = json.loads((here / "out/single.json").read_text())
    assert ran["name"] == "a=b=c"
    assert ran["seed"] == 3
    assert ran["path"][0] == str(here)
    assert ran["world"] is None
    if form != "my.recipe":
        assert Path(ran["argv"][0]) == here / "my/recipe.py"


def test_run_by_name_with_a_config_by_name(here, tune, monkeypatch):
    from torchtune import _recipe_registry

    root = here / "shipped"
    (root / "recipes").mkdir(parents=True)
    (root / "configs" / "toys").mkdir(parents=True)
    (root / "recipes" / "toy_recipe.py").write_text(RECIPE)
    (root / "recipes" / "other.py").write_text("")
    (root / "configs" / "toys" / "small.yaml").write_text("recipe: toy_recipe\nseed: 4\nout: out\n")
    monkeypatch.setattr(shipped, "_PACKAGE", root / "components")
    monkeypatch.setattr(_recipe_registry, "_ALL_RECIPES", [])
    assert tune("run", "toy_recipe", "--config=toys/small", "name=x")[0] == 0
    listed = {r.name: [c.name for c in r.configs] for r in _recipe_registry.get_all_recipes()}
    assert listed == {"toy_recipe": ["toys/small"], "other": []}
    ran = json.loads((here / "out/single.json").read_text())
    assert (ran["seed"], ran["name"]) == (4, "x")
    assert str(root / "recipes") not in ran["path"]
    assert tune("validate", "toys/small")[:2] == (
        0,
        "Config is well-formed! It fits recipe toy_recipe.\n",
    )


def test_run_lets_a_users_recipe_import_its_neighbours_after_the_working_directory(here, tune):
    (here / "my/beside.py").write_text("WHERE = 'beside'")
    (here / "my/both.py").write_text("WHERE = 'beside'")
    (here / "both.py").write_text("WHERE = 'here'")
    (here / "my/recipe.py").write_text("import beside, both; print(beside.WHERE, both.WHERE)")
    try:
        assert tune("run", "my/recipe.py", "--config", "my/toy.yaml")[1] == "beside here\n"
    finally:
        sys.modules.pop("beside", None)
        sys.modules.pop("both", None)


def test_run_in_two_processes(here):
    done = light("run", "--nproc_per_node", "2", "my/recipe.py", "--config", "my/toy.yaml",
                 "name=a=b", cwd=here)  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    ran = [json.loads((here / f"out/{rank}.json").read_text()) for rank in (0, 1)]
    for one in ran:
        assert (one["name"], one["world"]) == ("a=b", "2")
        assert one["path"][0] == str(here)
        assert Path(one["cli"]) == ROOT / "components/__init__.py"


def test_a_config_is_checked_before_processes_start(here, tune, monkeypatch):
    monkeypatch.setattr(cli, "_launch", lambda *_: pytest.fail("launched"))
    code, _, err = tune("run", "--nproc_per_node", "2", "my/recipe.py", "--config", "my/toy.yaml",
                        "sed=4")  # fmt: skip
    assert code == 2
    assert "sed: unknown key; did you mean 'seed'?" in err


@pytest.mark.slow
def test_a_process_that_fails_gives_its_exit_code_without_our_traceback(here):
    done = light("run", "--nproc_per_node", "1", "my/recipe.py", "--config", "my/toy.yaml",
                 "seed=13", cwd=here)  # fmt: skip
    assert done.returncode == 2
    assert "13 brings bad luck" in done.stderr
    assert "Traceback (most recent call last)" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["grpo_agentik", "--config", "my/toy.yaml"], "did you mean 'grpo_agentic'?"),
        (["my/recip.py", "--config", "my/toy.yaml"], "'my/recip.py' is neither a file nor"),
        (["my/recipe.py", "--config", "my/tory.yaml"], "'my/tory.yaml' is neither a file nor"),
        (["my/recipe.py", "--config", "llama2/7B_ful"], "did you mean 'llama2/7B_full'?"),
        (["my/recipe.py"], "'--config' argument is required"),
        (["my/recipe.py", "--config", "my/toy.yaml", "sed=4"], "did you mean 'seed'?"),
        (["my/recipe.py", "--config", "my/toy.yaml", "seed=13"], "13 brings bad luck"),
        (
            ["--nproc_per_node", "2", "full_finetune_single_device", "--config", "my/toy.yaml"],
            "runs on one device",
        ),
    ],
)
def test_run_says_what_is_wrong(here, tune, arguments, message):
    code, _, err = tune("run", *arguments)
    assert code == 2
    assert message in err
    assert "Traceback" not in err


def test_run_refuses_a_directory_that_hides_our_package(here, tune):
    (here / "components").mkdir()
    (here / "components/__init__.py").touch()
    code, _, err = tune("run", "my/recipe.py", "--config", "my/toy.yaml")
    assert code == 2
    assert "package of the same name" in err


def test_help_of_a_recipe_lists_its_settings(here, tune):
    code, out, _ = tune("run", "my/recipe.py", "--help")
    assert code == 0
    assert "group_size: an integer >= 1 (default 2)" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["my/toy.yaml"], None),
        (["--config", "my/toy.yaml", "seed=5", "name=a=b"], None),
        (["my/toy.yaml", "seed=5", "--recipe", "my/recipe.py", "name=x"], None),
        (["my/toy.yaml", "rollout.group_sise=4"], "rollout.group_sise: unknown key"),
        (["my/toy.yaml", "seed=-1"], "seed = -1: must be an integer >= 0"),
        (["my/toy.yaml", "~seed"], "seed: missing"),
        (["my/toy.yaml", "part={_component_: json.dumpz}"], "did you mean 'dump'?"),
        (["my/toy.yaml", "--recipe", "nothing"], "recipe 'nothing' is neither"),
        (["my/nothing.yaml"], "neither a file nor a known config"),
        ([], "a config is required"),
    ],
)
def test_validate(here, tune, arguments, message):
    code, out, err = tune("validate", *arguments)
    if message is None:
        assert (code, err) == (0, "")
        assert "fits recipe my/recipe.py" in out
    else:
        assert code == 2
        assert message in err


def test_validate_checks_torchtunes_configs_as_torchtune_does(here, tune):
    assert tune("validate", "llama2/7B_full")[:2] == (0, "Config is well-formed!\n")
    bad = here / "bad.yaml"
    bad.write_text("model:\n  _component_: torchtune.models.llama2.llama2_7b\n  nothing: 1\n")
    code, _, err = tune("validate", "bad.yaml")
    assert code == 2
    assert "nothing" in err


@pytest.mark.parametrize("command", ["download", "run", "validate"])
def test_each_command_has_help(tune, command):
    code, out, err = tune(command, "--help")
    assert (code, err) == (0, "")
    assert f"tune {command}" in out


@pytest.mark.parametrize("command", ["cp", "cat", "ls"])
def test_each_light_command_has_help(command):
    done = light(command, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"tune {command}" in done.stdout


def test_torchtunes_recipes_run(here, tune):
    code, out, _ = tune("run", "full_finetune_single_device", "--help")
    assert code == 0
    assert "--config" in out
