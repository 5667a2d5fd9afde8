"""Keys and certificates that cannot be used: what is wrong is said in words."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest

from loader_service import pem
from loader_service.errors import InvalidRequest
from tests.certificates import Authority
from tests.integration.test_caller_files import encrypt


def refusal(cert: str, key: str) -> str:
    with pytest.raises(InvalidRequest) as caught:
        pem.read_pair(cert, key)
    assert caught.value.reason == "TLS_FILES_INVALID"
    return caught.value.message


def test_what_is_wrong_with_a_pair_is_said_in_words(tmp_path: Path) -> None:
    cert, key = Authority(tmp_path).issue("me", "me.example")
    assert pem.read_pair(cert, key) == (Path(cert).read_bytes(), Path(key).read_bytes())
    assert refusal(key, cert) == f"{key}: it holds a private key and no certificate"
    assert refusal(cert, cert) == f"{cert}: it holds no private key; are it and {cert} exchanged?"
    encrypt(key)
    assert f"{key}: it has a passphrase; `openssl pkey -in {key}" in refusal(cert, key)


@pytest.mark.parametrize(("days", "fault"), [(1, ""), (-1, "has expired")])
def test_the_dates_of_a_certificate_are_looked_at(tmp_path: Path, days: float, fault: str) -> None:
    cert, key = Authority(tmp_path).issue("me", "me.example", days=days)
    assert pem.date_fault(cert, key) == fault


def test_files_that_cannot_be_used_have_no_dates(tmp_path: Path) -> None:
    cert, _ = Authority(tmp_path).issue("me", "me.example")
    with pytest.raises(ssl.SSLError):
        pem.date_fault(cert, cert)
