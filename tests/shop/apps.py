from __future__ import annotations

from django.apps import AppConfig


class ShopConfig(AppConfig):
    name = "tests.shop"

    def ready(self) -> None:
        from tests import failpoints

        failpoints.install()
