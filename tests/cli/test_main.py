import pytest

from asynccomm.cli.main import main
from asynccomm.version import __version__


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"asynccomm {__version__}\n"


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    assert "run a script on N ranks" in capsys.readouterr().out


@pytest.mark.parametrize("argv", [[], ["walk"]])
def test_a_command_is_required(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2
    assert "COMMAND" in capsys.readouterr().err


@pytest.mark.real_python
def test_starting_imports_no_torch(launcher) -> None:
    launcher.script("import asynccomm.cli.main, sys; print('torch' in sys.modules)", "look.py")
    assert launcher.run("run", "-n", "1", "look.py")[1] == "[0] False\n"
