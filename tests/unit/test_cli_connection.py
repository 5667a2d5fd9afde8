"""Where the connection settings come from: precedence, contexts, files that are not as they should be."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path

import pytest

from loader_service.cli.connection import (
    SETTINGS,
    ConnectionSettings,
    Contexts,
    Kind,
    Setting,
    SettingsError,
    resolve,
)
from loader_service.cli.contexts import config_path, read_contexts, use_context
from loader_service.cli.durations import format_seconds, parse_seconds

WITH_ENV = [setting for setting in SETTINGS if setting.env]


def value_of(kind: Kind, source: str) -> str:
    return {"flag": "1s", "env": "2s", "context": "3s"}[source] if kind is Kind.TIME else source


@pytest.mark.parametrize("setting", WITH_ENV, ids=lambda setting: setting.key)
@pytest.mark.parametrize("given", list(itertools.product([False, True], repeat=3)))
def test_a_flag_wins_over_the_environment_that_over_the_context_that_over_the_default(
    setting: Setting, given: tuple[bool, bool, bool]
) -> None:
    flag, env, context = (value_of(setting.kind, each) for each in ("flag", "env", "context"))
    settings = resolve(
        {setting.key: flag} if given[0] else {},
        {setting.env: env} if given[1] else {},
        Contexts("f", "prod", {"prod": {setting.key: context} if given[2] else {}}),
    )
    expected = [
        (flag, f"flag --{setting.key}"),
        (env, f"env {setting.env}"),
        (context, "context prod"),
    ]
    winners = [pair for pair, here in zip(expected, given, strict=True) if here]
    wanted = [*winners, (setting.default, "default")][0]
    assert (getattr(settings, setting.field), settings.origins[setting.key]) == wanted


@pytest.mark.parametrize(
    ("flags", "environ", "context", "origin"),
    [
        ({"context": "a"}, {"LOADER_CONTEXT": "b"}, "a", "flag --context"),
        ({}, {"LOADER_CONTEXT": "b"}, "b", "env LOADER_CONTEXT"),
        ({}, {"LOADER_CONTEXT": ""}, "c", "current-context"),
        ({"context": ""}, {"LOADER_CONTEXT": "b"}, "", "flag --context"),
    ],
)
def test_the_context_itself_has_the_same_precedence(
    flags: Mapping[str, str], environ: Mapping[str, str], context: str, origin: str
) -> None:
    contexts = Contexts("f", "c", {name: {"endpoint": f"{name}:1"} for name in "abc"})
    settings = resolve(flags, environ, contexts)
    assert (settings.context, settings.origins["context"]) == (context, origin)
    assert settings.endpoint == (f"{context}:1" if context else "127.0.0.1:50051")


def test_without_anything_there_is_a_default_and_each_call_its_own_deadline() -> None:
    settings = resolve({}, {}, Contexts("f"))
    assert settings.endpoint == "127.0.0.1:50051"
    assert not settings.tls
    assert (settings.timeout, settings.timeout_seconds) == ("per call", None)
    assert set(settings.origins.values()) == {"default"}


def test_a_deadline_that_was_given_is_in_seconds() -> None:
    assert resolve({"timeout": "1m"}, {}, Contexts("f")).timeout_seconds == 60.0
    # Also where it is the usual one.
    assert resolve({"timeout": "10s"}, {}, Contexts("f")).timeout_seconds == 10.0


@pytest.mark.parametrize("source", ["flag", "env"])
def test_the_home_folder_is_put_in_for_a_tilde(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/anna")
    flags = {"token-file": "~/token"} if source == "flag" else {}
    environ = {"LOADER_TOKEN_FILE": "~/token"} if source == "env" else {}
    assert resolve(flags, environ, Contexts("f")).token_file == "/home/anna/token"


def tls(
    flags: Mapping[str, str | bool],
    environ: Mapping[str, str] | None = None,
    context: Mapping[str, str | bool] | None = None,
) -> ConnectionSettings:
    return resolve(flags, environ or {}, Contexts("f", "prod", {"prod": context or {}}))


def test_certificates_imply_tls_and_the_origin_says_so() -> None:
    settings = tls({}, {"LOADER_TLS_CA_CERT": "ca"})
    assert settings.tls
    assert settings.origins["tls"] == "follows from tls-ca-cert"


def test_no_tls_leaves_out_certificates_from_farther_away() -> None:
    settings = tls({"tls": False}, {"LOADER_TLS_CA_CERT": "ca"}, {"tls-server-name": "name"})
    assert not settings.tls
    assert (settings.tls_ca_cert, settings.tls_server_name) == ("", "")
    assert settings.origins["tls-ca-cert"] == "flag --no-tls"


def test_certificates_from_closer_by_win_over_no_tls() -> None:
    settings = tls({"tls-ca-cert": "ca"}, {}, {"tls": False})
    assert settings.tls
    assert settings.origins["tls"] == "follows from tls-ca-cert"


@pytest.mark.parametrize(
    ("flags", "context", "words"),
    [
        ({"tls": False, "tls-cert": "c"}, {}, ["flag --no-tls", "tls-cert", "flag --tls-cert"]),
        ({}, {"tls": False, "tls-ca-cert": "c"}, ["context prod", "tls-ca-cert"]),
    ],
)
def test_no_tls_and_certificates_from_the_same_place_contradict_each_other(
    flags: Mapping[str, str | bool], context: Mapping[str, str | bool], words: list[str]
) -> None:
    with pytest.raises(SettingsError) as caught:
        tls(flags, {}, context)
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize("text", ["soon", "0s", "-1s", "1d", ""])
def test_a_deadline_that_makes_no_sense_is_refused_with_its_origin(text: str) -> None:
    with pytest.raises(SettingsError, match=r"timeout \(flag --timeout\)"):
        resolve({"timeout": text}, {}, Contexts("f"))


def write(folder: Path, text: str) -> dict[str, str]:
    path = folder / "config.toml"
    path.write_text(text, encoding="utf-8")
    return {"LOADER_CONFIG": str(path)}


def test_files_of_a_context_are_relative_to_the_config_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/anna")
    environ = write(
        tmp_path,
        '[contexts.c]\ntls-ca-cert = "pki/ca.pem"\ntls-key = "/etc/key"\n'
        'tls-cert = "~/cert"\ntoken-file = ""\n',
    )
    assert read_contexts(environ).settings_of("c") == {
        "tls-ca-cert": f"{tmp_path}/pki/ca.pem",
        "tls-key": "/etc/key",
        "tls-cert": "/home/anna/cert",
        "token-file": "",
    }


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("contexts = [", ["is not TOML"]),
        ('endpoint = "a:1"', ["unknown key endpoint", "contexts, current-context"]),
        (
            '[contexts.prod]\nendpont = "a:1"',
            ["unknown key endpont", "[contexts.prod]", "endpoint"],
        ),
        ("[contexts.prod]\na = 1\nb = 2", ["unknown keys a, b"]),
        ("[contexts.prod]\nendpoint = 1", ["endpoint in [contexts.prod] is a text, not 1"]),
        ('[contexts.prod]\ntls = "yes"', ["tls in [contexts.prod] is true or false"]),
        ("current-context = 1", ["current-context is a text"]),
        ("contexts = 1", ["contexts are tables"]),
        ("[contexts]\nprod = 1", ["[contexts.prod] is a table"]),
    ],
)
def test_a_config_file_that_is_wrong_is_refused_saying_where(
    tmp_path: Path, text: str, words: list[str]
) -> None:
    environ = write(tmp_path, text)
    with pytest.raises(SettingsError) as caught:
        read_contexts(environ)
    assert environ["LOADER_CONFIG"] in str(caught.value)
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_config_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_bytes(b"\xff\xfe")
    for named in (path, tmp_path):
        with pytest.raises(SettingsError, match="cannot be read"):
            read_contexts({"LOADER_CONFIG": str(named)})


def test_the_usual_file_may_be_missing_and_a_named_one_not(tmp_path: Path) -> None:
    assert read_contexts({"XDG_CONFIG_HOME": str(tmp_path)}).named == {}
    with pytest.raises(SettingsError, match=r"LOADER_CONFIG names .* does not exist"):
        read_contexts({"LOADER_CONFIG": str(tmp_path / "config.toml")})


def test_the_config_file_is_where_it_is_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/anna")
    assert config_path({}) == Path("/home/anna/.config/loaderctl/config.toml")
    assert config_path({"XDG_CONFIG_HOME": "/x"}) == Path("/x/loaderctl/config.toml")
    assert config_path({"XDG_CONFIG_HOME": "/x", "LOADER_CONFIG": "~/c"}) == Path("/home/anna/c")


@pytest.mark.parametrize("named", ["flag", "current"])
def test_a_context_that_is_not_there_is_refused_with_those_that_are(named: str) -> None:
    contexts = Contexts("file", "gone" if named == "current" else "", {"b": {}, "a": {}})
    with pytest.raises(SettingsError, match="no context 'gone' in file; there are: a, b"):
        resolve({"context": "gone"} if named == "flag" else {}, {}, contexts)


FILE = """\
# Clusters of the team.
current-context = "old"  # changed by `use-context`

[contexts.old]
endpoint = 'old:1'   # to be closed

[contexts."new one"]
endpoint = "new:1"
"""


def test_use_context_changes_one_line_and_keeps_the_rest(tmp_path: Path) -> None:
    environ = write(tmp_path, FILE)
    path = Path(environ["LOADER_CONFIG"])
    path.chmod(0o600)
    use_context(environ, "new one")
    assert path.read_text() == FILE.replace('context = "old"', 'context = "new one"')
    assert path.stat().st_mode & 0o777 == 0o600
    assert [each.name for each in tmp_path.iterdir()] == ["config.toml"]


def test_use_context_adds_the_key_where_it_is_missing(tmp_path: Path) -> None:
    text = "# mine\n[contexts.a]\n"
    environ = write(tmp_path, text)
    use_context(environ, "a")
    assert Path(environ["LOADER_CONFIG"]).read_text() == f'current-context = "a"\n{text}'
    assert read_contexts(environ).current == "a"


def test_use_context_follows_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    target = Path(write(tmp_path / "real", FILE)["LOADER_CONFIG"])
    link = tmp_path / "link.toml"
    link.symlink_to(target)
    use_context({"LOADER_CONFIG": str(link)}, "new one")
    assert link.is_symlink()
    assert read_contexts({"LOADER_CONFIG": str(target)}).current == "new one"


def test_use_context_leaves_the_file_alone_when_there_is_no_such_context(tmp_path: Path) -> None:
    environ = write(tmp_path, FILE)
    with pytest.raises(SettingsError, match="no context 'nowhere'"):
        use_context(environ, "nowhere")
    assert Path(environ["LOADER_CONFIG"]).read_text() == FILE


@pytest.mark.parametrize(
    ("text", "expected"),
    [("500ms", 0.5), ("30s", 30.0), ("2m", 120.0), ("1.5h", 5400.0), ("7", 7.0), (" 1s ", 1.0)],
)
def test_times_are_read(text: str, expected: float) -> None:
    assert parse_seconds(text) == expected


@pytest.mark.parametrize("text", ["", "s", "1x", "-1s", "1sm", "nan", "1 0s", "1e3"])
def test_other_texts_are_no_times(text: str) -> None:
    with pytest.raises(ValueError, match="is not a time"):
        parse_seconds(text)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.2, "0 s"), (59.4, "59 s"), (60, "1:00"), (3725, "1:02:05")]
)
def test_times_are_written(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text
