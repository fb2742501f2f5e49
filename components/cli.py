"""The ``tune`` command: torchtune's, with our recipes and configs added.

What differs from torchtune's own:

- ``tune ls``, ``cp``, ``cat`` and ``run`` know ours too, and start without torch where they can.
- ``tune run`` takes a recipe by name, by a path of any form, or as a dotted module; the working
  directory comes first on ``sys.path``; ``--config`` must exist.
- ``tune validate`` takes a name or a path and overrides, and checks a config against the schema
  of its recipe, or as torchtune does for its own.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import components
from components.training import registry
from components.training.component import did_you_mean


def main() -> None:
    """Run the command line in ``sys.argv``."""
    # libgomp's threads spin for milliseconds: beside a busy process work takes much longer.
    os.environ.setdefault("GOMP_SPINCOUNT", "3000")
    try:
        _main()
    except KeyboardInterrupt:
        print("tune: interrupted", file=sys.stderr)
        raise SystemExit(130) from None


def _main() -> None:
    command = sys.argv[1] if len(sys.argv) > 1 else ""
    if command in ("ls", "cp", "cat"):  # these need no torch
        _light(command)
        return
    from torchtune._cli import run, tune, validate

    registry.register()
    run_command: Any = run.Run
    validate_command: Any = validate.Validate
    run_command._run_cmd = _run
    validate_command._add_arguments = _add_validate_arguments
    validate_command._validate_cmd = _validate
    if command == "validate":
        sys.argv[2:] = _options_first(sys.argv[2:])
    tune.main()


def _light(command: str) -> None:
    """Run a command that reads only torchtune's list of recipes, without importing torch."""
    spec = importlib.util.find_spec("torchtune")
    if spec is None:
        raise SystemExit("tune: torchtune is not installed; pip install torchtune==0.6.1")
    # An empty package that still finds its submodules: torchtune's own __init__ imports torch.
    sys.modules["torchtune"] = importlib.util.module_from_spec(spec)
    from torchtune._cli.cat import Cat
    from torchtune._cli.cp import Copy
    from torchtune._cli.ls import List

    registry.register()
    _extend_cp()
    parser = argparse.ArgumentParser(prog="tune")
    {"ls": List, "cp": Copy, "cat": Cat}[command].create(parser.add_subparsers())
    args = parser.parse_args()
    args.func(args)


def _extend_cp() -> None:
    """Let ``tune cp`` copy into a directory that exists; torchtune's takes it for a file name."""
    from torchtune._cli.cp import Copy

    copy = Copy._cp_cmd

    def into_directory(self: Any, args: argparse.Namespace) -> None:
        source = registry.recipe_file(args.file) or registry.config_file(args.file)
        if source is not None and args.destination.is_dir():
            args.destination = args.destination / source.name
        copy(self, args)

    Copy._cp_cmd = into_directory


def _run(command: Any, args: argparse.Namespace) -> None:
    """``tune run``; ``command`` is torchtune's Run."""
    fail: Callable[[str], Any] = command._parser.error
    distributed = command._is_distributed_args(args)
    arguments = _split_config(args.recipe_args)
    config = _resolve_config(arguments, fail)
    _put_working_directory_first(fail)
    recipe = command._get_recipe(args.recipe)
    file = registry.recipe_file(args.recipe) or _file_at(args.recipe)
    if file is None and not _is_module(args.recipe):
        hint = did_you_mean(args.recipe, registry.recipe_names())
        fail(f"recipe {args.recipe!r} is neither a file nor a known recipe{hint}")
    if distributed:
        if recipe is not None and not recipe.supports_distributed:
            fail(f"recipe {recipe.name!r} runs on one device: leave out the torchrun options")
        if file is not None and config is not None:
            _check_before_launch(file, config, arguments, fail)
        # Each process is this command again, so that it finds modules as a single one does.
        args.recipe_args = ["run", str(file or args.recipe), *arguments]
        args.recipe = "components.cli"
        _launch(command, args)
        return
    args.recipe_args = arguments
    args.recipe = str(file or args.recipe)
    if file is not None:
        _make_neighbours_importable(file)
    command._run_single_device(args, is_builtin=file is not None)


def _launch(command: Any, args: argparse.Namespace) -> None:
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "300")  # to stop and save
    if args.nproc_per_node.isdigit():  # torchrun would give each process one thread, with a warning
        threads = max(1, (os.cpu_count() or 1) // int(args.nproc_per_node))
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    try:
        command._run_distributed(args, is_builtin=False)
    except ChildFailedError as error:
        print(error, file=sys.stderr)
        _, failure = error.get_first_failure()
        raise SystemExit(failure.exitcode if failure.exitcode > 0 else 1) from None
    except SignalException as error:  # the ranks have stopped
        raise SystemExit(128 + error.sigval) from None


def _split_config(arguments: list[str]) -> list[str]:
    """Write ``--config=x`` as two arguments."""
    split = []
    for argument in arguments:
        split += argument.split("=", 1) if argument.startswith("--config=") else [argument]
    return split


def _resolve_config(arguments: list[str], fail: Callable[[str], Any]) -> str | None:
    """Replace a config's name by its file in place; None when only help is asked for."""
    if "--config" not in arguments[:-1]:
        if not {"-h", "--help"} & set(arguments):
            fail("the '--config' argument is required: the name or path of a config")
        return None
    at = arguments.index("--config") + 1
    file = registry.config_file(arguments[at]) or Path(arguments[at])
    if not file.is_file():
        hint = did_you_mean(arguments[at], registry.config_names())
        fail(f"config {arguments[at]!r} is neither a file nor a known config{hint}")
    arguments[at] = str(file)
    return arguments[at]


def _put_working_directory_first(fail: Callable[[str], Any]) -> None:
    """Make the user's modules importable, unless that would hide our own package."""
    here = os.getcwd()
    other, own = Path(here, "components", "__init__.py"), Path(str(components.__file__))
    if other.is_file() and not other.samefile(own):
        fail(
            f"{other.parent} is a package of the same name as {own.parent}, which this `tune` "
            "belongs to; run `python -m components.cli` to use the one here, or change directory"
        )
    if sys.path[0] not in ("", here):
        sys.path.insert(0, here)


def _file_at(path: str) -> Path | None:
    """The file at a path, whose ``.py`` may be left out."""
    for candidate in (Path(path), Path(path + ".py")):
        if candidate.is_file():
            return candidate.absolute()
    return None


def _is_module(name: str) -> bool:
    if not all(part.isidentifier() for part in name.split(".")):
        return False
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def _check_before_launch(
    file: Path, config: str, arguments: list[str], fail: Callable[[str], Any]
) -> None:
    """Check the config once here, where many processes would each report the same problems."""
    from components.training.config import ConfigError, load_config

    validate = _validator(file)
    if validate is None:
        return
    at = arguments.index("--config")
    try:
        validate(load_config(config, arguments[:at] + arguments[at + 2 :]))
    except ConfigError as error:
        fail(f"{config}: {error}")


def _validator(file: Path) -> Callable[..., Any] | None:
    """``validate(cfg)`` of a recipe that declares a schema, else None."""
    if "SCHEMA" not in file.read_text("utf-8"):  # do not run a stranger's file to find out
        return None
    return getattr(getattr(_load(file), "recipe_main", None), "validate", None)


def _make_neighbours_importable(file: Path) -> None:
    """Let a user's recipe import modules beside it, after those in the working directory."""
    if not registry.is_listed(file):
        sys.path.insert(1, str(file.parent))


def _load(file: Path) -> ModuleType:
    _make_neighbours_importable(file)
    spec = importlib.util.spec_from_file_location("tune_recipe", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _add_validate_arguments(command: Any) -> None:
    parser = command._parser
    parser.usage = "tune validate [--config] CONFIG [--recipe RECIPE] [key=value ...] [~key ...]"
    parser.add_argument("--config", help="name or path of a config; may also stand first")
    parser.add_argument("--recipe", help="name or path of a recipe; default: the config's `recipe`")
    parser.add_argument("overrides", nargs="*", help="key=value or ~key, as for `tune run`")


def _options_first(arguments: list[str]) -> list[str]:
    """Move options before the overrides: argparse takes one run of positional arguments only."""
    options, rest = [], []
    remaining = iter(arguments)
    for argument in remaining:
        if argument in ("--config", "--recipe"):
            options += [argument, *([value] if (value := next(remaining, None)) else [])]
        else:
            (options if argument.startswith("-") else rest).append(argument)
    return options + rest


def _validate(command: Any, args: argparse.Namespace) -> None:
    """``tune validate``; ``command`` is torchtune's Validate."""
    from components.training.config import ConfigError, load_config

    fail: Callable[[str], Any] = command._parser.error
    arguments = [args.config, *args.overrides] if args.config else args.overrides
    if not arguments:
        fail("a config is required: its name or path")
    split = ["--config", arguments[0]]
    config = _resolve_config(split, fail)
    _put_working_directory_first(fail)
    assert config is not None
    try:
        cfg = load_config(config, arguments[1:])
        name = args.recipe or cfg.get("recipe")
        validator = None
        if name is not None:
            file = (
                registry.recipe_file(name)
                or _file_at(name)
                or _file_at(str(Path(config).parent / name))
            )
            if file is None:
                raise ConfigError(f"recipe {name!r} is neither a file nor a known recipe")
            validator = _validator(file)
        if validator is None:
            _torchtune_check(cfg)
        else:
            validator(cfg)
    except ConfigError as error:
        fail(f"{config}: {error}")
    else:
        print("Config is well-formed!" + (f" It fits recipe {name}." if validator else ""))


def _torchtune_check(cfg: Any) -> None:
    from torchtune.config import validate
    from torchtune.config._errors import ConfigError as ComponentErrors
    from torchtune.config._errors import InstantiationError

    from components.training.config import ConfigError

    try:
        validate(cfg)
    except (ComponentErrors, InstantiationError) as error:
        raise ConfigError(str(error)) from error


if __name__ == "__main__":
    main()
