"""Options of the servers that make no sense: the complaint names the option and what is missing."""

from __future__ import annotations

import pytest

from loader_service.coordinator.main import main


@pytest.mark.parametrize(
    ("option", "complaint"),
    [
        ("--window-bytes=xx", "argument --window-bytes: 'xx' is not a size such as 512MiB"),
        ("--data-ports=9", "--data-ports '9' is not a range of ports A-B"),
        ("--tls-cert=/nope", "--tls-cert and --tls-key go together; --tls-key is missing"),
        ("--tls-key=/nope", "--tls-cert and --tls-key go together; --tls-cert is missing"),
    ],
)
def test_an_option_that_makes_no_sense_is_named(
    option: str, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--model-root=/", option])
    assert complaint in f"{caught.value.code}{capsys.readouterr().err}"
