"""Pages of a list: bounded in number and in bytes, so that no answer nears gRPC's message limit."""

from __future__ import annotations

import base64
import binascii
import bisect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from google.protobuf.message import Message

from loader_service.errors import InvalidRequest

__all__ = ["PAGE_BYTES", "paginate"]

PAGE_BYTES = 1 << 20
"""Most bytes of a page's items; a single larger item travels alone."""

_Item = TypeVar("_Item")
_Message = TypeVar("_Message", bound=Message)


def paginate(
    items: Sequence[_Item],
    key: Callable[[_Item], str],
    message: Callable[[_Item], _Message],
    request: Any,
    *,
    default: int,
    maximum: int,
) -> tuple[list[_Message], str]:
    """Return one page's messages and the token of the next; the token is empty on the last page.

    Tokens name the last item seen, so that items that come and go elsewhere shift nothing.

    Args:
        items: everything, ascending by `key`.
        key: unique and constant text of an item.
        message: makes an item's message.
        request: has `page_size` (0 means `default`) and `page_token` (empty for the first page).
        default: items a page when nobody asks.
        maximum: larger pages are cut to this.

    Raises:
        InvalidRequest: negative size, or a token that no page gave out.
    """
    if request.page_size < 0:
        raise InvalidRequest(
            f"page_size must not be negative, {request.page_size} is", field="page_size"
        )
    start = _start(items, key, request.page_token)
    page: list[_Message] = []
    room = PAGE_BYTES
    for item in items[start : start + min(request.page_size or default, maximum)]:
        made = message(item)
        room -= made.ByteSize()
        if room < 0 and page:
            break
        page.append(made)
    end = start + len(page)
    if end >= len(items):
        return page, ""
    return page, base64.urlsafe_b64encode(key(items[end - 1]).encode()).decode("ascii")


def _start(items: Sequence[_Item], key: Callable[[_Item], str], token: str) -> int:
    if not token:
        return 0
    try:
        last = base64.b64decode(token.encode("ascii"), b"-_", validate=True).decode()
    except (UnicodeError, binascii.Error):
        raise InvalidRequest("page_token is not one of this server's", field="page_token") from None
    return bisect.bisect_right(items, last, key=key)
