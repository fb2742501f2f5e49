"""The list behind ``tune ls``: torchtune's recipes and configs, and ours appended to it."""

from __future__ import annotations

from pathlib import Path

from components.training import shipped


def register() -> None:
    """Append our recipes and their configs to torchtune's list, once."""
    from torchtune._recipe_registry import Config, Recipe, get_all_recipes

    listed = get_all_recipes()
    known = {recipe.name for recipe in listed}
    configs = [(shipped.recipe_of(path), name, path) for name, path in shipped.configs().items()]
    for recipe, file in shipped.recipes().items():
        if recipe not in known:
            # Absolute paths: torchtune joins them to its own folder, and the absolute one wins.
            own = [Config(name, str(path)) for owner, name, path in configs if owner == recipe]
            listed.append(Recipe(recipe, str(file), own, supports_distributed=True))


def _folder() -> Path:
    import torchtune

    assert torchtune.__file__ is not None
    return Path(torchtune.__file__).parent.parent / "recipes"


def _recipe_files() -> dict[str, Path]:
    from torchtune._recipe_registry import get_all_recipes

    return {recipe.name: _folder() / recipe.file_path for recipe in get_all_recipes()}


def _config_files() -> dict[str, Path]:
    from torchtune._recipe_registry import get_all_recipes

    return {
        config.name: _folder() / "configs" / config.file_path
        for recipe in get_all_recipes()
        for config in recipe.configs
    }


def recipe_names() -> list[str]:
    """The recipes that ``tune ls`` shows."""
    return list(_recipe_files())


def config_names() -> list[str]:
    """The configs that ``tune ls`` shows."""
    return list(_config_files())


def recipe_file(name: str) -> Path | None:
    """The file of a listed recipe."""
    return _recipe_files().get(name)


def config_file(name: str) -> Path | None:
    """The file of a listed config."""
    return _config_files().get(name)


def is_listed(file: Path) -> bool:
    """Whether a file is that of a listed recipe, not a user's."""
    return file in _recipe_files().values()
