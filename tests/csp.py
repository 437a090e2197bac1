from __future__ import annotations

import secrets
from collections.abc import Callable

from django.http import HttpRequest, HttpResponse


class StrictPolicy:
    """A content security policy as strict projects have it: nothing inline without a nonce, nothing from elsewhere."""

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponse]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        request.csp_nonce = secrets.token_urlsafe(16)  # type: ignore[attr-defined]
        response = self.get_response(request)
        nonce = f"'nonce-{request.csp_nonce}'"  # type: ignore[attr-defined]
        response["Content-Security-Policy"] = (
            f"default-src 'self'; script-src 'self' {nonce}; style-src 'self' {nonce}; img-src 'self' data:"
        )
        return response
