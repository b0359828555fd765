"""The whole pipeline in one process and thread, turn by turn: the same native objects, no
waiting."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import Any

import numpy as np
from object_oracle import CheckedMaker

import tokenpipe as tp
from tokenpipe import _native
from tokenpipe.commands import ANY_ROW, CommandKind, FinishReason, ReplyStatus
from tokenpipe.delivery import Delivery, OpenRequests
from tokenpipe.events import RequestEvent
from tokenpipe.handover import Handover
from tokenpipe.layout import HEADER
from tokenpipe.outputs import OutputBatch
from tokenpipe.records import AnyOutput
from tokenpipe.resources import Resources
from tokenpipe.segment import Segment
from tokenpipe.status import View


class InProcess:
    """Every party of a pipeline, driven by hand."""

    def __init__(self, config: tp.PipelineConfig) -> None:
        self.config = config
        self.segment = Segment.create(config)
        core, source = self.segment.core, self.segment.source
        self.book = _native.Book(core, source)
        self.resources = Resources(core, source, self.book, config)
        self.writer = tp.EngineWriter.attach(config.name)
        self.producer = _native.Producer(core, 0.0)
        self.reader = _native.SourceReader(source, core, 0.0)
        self.decoders = [_native.Decoder(core, k, 0.0) for k in range(config.num_decoders)]
        self.client = _native.Client(core, 0.0)
        self.requests = OpenRequests(core, config.max_num_seqs)
        self.events: list[RequestEvent] = []
        offset = int(np.frombuffer(self.segment.core_memory, HEADER, 1)[0]["wall_offset_ns"])
        self.maker = CheckedMaker(config, offset)
        self.delivery = Delivery(
            self.segment,
            self.client,
            self.requests,
            lambda _asks: False,
            lambda: FinishReason.SHUTDOWN,
            self.maker,
            self.events.append,
            Handover(None, config.prefill_timeout_s),
        )
        self._next_slot = 0

    def submit(self, request: tp.Request, row: int | None = None, **stamps: int) -> tp.Admission:
        """Gives the request a row at once; fails the test when there is none."""
        request.check(self.config)
        self.requests.expect(request)
        slot = self._next_slot = (self._next_slot + 1) % self.config.command_slots
        self.client.post(
            slot,
            CommandKind.SUBMIT,
            id=request.request_id,
            eos=[int(t) for t in request.eos_token_ids],
            row=ANY_ROW if row is None else row,
            max_tokens=request.max_tokens or 0,
            num_emitted=request.num_emitted_tokens,
            prompt_tokens=len(request.prompt_token_ids),
            num_blocks=request.blocks_wanted(self.config),
            num_chunks=len(request.prefill_chunk_info or ()),
            flags=request.flags,
            **stamps,
        )
        self.resources.sweep()
        self.resources.serve()
        status, got_row, generation, _value, blocks = self.client.reply(slot)
        self.client.free(slot)
        assert status == ReplyStatus.OK, ReplyStatus(status).name
        admission = tp.Admission(request.request_id, got_row, generation, tuple(blocks))
        self.requests.admit(admission, request)
        return admission

    def pump(self) -> None:
        """Lets reader, decoders and coordinator do all they can."""
        while self.read_step():
            self.decode()
        self.decode()

    def read_step(self) -> bool:
        """Lets the reader take one step; False when there is none."""
        if not (self.producer.claim(0.0) and self.reader.get_output(self.producer, 0.0)):
            return False
        self.producer.publish()
        self.reader.release()
        return True

    def decode(self) -> None:
        """Lets the decoders and the coordinator's sweep do all they can."""
        for decoder in self.decoders:
            while decoder.run(64, 0.0):
                pass
        self.resources.sweep()

    def batches(self, by_step: bool = False) -> Iterator[OutputBatch]:
        """Yields what can be read now."""
        take = self.delivery.next_step if by_step else self.delivery.next
        while (batch := take(0.0)) is not None:
            yield batch
            batch.release()

    def outputs(self, by_step: bool = False) -> list[AnyOutput]:
        """Pumps, and returns all outputs as objects."""
        self.pump()
        return [output for batch in self.batches(by_step) for output in batch]

    def counters(self) -> dict[str, Any]:
        """Returns the committed counters, summed over the decoders."""
        commits = View(self.segment).commits()
        names = [n for n in commits.dtype["counters"].names if n != "pad_"]
        return {
            n: sum(c["counters"][n].tolist() for c in commits) for n in names if n != "spec_heads"
        }

    def __enter__(self) -> InProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.writer.close()
        self.segment.close()
