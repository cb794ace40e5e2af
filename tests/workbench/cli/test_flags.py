"""A flag is written once: its name, default and help are those of Config, Options and RunLimits."""

import dataclasses
import shlex
import sys

import pytest

pytest.importorskip("typer")

from typer.main import get_command
from typer.testing import CliRunner

from gradwire.config import Config
from gradwire.workbench import cli
from gradwire.workbench.cli import train as train_command
from gradwire.workbench.cli.app import app
from gradwire.workbench.cli.flags import config_help, config_options, long_name
from gradwire.workbench.train import Options, RunLimits
from gradwire.workbench.train.flag import PANELS, default_text, flag_fields
from gradwire.workbench.train.options import resolve

NO_FLAG = {
    "momentum": "--momentum is that of the run; --momentum-correction says who applies it",
    "decay": "it forgets, which local steps may and gradients before SGD should not",
    "bundle_mb": "gradwire bench step compares bundles",
    "dense_below": "a matter of latency, as bundles are",
    "watch": "a run compares its replicas when it ends",
    "timeout": "the run opens its groups itself",
}
"""The fields of Config without a flag of `gradwire train`, each with the reason."""

OTHER_NAMES = {"clip": "--local-clip"}
"""The fields of Config whose flag cannot have their name: --clip limits the averaged gradient."""

OTHER_DEFAULTS = {("bench step", "values"): "bf16", ("bench step", "indices"): "packed"}
"""Defaults that are not those of Config."""


def command(words):
    found = get_command(app)
    for word in words.split():
        found = found.commands[word]
    return found


def flags_of(words):
    """The parameters of a command, by each of their names."""
    return {name: p for p in command(words).params for name in p.opts}


def parsed(words, line):
    with command(words).make_context("gradwire", shlex.split(line)) as context:
        return context.params


@pytest.fixture
def trained(monkeypatch, capsys):
    """Runs `gradwire train LINE` up to the training; the plan, and what was said on stderr."""

    def run(line):
        plans = []
        monkeypatch.setattr(train_command, "train_and_report", lambda job: plans.append(job) or 0)
        monkeypatch.setattr(sys, "argv", ["gradwire", "train", *shlex.split(line)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        assert end.value.code in (0, None)
        return plans[0], capsys.readouterr().err

    return run


def test_every_field_of_config_is_a_flag_of_train_or_says_why_not():
    fields = [field.name for field in dataclasses.fields(Config)]
    assert sorted(set(fields) - set(config_options())) == sorted(NO_FLAG)
    known = flags_of("train")
    for field in sorted(set(fields) - set(NO_FLAG)):
        assert OTHER_NAMES.get(field, long_name(field)) in known
        assert config_help(field) in known[long_name(config_options()[field])].help


def test_config_documents_every_field():
    assert [f.name for f in dataclasses.fields(Config) if not config_help(f.name)] == []


def test_train_has_the_defaults_of_config(trained):
    job, _ = trained("")
    assert job.options.config() == Config()
    assert f"Default: {default_text(Config.density)}." in flags_of("train")["--density"].help


@pytest.mark.parametrize("group", [Options, RunLimits])
def test_every_option_of_a_run_is_a_flag(group):
    fields = [field.name for field in dataclasses.fields(group)]
    assert list(flag_fields(group)) == fields
    known = flags_of("train")
    for name, field in flag_fields(group).items():
        assert long_name(name) in known
        assert field.flag.help in known[long_name(name)].help


@pytest.mark.parametrize("words", ["doctor", "bench compress", "bench exchange", "bench step"])
def test_other_commands_have_names_defaults_and_help_of_config(words):
    known = flags_of(words)
    checked = [name for name in config_options() if long_name(name) in known]
    # The warm-up of a measurement: steps, not densities.
    checked = [name for name in checked if (words, name) != ("bench compress", "warmup")]
    assert len(checked) >= 2
    defaults = dataclasses.asdict(Config())
    for name in checked:
        parameter = known[long_name(name)]
        assert config_help(name) in parameter.help
        wanted = OTHER_DEFAULTS.get((words, name), defaults[name])
        assert parameter.default in (wanted, str(wanted), None if name == "options" else wanted)


def test_former_names_work_and_warn_once(trained):
    line = "--method randk --option seed=3 --option shared=false --keep-dense '*.bias'"
    job, said = trained(line)
    assert job.options.options == ("seed=3", "shared=false")
    assert job.options.dense == ("*.bias",)
    assert said.splitlines() == [
        "warning: --option is now called --options.",
        "warning: --keep-dense is now called --dense.",
    ]
    present = line.replace("--option ", "--options ").replace("--keep-dense", "--dense")
    again, said = trained(present)
    assert (again.options, said) == (job.options, "")


@pytest.mark.parametrize("words", ["doctor", "bench compress", "bench exchange"])
def test_former_names_work_in_every_command_that_had_them(words, capsys):
    assert list(parsed(words, "--option=seed=3")["options"]) == ["seed=3"]
    assert capsys.readouterr().err == "warning: --option is now called --options.\n"
    assert list(parsed(words, "--options seed=3")["options"]) == ["seed=3"]
    assert capsys.readouterr().err == ""


def test_a_former_name_means_nothing_to_other_commands():
    end = CliRunner().invoke(app, ["plan", "--option", "seed=3"])
    assert end.exit_code == 2
    assert "warning" not in end.output
    assert "--option" in end.output


def test_the_help_of_train_shows_the_panels_in_order_and_no_former_name():
    environment = {"COLUMNS": "100", "TERM": "dumb"}
    said = CliRunner().invoke(app, ["train", "--help"], env=environment).output
    titles = [line.strip("╭─╮ ") for line in said.splitlines() if line.startswith("╭")]
    assert titles == ["Options", *PANELS]
    flags = [line for line in said.splitlines() if line.startswith("│ --")]
    assert flags[1].split()[1] == "--model"
    for former in ("--keep-dense", "--option ", "--method-options"):
        assert former not in said


def test_values_have_the_types_of_the_fields(trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    job, _ = trained(
        "--data-dir data --lr-drop 3,8 --warmup 0.5,0.25 --warmup-steps 2 --no-masking "
        "--momentum-correction --compare dense --compare randk --max-steps 5 -q"
    )
    options = job.options
    assert options.data_dir == str(tmp_path / "data")
    assert (options.lr_drop, options.warmup) == ((3, 8), (0.5, 0.25))
    assert (options.masking, options.compare) == (False, ("dense", "randk"))
    assert job.limits == RunLimits(max_steps=5, quiet=True)
    assert resolve(options.asdict()).density == Config.density
