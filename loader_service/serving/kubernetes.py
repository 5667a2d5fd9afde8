"""Checking a projected service-account token with the Kubernetes API (`TokenReview`).

Format: https://kubernetes.io/docs/reference/kubernetes-api/authentication-resources/token-review-v1/
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import ssl
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

__all__ = ["TokenReviewer"]

_log = logging.getLogger(__name__)

REVIEW_SECONDS = 5.0
REMEMBER_SECONDS = 60.0
"""How long an answer counts; a token that is revoked meanwhile still works for this long."""

_THREADS, _MOST_WAITING = 4, 64
_MOST_REMEMBERED = 4096
_MOST_TOKEN_CHARACTERS = 8192
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
        """
        host = os.environ.get("KUBERNETES_SERVICE_HOST", "kubernetes.default.svc")
        port = os.environ.get("KUBERNETES_SERVICE_PORT", "443")
        server = api_server or f"https://{host}:{port}"
        self._url = f"{server}/apis/authentication.k8s.io/v1/tokenreviews"
        self._audience = audience
        self._ca_cert = ca_cert or str(_POD / "ca.crt")
        self._token_file = Path(token_file or _POD / "token")
        self._answers: dict[str, tuple[float, str]] = {}
        # Threads of its own: an API server that does not answer must not hold up heartbeats and plans.
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="review")
        self._waiting = 0

    async def review(self, token: str) -> str:
        """Return `NAMESPACE:NAME` of the service account that holds `token`, or an empty text."""
        if len(token) > _MOST_TOKEN_CHARACTERS:
            return ""
        key = hashlib.sha256(token.encode()).hexdigest()
        now = time.monotonic()
        known = self._answers.get(key)
        if known and known[0] > now:
            return known[1]
        if self._waiting >= _MOST_WAITING:
            _log.warning("a token was not reviewed: %d others wait", self._waiting)
            return ""
        self._waiting += 1
        try:
            loop = asyncio.get_running_loop()
            account = await loop.run_in_executor(self._threads, self._ask, token)
        except (OSError, ValueError) as error:
            # Not remembered: the API server may be back at the next call.
            _log.error("a token could not be reviewed: %s", error)
            return ""
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
        request = urllib.request.Request(  # noqa: S310 - the URL is the operator's
            self._url,
            data=json.dumps(review).encode(),
            headers={
                "Authorization": f"Bearer {self._token_file.read_text(encoding='ascii').strip()}",
                "Content-Type": "application/json",
            },
        )
        context = ssl.create_default_context(cafile=self._ca_cert)
        with urllib.request.urlopen(  # noqa: S310 - the URL is the operator's
            request, timeout=REVIEW_SECONDS, context=context
        ) as answer:
            return self._account(json.load(answer))

    def _account(self, answer: Any) -> str:
        status = answer.get("status", {})
        name = str(status.get("user", {}).get("username", ""))
        if (
            not status.get("authenticated")
            or self._audience not in status.get("audiences", ())
            or not name.startswith(_PREFIX)
        ):
            return ""
        return name.removeprefix(_PREFIX)
