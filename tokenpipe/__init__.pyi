"""Types of the public names; __init__.py imports them when they are first used."""

from tokenpipe.commands import FinishReason as FinishReason
from tokenpipe.config import PipelineConfig as PipelineConfig
from tokenpipe.errors import ChildBootError as ChildBootError
from tokenpipe.errors import ChildError as ChildError
from tokenpipe.errors import ConfigError as ConfigError
from tokenpipe.errors import DeliveryModeError as DeliveryModeError
from tokenpipe.errors import DrainingError as DrainingError
from tokenpipe.errors import DuplicateRequestError as DuplicateRequestError
from tokenpipe.errors import ExitCode as ExitCode
from tokenpipe.errors import InvalidRequestError as InvalidRequestError
from tokenpipe.errors import LayoutMismatchError as LayoutMismatchError
from tokenpipe.errors import NoFreeRowError as NoFreeRowError
from tokenpipe.errors import NotEnoughBlocksError as NotEnoughBlocksError
from tokenpipe.errors import OpArgumentError as OpArgumentError
from tokenpipe.errors import PartyExistsError as PartyExistsError
from tokenpipe.errors import PipelineGoneError as PipelineGoneError
from tokenpipe.errors import PipelineStartError as PipelineStartError
from tokenpipe.errors import PortInUseError as PortInUseError
from tokenpipe.errors import RequestAbortedError as RequestAbortedError
from tokenpipe.errors import RequestError as RequestError
from tokenpipe.errors import RoleLostError as RoleLostError
from tokenpipe.errors import RowBusyError as RowBusyError
from tokenpipe.errors import SegmentError as SegmentError
from tokenpipe.errors import SegmentExistsError as SegmentExistsError
from tokenpipe.errors import SegmentMissingError as SegmentMissingError
from tokenpipe.errors import SegmentSpaceError as SegmentSpaceError
from tokenpipe.errors import SyncTimeoutError as SyncTimeoutError
from tokenpipe.errors import TokenpipeError as TokenpipeError
from tokenpipe.errors import UnknownRequestError as UnknownRequestError
from tokenpipe.layout import PipelineState as PipelineState
from tokenpipe.outputs import CompletionOutput as CompletionOutput
from tokenpipe.outputs import LogprobsLists as LogprobsLists
from tokenpipe.outputs import OutputBatch as OutputBatch
from tokenpipe.outputs import RequestOutput as RequestOutput
from tokenpipe.pipeline import Pipeline as Pipeline
from tokenpipe.requests import Admission as Admission
from tokenpipe.requests import Request as Request
from tokenpipe.writer import ControlEvent as ControlEvent
from tokenpipe.writer import EngineWriter as EngineWriter
from tokenpipe.writer import Step as Step

__version__: str
