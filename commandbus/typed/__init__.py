"""Typed data: a handler that says `Command[Debit]` gets a Debit, and a Debit can be sent. No Django, no database."""

from commandbus.typed.annotations import data_type
from commandbus.typed.readers import reader_of
from commandbus.typed.scalars import Reader, json_kind
from commandbus.typed.sending import data_json

__all__ = ["Reader", "data_json", "data_type", "json_kind", "reader_of"]
