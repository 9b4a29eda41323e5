"""Telemetry: the record of one edge, its store, and its exports."""

from __future__ import annotations

from jaxcoll.telemetry.diagnose import (
    Diagnosis,
    SlowHost,
    SlowLink,
    Straggler,
    behind,
    diagnose,
    epoch_seconds,
    find_stragglers,
    lateness,
)
from jaxcoll.telemetry.ends import split_waits
from jaxcoll.telemetry.export import chrome_trace, prometheus, write_jsonl
from jaxcoll.telemetry.launches import NEAR, by_executable, near
from jaxcoll.telemetry.matrix import Matrix, measurement_matrix
from jaxcoll.telemetry.record import (
    RECEIVER,
    RECORD_DTYPE,
    RECORD_SIZE,
    SENDER,
    TOGETHER,
    UNSPLIT,
    Record,
    Records,
    as_records,
    concatenate,
    empty_records,
    from_records,
    to_record,
)
from jaxcoll.telemetry.store import Counts, Epoch, EpochId, Store, group_epochs

__all__ = [
    "NEAR",
    "RECEIVER",
    "RECORD_DTYPE",
    "RECORD_SIZE",
    "SENDER",
    "TOGETHER",
    "UNSPLIT",
    "Counts",
    "Diagnosis",
    "Epoch",
    "EpochId",
    "Matrix",
    "Record",
    "Records",
    "SlowHost",
    "SlowLink",
    "Store",
    "Straggler",
    "as_records",
    "behind",
    "by_executable",
    "chrome_trace",
    "concatenate",
    "diagnose",
    "empty_records",
    "epoch_seconds",
    "find_stragglers",
    "from_records",
    "group_epochs",
    "lateness",
    "measurement_matrix",
    "near",
    "prometheus",
    "split_waits",
    "to_record",
    "write_jsonl",
]
