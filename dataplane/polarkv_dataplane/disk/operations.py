"""The three commands of a disk server: offload, load, purge."""

from __future__ import annotations

import time
from collections.abc import Callable

from polarkv_client.errors import Damaged
from polarkv_client.keys import KEY_BYTES, short
from polarkv_client.layout import ALIGNMENT_BYTES, MAX_PAYLOAD_BYTES, Header, stride_bytes
from polarkv_client.protocol.messages import DiskCommand, Op, OperationDone, OperationResult
from polarkv_dataplane.disk.attachment import Attachment
from polarkv_dataplane.disk.executor import KeyedExecutor, Task
from polarkv_dataplane.disk.files import Dropped, Files, Missing, NoSpace, verify_memory
from polarkv_dataplane.disk.index import Index
from polarkv_dataplane.runtime.counters import Counters, labelled
from polarkv_dataplane.runtime.session import Session

_NAMES = {Op.OFFLOAD: "offload", Op.LOAD: "load", Op.PURGE: "purge"}


class Operations:
    """Runs commands; each ends with one OPERATION_DONE on the session that it came on, or with none if that is over."""

    def __init__(
        self, files: Files, index: Index, executor: KeyedExecutor, counters: Counters, timeout_s: float
    ) -> None:
        self._files = files
        self._index = index
        self._executor = executor
        self._counters = counters
        self._timeout_s = timeout_s
        for name in _NAMES.values():
            counters.add(f"polarkv_disk_{name}_operations_total", 0)
            if name != "purge":
                counters.add(f"polarkv_disk_{name}_bytes_total", 0)

    def take(self, session: Session, attachment: Attachment, op: Op, command: DiskCommand) -> None:
        """Queue a command. Never blocks."""
        if len(command.key) != KEY_BYTES:
            text = f"a key of {len(command.key)} bytes"
            self._end(session, attachment, op, command, OperationResult.FAILED, 0, text, block=False)
            return
        self._index.touch(command.key)
        task = Task(command.key, lambda: None)
        task.run = lambda: self._run(session, attachment, op, command, task.came_at)
        if not self._executor.submit(task):
            text = "the disk server's queue is full"
            self._end(session, attachment, op, command, OperationResult.FAILED, 0, text, block=False)

    def _run(self, session: Session, attachment: Attachment, op: Op, command: DiskCommand, came_at: float) -> None:
        def check() -> None:
            # After these times the manager may have given the operation up, and its slot to someone else.
            if not session.trusted():
                raise Dropped("the manager has been silent for too long")

        moved_bytes, text = 0, ""
        try:
            check()
            # A purge touches no memory, and one that is refused would leave a file of which no entry knows.
            if op != Op.PURGE and time.monotonic() - came_at > self._timeout_s:
                raise Dropped(f"it waited longer than {self._timeout_s:g} s")
            moved_bytes = self._do(attachment, op, command, check)
            result = OperationResult.OK
        except NoSpace as error:
            result, text = OperationResult.NO_SPACE, str(error)
        except Missing as error:
            result, text = OperationResult.MISSING, str(error)
        except Damaged as error:
            result, text = OperationResult.DAMAGED, str(error)
        except (Dropped, OSError) as error:
            result, text = OperationResult.FAILED, f"{short(command.key)}: {error}"
        self._end(session, attachment, op, command, result, moved_bytes, text)

    def _do(self, attachment: Attachment, op: Op, command: DiskCommand, check: Callable[[], None]) -> int:
        if op == Op.PURGE:
            self._files.delete(command.key)
            self._index.remove(command.key)
            return 0
        header = Header(command.key, command.length_bytes, command.checksum, command.tenant)
        slot = _slot(attachment, command)
        if op == Op.LOAD:
            return self._load(header, slot, check)
        return self._offload(header, slot)

    def _offload(self, header: Header, slot: memoryview) -> int:
        if not self._index.reserve(header.key, len(slot)):
            raise NoSpace(f"{short(header.key)}: the files would take more than {self._index.capacity_bytes} bytes")
        try:
            allocated_bytes = self._files.write(header, slot, lambda: verify_memory(header, slot))
        except BaseException:
            self._index.unreserve(len(slot))
            raise
        self._index.put(header, allocated_bytes, reserved_bytes=len(slot))
        return len(slot)

    def _load(self, header: Header, slot: memoryview, check: Callable[[], None]) -> int:
        try:
            allocated_bytes = self._files.read(header, slot, check)
        except Missing:
            self._index.remove(header.key)
            raise
        except Damaged:
            self._files.delete(header.key)
            self._index.remove(header.key)
            raise
        self._index.put(header, allocated_bytes)
        return len(slot)

    def _end(
        self,
        session: Session,
        attachment: Attachment,
        op: Op,
        command: DiskCommand,
        result: OperationResult,
        moved_bytes: int,
        text: str,
        *,
        block: bool = True,
    ) -> None:
        name = _NAMES[op]
        self._counters.add(f"polarkv_disk_{name}_operations_total")
        if moved_bytes:
            self._counters.add(f"polarkv_disk_{name}_bytes_total", moved_bytes)
        if result != OperationResult.OK:
            self._counters.add(labelled("polarkv_disk_failures_total", "kind", f"{name}_{result.name.lower()}"))
        life = session.life
        done = OperationDone(
            life.number, life.incarnation, command.operation, int(result), moved_bytes, attachment.pool, text
        )
        session.post(Op.OPERATION_DONE, lambda: done, block=block)


def _slot(attachment: Attachment, command: DiskCommand) -> memoryview:
    """The slot that a command names. Raises Dropped when it is not within the memory."""
    start, length_bytes = command.offset_bytes, command.length_bytes
    if not 0 <= length_bytes <= MAX_PAYLOAD_BYTES:
        raise Dropped(f"a length of {length_bytes} bytes is out of range")
    size_bytes = stride_bytes(length_bytes)
    if start < 0 or start % ALIGNMENT_BYTES or start + size_bytes > attachment.size_bytes:
        raise Dropped(f"a slot at {start} lies outside this node's memory")
    return attachment.view[start : start + size_bytes]
