"""What is answered before the parser is loaded: the same as the parser's answers, without its imports."""

from __future__ import annotations

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from weft.cli import data_list
from weft.cli.app import app
from weft.cli.main import answer_at_once
from weft.cli.spec import spec_of
from weft.core.errors import GraphError, SpecError
from weft.graph.catalog.listing import DATA_VARIABLE, check_name

SPEC = 'graph = "demo"\n[model]\nname = "gcn"\n'
LOADED = (
    "import sys, json; from weft.cli.main import main\ntry: main()\nexcept SystemExit: pass\nprint(sorted(sys.modules))"
)


@pytest.fixture(autouse=True)
def no_other_graphs(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv(DATA_VARIABLE, str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("words", [["--version"], ["data", "ls"], ["data", "ls", "--json"]])
def test_the_answer_is_the_parsers(words, capsys):
    assert answer_at_once(words)
    shown = capsys.readouterr().out
    assert shown == CliRunner().invoke(app, words, catch_exceptions=False).stdout


@pytest.mark.parametrize("words", [[], ["--help"], ["data"], ["data", "ls", "-h"], ["run"], ["run", "--json"]])
def test_anything_else_is_left_to_the_parser(words, capsys):
    assert not answer_at_once(words)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("words", [["--version"], ["data", "ls"], ["run", "bad.toml"], ["plan", "bad.toml"]])
def test_no_parser_is_loaded(words, tmp_path):
    (tmp_path / "bad.toml").write_text(SPEC.replace("gcn", "gnc"))
    done = subprocess.run([sys.executable, "-c", LOADED, *words], capture_output=True, text=True, cwd=tmp_path)
    loaded = done.stdout.splitlines()[-1]
    for library in ("'typer'", "'rich'", "'click'", "'pydantic'", "'torch'", "'numpy'"):
        assert library not in loaded


@pytest.mark.parametrize("options", [["--set", "model.hidden=0"], ["--set=model.hidden=0"]])
@pytest.mark.parametrize("command", ["run", "plan"])
def test_a_mistake_in_an_override_is_raised(command, options, tmp_path):
    (tmp_path / "good.toml").write_text(SPEC)
    assert not answer_at_once([command, "good.toml"])
    with pytest.raises(SpecError, match="hidden=0 must be at least 1"):
        answer_at_once([command, "good.toml", *options])
    assert not answer_at_once([command, "good.toml", *options, "--help"])


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("corra", r"there is no graph 'corra'.*did you mean 'cora'\?"),
        ("shape:corra", "there is no shape 'corra'"),
        ("planetoid:corra", r"planetoid:corra is not one of cora.*did you mean 'cora'\?"),
        ("ogb:ogbn-arxive", "is not one of ogbn-arxiv"),
        ("graphs/mine", "graphs/mine does not exist; check the path"),
        ("mine.npz", "mine.npz does not exist; check the path"),
    ],
)
def test_a_graph_that_nobody_knows_is_said_before_torch_is_loaded(name, said, tmp_path):
    (tmp_path / "bad.toml").write_text(SPEC.replace("demo", name))
    with pytest.raises(GraphError, match=said):
        answer_at_once(["run", "bad.toml"])
    with pytest.raises(GraphError, match=said):
        answer_at_once(["run", "bad.toml", "--set", "seed=[1, 2]"])
    assert not answer_at_once(["run", "bad.toml", "--on", "ray"])  # the nodes may have it


def test_names_that_may_be_there_are_not_refused(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "mine.npz").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file.npz").touch()
    for name in ("demo", "mine", "folder", "Cora", "./folder", "folder/file.npz", "pyg:Amazon/Photo", "edges.csv"):
        check_name(name)
    for name in ("shape:CORA?scale=0.1", "planetoid:Cora", "ogb:ogbn-papers100m", "planted:relations?nodes=50"):
        check_name(name)


@pytest.mark.parametrize("override", ["seed=0", "seed=[1, 2]", 'model.name=["gcn", "mine.py:Net"]'])
def test_a_file_of_a_model_that_is_not_there_is_said_before_torch_is_loaded(override, tmp_path):
    (tmp_path / "own.toml").write_text(SPEC.replace("gcn", "mine.py:Net"))
    with pytest.raises(SpecError, match=r"model='mine.py:Net': no such file: mine.py"):
        answer_at_once(["run", "own.toml", "--set", override])
    (tmp_path / "mine.py").touch()
    assert not answer_at_once(["run", "own.toml", "--set", override])


def test_a_spec_is_read_again_after_it_has_changed(tmp_path):
    spec = tmp_path / "spec.toml"
    spec.write_text(SPEC)
    first = spec_of(spec)
    assert spec_of(spec) is first
    spec.write_text(SPEC + "hidden = 32\n")
    assert spec_of(spec).hidden == 32


@pytest.mark.parametrize("columns", [80, 120])
def test_notes_fold_and_nothing_else(columns, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("NO_COLOR", "1")
    data_list.print_graphs()
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= columns
    assert any(line.startswith("    ") for line in lines)
    assert any(line.startswith("shape:ogbn-papers100M") and "1,615,685,872" in line for line in lines)


@pytest.mark.parametrize("one_word", [False, True])
@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--budget", "3XB", "budget='3XB' is not an amount of memory"),
        ("--budget", "0", "budget='0' must be at least one byte"),
        ("--cache", "much", "cache='much' is not an amount of memory"),
        ("--device", "gpu", "device 'gpu' is unknown; use auto, cpu, cuda or cuda:N"),
        ("--device", "cuda:one", "device 'cuda:one' is unknown"),
    ],
)
def test_a_mistake_in_an_option_is_raised(option, value, words, one_word, tmp_path):
    (tmp_path / "good.toml").write_text(SPEC)
    given = [f"{option}={value}"] if one_word else [option, value]
    told = CliRunner().invoke(app, ["run", "good.toml", *given])
    assert isinstance(told.exception, SpecError)
    assert words in str(told.exception)


@pytest.mark.parametrize("given", [["--device", "auto"], ["--device=cuda:3"], ["--budget", "2GiB"], ["--budget"]])
def test_options_without_a_mistake_are_left_to_the_parser(given, tmp_path):
    (tmp_path / "good.toml").write_text(SPEC)
    assert not answer_at_once(["run", "good.toml", *given])
