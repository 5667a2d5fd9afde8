"""Checking a projected service-account token with the Kubernetes API (`TokenReview`).

Format: https://kubernetes.io/docs/reference/kubernetes-api/authentication-resources/token-review-v1/
"""

from __future__ import annotations

import asyncio
import hashlib
import http.client
import json
import logging
import os
import ssl
import time
import urllib.parse
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from loader_service import addresses
from loader_service.channel_security import MOST_TOKEN_CHARACTERS
from loader_service.errors import ServiceUnavailable

__all__ = ["TokenReviewer"]

_log = logging.getLogger(__name__)

REVIEW_SECONDS = 5.0
REMEMBER_SECONDS = 60.0
"""How long an answer counts; a token that is revoked meanwhile still works for this long."""

_THREADS, _MOST_WAITING = 4, 64
_MOST_REMEMBERED = 4096
_MOST_ANSWER_BYTES = 1 << 20
_POD = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_PREFIX = "system:serviceaccount:"


class TokenReviewer:
    """Asks the API server whose token one is, and remembers the answers for a minute."""

    def __init__(
        self, audience: str, api_server: str = "", ca_cert: str = "", token_file: str = ""
    ) -> None:
        """Describe the API server; nothing is asked yet.

        Args:
            audience: audience that a token must have been issued for.
            api_server: URL; empty is the one of the pod that this process runs in.
            ca_cert: PEM file of the API server's authority; empty is the pod's.
            token_file: token of this process itself, which needs `system:auth-delegator`; empty is
                the pod's.

        Raises:
            ValueError: `api_server` is no https:// URL; tokens are sent to it.
        """
        host = os.environ.get("KUBERNETES_SERVICE_HOST", "kubernetes.default.svc")
        port = int(os.environ.get("KUBERNETES_SERVICE_PORT", "443"))
        url = urllib.parse.urlsplit(api_server or f"https://{addresses.join(host, port)}")
        if url.scheme != "https" or not url.hostname:
            raise ValueError("api_server is an https:// URL")
        self._host, self._port = url.hostname, url.port or 443
        self._url = f"{url.path.rstrip('/')}/apis/authentication.k8s.io/v1/tokenreviews"
        self._audience = audience
        self._ca_cert = ca_cert or str(_POD / "ca.crt")
        self._token_file = Path(token_file or _POD / "token")
        self._answers: dict[str, tuple[float, str]] = {}
        # Threads of its own: an API server that does not answer must not hold up heartbeats and plans.
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="review")
        self._waiting = 0

    async def review(self, token: str) -> str:
        """Return `NAMESPACE:NAME` of the service account that holds `token`, or an empty text.

        Raises:
            ServiceUnavailable: TOKEN_NOT_REVIEWED, the API server could not be asked.
        """
        if len(token) > MOST_TOKEN_CHARACTERS:
            return ""
        key = hashlib.sha256(token.encode()).hexdigest()
        now = time.monotonic()
        known = self._answers.get(key)
        if known and known[0] > now:
            return known[1]
        if self._waiting >= _MOST_WAITING:
            raise _not_reviewed(f"{self._waiting} others wait")
        self._waiting += 1
        try:
            loop = asyncio.get_running_loop()
            account = await loop.run_in_executor(self._threads, self._ask, token)
        except (OSError, ValueError, RecursionError, http.client.HTTPException) as error:
            # Not remembered: the API server may be back at the next call. What is wrong with it is not
            # for strangers.
            _log.error("a token could not be reviewed: %s", error)
            raise _not_reviewed("the Kubernetes API does not answer as it should") from error
        finally:
            self._waiting -= 1
        if len(self._answers) >= _MOST_REMEMBERED:
            self._answers.clear()
        self._answers[key] = (now + REMEMBER_SECONDS, account)
        return account

    def _ask(self, token: str) -> str:
        review = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenReview",
            "spec": {"token": token, "audiences": [self._audience]},
        }
        headers = {
            "Authorization": f"Bearer {self._token_file.read_text(encoding='ascii').strip()}",
            "Content-Type": "application/json",
        }
        # Straight to the API server: neither a proxy of the environment nor the target of a redirect
        # may get these tokens.
        context = ssl.create_default_context(cafile=self._ca_cert)
        connection = http.client.HTTPSConnection(
            self._host, self._port, timeout=REVIEW_SECONDS, context=context
        )
        try:
            connection.request("POST", self._url, json.dumps(review), headers)
            with connection.getresponse() as answer:
                if answer.status not in (http.HTTPStatus.OK, http.HTTPStatus.CREATED):
                    raise OSError(f"the API server answers {answer.status} {answer.reason}")
                return self._account(json.loads(answer.read(_MOST_ANSWER_BYTES)))
        finally:
            connection.close()

    def _account(self, answer: Any) -> str:
        match answer:
            case {
                "status": {
                    "authenticated": True,
                    "audiences": [*audiences],
                    "user": {"username": str(name)},
                }
            } if self._audience in audiences and name.startswith(_PREFIX):
                return name.removeprefix(_PREFIX)
        return ""


def _not_reviewed(why: str) -> ServiceUnavailable:
    return ServiceUnavailable(
        f"the token could not be reviewed: {why}; try again", reason="TOKEN_NOT_REVIEWED"
    )
