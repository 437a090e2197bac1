"""The operators' pages."""

from commandbus.admin.audit import AuditAdmin
from commandbus.admin.batch import BatchAdmin
from commandbus.admin.command import CommandAdmin
from commandbus.admin.domain import DomainAdmin
from commandbus.admin.node import NodeAdmin
from commandbus.admin.spark import SparkJobAdmin
from commandbus.admin.troubleshooting import TroubledCommandAdmin
from commandbus.admin.unreadable import UnreadableMessageAdmin

__all__ = [
    "AuditAdmin",
    "BatchAdmin",
    "CommandAdmin",
    "DomainAdmin",
    "NodeAdmin",
    "SparkJobAdmin",
    "TroubledCommandAdmin",
    "UnreadableMessageAdmin",
]
