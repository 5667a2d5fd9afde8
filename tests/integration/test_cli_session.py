"""`loaderctl` against a coordinator with fixed answers: options, exit codes, refusals, TLS, health."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
import yaml
from grpc_health.v1 import health_pb2
from typer.testing import CliRunner

from loader_service.cli.main import app
from loader_service.v1 import coordinator_pb2, types_pb2
from loader_service.version import __version__
from tests.fake_coordinator import REFUSALS, FakeCoordinator, fake_coordinator
from tests.messages import failed, streaming, succeeded, worker

NOBODY = "127.0.0.1:1"


@pytest.fixture(scope="module")
def server() -> Iterator[FakeCoordinator]:
    with fake_coordinator() as running:
        yield running


@pytest.fixture
def fake(
    server: FakeCoordinator, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> FakeCoordinator:
    """The coordinator, named by the environment; there is no config file."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("LOADER_ENDPOINT", server.endpoint)
    server.requests.clear()
    return server


def loaderctl(*words: str) -> Any:
    """Run the command line in this process; anything but an exit is an error of the test."""
    result = CliRunner().invoke(app, list(words), prog_name="loaderctl")
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


@pytest.mark.parametrize(
    "words",
    [
        ["--endpoint", "HERE", "get", "workers"],
        ["get", "--endpoint", "HERE", "workers"],
        ["get", "workers", "--endpoint", "HERE"],
        ["--endpoint", NOBODY, "get", "workers", "--endpoint", "HERE"],
    ],
)
def test_connection_options_stand_before_or_after_the_verb_and_the_last_one_counts(
    fake: FakeCoordinator, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.setenv("LOADER_ENDPOINT", NOBODY)
    result = loaderctl(*[fake.endpoint if word == "HERE" else word for word in words])
    assert result.exit_code == 0, result.stderr


@pytest.mark.parametrize("named_by", ["current-context", "flag", "environment"])
def test_a_context_says_where_the_coordinator_is(
    fake: FakeCoordinator, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, named_by: str
) -> None:
    monkeypatch.delenv("LOADER_ENDPOINT")
    current = "here" if named_by == "current-context" else "elsewhere"
    config = tmp_path / "loaderctl" / "config.toml"
    config.parent.mkdir()
    config.write_text(
        f'current-context = "{current}"\n[contexts.here]\nendpoint = "{fake.endpoint}"\n'
        f'[contexts.elsewhere]\nendpoint = "{NOBODY}"\n'
    )
    if named_by == "environment":
        monkeypatch.setenv("LOADER_CONTEXT", "here")
    flags = ["--context", "here"] if named_by == "flag" else []
    assert loaderctl("get", "workers", *flags).exit_code == 0


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        ("LOAD_NOT_FOUND", 3),
        ("NOT_ENOUGH_WORKERS", 4),
        ("WORKER_BUSY", 4),
        ("TP_NOT_DIVISIBLE", 4),
        ("REQUEST_ID_REUSED", 4),
        ("ACCESS_DENIED", 5),
        ("TOKEN_UNKNOWN", 5),
        ("DEADLINE_EXCEEDED", 6),
        ("SHUTTING_DOWN", 7),
        ("FILE_TRUNCATED", 1),
    ],
)
def test_a_refusal_has_its_exit_code_its_words_and_a_hint(
    fake: FakeCoordinator, reason: str, code: int
) -> None:
    result = loaderctl("load", f"refuse-{reason}")
    assert (result.exit_code, result.stdout) == (code, "")
    told, advice = result.stderr.splitlines()
    assert told == f"loaderctl: {reason}: {REFUSALS[reason].message}"
    assert advice.startswith("loaderctl: hint: ")


@pytest.mark.parametrize("output", ["json", "jsonl", "yaml"])
def test_a_refusal_is_a_document_where_one_was_asked_for(
    fake: FakeCoordinator, output: str
) -> None:
    result = loaderctl("load", "refuse-TP_NOT_DIVISIBLE", "-o", output)
    read = yaml.safe_load if output == "yaml" else json.loads
    assert read(result.stdout) == {
        "reason": "TP_NOT_DIVISIBLE",
        "message": REFUSALS["TP_NOT_DIVISIBLE"].message,
        "validTp": [1, 2, 4],
    }
    assert output != "jsonl" or result.stdout.count("\n") == 1


def test_verbose_tells_whom_it_calls_and_all_facts_of_an_error(fake: FakeCoordinator) -> None:
    result = loaderctl("cancel", "refuse-WORKER_BUSY", "-v")
    assert f"calling {fake.endpoint} (env LOADER_ENDPOINT, no TLS)" in result.stderr
    assert "  worker_id: w0" in result.stderr
    assert "worker_id" not in loaderctl("cancel", "refuse-WORKER_BUSY").stderr


@pytest.mark.parametrize(
    ("words", "request_type"),
    [
        ("load m --no-wait", coordinator_pb2.LoadRequest),
        ("cancel load-1", coordinator_pb2.CancelLoadRequest),
        ("unload load-1", coordinator_pb2.UnloadRequest),
        ("drain worker w0", coordinator_pb2.DrainWorkerRequest),
        ("undrain worker w0", coordinator_pb2.UndrainWorkerRequest),
    ],
)
def test_what_changes_something_carries_a_request_id(
    fake: FakeCoordinator, words: str, request_type: type[Any]
) -> None:
    assert loaderctl(*words.split(), "--request-id", "mine").exit_code == 0
    assert fake.last(request_type).request_id == "mine"
    loaderctl(*words.split())
    made_up = fake.last(request_type).request_id
    assert made_up
    assert made_up != "mine"


def test_the_options_of_a_load_arrive(fake: FakeCoordinator) -> None:
    words = "load m --tp 2 --workers a,b --wait-for-workers 1.5s --tied obey-file --no-wait"
    loaderctl(*words.split(), "--unknown", "replicate", "--allow-trailing-bytes")
    request = fake.last(coordinator_pb2.LoadRequest)
    assert (request.path, request.tp, [*request.worker_ids]) == ("m", 2, ["a", "b"])
    assert request.wait_for_workers_duration.ToMilliseconds() == 1500
    assert str(request.options).split() == [
        *("tied_head:", "TIED_HEAD_POLICY_OBEY_FILE"),
        *("unknown_tensors:", "UNKNOWN_TENSOR_POLICY_REPLICATE"),
        *("allow_trailing_bytes:", "true"),
    ]


@pytest.mark.parametrize("flag", [[], ["--cancel-on-interrupt"]])
def test_only_a_load_that_dies_with_its_caller_is_watched_so(
    fake: FakeCoordinator, flag: list[str]
) -> None:
    fake.put(succeeded())
    assert loaderctl("load", "m", *flag).exit_code == 0
    assert fake.last(coordinator_pb2.WatchLoadRequest).cancel_when_gone == bool(flag)


def test_each_update_of_a_watched_load_is_one_line_of_jsonl(fake: FakeCoordinator) -> None:
    fake.put(streaming((0.5, 0.1)), streaming((0.6, 0.2)), succeeded())
    result = loaderctl("watch", "load-1", "-o", "jsonl", "--no-progress")
    states = [json.loads(line) for line in result.stdout.splitlines()]
    assert [state["progress"] for state in states] == [0.1, 0.2, 1.0]
    assert result.stderr == ""


@pytest.mark.parametrize("output", ["table", "jsonl"])
def test_top_prints_a_snapshot_an_interval_where_there_is_no_terminal(
    fake: FakeCoordinator, monkeypatch: pytest.MonkeyPatch, output: str
) -> None:
    snapshots: list[int] = []

    def workers() -> list[types_pb2.Worker]:
        snapshots.append(len(snapshots))
        monkeypatch.setattr(fake, "away", len(snapshots) == 3)
        return [worker()]

    monkeypatch.setattr(fake, "_workers", workers)
    result = loaderctl("top", "--interval", "1ms", "-o", output)
    # It ends with the coordinator.
    assert result.exit_code == 7
    if output == "jsonl":
        assert all(json.loads(line)["workers"] for line in result.stdout.splitlines()[:2])
    shown = "\nWORKER " if output == "table" else '{"loads"'
    assert result.stdout.count(shown) in (2, 3)


@pytest.mark.parametrize("flag", ["-q", "--no-progress"])
def test_progress_can_be_left_out(fake: FakeCoordinator, flag: str) -> None:
    for arguments, shown in (([], True), ([flag], False)):
        fake.put(streaming(), succeeded())
        assert ("streaming" in loaderctl("watch", "load-1", *arguments).stderr) == shown


def test_quiet_still_tells_why_a_load_failed(fake: FakeCoordinator) -> None:
    fake.put(failed())
    result = loaderctl("watch", "load-1", "-q")
    assert result.exit_code == 1
    assert "DIGEST_MISMATCH" in result.stderr


@pytest.mark.parametrize(
    ("words", "least", "most"),
    [
        ("plan m --timeout 5s", 4, 5),
        ("plan m", 55, 60),
        ("get loads", 9, 10),
        ("get loads --timeout 1m", 55, 60),
        # What `config view` shows for no timeout is not a time that would be another one here.
        ("plan m --timeout 10s", 9, 10),
    ],
)
def test_a_deadline_that_was_given_counts_also_for_calls_that_read(
    fake: FakeCoordinator, words: str, least: float, most: float
) -> None:
    assert loaderctl(*words.split()).exit_code == 0
    seconds = fake.seconds_left[-1]
    assert seconds is not None
    # The clocks of both sides differ a little.
    assert least < seconds < most + 1


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("--endpoint nonsense", "'nonsense' is not HOST:PORT"),
        ("--endpoint far.example:1 --token-file TOKEN", "TOKEN_NEEDS_TLS"),
        ("--token-file /nowhere", "FILE_UNREADABLE: /nowhere"),
        ("--tls-ca-cert /nowhere", "FILE_UNREADABLE: /nowhere"),
        ("--tls-cert /nowhere", "go together; --tls-key is missing"),
        ("--tls-key /nowhere", "go together; --tls-cert is missing"),
        ("--context nowhere", "the lines [contexts.nowhere] and endpoint ="),
        ("--no-tls --tls-ca-cert TOKEN", "contradicts"),
    ],
)
def test_settings_that_cannot_work_are_usage_errors_before_anything_is_sent(
    fake: FakeCoordinator, tmp_path: Path, words: str, complaint: str
) -> None:
    token = tmp_path / "token"
    token.write_text("secret")
    result = loaderctl(
        "get", "loads", *words.replace("TOKEN ", "").replace("TOKEN", str(token)).split()
    )
    assert result.exit_code == 2
    assert complaint in result.stderr
    assert fake.requests == []


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("load m --wait-for-workers soon", "'--wait-for-workers': 'soon' is not a time"),
        ("top --interval soon", "'--interval': 'soon' is not a time"),
        ("top --interval 0s", "'--interval': it must be more than 0"),
    ],
)
def test_a_time_that_makes_no_sense_is_found_before_any_file_is_read(
    fake: FakeCoordinator, words: str, complaint: str
) -> None:
    result = loaderctl(*words.split(), "--token-file", "/nowhere")
    assert result.exit_code == 2
    assert complaint in result.stderr
    assert "FILE_UNREADABLE" not in result.stderr
    assert fake.requests == []


def test_nobody_at_the_endpoint_is_exit_code_7_with_the_way_out(fake: FakeCoordinator) -> None:
    result = loaderctl("get", "loads", "--endpoint", NOBODY)
    assert result.exit_code == 7
    assert f"is a coordinator at {NOBODY}? --endpoint or LOADER_ENDPOINT" in result.stderr


@pytest.mark.parametrize(
    ("words", "code", "statuses"),
    [
        ("health", 0, ["SERVING"]),
        ("health --all", 0, ["SERVING"] * 3),
        ("health --worker HERE", 0, ["SERVING"]),
        (f"health --worker {NOBODY}", 7, ["UNREACHABLE"]),
        (f"health --all --endpoint {NOBODY}", 7, ["UNREACHABLE"]),
    ],
)
def test_health_is_0_or_7(
    fake: FakeCoordinator, words: str, code: int, statuses: list[str]
) -> None:
    result = loaderctl(*words.replace("HERE", fake.endpoint).split(), "-o", "json")
    document = json.loads(result.stdout)
    assert [server["status"] for server in document["servers"]] == statuses
    assert (result.exit_code, document["serving"]) == (code, code == 0)


def test_a_coordinator_that_stops_is_not_healthy(
    fake: FakeCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake, "serving", health_pb2.HealthCheckResponse.NOT_SERVING)
    result = loaderctl("health")
    assert result.exit_code == 7
    assert "NOT_SERVING" in result.stdout


def test_tls_is_spoken_when_told_and_asked_for_when_not(
    fake: FakeCoordinator, tmp_path: Path
) -> None:
    authority = trustme.CA()
    certificate = authority.issue_cert("localhost")
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    credentials = grpc.ssl_server_credentials(
        [(certificate.private_key_pem.bytes(), certificate.cert_chain_pems[0].bytes())]
    )
    with fake_coordinator(credentials) as secured:
        address = secured.endpoint.replace("127.0.0.1", "localhost")
        trusted = ["--endpoint", address, "--tls-ca-cert", str(tmp_path / "ca.pem")]
        assert loaderctl("get", "loads", *trusted).exit_code == 0
        assert loaderctl("health", *trusted).exit_code == 0
        result = loaderctl("get", "loads", "--endpoint", address)
        assert result.exit_code == 5
        assert "TLS_REQUIRED" in result.stderr
        assert "hint: --tls-ca-cert" in result.stderr
        assert loaderctl("health", "--endpoint", address).exit_code == 7


def test_version_starts_without_grpc_and_rich() -> None:
    code = (
        "import sys; from loader_service.cli.main import app; app(['version'], standalone_mode=False);"
        "print(sorted({'grpc', 'rich', 'numpy', 'tomlkit', 'yaml'} & sys.modules.keys()))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.splitlines()[1] == "[]"


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("load m --workers ,", "--workers ',' has an empty name"),
        ("plan m --workers a,,b", "--workers 'a,,b' has an empty name"),
        ("health --worker w0", "--worker 'w0' is not HOST:PORT"),
        ("get loads -o xml", "'--output' / '-o': 'xml' is not one of"),
    ],
)
def test_what_cannot_be_meant_is_a_usage_error(
    fake: FakeCoordinator, words: str, complaint: str
) -> None:
    result = loaderctl(*words.split())
    assert (result.exit_code, result.stdout) == (2, "")
    assert complaint in " ".join(result.stderr.split())


def test_blanks_around_workers_names_do_not_count(fake: FakeCoordinator) -> None:
    assert loaderctl("load", "m", "--tp", "2", "--workers", "w1, w0", "--no-wait").exit_code == 0
    assert list(fake.last(coordinator_pb2.LoadRequest).worker_ids) == ["w1", "w0"]


def test_version_may_be_asked_for_as_of_other_programs() -> None:
    assert loaderctl("--version").stdout == loaderctl("version").stdout == f"{__version__}\n"
