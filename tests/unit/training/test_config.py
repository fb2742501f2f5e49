"""Configs: loading, overrides, the check against a schema, and building components."""

import functools
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
import torch
from omegaconf import DictConfig, ListConfig

from components.training.component import check_component, fits, locate
from components.training.config import (
    Anything,
    Bool,
    Component,
    ConfigError,
    Float,
    Int,
    ListOf,
    MapOf,
    OneOf,
    Section,
    Str,
    as_partial,
    instantiate,
    load_config,
    parse,
    validate,
)

HERE = "tests.unit.training.test_config"


@dataclass(frozen=True, kw_only=True)
class User:
    seed: int
    style: Literal["terse", "chatty"] = "terse"


class Env:
    def __init__(self, domain: str, *, user: Any = None, limits: Sequence[int] = (), **extra: Any):
        self.domain, self.user, self.limits, self.extra = domain, user, limits, extra


def make_optimizer(params: list[Any], lr: float, betas: tuple[float, float] = (0.9, 0.99)):
    return params, lr, betas


def make_model(path: str, *, dtype: str, rank: int | None = None):
    return path, dtype, rank


SCHEMA = {
    "seed": Int(min=0),
    "dtype": OneOf("bf16", "fp32"),
    "output_dir": Str(default="runs/${dtype}"),
    "resume": Bool(default=False),
    "rollout": {"group_size": Int(min=1), "temperature": Float(gt=0, max=2, default=1.0)},
    "env": Component(default=None),
    "optimizer": Component(positional=1, default=None),
    "model": Component(positional=1, provided=("dtype",), default=None),
    "weights": MapOf(Float(), default={}),
    "stages": ListOf({"steps": Int(min=1), "lr": Float(default=0.1)}, default=[]),
    "eval": Section({"every": Int(min=1), "trials": Int(default=4)}, default=None),
    "note": Anything(default=""),
}
GOOD = "seed: 1\ndtype: bf16\nrollout: {group_size: 4}\n"


@pytest.fixture
def load(tmp_path):
    """Writes a config and loads it with overrides."""

    def write_and_load(text=GOOD, *overrides):
        path = tmp_path / "c.yaml"
        path.write_text(text)
        return load_config(path, overrides)

    return write_and_load


def problems(cfg, schema=SCHEMA):
    with pytest.raises(ConfigError) as caught:
        validate(cfg, schema)
    return [line.strip() for line in str(caught.value).splitlines()[1:]]


# Loading and overrides


def test_a_valid_config_gets_its_defaults_and_plain_values(load):
    cfg = validate(load(GOOD + "eval: {every: 2}\nstages: [{steps: 3}]\n"), SCHEMA)
    assert cfg == {
        "recipe": None,
        "seed": 1,
        "dtype": "bf16",
        "output_dir": "runs/bf16",
        "resume": False,
        "rollout": {"group_size": 4, "temperature": 1.0},
        "env": None,
        "optimizer": None,
        "model": None,
        "weights": {},
        "stages": [{"steps": 3, "lr": 0.1}],
        "eval": {"every": 2, "trials": 4},
        "note": "",
    }
    with pytest.raises(AttributeError):
        _ = cfg.sede
    with pytest.raises(AttributeError):
        cfg.sede = 2


def test_integers_become_floats_where_a_number_is_wanted(load):
    cfg = validate(load(GOOD, "rollout.temperature=1", "weights.a=2"), SCHEMA)
    assert type(cfg.rollout.temperature) is float
    assert type(cfg.weights.a) is float


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("note=a=b=c", "a=b=c"),
        ("note=a==", "a=="),
        ("note=1e-5", 1e-5),
        ("note=None", None),
        ("note=null", None),
        ("note='1'", "1"),
        ("note=true", True),
        ("note=[1, x]", [1, "x"]),
        ("note={a: {b: 1}}", {"a": {"b": 1}}),
        ("note.a.b=1", {"a": {"b": 1}}),
        ("note=${seed}", 1),
        ("note=https://x.y/?q=1", "https://x.y/?q=1"),
    ],
)
def test_override_values(load, override, value):
    assert validate(load("seed: 1\n", override), {"seed": Int(), "note": Anything()}).note == value


def test_overrides_apply_in_order_and_inside_lists(load):
    text = GOOD + "stages: [{steps: 1}, {steps: 2}, {steps: 3}]\n"
    cfg = load(text, "stages[0].steps=7", "stages.1.lr=0.5", "~stages.2", "seed=2", "seed=3")
    assert cfg.stages == [{"steps": 7}, {"steps": 2, "lr": 0.5}]
    assert cfg.seed == 3


def test_a_string_for_a_component_replaces_its_path_only(load):
    text = f"env: {{_component_: {HERE}.User, seed: 1}}\na: {{b: {{_component_: x, k: 1}}}}\n"
    cfg = load(text, f"env={HERE}.Env", "a.b=y")
    assert cfg.env == {"_component_": f"{HERE}.Env", "seed": 1}
    assert cfg.a.b == {"_component_": "y", "k": 1}


def test_deleting_keys(load):
    cfg = load(GOOD, "~rollout.group_size", "~dtype")
    assert cfg == {"seed": 1, "rollout": {}}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("seed", "must be key=value"),
        ("=3", "must be key=value"),
        ("a..b=3", "must be key=value"),
        ("--seed=3", "must be key=value"),
        ("~sed", "did you mean 'seed'?"),
        ("~rolout.group_size", "did you mean 'rollout'?"),
        ("seed.x=1", "'seed' is 1, which has no keys"),
        ("note=[1", "not valid YAML"),
        ("stages.4.lr=1", "an index below 1"),
    ],
)
def test_malformed_overrides(load, override, message):
    with pytest.raises(ConfigError) as caught:
        load(GOOD + "stages: [{steps: 1}]\n", override)
    assert override in str(caught.value)
    assert message in str(caught.value)


def test_files_that_are_no_configs(load, tmp_path):
    with pytest.raises(ConfigError, match="neither a file nor a shipped config"):
        load_config(tmp_path / "none.yaml")
    for text in ("a: [1", "a: 1\na: 2", "- 1\n- 2\n"):
        with pytest.raises(ConfigError, match=r"c\.yaml"):
            load(text)


def test_environment_variables_and_their_defaults(load, monkeypatch):
    text = GOOD + "output_dir: ${oc.env:SINKFLEX_TEST_RUNS,runs}/x\n"
    monkeypatch.delenv("SINKFLEX_TEST_RUNS", raising=False)
    assert validate(load(text), SCHEMA).output_dir == "runs/x"
    monkeypatch.setenv("SINKFLEX_TEST_RUNS", "/data")
    assert validate(load(text), SCHEMA).output_dir == "/data/x"


def test_what_cannot_be_resolved_is_named(load):
    text = GOOD + "output_dir: ${nothing}/x\nnote: [a, '${oc.env:SINKFLEX_NOT_SET}']\n"
    found = problems(load(text))
    assert [line.split(":")[0] for line in found] == ["output_dir", "note[1]"]


def test_a_literal_dollar_brace_survives(load):
    assert validate(load("note: a\\${b}\n"), {"note": Str()}).note == "a${b}"


# The schema


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("seed=-1", "seed = -1: must be an integer >= 0"),
        ("seed=1.5", "seed = 1.5: must be an integer >= 0"),
        ("seed=true", "seed = True: must be an integer >= 0"),
        ("seed=null", "seed = None: must be an integer >= 0"),
        ("resume=1", "resume = 1: must be true or false"),
        ("output_dir=''", "output_dir = '': must be a string that is not empty"),
        ("dtype=bf", "dtype = 'bf': must be one of bf16, fp32; did you mean 'bf16'?"),
        ("rollout.temperature=0", "rollout.temperature = 0: must be a number <= 2 and > 0"),
        ("rollout.temperature=.nan", "rollout.temperature = nan: must be a number <= 2 and > 0"),
        (
            "rollout=4",
            "rollout = 4: must be a mapping with the keys group_size, temperature",
        ),
        ("stages=[{steps: 0}]", "stages[0].steps = 0: must be an integer >= 1"),
        ("weights={a: x}", "weights.a = 'x': must be a number"),
        ("eval=3", "eval = 3: must be a mapping with the keys every, trials, or null"),
        ("eval={}", "eval.every: missing; must be an integer >= 1"),
        ("~rollout.group_size", "rollout.group_size: missing; must be an integer >= 1"),
        ("~rollout", "rollout.group_size: missing; must be an integer >= 1"),
        (
            "rollout.group_sise=4",
            "rollout.group_sise: unknown key; did you mean 'rollout.group_size'?",
        ),
        ("stages=[{steps: 1, lrr: 1}]", "stages[0].lrr: unknown key; did you mean 'stages[0].lr'?"),
        ("group_size=4", "group_size: unknown key; did you mean 'rollout.group_size'?"),
        ("rolout.group_size=4", "rolout: unknown key; did you mean 'rollout'?"),
        ("env=3", "env = 3: must be a mapping with _component_ and its keyword arguments, or null"),
    ],
)
def test_a_problem_names_key_value_and_what_is_allowed(load, override, expected):
    assert problems(load(GOOD, override)) == [expected]


def test_an_unknown_key_like_no_other_lists_the_keys(load):
    (found,) = problems(load(GOOD, "rollout.zzz=1"))
    assert found == "rollout.zzz: unknown key; the keys here are group_size, temperature"


def test_all_problems_are_reported_together(load):
    cfg = load(GOOD, "seed=x", "rollout.group_size=0", "dtypo=1", "env._component_=nothing.at.all")
    assert [line.split(" ")[0].rstrip(":") for line in problems(cfg)] == [
        "dtypo",
        "seed",
        "rollout.group_size",
        "env._component_",
    ]


def test_bounds_include_min_and_max_but_not_gt_and_lt(load):
    schema = {"a": Int(min=1, max=3), "b": Float(gt=0, lt=1)}
    for a, b in ((1, 0.5), (3, 0.999)):
        validate(load(f"a: {a}\nb: {b}\n"), schema)
    assert len(problems(load("a: 0\nb: 0\n"), schema)) == 2
    assert len(problems(load("a: 4\nb: 1\n"), schema)) == 2


def test_a_gpu_is_called_cuda(load):
    schema = {"a": OneOf("cpu", "cuda")}
    assert problems(load("a: gpu\n"), schema) == [
        "a = 'gpu': must be one of cpu, cuda; did you mean 'cuda'?"
    ]


def test_a_whole_number_may_be_written_as_a_float(load):
    value = validate(load("a: 1e3\n"), {"a": Int(min=1)}).a
    assert (value, type(value)) == (1000, int)


def test_one_of_tells_true_from_one(load):
    assert problems(load("a: true\n"), {"a": OneOf(1, 2)})
    assert problems(load("a: 1\n"), {"a": OneOf("auto", True, False)})


def test_settings_that_contradict_each_other(load):
    def check(cfg):
        return ["seed and group_size must differ"] if cfg.seed == cfg.rollout.group_size else []

    validate(load(), SCHEMA, check=check)
    with pytest.raises(ConfigError, match="must differ"):
        validate(load(GOOD, "seed=4"), SCHEMA, check=check)


# Components


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("torch.optim.AdamX", "'torch.optim' has no 'AdamX'; did you mean 'Adam"),
        ("torch.optimm.Adam", "'torch' has no 'optimm'; did you mean 'optim'?"),
        ("components.training.confog.parse", "did you mean 'config'?"),
        ("no_such_package.x", "no module 'no_such_package' is installed"),
        ("math.pi", "is a float, not a class or function"),
        ("torch.optim.adamw", "is a module, not a class or function; did you mean 'AdamW'?"),
        ("math.sqrt.x", "'math.sqrt' has no 'x'"),
        (".x", "is not a dotted path"),
        (3, "is not a dotted path"),
    ],
)
def test_components_that_are_not_there(path, message):
    with pytest.raises(ConfigError) as caught:
        locate(path)
    assert message in str(caught.value)


def test_an_error_inside_a_module_is_not_a_missing_module(tmp_path, monkeypatch):
    (tmp_path / "sinkflex_bad1.py").write_text("import sinkflex_not_there\n")
    (tmp_path / "sinkflex_bad2.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"importing 'sinkflex_bad1' failed.*sinkflex_not_there"):
        locate("sinkflex_bad1.x")
    with pytest.raises(ConfigError, match="importing 'sinkflex_bad2' failed: ZeroDivisionError"):
        locate("sinkflex_bad2.x")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{{_component_: {HERE}.User, seed: 1}}", []),
        ("{seed: 1}", ["env: missing _component_, the dotted path of a class or function"]),
        (
            f"{{_component_: {HERE}.User, sede: 1}}",
            [
                f"env.sede: {HERE}.User takes no 'sede'; did you mean 'seed'?",
                f"env.seed: missing, {HERE}.User needs it; must be an integer",
            ],
        ),
        (
            f"{{_component_: {HERE}.User, seed: x, style: loud}}",
            [
                "env.seed = 'x': must be an integer",
                "env.style = 'loud': must be one of terse, chatty",
            ],
        ),
        # Env takes **extra, so any further key is fine, but not inside its user.
        (f"{{_component_: {HERE}.Env, domain: x, anything: 1}}", []),
        (
            f"{{_component_: {HERE}.Env, domain: x, user: {{_component_: {HERE}.User, seeds: 1}}}}",
            [
                f"env.user.seeds: {HERE}.User takes no 'seeds'; did you mean 'seed'?",
                f"env.user.seed: missing, {HERE}.User needs it; must be an integer",
            ],
        ),
        (
            f"{{_component_: {HERE}.Env, domain: x, user: [{{_component_: nothing.x}}]}}",
            ["env.user[0]._component_ = 'nothing.x': no module 'nothing' is installed"],
        ),
        (
            f"{{_component_: {HERE}.Env, domain: 3, limits: [1, x]}}",
            [
                "env.domain = 3: must be a string",
                "env.limits = [1, 'x']: must be a list, each element an integer",
            ],
        ),
    ],
)
def test_components_are_checked_against_their_signature(load, text, expected):
    cfg = load(GOOD + f"env: {text}\n")
    if expected:
        assert problems(cfg) == expected
    else:
        validate(cfg, SCHEMA)


def test_what_the_recipe_passes_is_neither_needed_nor_allowed_in_the_config(load):
    good = (
        f"optimizer: {{_component_: {HERE}.make_optimizer, lr: 1}}\n"
        f"model: {{_component_: {HERE}.make_model}}\n"
    )
    validate(load(GOOD + good), SCHEMA)
    assert problems(load(GOOD + good, "optimizer.params=[]", "model.dtype=x", "~optimizer.lr")) == [
        "optimizer.params: the recipe itself passes 'params'; leave it out",
        f"optimizer.lr: missing, {HERE}.make_optimizer needs it; must be a number",
        "model.dtype: the recipe itself passes 'dtype'; leave it out",
    ]


def test_a_component_that_cannot_take_what_the_recipe_passes():
    user = {"_component_": f"{HERE}.User", "seed": 1}
    assert check_component(user, "user", provided=("domain",)) == [
        f"user: {HERE}.User takes no 'domain', which the recipe passes"
    ]
    assert check_component(user, "user", positional=1) == [
        f"user: {HERE}.User takes 0 positional arguments, and the recipe passes 1"
    ]
    env = {"_component_": f"{HERE}.Env", "domain": "x"}
    assert check_component(env, "env", provided=("whatever",)) == []


def test_checking_calls_nothing(load):
    cfg = load("a: {_component_: sys.exit}\n")
    validate(cfg, {"a": Component()})


@pytest.mark.parametrize(
    ("value", "hint", "expected"),
    [
        (1, float, True),
        (True, int, False),
        (True, float, False),
        ("1", int, False),
        (None, int | None, True),
        ("x", int | None, False),
        ([1], list[int], True),
        ([1.5], list[int], False),
        ([1, "x"], tuple[int, str], True),
        (["x"], tuple[int, ...], False),
        ("ab", Sequence[str], False),
        ({"a": 1}, dict[str, int], True),
        ({"a": "x"}, Mapping[str, int], False),
        ([], dict, False),
        ("auto", Literal["auto", "on"], True),
        ("off", Literal["auto", "on"], False),
        (1, Literal[True], False),
        ("anything", object, True),
        ("bf16", Env, False),
        ("fast", float | torch.Tensor, False),
        ("a/b", Path, True),
        ({"_component_": "x"}, int, True),
    ],
)
def test_annotations(value, hint, expected):
    assert fits(value, hint) is expected


# Building


def test_instantiate_builds_nested_components_from_plain_values(load):
    text = f"""
    name: retail
    env:
      _component_: {HERE}.Env
      domain: ${{name}}
      limits: [1, 2]
      user: {{_component_: {HERE}.User, seed: 7}}
      table: {{a: [{{_component_: {HERE}.User, seed: 8}}]}}
    """
    env = instantiate(load(text).env)
    assert (env.domain, env.limits, env.user) == ("retail", [1, 2], User(seed=7))
    assert env.extra == {"table": {"a": [User(seed=8)]}}
    assert type(env.limits) is list
    assert type(env.extra["table"]) is dict
    assert not isinstance(env.extra["table"]["a"], (DictConfig, ListConfig))


def test_instantiate_passes_arguments_on_and_keywords_win(load):
    cfg = load(f"o: {{_component_: {HERE}.make_optimizer, lr: 1}}\nnone: null\nx: {{a: 1}}\n")
    params = [object()]
    assert instantiate(cfg.o, params, lr=2) == (params, 2, (0.9, 0.99))
    assert instantiate(cfg.o, params)[0] is params
    assert instantiate(cfg.none) is None
    with pytest.raises(ConfigError, match="_component_"):
        instantiate(cfg.x)


def test_keywords_that_replace_a_nested_component_spare_building_it(load):
    cfg = load(f"e: {{_component_: {HERE}.Env, domain: x, user: {{_component_: sys.exit}}}}\n")
    assert instantiate(cfg.e, user="mine").user == "mine"


def test_as_partial_builds_later_and_pickles(load):
    text = f"""
    env: {{_component_: {HERE}.Env, domain: x, user: {{_component_: {HERE}.User, seed: 7}}}}
    bad: {{_component_: {HERE}.Envy}}
    """
    cfg = load(text)
    make = as_partial(cfg.env, domain="y")
    assert isinstance(make, functools.partial)
    first, second = make(), pickle.loads(pickle.dumps(make))(limits=[3])
    assert (first.domain, first.user) == ("y", User(seed=7))
    assert second.limits == [3]
    assert first.user is not make().user
    with pytest.raises(ConfigError, match="did you mean 'Env'"):
        as_partial(cfg.bad)


class Several:
    """Makes the components in ``parts`` itself, each with the same seed."""

    component_makers: ClassVar = {"parts": ("seed",)}

    def __init__(self, *, seed: int, parts: Mapping[str, Any], one: User) -> None:
        self.parts = {name: make(seed=seed) for name, make in parts.items()}
        self.one = one


def test_a_class_may_make_the_components_in_an_argument_itself(load):
    text = f"""
    s:
      _component_: {HERE}.Several
      seed: 3
      parts: {{a: {{_component_: {HERE}.User}}, b: {{_component_: {HERE}.User}}}}
      one: {{_component_: {HERE}.User, seed: 8}}
    """
    cfg = load(text)
    validate(cfg, {"s": Component()})
    several = pickle.loads(pickle.dumps(as_partial(cfg.s)))()
    assert several.parts == {"a": User(seed=3), "b": User(seed=3)}
    assert several.one == User(seed=8)
    cfg.s.parts.b.seed = 4
    with pytest.raises(ConfigError, match=r"s\.parts\.b\.seed: the recipe itself passes 'seed'"):
        validate(cfg, {"s": Component()})


# The decorator


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    (tmp_path / "c.yaml").write_text(GOOD)
    monkeypatch.chdir(tmp_path)
    seen = []

    @parse(SCHEMA, check=lambda cfg: ["seed 5 is taken"] if cfg.seed == 5 else [])
    def recipe_main(cfg):
        """Runs."""
        seen.append(cfg)
        if cfg.seed == 13:
            raise ConfigError("13 brings bad luck")
        return 3

    return recipe_main, seen


def test_a_recipe_gets_the_checked_config(recipe, monkeypatch):
    main, seen = recipe
    assert main(["--config", "c.yaml", "seed=2", "note=a=b", "~rollout.temperature"][:4]) == 3
    assert isinstance(seen[0], DictConfig)
    assert (seen[0].seed, seen[0].note, seen[0].rollout.temperature) == (2, "a=b", 1.0)
    monkeypatch.setattr("sys.argv", ["recipe.py", "seed=9", "--config", "c.yaml"])
    main()
    assert seen[1].seed == 9
    assert main.__doc__ == "Runs."


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("sed=1", "did you mean 'seed'?"),
        ("seed=5", "seed 5 is taken"),
        ("seed=13", "13 brings bad luck"),
        ("--seed", "must be key=value"),
    ],
)
def test_a_bad_config_exits_with_2_and_no_traceback(recipe, capsys, override, message):
    main, _ = recipe
    with pytest.raises(SystemExit) as exit:
        main(["--config", "c.yaml", override])
    assert exit.value.code == 2
    err = capsys.readouterr().err
    assert message in err
    assert "c.yaml" in err
    assert "Traceback" not in err


def test_the_decorated_recipe_offers_its_check(recipe, load):
    main, _ = recipe
    assert main.validate(load()).rollout.temperature == 1.0
    with pytest.raises(ConfigError, match="is taken"):
        main.validate(load(GOOD, "seed=5"))
