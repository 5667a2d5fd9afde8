"""Pages of a list: whole, in order, and bounded in number and bytes."""

from __future__ import annotations

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loader_service.errors import InvalidRequest
from loader_service.serving.paging import PAGE_BYTES, paginate
from loader_service.v1 import coordinator_pb2, types_pb2


def page_of(
    items: list[str], size: int, token: str = "", *, maximum: int = 9
) -> tuple[list[str], str]:
    """Return the names of a page of messages, and the next token."""
    request = coordinator_pb2.InspectCheckpointRequest(page_size=size, page_token=token)
    page, following = paginate(
        items,
        str,
        lambda name: types_pb2.TensorSlice(name=name),
        request,
        default=3,
        maximum=maximum,
    )
    return [message.name for message in page], following


def all_pages(items: list[str], size: int, maximum: int = 1000) -> list[list[str]]:
    pages: list[list[str]] = []
    token = ""
    while True:
        page, token = page_of(items, size, token, maximum=maximum)
        pages.append(page)
        if not token:
            return pages


NAMES = st.lists(st.text(min_size=1, max_size=8), unique=True, max_size=25).map(sorted)


@given(items=NAMES, size=st.integers(0, 30), maximum=st.integers(1, 10))
def test_pages_hold_everything_once_in_order_within_their_size(
    items: list[str], size: int, maximum: int
) -> None:
    pages = all_pages(items, size, maximum)
    assert [item for page in pages for item in page] == items
    wanted = min(size or 3, maximum)
    assert all(len(page) == wanted for page in pages[:-1])
    assert len(pages[-1]) <= wanted
    assert len(pages) == max(1, -(-len(items) // wanted))


@given(items=NAMES, others=NAMES, size=st.integers(1, 5))
def test_items_that_come_and_go_elsewhere_shift_no_page(
    items: list[str], others: list[str], size: int
) -> None:
    first, token = page_of(items, size)
    if not token:
        return
    # Whatever happens to the list, the next page begins right behind the last item seen.
    changed = sorted({*others, *items[size:]})
    second, _ = page_of(changed, 100, token, maximum=100)
    assert list(second) == [item for item in changed if item > first[-1]]


@pytest.mark.parametrize("size", [-1, -(2**31)])
def test_a_negative_size_is_refused(size: int) -> None:
    with pytest.raises(InvalidRequest, match="negative") as caught:
        page_of(["a"], size)
    assert caught.value.metadata == {"field": "page_size"}


@pytest.mark.parametrize(
    "token",
    ["?", "a", "####", "YWJj\n", "Y W J j", "ä", "-", base64.urlsafe_b64encode(b"\xff").decode()],
)
def test_a_token_that_no_page_gave_out_is_refused(token: str) -> None:
    with pytest.raises(InvalidRequest, match="page_token") as caught:
        page_of(["a", "b"], 1, token)
    assert caught.value.metadata == {"field": "page_token"}


def test_a_token_behind_the_last_item_gives_an_empty_last_page() -> None:
    _, token = page_of(["a", "z"], 1)
    assert page_of([], 1, token) == ([], "")


def test_a_page_holds_no_more_bytes_than_a_message_may() -> None:
    names = [f"{number:03d}{'x' * 100_000}" for number in range(40)]
    seen: list[str] = []
    token = ""
    while True:
        page, token = page_of(names, 1000, token, maximum=1000)
        assert sum(map(len, page)) <= PAGE_BYTES
        seen += page
        if not token:
            break
    assert seen == names


def test_an_item_larger_than_a_page_travels_alone() -> None:
    names = ["a" * 2 * PAGE_BYTES, "b" * 2 * PAGE_BYTES]
    page, token = page_of(names, 10)
    assert page == names[:1]
    assert page_of(names, 10, token) == (names[1:], "")
