"""What every verb prints, in every format and as help, against a coordinator with fixed answers.

`UPDATE_GOLDEN=1 python -m pytest tests/integration/test_cli_golden.py` writes the files anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from loader_service.cli.main import app
from loader_service.cli.output import Format
from tests.fake_coordinator import FakeCoordinator, fake_coordinator
from tests.golden_files import check_golden
from tests.messages import streaming, succeeded

GOLDEN = Path(__file__).parents[1] / "golden" / "cli"
# As wide as every port that the system hands out, so that columns stay where they are.
ADDRESS = "127.0.0.1:50051"

LIST = "table wide json jsonl yaml name"
ONE = "table wide json yaml name"
VERBS = {
    "load": ("load llama --tp 2 --workers w0,w1", f"{ONE} jsonl"),
    "watch": ("watch load-5e5e5e5e", f"{ONE} jsonl"),
    "cancel": ("cancel load-5e5e5e5e", ONE),
    "unload": ("unload load-0a1b2c3d", ONE),
    "plan": ("plan llama --tp 2", "table wide json yaml"),
    "inspect": ("inspect llama", LIST),
    "tensors": ("tensors load-0a1b2c3d --digest", "table json jsonl yaml"),
    "get-loads": ("get loads", LIST),
    "get-workers": ("get workers", LIST),
    "describe-load": ("describe load load-5e5e5e5e", "table json yaml"),
    "describe-worker": ("describe worker host-0", "table json yaml"),
    "drain-worker": ("drain worker host-1", ONE),
    "undrain-worker": ("undrain worker host-1", ONE),
    "top": ("top --once", "table json jsonl"),
    "health": ("health --all", "table json jsonl yaml"),
    "config-view": ("config view --show-origin", "table json yaml"),
    "config-get-contexts": ("config get-contexts", "table json yaml name"),
    "version": ("version", "table json yaml"),
}
OTHERS = {
    "load.no-wait": "load llama --no-wait -o name",
    "load.refused": "load refuse-TP_NOT_DIVISIBLE --tp 5 -o json",
    "load.failed": "watch load-ffffffff -q",
    "describe-load.failed": "describe load load-ffffffff",
    "plan.admitted": "plan llama --tp 2 --workers host-0,host-1 --explain",
    "config-view.plain": "config view --no-tls",
    "config-use-context": "config use-context local",
    "completion.bash": "completion bash",
    "completion.zsh": "completion zsh",
    "completion.fish": "completion fish",
}
HELP = [
    *("load", "watch", "cancel", "unload", "plan", "inspect", "tensors", "top", "health"),
    *("get", "get loads", "get workers", "describe", "describe load", "describe worker"),
    *("drain", "drain worker", "undrain", "undrain worker"),
    *("config", "config view", "config get-contexts", "config use-context"),
    *("completion", "version", ""),
]
CONFIG = """\
current-context = "prod"

[contexts.prod]
endpoint = "coordinator.example:50051"
tls-ca-cert = "ca.pem"
token-file = "tokens/me"

[contexts.local]
"""

CASES = {
    **{
        f"{verb}.{output}": f"{command} -o {output}"
        for verb, (command, outputs) in VERBS.items()
        for output in outputs.split()
    },
    **OTHERS,
}


@pytest.fixture(scope="module")
def fake() -> Iterator[FakeCoordinator]:
    with fake_coordinator() as running:
        yield running


@pytest.fixture
def _environment(fake: FakeCoordinator, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LOADER_CONFIG", "config.toml")
    monkeypatch.setenv("COLUMNS", "80")


def run(fake: FakeCoordinator, words: list[str]) -> str:
    """Return command, stdout, stderr and exit code, as a person would see them."""
    calls = words and words[0] not in ("config", "version", "completion") and "--help" not in words
    connection = ["--no-tls", "--endpoint", fake.endpoint, "--token-file", ""] if calls else []
    result = CliRunner().invoke(app, [*connection, *words], prog_name="loaderctl")
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    complaints = "".join(f"! {line}\n" for line in result.stderr.splitlines())
    text = f"$ loaderctl {' '.join(words)}\n{result.stdout}{complaints}exit {result.exit_code}\n"
    return text.replace(fake.endpoint, ADDRESS)


@pytest.mark.usefixtures("_environment")
@pytest.mark.parametrize("name", CASES)
def test_output(fake: FakeCoordinator, name: str) -> None:
    words = CASES[name].split()
    if name == "load.failed":
        fake.put(fake.loads[-1])
    elif words[0] in ("load", "watch") and "--no-wait" not in words and name != "load.refused":
        fake.put(streaming(), streaming((0.9, 0.25), stalled=[1]), succeeded())
    check_golden(GOLDEN / f"{name}.txt", run(fake, words))


@pytest.mark.usefixtures("_environment")
@pytest.mark.parametrize("verb", HELP)
def test_help_ends_with_an_example_of_the_verb(fake: FakeCoordinator, verb: str) -> None:
    text = run(fake, [*verb.split(), "--help"])
    heading, example, _ = text.splitlines()[-3:]
    assert heading == "Example:"
    assert example.startswith("  loaderctl ")
    assert verb in example
    check_golden(GOLDEN / help_file(verb), text)


def help_file(verb: str) -> str:
    return f"{verb.replace(' ', '-') or 'loaderctl'}.help.txt"


def test_every_golden_file_belongs_to_a_case() -> None:
    wanted = {f"{name}.txt" for name in CASES} | {help_file(verb) for verb in HELP}
    assert {path.name for path in GOLDEN.iterdir()} == wanted


@pytest.mark.usefixtures("_environment")
@pytest.mark.parametrize("verb", VERBS)
def test_other_formats_are_refused_with_those_that_make_sense(
    fake: FakeCoordinator, verb: str
) -> None:
    command, outputs = VERBS[verb]
    fake.requests.clear()
    for output in {*map(str, Format), "xml"} - {*outputs.split()}:
        told = run(fake, [*command.split(), "-o", output])
        assert told.endswith("exit 2\n")
        complaint = " ".join(told.split())
        assert all(f"'{each}'" in complaint for each in (output, *outputs.split())), told
    assert not fake.requests
