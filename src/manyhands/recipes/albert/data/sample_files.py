"""Files of samples: Arrow streams in the format of ``datasets``, memory-mapped. Imports no torch.

The operating system caches the pages that are read, and drops them when memory is short. This process keeps a few bytes
for each sample, however large the files are.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, overload

from manyhands.base.errors import ConfigError, MissingExtra
from manyhands.recipes.albert.data.pairs import StoredSample

try:
    import numpy as np
    import pyarrow as pa
except ModuleNotFoundError as error:
    if error.name not in ("numpy", "pyarrow"):
        raise
    raise MissingExtra("prepared data", "albert") from error

ROWS_PER_BATCH = 1_000
"""Samples in one record batch, as in files of ``datasets``."""

SCHEMA = pa.schema(
    [
        ("attention_mask", pa.list_(pa.int8())),
        ("input_ids", pa.list_(pa.int32())),
        ("sentence_order_label", pa.int64()),
        ("special_tokens_mask", pa.list_(pa.int8())),
        ("token_type_ids", pa.list_(pa.int8())),
    ]
)
"""The columns of hivemind's archives."""


class SampleFiles(Sequence[StoredSample]):
    """All samples of some files, in order.

    Raises:
        ConfigError: a file is missing, truncated or damaged, or has other columns.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        self._batches: list[Any] = []
        self._ends: list[int] = []
        for path in paths:
            self._open(path)

    def _open(self, path: Path) -> None:
        try:
            batches = list(pa.ipc.open_stream(pa.memory_map(str(path))))
            for batch in batches:
                batch.validate()
        except FileNotFoundError as error:
            raise ConfigError(f"data file {path} is missing; get the data again") from error
        except (pa.ArrowInvalid, OSError) as error:
            reason = str(error).partition("\n")[0]
            raise ConfigError(f"data file {path} is truncated or damaged ({reason}); get it again") from error
        for batch in batches:
            missing = [name for name in SCHEMA.names if name not in batch.schema.names]
            if missing or not pa.types.is_list(batch.schema.field("input_ids").type):
                raise ConfigError(
                    f"data file {path} has columns {', '.join(batch.schema.names)}; it must also have the lists "
                    f"{', '.join(missing)}, as files of manyhands data prepare have"
                )
            self._batches.append(batch)
            self._ends.append(len(self) + batch.num_rows)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @overload
    def __getitem__(self, index: int) -> StoredSample: ...
    @overload
    def __getitem__(self, index: slice) -> list[StoredSample]: ...
    def __getitem__(self, index: int | slice) -> StoredSample | list[StoredSample]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(index)
        number = bisect.bisect_right(self._ends, index)
        batch = self._batches[number]
        row = index - (self._ends[number] - batch.num_rows)

        def values(name: str) -> np.ndarray[Any, Any]:
            column = batch.column(name)
            start = column.offsets[row].as_py()
            end = column.offsets[row + 1].as_py()
            found: np.ndarray[Any, Any] = column.values[start:end].to_numpy()
            return found

        length = int(values("attention_mask").sum())  # without padding, which other programs may have added
        return StoredSample(
            values("input_ids")[:length],
            values("token_type_ids")[:length],
            values("special_tokens_mask")[:length],
            batch.column("sentence_order_label")[row].as_py(),
        )

    def longest(self) -> int:
        """Number of tokens of the longest sample, padding included."""
        offsets = (batch.column("input_ids").offsets.to_numpy() for batch in self._batches if batch.num_rows)
        return max((int(np.diff(of_batch).max()) for of_batch in offsets), default=0)

    def batches(self, start: int, end: int) -> Iterator[Any]:
        """Record batches with the samples ``start`` to ``end`` (exclusive), for copying."""
        for batch, batch_end in zip(self._batches, self._ends, strict=True):
            batch_start = batch_end - batch.num_rows
            first = max(start, batch_start)
            last = min(end, batch_end)
            if first < last:
                yield batch.slice(first - batch_start, last - first).select(SCHEMA.names)


class SampleWriter:
    """Writes one file, in batches of ``ROWS_PER_BATCH``: the same samples give the same bytes, however they are added.

    Attributes:
        num_samples: number of samples that were added so far.
    """

    def __init__(self, path: Path) -> None:
        self.num_samples = 0
        self._waiting: list[Any] = []
        self._num_waiting = 0
        self._stream = pa.ipc.new_stream(str(path), SCHEMA)

    def __enter__(self) -> SampleWriter:
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self._write(self._num_waiting)
        finally:
            self._stream.close()

    def add(self, batch: Any) -> None:
        """Append a record batch with the columns of ``SCHEMA``."""
        self.num_samples += batch.num_rows
        self._waiting.append(batch)
        self._num_waiting += batch.num_rows
        if self._num_waiting >= ROWS_PER_BATCH:
            self._write(self._num_waiting - self._num_waiting % ROWS_PER_BATCH)

    def _write(self, num_rows: int) -> None:
        table = pa.Table.from_batches(self._waiting, SCHEMA).combine_chunks()
        self._stream.write_table(table.slice(0, num_rows), max_chunksize=ROWS_PER_BATCH)
        rest = table.slice(num_rows).combine_chunks()
        self._waiting = rest.to_batches()
        self._num_waiting = rest.num_rows
