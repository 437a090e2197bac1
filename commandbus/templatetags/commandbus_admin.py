"""How the pages show numbers, times and statuses."""

from __future__ import annotations

from datetime import datetime, timedelta

from django import template
from django.urls import NoReverseMatch, reverse
from django.utils.safestring import SafeString

from commandbus.admin import badges
from commandbus.models import Command

register = template.Library()


@register.simple_tag(takes_context=True)
def command_url(context: template.Context, command: Command) -> str:
    """Of its page, on the admin site that is shown; empty, if that has none."""
    app = getattr(context["request"], "current_app", None)
    try:
        arguments = [f"{command.domain}/{command.command_id}"]
        return reverse("admin:commandbus_command_change", args=arguments, current_app=app)
    except NoReverseMatch:
        return ""


@register.filter
def grouped(number: int) -> str:
    """As in 1,234,567."""
    return f"{number:,}"


@register.filter
def span(duration: timedelta | float) -> str:
    """Of a timedelta, or of seconds."""
    return badges.span(duration if isinstance(duration, timedelta) else timedelta(seconds=duration))


@register.filter
def moment(value: datetime) -> SafeString:
    return badges.moment(value)


@register.filter
def badge(name: str) -> SafeString:
    return badges.status(name)


@register.filter
def foreign(text: str) -> SafeString:
    """What somebody else wrote."""
    return badges.text(text)
