"""The command line: serve, demo, inspect, clean, ops. The only argparse, print and exit of the
package."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import faulthandler
import json
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from tokenpipe import __version__
from tokenpipe._native import LAYOUT_VERSION
from tokenpipe.config import PipelineConfig, fault_of
from tokenpipe.errors import ConfigError, ExitCode, TokenpipeError, in_words, to_json


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code (README: table of exit codes)."""
    args = _parser().parse_args(arguments)
    try:
        return int(args.run(args))
    except TokenpipeError as error:
        print(f"tokenpipe {args.command}: {error}", file=sys.stderr)
        return int(error.exit_code)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tokenpipe",
        description="The output path of an LLM engine as its own processes.",
    )
    parser.add_argument(
        "--version",
        action="version",
        version=f"tokenpipe {__version__} (layout of the shared memory: {LAYOUT_VERSION})",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_serve(
        commands.add_parser("serve", help="run a pipeline in the foreground", allow_abbrev=False)
    )
    _add_demo(
        commands.add_parser(
            "demo", help="run a real small model through a pipeline", allow_abbrev=False
        )
    )
    _add_inspect(commands.add_parser("inspect", help="show what a running pipeline is doing"))
    _add_clean(commands.add_parser("clean", help="remove what dead runs left in /dev/shm"))
    _add_ops(commands.add_parser("ops", help="say which form of the output ops is used, and why"))
    role = commands.add_parser("role")  # started by the coordinator; no help: it is not for hands
    role.add_argument("role")
    role.add_argument("--name", required=True)
    role.add_argument("--epoch", type=int, default=1)
    role.add_argument("--words-fd", type=int)
    role.add_argument("--log-level", default="info")
    role.set_defaults(run=_role)
    return parser


# ---------------------------------------------------------------- serve


def _add_serve(parser: argparse.ArgumentParser) -> None:
    PipelineConfig.add_cli_args(parser)
    parser.add_argument(
        "--ready-fd",
        type=int,
        default=1,
        metavar="FD",
        help="descriptor of the ready line (default 1)",
    )
    parser.add_argument(
        "--exit-with-parent",
        type=int,
        nargs="?",
        const=0,
        default=None,
        metavar="PID",
        help="end with the process that started this one; PID says which one that was, for a "
        "parent that may be gone before this one looks",
    )
    parser.add_argument("--owner-fd", type=int, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--epoch", type=int, default=1, help=argparse.SUPPRESS)
    parser.set_defaults(run=_serve)


def _serve(args: argparse.Namespace) -> int:
    from tokenpipe import coordinator
    from tokenpipe.children import parent_fd

    is_ready = False

    def say(line: str) -> None:
        os.write(args.ready_fd, line.encode() + b"\n")
        if args.ready_fd > 2:
            os.close(args.ready_fd)

    def ready(facts: Mapping[str, Any]) -> None:
        nonlocal is_ready
        is_ready = True
        # Not before: how often it passes a point while it starts depends on the machine.
        _arm_fault("coordinator", args.epoch)
        say(json.dumps(facts))

    try:
        config = PipelineConfig.from_cli_args(args)
        try:
            os.fstat(args.ready_fd)
        except OSError as error:
            raise ConfigError("ready_fd", args.ready_fd, str(error)) from None
        _set_up_logging("coordinator", config.log_level)
        _pass_boot("coordinator", args.epoch)
        owner_fds = [] if args.owner_fd is None else [args.owner_fd]
        if args.exit_with_parent is not None:
            owner_fds.append(parent_fd(args.exit_with_parent))
        coordinator.run(config, ready, owner_fds, has_keeper=args.owner_fd is not None)
    except Exception as error:
        if not is_ready and args.ready_fd > 2:
            say(to_json(error))  # the owner raises it again
            if isinstance(error, TokenpipeError):
                return int(error.exit_code)
        raise
    return ExitCode.OK


def _set_up_logging(role: str, level: str) -> None:
    logging.basicConfig(
        level=level.upper(),
        format=f"%(asctime)s tokenpipe {role}[%(process)d] %(levelname)s %(message)s",
        stream=sys.stderr,
    )
    faulthandler.enable()


def _arm_fault(role: str, epoch: int) -> None:
    fault = fault_of(role, epoch)
    if fault is not None:
        from tokenpipe import _native

        _native.arm_fault(*fault)


def _pass_boot(role: str, epoch: int) -> None:
    fault = fault_of(role, epoch)
    if fault is not None and fault[0] == "boot":
        from tokenpipe import _native

        _native.arm_fault(*fault)
        _native.fault_point("boot")


def _role(args: argparse.Namespace) -> int:
    _set_up_logging(args.role, args.log_level)
    _pass_boot(args.role, args.epoch)
    _arm_fault(args.role, args.epoch)
    try:
        return _run_role(args)
    except Exception as error:
        if args.words_fd is not None:  # /health and the owner's exception repeat it
            with contextlib.suppress(BrokenPipeError):  # an orphan has nobody to tell
                os.write(args.words_fd, in_words(error).encode()[:4096])
        raise


def _run_role(args: argparse.Namespace) -> int:
    kind, _, index = args.role.partition("-")
    if kind == "reader":
        from tokenpipe import reader

        reader.run(args.name)
    elif kind == "decoder":
        from tokenpipe import decoder

        decoder.run(args.name, int(index))
    else:
        print(f"tokenpipe role: unknown role {args.role!r}", file=sys.stderr)
        return ExitCode.BAD_CONFIG
    return ExitCode.OK


# ---------------------------------------------------------------- demo


def _add_demo(parser: argparse.ArgumentParser) -> None:
    from tokenpipe.demo.options import DemoOptions

    parser.epilog = "Flags of `tokenpipe serve` are passed on to the pipeline."
    for f in dataclasses.fields(DemoOptions):
        flag, help_text = "--" + f.name.replace("_", "-"), f.metadata["help"]
        if isinstance(f.default, bool):
            parser.add_argument(flag, action="store_true", help=help_text)
        else:
            kind = f.metadata.get("type", type(f.default))
            shown = "" if f.default is None else f" (default {f.default})"
            parser.add_argument(flag, type=kind, default=f.default, help=help_text + shown)
    PipelineConfig.add_cli_args(parser)
    parser.set_defaults(run=_demo)


def _demo(args: argparse.Namespace) -> int:
    from tokenpipe.demo import launcher
    from tokenpipe.demo.options import DemoOptions

    names = [f.name for f in dataclasses.fields(DemoOptions)]
    options = DemoOptions(**{n: getattr(args, n) for n in names})
    given = {
        f.name for f in dataclasses.fields(PipelineConfig) if getattr(args, f.name) is not None
    }
    if "num_decoders" not in given:
        args.num_decoders = "2"
    if "max_num_seqs" not in given:
        args.max_num_seqs = "16"
    return launcher.run(options, PipelineConfig.from_cli_args(args).to_cli_args())


# ---------------------------------------------------------------- inspect and clean


def _add_inspect(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME", help="the pipeline")
    parser.add_argument("--all", action="store_true", help="every segment of ours in /dev/shm")
    parser.add_argument("--json", action="store_true", help="the same as JSON")
    parser.set_defaults(run=_inspect)


def _inspect(args: argparse.Namespace) -> int:
    from tokenpipe.segment import Segment, leftovers
    from tokenpipe.status import status_of

    if args.name is None:
        for found in leftovers():
            state = "dead" if found.is_dead else "kept"
            print(f"{found.file_name}  {found.num_bytes} bytes  {state}: {found.why}")
        return ExitCode.OK
    with Segment.attach(args.name) as segment:
        status = status_of(segment)
    if args.json:
        print(json.dumps(status))
        return ExitCode.OK
    ring, segment_bytes = status["ring"], status["segment"]
    print(f"{status['name']}: {status['state']}, {status['reason']}")
    rows = status["rows"]
    print(f"rows     {rows['live']} of {rows['of']} given out, at most {rows['high_water']}")
    print(f"waiting  {status['waiting_submits']} submits")
    print(
        f"ring     {ring['occupancy']} of {ring['slots']} slots of {ring['slot_bytes']} bytes "
        f"in use; {ring['advice']}"
    )
    print(
        f"segment  {segment_bytes['core_bytes']} bytes: ring {segment_bytes['ring_bytes']}, output "
        f"rings {segment_bytes['output_bytes']}, all else {segment_bytes['control_bytes']}; source "
        f"segment {segment_bytes['source_bytes']}"
    )
    for name, role in status["roles"].items():
        resident = role.get("resident_bytes", 0) / 1e6
        lag = f", lag {role['lag']}" if "lag" in role else ""
        print(
            f"{name:<12} pid {role['pid']}, heartbeat {role['heartbeat_age_s']:.2f} s ago, waits "
            f"for {role['waits_for']}{lag}, {resident:.0f} MB, blocked {role['blocked_s']:.3f} s"
        )
    counters = status["counters"]
    dropped = {n: v for n, v in counters.items() if n.startswith("dropped_") and v}
    print(
        f"tokens   saved {status['source']['tokens_saved']}, delivered "
        f"{counters['tokens_delivered']}, dropped {dropped or 0}"
    )
    return ExitCode.OK


def _add_clean(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME", help="only this pipeline's files")
    parser.set_defaults(run=_clean)


def _clean(args: argparse.Namespace) -> int:
    from tokenpipe.segment import Leftover, sweep

    def report(found: Leftover) -> None:
        did = "removed" if found.is_dead else "kept"
        print(f"{did} {found.file_name} ({found.num_bytes} bytes): {found.why}")

    removed = sweep(args.name, report)
    print(f"{removed} files removed")
    return ExitCode.OK


# ---------------------------------------------------------------- ops


def _add_ops(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="the same as JSON")
    parser.set_defaults(run=_ops)


def _ops(args: argparse.Namespace) -> int:
    from tokenpipe.cuda import choose

    choice = choose()
    if args.json:
        print(json.dumps(dataclasses.asdict(choice)))
        return ExitCode.OK
    what = "tensors on a GPU and on the CPU" if choice.form == "cuda" else "tensors on the CPU"
    print(f"output ops: {choice.form}, for {what}")
    print(f"because:    {choice.why}")
    for ordinal, name in enumerate(choice.devices):
        print(f"device {ordinal}:   {name}")
    return ExitCode.OK
