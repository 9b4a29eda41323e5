"""What a tool can see, nobody has to remember: layers, sizes, documented settings, commands that exist, owned skips."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest

from jaxcoll import cli, config
from jaxcoll.version import __version__

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
README = (ROOT / "README.md").read_text()
MOST_LINES = 500
# Longer files that are there already, with their length: it may only shrink, and an entry goes when its file is split.
LONGER: dict[str, int] = {}


def tracked(*patterns: str) -> list[Path]:
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listing.returncode:  # an unpacked archive
        return sorted({path for pattern in patterns for path in ROOT.rglob(pattern) if "build" not in path.parts})
    return [ROOT / line for line in listing.stdout.splitlines() if (ROOT / line).is_file()]


PYTHON = tracked("*.py")
NATIVE = tracked("*.cc", "*.h", "*.inc")


def test_layers():
    done = subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports_command; lint_imports_command()"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"Contracts: [1-9]\d* kept, 0 broken", done.stdout)


def test_layers_can_fail(tmp_path: Path):
    # The same contracts over a copy in which the lowest layer imports the highest.
    package = tmp_path / "jaxcoll"
    for path in PYTHON:
        if path.is_relative_to(ROOT / "jaxcoll"):
            target = tmp_path / path.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(path.read_text())
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    errors = package / "errors.py"
    errors.write_text(errors.read_text() + "\nfrom jaxcoll import cli as cli\n")
    done = subprocess.run(
        # Without site: an editable installation's own finder would put the checkout before the copy.
        [sys.executable, "-S", "-c", "from importlinter.cli import lint_imports_command; lint_imports_command()"],
        cwd=tmp_path,
        env={"PYTHONPATH": os.pathsep.join([str(tmp_path), sysconfig.get_path("purelib")]), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "An import never points up BROKEN" in done.stdout


@pytest.mark.parametrize("path", [*PYTHON, *NATIVE], ids=lambda path: str(path.relative_to(ROOT)))
def test_files_stay_small(path: Path):
    lines, allowed = len(path.read_text().splitlines()), LONGER.get(str(path.relative_to(ROOT)))
    if allowed is None:
        assert lines < MOST_LINES, f"{path.name} has {lines} lines: split it"
    else:
        assert MOST_LINES <= lines <= allowed, f"{path.name} has {lines} lines; its entry says {allowed}"


def test_ruff_is_content():
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--no-cache", "."],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def test_every_setting_is_documented():
    documented = dict(re.findall(r"^\| `(JAXCOLL_\w+)` \| (?:`([^`]*)`)? *\|", README, re.MULTILINE))
    assert documented == {row.env: row.show(row.default) for row in config.settings()}


def test_every_variable_in_the_code_is_a_setting():
    known = {row.env for row in config.settings()}
    used: dict[str, Path] = {}
    for path in (*PYTHON, *NATIVE, ROOT / "README.md", ROOT / "BUILD.md"):
        if "tests" in path.relative_to(ROOT).parts:
            continue  # tests misspell on purpose
        for name in re.findall(r"(?<![\w-])JAXCOLL_[A-Z][A-Z_]*[A-Z]\b(?=[\"'`= ,.)]|$)", path.read_text()):
            used.setdefault(name, path)
    for name, path in used.items():
        macro = path.suffix in (".cc", ".h", ".inc") or name == "JAXCOLL_NAME"
        assert name in known or name.startswith(config.OTHER_PREFIXES) or macro, f"{name} in {path} is no setting"
    assert known <= used.keys()


def blocks(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.startswith("    ")]


def test_make_targets_in_the_documents_exist():
    makefile = (ROOT / "Makefile").read_text()
    targets = {name for line in re.findall(r"^([a-z][\w ]*):(?!=)", makefile, re.MULTILINE) for name in line.split()}
    wanted = set()
    for document in ("README.md", "BUILD.md", "BENCHMARKS.md", "Makefile"):
        wanted |= set(re.findall(r"(?:^#? *|`)make ([a-z]\w*)", (ROOT / document).read_text(), re.MULTILINE))
    assert {"demo", "test"} <= wanted
    assert wanted <= targets


def test_commands_in_the_readme_exist():
    known = {command.name for command in cli.COMMANDS}
    wanted = set(re.findall(r"(?:^    |`)jaxcoll ([a-z]\w*)", README, re.MULTILINE))
    assert {"bench", "doctor", "config"} <= wanted
    assert wanted <= known


def test_the_readme_is_honest_first():
    screen = README.split("## Status")[0]
    for word in ("make demo", "make test", "jax.shard_map", "partitioner", "jaxcoll.enable()"):
        assert word in screen


def test_files_named_in_the_documents_exist():
    for document in ("README.md", "BENCHMARKS.md"):
        for name in re.findall(r"\]\((?!http)([^)#]+)\)", (ROOT / document).read_text()):
            assert (ROOT / name).exists(), f"{document} points to {name}"


def skips(tree: ast.AST) -> list[int]:
    names = {"skip", "skipif", "importorskip", "xfail"}
    return [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr in names]


@pytest.mark.parametrize("path", tracked("tests/*.py"), ids=lambda path: str(path.relative_to(ROOT)))
def test_every_skip_has_a_switch_that_forbids_it(path: Path):
    text = path.read_text()
    places = skips(ast.parse(text))
    if path == Path(__file__):
        assert len(places) == 1  # the test of the switch
    elif path.name != "needs.py":
        assert not places, f"{path}: lines {places}: skip with needs.need(), which names the switch"
    else:
        assert places
        assert "JAXCOLL_REQUIRE_" in text


def test_the_switch_forbids_the_skip(monkeypatch: pytest.MonkeyPatch):
    from needs import need

    need(True, "thing", "THING")
    with pytest.raises(pytest.skip.Exception, match="JAXCOLL_REQUIRE_THING=1 makes this a failure"):
        need(False, "thing", "THING")
    monkeypatch.setenv("JAXCOLL_REQUIRE_THING", "1")
    with pytest.raises(pytest.fail.Exception, match="there is no thing"):
        need(False, "thing", "THING")


def test_importing_the_package_is_light():
    code = "import sys, jaxcoll; print(sorted({'jax', 'numpy', 'cffi', 'networkx'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_module_is_part_of_a_layer():
    (contract,) = [c for c in PROJECT["tool"]["importlinter"]["contracts"] if c["id"] == "layers"]
    named = set(re.findall(r"\w+", " ".join(contract["layers"])))
    here = {
        path.stem for path in (ROOT / "jaxcoll").iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    assert here - {"__init__"} <= named


def test_one_version():
    assert PROJECT["project"]["version"] == __version__


def test_extras_name_only_what_exists():
    assert importlib.util.find_spec("jaxcoll") is not None
    extras = PROJECT["project"]["optional-dependencies"]
    for name in re.findall(r"jaxcoll\[([\w,]+)\]", README + str(extras)):
        assert set(name.split(",")) <= extras.keys()


def test_the_readme_recipe_runs():
    """The training step of the first screen, with the least around it; jax.lax stands in for jaxcoll."""
    recipe = next(block for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "def step" in block)
    around = """
import functools, types, jax, jax.numpy as jnp
from jax.sharding import PartitionSpec as P
mesh = jax.make_mesh((8,), ("data",))
jaxcoll = types.SimpleNamespace(pmean=jax.lax.pmean)
loss_fn = lambda params, batch: jnp.mean((batch @ params["w"]) ** 2)
update = lambda params, grads: jax.tree.map(lambda p, g: p - g, params, grads)
"""
    check = """
params = {"w": jnp.arange(3.0)}
batch = jax.random.normal(jax.random.key(0), (16, 3))
new, loss = step(params, jax.device_put(batch, jax.NamedSharding(mesh, P("data"))))
want, grads = jax.value_and_grad(loss_fn)(params, batch)
assert jnp.allclose(loss, want) and jnp.allclose(new["w"], params["w"] - grads["w"], rtol=1e-5, atol=1e-5), (new, loss)
"""
    env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", around + recipe + check], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_library_is_replaced_by_rename(tmp_path: Path):
    # A program that runs has it mapped: written over in place, it would die of a bus error.
    from needs import need

    build = ROOT / "build" / Path(sys.prefix).name
    need((build / ".configured").is_file(), "a native build", "NATIVE")
    installed = tmp_path / "libjaxcoll.so"
    installed.write_bytes(b"old" * 1000)
    command = ["make", "native", f"NATIVE={tmp_path}"]
    if sys.prefix != str(ROOT / ".venv"):
        command.append(f"PYTHON={Path(sys.prefix).name.removeprefix('.venv-')}")
    with installed.open("rb") as running:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert running.read() == b"old" * 1000
    assert len(installed.read_bytes()) > 100_000
    assert {path.name for path in tmp_path.iterdir()} == {p.name for p in (build / "installed/_native").iterdir()}
