"""`format("commandbus")`. Spark pickles this class by its name, so every process of Spark must be able to import it."""

from __future__ import annotations

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.types import StructType

from commandbus.exceptions import ConfigurationError
from commandbus.spark.options import WriteOptions
from commandbus.spark.reader import REJECTS, RejectsReader
from commandbus.spark.stream import CommandStreamWriter
from commandbus.spark.writer import CommandWriter


class CommandBusDataSource(DataSource):
    @classmethod
    def name(cls) -> str:
        return "commandbus"

    def schema(self) -> str:
        return REJECTS

    def reader(self, schema: StructType) -> DataSourceReader:
        return RejectsReader(self.options)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        if overwrite:
            raise ConfigurationError('what was sent cannot be overwritten; write with mode("append")')
        return CommandWriter(WriteOptions.of(self.options), schema)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802 - Spark's name
        if overwrite:
            raise ConfigurationError('what was sent cannot be overwritten; write with outputMode("append")')
        return CommandStreamWriter(WriteOptions.of(self.options, is_stream=True), schema)
