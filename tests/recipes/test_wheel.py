"""The wheel: what is in it, and who owns ``tune`` while it is installed and afterwards.

Everything happens in a virtual environment of its own, without a network: torchtune's wheel is
packed again from its installed files, and the heavy packages are links to this environment's.
"""

import base64
import csv
import hashlib
import json
import subprocess
import sys
import sysconfig
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SITE = Path(sysconfig.get_path("purelib"))
TORCHTUNE = distribution("torchtune")

RECIPE = """
import json, sys
from pathlib import Path
import torchtune
import components
from components.training.config import Int, Str, parse

@parse({"seed": Int(min=0), "out": Str()})
def recipe_main(cfg):
    Path(cfg.out).write_text(json.dumps([cfg.seed, components.__file__, torchtune.__file__]))

if __name__ == "__main__":
    sys.exit(recipe_main())
"""


def run(*command, cwd=None):
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def digest(data):
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def record(site):
    """Path and hash of each file that torchtune's installation owns, below ``site``."""
    (file,) = site.glob("torchtune-*.dist-info/RECORD")
    rows = list(csv.reader(file.read_text().splitlines()))
    return [(path, expected.removeprefix("sha256=")) for path, expected, _ in rows if expected]


def changed(site):
    """Files of torchtune that are gone or differ from what was installed."""
    return [
        path
        for path, expected in record(site)
        if not (site / path).is_file() or digest((site / path).read_bytes()) != expected
    ]


def pack_torchtune(folder):
    """torchtune's wheel, from the files that its installation recorded."""
    info = f"torchtune-{TORCHTUNE.version}.dist-info"
    name = folder / f"torchtune-{TORCHTUNE.version}-py3-none-any.whl"
    own = {f"{info}/{file}" for file in ("INSTALLER", "REQUESTED", "RECORD", "direct_url.json")}
    rows = []
    with zipfile.ZipFile(name, "w") as wheel:
        for path in map(str, TORCHTUNE.files or []):
            if path in own or path.startswith("..") or path.endswith(".pyc"):
                continue
            data = (SITE / path).read_bytes()
            wheel.writestr(path, data)
            rows.append(f"{path},sha256={digest(data)},{len(data)}")
        wheel.writestr(f"{info}/RECORD", "\n".join([*rows, f"{info}/RECORD,,", ""]))
    return name


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheels")
    run(sys.executable, "-m", "pip", "wheel", ROOT, "--no-deps", "--no-build-isolation",
        "--no-index", "-w", folder)  # fmt: skip
    pack_torchtune(folder)
    return folder


@pytest.fixture
def env(tmp_path, wheels):
    """A fresh environment that sees our heavy packages, but neither torchtune nor us."""
    heavy = tmp_path / "heavy"
    heavy.mkdir()
    for entry in SITE.iterdir():
        name = entry.name.lower()
        if not name.startswith(("torchtune", "sinkflex", "recipes", "components", "__")):
            (heavy / entry.name).symlink_to(entry)
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "env")
    return Environment(tmp_path / "env", wheels, heavy)


class Environment:
    def __init__(self, prefix, wheels, heavy):
        self.bin, self.wheels = prefix / "bin", wheels
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        self.site = prefix / "lib" / version / "site-packages"
        (self.site / "heavy.pth").write_text(str(heavy))

    def pip(self, command, *arguments):
        source = ["--no-index", "--find-links", self.wheels] if command == "install" else []
        run(sys.executable, "-m", "pip", "--python", self.bin / "python", command, *source,
            *arguments)  # fmt: skip

    def tune(self, *arguments, cwd=None):
        return run(self.bin / "tune", *arguments, cwd=cwd)


def test_the_wheel_has_no_top_level_package_but_ours(wheels):
    (wheel,) = wheels.glob("sinkflex_rl-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {
        "components",
        "sinkflex_rl",
    }
    for folder, pattern in (("recipes", "*.py"), ("configs", "*.yaml")):
        files = {file.relative_to(ROOT).as_posix() for file in (ROOT / folder).rglob(pattern)}
        assert {f"components/_shipped/{file}" for file in files} <= set(names)
    assert not [name for name in names if "__pycache__" in name or name.startswith("tests")]


def test_tune_while_installed_and_after_uninstalling(env, tmp_path):
    env.pip("install", "--no-deps", "torchtune==0.6.1")
    env.pip("install", "--no-deps", "sinkflex-rl")
    assert changed(env.site) == ["../../../bin/tune"]

    user = tmp_path / "user"
    user.mkdir()
    listed = env.tune("ls", cwd=user)
    assert "full_finetune_single_device" in listed.stdout
    assert "grpo_agentic" in listed.stdout
    env.tune("cp", "grpo_agentic", "my/recipe.py", "--make-parents", cwd=user)
    copied = (user / "my/recipe.py").read_bytes()
    assert copied == (ROOT / "recipes/grpo_agentic.py").read_bytes()

    (user / "my/toy.py").write_text(RECIPE)
    (user / "my/toy.yaml").write_text("seed: 3\nout: ran.json\n")
    done = env.tune("run", "my/toy.py", "--config", "my/toy.yaml", "seed=4", cwd=user)
    assert done.stderr == ""
    seed, ours, theirs = json.loads((user / "ran.json").read_text())
    assert seed == 4
    assert Path(ours) == env.site / "components/__init__.py"
    assert Path(theirs) == env.site / "torchtune/__init__.py"

    env.pip("uninstall", "-y", "sinkflex-rl")
    assert changed(env.site) == ["../../../bin/tune"]
    assert not (env.site / "components").exists()
    run(env.bin / "python", "-c", "import torchtune, torchtune.modules")

    env.pip("install", "--force-reinstall", "--no-deps", "torchtune==0.6.1")
    assert changed(env.site) == []
    listed = env.tune("ls", cwd=user).stdout
    assert "full_finetune_single_device" in listed
    assert "grpo_agentic" not in listed


def test_an_installer_with_another_order_is_repaired_by_installing_ours_again(env):
    env.pip("install", "--no-deps", "sinkflex-rl")
    env.pip("install", "--no-deps", "torchtune==0.6.1")
    assert "grpo_agentic" not in env.tune("ls").stdout
    env.pip("install", "--force-reinstall", "--no-deps", "sinkflex-rl")
    assert "grpo_agentic" in env.tune("ls").stdout
