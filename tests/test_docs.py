"""The code in the README and the docs runs, and the commands in them exist."""

import multiprocessing
import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import gradwire
from tests.rank_pool import PRELOAD

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
WITHOUT_CODE = {"torch-versions.md", "index.md", "api.md"}


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.S | re.M)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Runs code as `python -c` would, and returns what it printed.

    Each time in a new process, forked from one that has imported gradwire, and what torch's
    optimisers import when they are first used, and done nothing else.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    said = tmp_path_factory.mktemp("docs") / "said"

    def run(code):
        process = context.Process(target=_as_main, args=(code, said))
        process.start()
        process.join()
        assert process.exitcode == 0, said.read_text()[-3000:]
        return said.read_text()

    return run


def _as_main(code, said):
    with said.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ["MASTER_PORT"] = str(port)
    sys.modules["__main__"] = ModuleType("__main__")
    exec(code, vars(sys.modules["__main__"]))


@pytest.mark.parametrize(
    "page", [p for p in PAGES if p.name not in WITHOUT_CODE], ids=lambda p: p.name
)
def test_python_blocks_run(page, run):
    code = blocks(page, "python")
    assert code, f"{page.name} has no Python block"
    run("\n".join(code))


def commands():
    for page in PAGES:
        for block in blocks(page, "(?:bash|console|sh)"):
            for line in block.splitlines():
                line = line.removeprefix("$ ").partition(" #")[0].strip()
                if line.startswith("gradwire "):
                    yield line


@pytest.mark.parametrize("line", sorted(set(commands())))
def test_commands_parse(line):
    """Every `gradwire ...` line names a command and options that exist."""
    import typer

    from gradwire.workbench.cli.app import app

    command, context = typer.main.get_command(app), None
    words = shlex.split(line)[1:]
    while hasattr(command, "commands"):
        context = command.make_context(
            "gradwire", [words[0]], parent=context, resilient_parsing=True
        )
        command = command.commands[words.pop(0)]
    command.make_context("gradwire", words, parent=context).close()


@pytest.mark.parametrize("name", ["ddp.py", "fsdp2.py"])
def test_example_runs(name, run):
    """Under a launcher with one rank."""
    out = run(
        f"import runpy; runpy.run_path({str(ROOT / 'examples' / name)!r}, run_name='__main__')"
    )
    assert "all-reduce sends" in out


def test_excerpts_are_from_the_examples():
    """Blocks marked py need a trainer and two ranks: their lines are those of a tested example."""
    lines = {"", ")"}
    for example in (ROOT / "examples").glob("*.py"):
        lines |= {line.strip() for line in example.read_text().splitlines()}
    excerpts = [block for page in PAGES for block in blocks(page, "py")]
    assert len(excerpts) > 5
    for line in "".join(excerpts).splitlines():
        assert line.strip() in lines, f"in no example: {line}"


def test_site_builds_and_needs_no_network(tmp_path):
    """mkdocs --strict: no broken link, no page outside the navigation, nothing to be fetched."""
    # Not --quiet: that also hides warnings from --strict.
    command = ["build", "--strict", "--site-dir", str(tmp_path)]
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", *command],
        cwd=ROOT, env=env, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    for page in [*tmp_path.glob("*.html"), *tmp_path.glob("*/*.html")]:
        fetched = re.findall(r'<(?:script|link|img)[^>]*="(https?://[^"]*)"', page.read_text())
        assert not fetched, f"{page.name} fetches {fetched}"
    api = (tmp_path / "api.html").read_text()
    for name in {*gradwire.__all__, "GradwireStrategy", "transformers.attach"} - {"__version__"}:
        assert re.search(rf'id="gradwire\.([a-z_]+\.)*{name}"', api), f"the API has no {name}"
    assert "<strong>density</strong>: the share of entries" in api
    assert (tmp_path / "examples" / "lightning_trainer.html").is_file()
