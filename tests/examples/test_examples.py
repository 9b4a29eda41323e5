"""Each example runs as its own first lines say, and says what it should."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from needs import need

from jaxcoll.testbed import access

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


def run(*words: str, timeout: float = 280) -> str:
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=env, capture_output=True, text=True, timeout=timeout, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def launched(name: str, *words: str) -> str:
    return run("-m", "jaxcoll", "launch", "-n", "8", "--output", "first", str(EXAMPLES / name), *words)


@pytest.mark.parametrize("how", ["8 devices", "8 processes"])
def test_replace_psum(how: str):
    out = run("examples/replace_psum.py") if how == "8 devices" else launched("replace_psum.py")
    assert float(re.search(r"8 ranks; largest difference .*: (\S+)", out)[1]) < 1e-5


@pytest.mark.parametrize("how", ["8 devices", "8 processes"])
def test_enable(how: str):
    out = run("examples/enable.py") if how == "8 devices" else launched("enable.py")
    before, after = map(int, re.search(r"jaxcoll's: (\d+) before, (\d+) with", out).groups())
    assert before == 0
    assert after >= 2  # the loss, and the gradient's sum, which isn't in the source


def check_training(out: str, processes: int) -> None:
    assert f"8 ranks in {processes} processes" in out
    lax, ours = map(float, re.search(r"accuracy on the test set +(\S+) +(\S+)", out).groups())
    assert min(lax, ours) > 0.9
    assert float(re.search(r"between the two loss curves: (\S+)", out)[1]) < 1e-3
    assert re.search(r"communication a step \(gradient sum\), ms +\S+ +\S+ +\S+x", out)
    losses = [float(loss) for loss in re.findall(r"loss lax (\S+), jaxcoll", out)]
    assert losses == sorted(losses, reverse=True)


def test_train_digits_in_one_process():
    check_training(run("examples/train_digits.py", "--epochs=5", "--repeats=5"), 1)


def test_train_digits_in_eight_processes():
    check_training(run("examples/train_digits.py", "--demo", "--epochs=4", "--repeats=5"), 8)


def test_train_digits_fails_where_it_learns_nothing():
    with pytest.raises(AssertionError, match="accuracy on the test set"):
        run("examples/train_digits.py", "--impl=lax", "--epochs=1", "--batch=1024", "--repeats=1")


def test_the_demo_tells_its_story(tmp_path: Path):
    need(not access.missing(), f"the testbed: {access.missing()}", "TESTBED")
    page = tmp_path / "demo_report.html"
    out = run("examples/demo.py", "--steps", "30", "-o", str(page))
    rows = re.findall(r"^(quiet|congested), .+? {2,}(\d+) +\d+$", out, re.MULTILINE)
    assert {name for name, _ in rows} == {"quiet", "congested"}, out
    assert all(float(ms) > 0 for _, ms in rows), out
    assert float(re.findall(r"accuracy on the test set: (\S+)", out)[0]) > 0.9
    assert page.read_text().lstrip().startswith("<!")


def test_microbenchmark():
    out = run("examples/microbenchmark.py", "--bytes", "4096", "65536", "--blocks=1")
    assert len(re.findall(r"^psum of +\d+ B on 8 ranks: jax.lax +\S+ us, jaxcoll +\S+ us", out, re.MULTILINE)) == 2


def test_draw_schedule(tmp_path: Path):
    picture = tmp_path / "tree.svg"
    out = run("examples/draw_schedule.py", "-o", str(picture))
    assert "sums on NumPy arrays are right" in out
    assert picture.read_text().lstrip().startswith(("<svg", "<?xml"))


def test_every_example_is_tested_and_listed():
    names = {path.name for path in EXAMPLES.glob("*.py")}
    here, readme = Path(__file__).read_text(), (ROOT / "README.md").read_text()
    assert {name for name in names if name not in here} == set()
    assert set(re.findall(r"`examples/(\w+\.py)`", readme)) == names
