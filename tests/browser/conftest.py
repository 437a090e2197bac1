"""A real browser: Debian's chromium, driven by Playwright."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from django.contrib.auth.models import Group, User
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, sync_playwright
from pytest_django.live_server_helper import LiveServer

from commandbus.permissions import OPERATORS, VIEWERS

SCREENSHOTS = Path(__file__).parent / "screenshots"

Login = Callable[[str], Page]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.browser)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    os.environ["DJANGO_ALLOW_ASYNC_UNSAFE"] = "true"  # Playwright's loop runs in this thread, and so do the tests
    chromium = shutil.which("chromium")
    assert chromium, "there is no chromium; on Debian: apt-get install chromium"
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.fixture
def context(browser: Browser, live_server: LiveServer) -> Iterator[BrowserContext]:
    fresh = browser.new_context(base_url=live_server.url, viewport={"width": 1280, "height": 900})
    fresh.set_default_timeout(15_000)
    yield fresh
    fresh.close()


@pytest.fixture
def login(context: BrowserContext) -> Iterator[Login]:
    """A page of somebody in one of the groups. Whatever a page's console complains about fails the test."""
    complaints: list[str] = []

    def complain(message: ConsoleMessage) -> None:
        if message.type == "error" and not message.location["url"].endswith("/favicon.ico"):
            complaints.append(f"{message.text} {message.location['url']}")

    def enter(group: str) -> Page:
        name = {OPERATORS: "olga", VIEWERS: "victor"}[group]
        user = User.objects.create_user(name, password="secret", is_staff=True)
        user.groups.add(Group.objects.get(name=group))
        page = context.new_page()
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", complain)
        page.on("dialog", lambda dialog: complaints.append(f"dialog {dialog.message}"))
        page.goto("/admin/")
        page.fill("#id_username", name)
        page.fill("#id_password", "secret")
        page.click("input[type=submit]")
        return page

    yield enter
    assert complaints == []


@pytest.fixture
def operator(login: Login) -> Page:
    return login(OPERATORS)


@pytest.fixture
def viewer(login: Login) -> Page:
    return login(VIEWERS)


def shot(page: Page, name: str) -> None:
    SCREENSHOTS.mkdir(exist_ok=True)
    page.screenshot(path=SCREENSHOTS / f"{name}.png", full_page=True)
