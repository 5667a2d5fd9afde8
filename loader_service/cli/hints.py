"""What to do next, by the reason of an error: one sentence each."""

from __future__ import annotations

from collections.abc import Mapping

from loader_service.errors import LoaderError, PlanRefused

__all__ = ["HINTS", "WORKER_HINTS", "hint"]

HINTS: Mapping[str, str] = {
    # Reaching the coordinator
    "UNAVAILABLE": "is a coordinator at {endpoint}? --endpoint or LOADER_ENDPOINT names another",
    "SHUTTING_DOWN": "the coordinator restarts or moves; try again in a moment",
    "DEADLINE_EXCEEDED": "--timeout (or LOADER_TIMEOUT) gives calls more time; `loaderctl health` "
    "asks whether the coordinator answers at all",
    "VERSION_SKEW": "install the same release of loader-service on the coordinator and its workers",
    # Who the caller is
    "UNAUTHENTICATED": "the coordinator wants to know who calls: --token-file, or --tls-cert with "
    "--tls-key",
    "TOKEN_UNKNOWN": "the access file of the coordinator does not list this token; `loaderctl config "
    "view --show-origin` shows which file it came from",
    "TOKEN_NOT_REVIEWED": "the coordinator could not ask the Kubernetes API server whose token it is; its "
    "log says why",
    "CERTIFICATE_UNKNOWN": "the access file of the coordinator does not list this certificate; "
    "another is named by --tls-cert and --tls-key",
    "ACCESS_DENIED": "ask for the role, or use a context of somebody who has it: --context",
    "TOKEN_NEEDS_TLS": "--tls-ca-cert names who signs the coordinator's certificate; --tls trusts this "
    "machine's authorities",
    "TOKEN_INVALID": "the file named by --token-file (or LOADER_TOKEN_FILE) holds the token and nothing "
    "else",
    "TLS_FILES_INVALID": "--tls-ca-cert, --tls-cert and --tls-key name PEM files; the key belongs to the "
    "certificate and has no passphrase",
    "FILE_UNREADABLE": "`loaderctl config view --show-origin` shows where the name came from",
    "TLS_REQUIRED": "--tls-ca-cert (or LOADER_TLS_CA_CERT) names who signs the server's certificate",
    "TLS_NOT_SPOKEN": "--no-tls leaves TLS out; `loaderctl config view --show-origin` shows who asked "
    "for it",
    "TLS_CERTIFICATE_REFUSED": "--tls-ca-cert names the authority that signed the server's certificate",
    "TLS_NAME_MISMATCH": "--endpoint with a name of the certificate, or --tls-server-name for a tunnel",
    "TLS_CLIENT_REFUSED": "--tls-cert and --tls-key name a certificate that the server's authority signed and that is valid now",
    # Loads and workers
    "LOAD_NOT_FOUND": "`loaderctl get loads` lists them; a coordinator that restarts begins anew",
    "WORKER_NOT_FOUND": "`loaderctl get workers` lists them",
    "NOT_ENOUGH_WORKERS": "`loaderctl get workers` shows them{too_few}",
    "WORKER_BUSY": "`loaderctl get workers` shows which are READY; `loaderctl unload` gives one back",
    "WORKER_DRAINING": "`loaderctl undrain worker {worker_id}` lets it take loads again",
    "WORKER_LOST": "`loaderctl get workers` shows who is left; the log of {worker_id} may say why",
    "STREAMER_LOST": "load again; the coordinator's log says why the streamer ended",
    "WRONG_STATE": "`loaderctl describe load {load_id}` shows its state; `unload` is for loads that "
    "serve, `cancel` for those that do not yet",
    "LOAD_CANCELLED": "`loaderctl load` starts it anew",
    "QUOTA_EXCEEDED": "end what is not needed (`loaderctl get loads`), or ask for a larger quota",
    "CONFLICT": "`loaderctl get loads` and `loaderctl get workers` show what is there",
    "REQUEST_ID_REUSED": "another --request-id, or none, makes a new request",
    "OUT_OF_MEMORY": "`loaderctl plan PATH --tp N` shows what each rank needs; more ranks need less "
    "each, and `loaderctl unload` gives memory back",
    # Checkpoints and plans
    "CHECKPOINT_NOT_FOUND": "PATH is on the coordinator, relative to its --model-root",
    "PATH_OUTSIDE_ROOT": "PATH is relative to the coordinator's --model-root, or absolute inside it",
    "NOT_A_FILE": "PATH is a folder with safetensors files, or one such file",
    "EMPTY_CHECKPOINT": "PATH is a folder with safetensors files, or one such file",
    "LFS_POINTER": "`git lfs pull` in the checkpoint's folder fetches the real files",
    "SHARD_MISSING": "the download is not complete; fetch the checkpoint again",
    "FILE_TRUNCATED": "the download is not complete; fetch the checkpoint again",
    "FILE_TOO_SHORT": "the download is not complete; fetch the checkpoint again",
    "FILE_CHANGED": "something writes to the checkpoint while it is read; load again when it is done",
    "READ_FAILED": "look at the storage of the coordinator; its log has the system's error",
    "DATA_LOSS": "compare the files with their source; `loaderctl inspect PATH` reads the headers",
    "DIGEST_MISMATCH": "load again; if it repeats, look at the memory and network of {worker_id}",
    "TRAILING_BYTES": "--allow-trailing-bytes accepts them",
    "LIMIT": "the coordinator's --max-header-bytes and --max-tensors set the limits",
    "WINDOW_TOO_SMALL": "a larger --window-bytes of the coordinator, or fewer ranks",
    "TP_NOT_DIVISIBLE": "--tp {valid_tp} would fit",
    "PLAN_REFUSED": "--tp {valid_tp} would fit",
    "SUB_BYTE_CUT": "--tp {valid_tp} would fit",
    "CONFIG_MISSING": "--tp 1 loads every tensor whole, --unknown replicate puts all on every rank",
    "UNSUPPORTED_ARCHITECTURE": "--tp 1 loads every tensor whole, --unknown replicate puts all on every "
    "rank",
    "UNSUPPORTED_QUANTIZATION": "--tp 1 loads every tensor whole, --unknown replicate puts all on every "
    "rank",
    "UNKNOWN_TENSOR": "--unknown replicate puts it on every rank",
    "LOCAL_SOURCE_UNAVAILABLE": "--source auto has the coordinator send what a worker cannot read itself",
    "TIED_HEAD_DIFFERS": "--tied obey-file loads the head as a tensor of its own, --tied trust-config "
    "leaves it out",
}
"""Hints by reason. `{endpoint}` is the coordinator's, other words are facts of the error."""

_WORKERS_ACCESS = (
    "the access file of worker {worker_id} (its --access) has to list who calls it: the coordinator "
    "with the role coordinator, people as viewer, operator or admin"
)
WORKER_HINTS: Mapping[str, str] = {
    "UNAUTHENTICATED": "worker {worker_id} wants to know who calls: --tls-cert with --tls-key, or "
    "--token-file, of the coordinator too",
    "TOKEN_UNKNOWN": _WORKERS_ACCESS,
    "CERTIFICATE_UNKNOWN": _WORKERS_ACCESS,
    "ACCESS_DENIED": _WORKERS_ACCESS,
}
"""Hints for errors of which a worker is the cause; other reasons have the same hint as elsewhere."""


def hint(error: LoaderError, endpoint: str) -> str:
    """Return what to do about an error; empty where the message says it all.

    Args:
        error: what happened.
        endpoint: the coordinator that was asked.
    """
    sizes = [str(size) for size in error.valid_tp] if isinstance(error, PlanRefused) else []
    template = HINTS.get(error.reason, "")
    if "worker_id" in error.metadata:
        template = WORKER_HINTS.get(error.reason, template)
    if "{valid_tp}" in template and not sizes:
        return ""
    facts = {key: value for key, value in error.metadata.items() if value}
    facts["too_few"] = _too_few(facts)
    return template.format_map(_Facts(facts, endpoint=endpoint, valid_tp=_either(sizes)))


def _too_few(facts: Mapping[str, str]) -> str:
    """Say how a load that lacks workers gets them: by those that are there, if that can be."""
    parts = [""]
    if drained := facts.get("drained"):
        parts.append(f"`loaderctl undrain worker {drained.split(',')[0]}` lets it take loads again")
    there, needed = facts.get("workers", ""), facts.get("needed", "")
    if there.isdecimal() and needed.isdecimal() and int(there) < int(needed):
        parts.append("start more workers, or load with a smaller --tp")
    elif facts.get("busy"):
        waiting = (
            "a longer --wait-for-workers" if "waited_seconds" in facts else "--wait-for-workers 60s"
        )
        parts.append(f"`loaderctl unload LOAD` gives busy ones back, {waiting} waits for that")
    return "; ".join(parts)


class _Facts(dict[str, str]):
    """Facts of an error; one that it lacks stays a placeholder for people."""

    def __missing__(self, key: str) -> str:
        return key.removesuffix("_id").upper()


def _either(words: list[str]) -> str:
    return " or ".join(filter(None, (", ".join(words[:-1]), words[-1]))) if words else ""
