from commandbus.models.audit import Audit
from commandbus.models.batch import Batch, BatchDelta
from commandbus.models.command import Command, TroubledCommand
from commandbus.models.domain import CommandType, Domain
from commandbus.models.node import Node
from commandbus.models.payload import PayloadArchive, UnreadableMessage
from commandbus.models.spark import SparkJob, SparkJobDelta, SparkReject, SparkStaged
from commandbus.models.suspect import Suspect
from commandbus.models.tombstone import Tombstone

__all__ = [
    "Audit",
    "Batch",
    "BatchDelta",
    "Command",
    "CommandType",
    "Domain",
    "Node",
    "PayloadArchive",
    "SparkJob",
    "SparkJobDelta",
    "SparkReject",
    "SparkStaged",
    "Suspect",
    "Tombstone",
    "TroubledCommand",
    "UnreadableMessage",
]
